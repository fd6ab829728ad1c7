"""Folder of the model that makes draft tokens, in Hugging Face format: its check, and its place in an engine."""

from __future__ import annotations

from pathlib import Path

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import place
from trtpipe.engines.hf.chat_template import TOOL_TEMPLATE
from trtpipe.engines.hf.folder import (
    INDEX_NAME,
    SINGLE_NAME,
    TOKENIZER_FILES,
    read_config_json,
    read_model_config,
    superseded,
)
from trtpipe.engines.hf.layout import place_config
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL

_NAMES = (
    "config.json", "*.safetensors", "*.safetensors.index.json",
    *(name for name in TOKENIZER_FILES if name != TOOL_TEMPLATE),  # it is sent no chats
)  # fmt: skip


def draft_files(folder: Path) -> list[Path]:
    """The folder's files that an engine has. Raises InputDataError for a folder without weights or config."""
    files = sorted({path for name in _NAMES for path in folder.glob(name) if path.is_file()})
    if {folder / INDEX_NAME, folder / SINGLE_NAME} <= set(files):
        # Runtimes differ in which they would read.
        unread = superseded(folder / INDEX_NAME)
        files = [path for path in files if path.name not in unread]
    for name, there in (
        ("config.json", (folder / "config.json").is_file()),
        ("weights in safetensors files", any(path.suffix == ".safetensors" for path in files)),
    ):
        if not there:
            raise InputDataError(
                f"build.speculative_model {folder} has no {name}",
                why="there is no such folder" if not folder.is_dir() else "only such files are read",
                remedy="give the Hugging Face folder of the draft model",
            )
    return files


def check_draft(folder: Path, mode: str, model: ModelConfig) -> None:
    """Raises InputDataError for a folder that makes no draft tokens for `model` in a mode of `engines.speculation`."""
    draft_files(folder)
    if mode == DRAFT_MODEL:
        size: object = read_model_config(folder, quantized=True).vocab_size
    else:
        size = read_config_json(folder / "config.json", "config of the EAGLE-3 head").get("vocab_size")
        _refuse_whole(folder)
    if size != model.vocab_size:
        raise InputDataError(
            f"build.speculative_model {folder} has a vocabulary of {size} tokens, the model one of {model.vocab_size}",
            why="a draft token must be the same token for both",
            remedy="give a draft model of the same tokenizer, or use build.speculative_decoding_mode=ngram",
        )


def _refuse_whole(folder: Path) -> None:
    """Raises InputDataError for a model in place of an EAGLE-3 head, which is told by its tensors: the `architectures`
    of published heads are those of a model too."""
    weights = (path for path in draft_files(folder) if path.suffix == ".safetensors")
    names = {name for path in weights for name in read_header(path).tensors}
    if any(name.startswith("model.layers.") for name in names) and not any(
        name.endswith("fc.weight") or "midlayer." in name for name in names
    ):
        raise InputDataError(
            f"build.speculative_model {folder} is a whole model, and no EAGLE-3 head",
            why="it has layers of its own and no fc.weight, which takes the model's hidden states",
            remedy="give a head that was trained for the model, or use build.speculative_decoding_mode=draft_model",
        )


def lay_out_draft(folder: Path, engine: Path) -> None:
    """Link the draft model's files into an engine's folder, its config.json with the older names too. Raises
    InputDataError."""
    (engine / DRAFT).mkdir()
    for path in draft_files(folder):
        (place_config if path.name == "config.json" else place)(path, engine / DRAFT / path.name)


def place_draft(engine: Path, out: Path) -> None:
    """Link the draft model of the engine in `engine` into the copy of it in `out`, where it has one."""
    if (engine / DRAFT).is_dir():
        lay_out_draft(engine / DRAFT, out)
