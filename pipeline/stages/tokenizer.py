"""Extraction of the tokenizer and the end tokens from an HFSnapshot: packaging needs them without the weights."""

from __future__ import annotations

from typing import Any

from trtpipe.engines.files import copy_files, write_json
from trtpipe.engines.hf.folder import TOKENIZER_FILES, read_config_json, require_tokenizer
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
        ends = read_config_json(source / "config.json", "model config").get("eos_token_id")
        ids, generation = ends if isinstance(ends, list) else [ends], job.out / "generation_config.json"
        if not generation.is_file() and ids and all(type(one) is int and one >= 0 for one in ids):
            # Readers of the tokenizer's folder have no config.json. transformers takes the ids from it too.
            write_json(generation, {"eos_token_id": ends})
        return {}


TOKENIZER = Tokenizer()
