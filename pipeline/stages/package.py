"""Engine and tokenizer -> Triton model repository."""

from __future__ import annotations

import dataclasses
from typing import Any

from engines.base import Engine
from pipeline.digests import Digests
from pipeline.plan import Plan
from pipeline.stages.base import Job
from triton_repo.render import render
from triton_repo.serving import ServingConfig


class Package:
    name = "package"
    makes = "repository"
    version = 2
    inputs: tuple[str, ...] = ("model", "engine")

    def settings(self, plan: Plan) -> ServingConfig:
        return plan.serving

    def hashed(self, settings: ServingConfig) -> dict[str, Any]:
        return dataclasses.asdict(settings)

    def sources(self, settings: ServingConfig, digests: Digests) -> dict[str, str]:
        return {}

    def tools(self, settings: ServingConfig) -> dict[str, str]:
        return {}

    def run(self, job: Job) -> dict[str, Any]:
        repository = render(Engine(path=job.inputs["engine"]), job.inputs["model"], job.settings, job.out)
        return {"models": list(repository.models)}


PACKAGE = Package()
