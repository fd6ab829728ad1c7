"""Extraction of the tokenizer from an HFSnapshot: packaging needs it without the weights."""

from __future__ import annotations

import shutil
from typing import Any

from trtpipe.engines.hf.folder import TOKENIZER_FILES, require_tokenizer
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job
from trtpipe.pipeline.store.digests import Digests


class Tokenizer:
    name = "tokenizer"
    makes = "tokenizer"
    version = 1
    inputs: tuple[str, ...] = ("model",)

    def settings(self, plan: BuildSpec) -> None:
        return None

    def hashed(self, settings: None) -> dict[str, Any]:
        return {}

    def sources(self, settings: None, digests: Digests) -> dict[str, str]:
        return {}

    def tools(self, settings: None) -> dict[str, str]:
        return {}

    def run(self, job: Job) -> dict[str, Any]:
        source = job.inputs["model"]
        require_tokenizer(source)
        for name in TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, job.out / name)
        return {}


TOKENIZER = Tokenizer()
