"""Extraction of the tokenizer and the end tokens from an HFSnapshot: packaging needs them without the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines.files import copy_files, write_json
from trtpipe.engines.hf.chat_template import special_tokens
from trtpipe.engines.hf.folder import TOKENIZER_FILES, read_config_json, require_tokenizer
from trtpipe.engines.hf.tokenizer import read_tokenizer
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage


class Tokenizer(Stage):
    name = "tokenizer"
    makes = "tokenizer"
    version = 2
    travels = True

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def run(self, job: Job) -> dict[str, Any]:
        source = job.inputs["model"]
        require_tokenizer(source)
        copy_files(source, job.out, TOKENIZER_FILES)
        generation = job.out / "generation_config.json"
        if not generation.is_file() and (ends := _ends(source)):
            # Readers of the tokenizer's folder have no config.json. transformers takes the ids from it too.
            write_json(generation, {"eos_token_id": ends})
        return {}


def _ends(folder: Path) -> list[int]:
    """End tokens of a model without generation_config.json: the tokenizer's own, and then those of config.json, which
    may be the base model's; vLLM ends at both. Empty where config.json states none."""
    stated = read_config_json(folder / "config.json", "model config").get("eos_token_id")
    ids = stated if isinstance(stated, list) else [stated]
    if not ids or not all(type(one) is int and one >= 0 for one in ids):
        return []
    own = read_tokenizer(folder).token_to_id(special_tokens(folder).get("eos_token", ""))
    return list(dict.fromkeys([*([] if own is None else [own]), *ids]))


TOKENIZER = Tokenizer()
