"""Stage that takes the model of draft tokens: the engine, which may be built on another machine, needs its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines.files import copy
from trtpipe.engines.hf.draft import draft_files
from trtpipe.engines.model_config import ModelConfig
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage
from trtpipe.pipeline.store.digests import Digests, combined


class Draft(Stage):
    name = "draft"
    makes = "draft"
    version = 1
    travels = True
    local = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.build.speculative_model is not None

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ()

    def settings(self, spec: BuildSpec) -> Path:
        """Folder of the draft model, or of the EAGLE-3 head."""
        return Path(spec.build.speculative_model or "")

    def sources(self, settings: Path, digests: Digests) -> dict[str, str]:
        return {"folder": combined((path.name, digests.file(path)) for path in draft_files(settings))}

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        return sum(path.stat().st_size for path in draft_files(self.settings(spec)))

    def run(self, job: Job) -> dict[str, Any]:
        for path in draft_files(job.settings):
            copy(path, job.out / path.name)
        return {}


DRAFT = Draft()
