"""Extraction of the tokenizer from an HFSnapshot: packaging needs it without the weights."""

from __future__ import annotations

import shutil
from typing import Any

from trtpipe.engines.hf.folder import TOKENIZER_FILES, require_tokenizer
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage


class Tokenizer(Stage):
    name = "tokenizer"
    makes = "tokenizer"
    version = 1
    travels = True

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def run(self, job: Job) -> dict[str, Any]:
        source = job.inputs["model"]
        require_tokenizer(source)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, job.out / name)
        return {}


TOKENIZER = Tokenizer()
