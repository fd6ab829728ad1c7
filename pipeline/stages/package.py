"""Packaging of an engine and a tokenizer as a Triton model repository."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import Engine
from trtpipe.engines.passport import read_passport, require_target
from trtpipe.engines.toolchain import Toolchain
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage
from trtpipe.triton_repo.check import check_repository, require_sound
from trtpipe.triton_repo.render import render
from trtpipe.triton_repo.serving import ServingConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    serving: ServingConfig
    runtime: str
    target: Target


class Package(Stage):
    name = "package"
    makes = "repository"
    version = 13

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("tokenizer", "engine", "adapters") if spec.adapters else ("tokenizer", "engine")

    def settings(self, spec: BuildSpec) -> Settings:
        return Settings(serving=spec.serving, runtime=spec.runtime, target=spec.engine_target)

    def hashed(self, settings: Settings) -> dict[str, Any]:
        return dataclasses.asdict(settings.serving)

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        engine = Engine(path=job.inputs["engine"])
        require_target(read_passport(engine.path), settings.target, engine.path)
        repository = render(
            engine, job.inputs["tokenizer"], settings.serving, job.out, adapters=job.inputs.get("adapters")
        )
        faults = check_repository(job.out, toolchain=_release(settings))
        require_sound("the repository", faults)
        return {"models": list(repository.models), "notices": [str(fault) for fault in faults]}


def _release(settings: Settings) -> Toolchain | None:
    """The release that will serve the repository; None for a runtime without one."""
    released = settings.runtime in settings.target.toolchain.runtimes
    return settings.target.toolchain if released else None


PACKAGE = Package()
