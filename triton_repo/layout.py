"""Places in a model repository, and its models by name. Imports little: every command that asks a server reads it."""

from __future__ import annotations

from pathlib import Path

from trtpipe.engines.adapters import FOLDER

ENGINE_FOLDER = "tensorrt_llm/1"
TOKENIZER_FOLDER = "preprocessing/1/tokenizer"
# What guided decoding reads of the tokenizer.
TOKENIZER_INFO = f"{ENGINE_FOLDER}/xgrammar_tokenizer_info.json"
ADAPTER_FOLDER = f"{ENGINE_FOLDER}/{FOLDER}"


def tokenizer_folder(repository: Path) -> Path:
    """Folder of the tokenizer; a repository of the LLM API has it beside the weights."""
    folder, engine = repository / TOKENIZER_FOLDER, repository / ENGINE_FOLDER
    return engine if engine.is_dir() and not folder.is_dir() else folder


def model_names(repository: Path) -> list[str]:
    """Names of the models of a repository, sorted."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
