"""Checkpoint -> Engine for one kind of GPU, with its passport."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from engines import load_backend
from engines.base import BuildConfig, Checkpoint
from engines.files import read_json
from engines.gpu import GpuSpec
from engines.passport import write_passport
from pipeline.accuracy import JSON_NAME
from pipeline.digests import Digests
from pipeline.plan import Plan
from pipeline.stages.base import Job

# Of the accuracy gate's result. A gate that did not pass has been accepted, or there would be no engine.
IN_PASSPORT = ("passed", "failures", "perplexity_ratio", "mean_kl", "top1_agreement")


@dataclass(frozen=True, kw_only=True)
class Settings:
    runtime: str
    gpu: GpuSpec
    build: BuildConfig


class Build:
    name = "build"
    makes = "engine"
    version = 2

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs

    def settings(self, plan: Plan) -> Settings:
        return Settings(runtime=plan.runtime, gpu=plan.gpu, build=plan.build)

    def hashed(self, settings: Settings) -> dict[str, Any]:
        # By name and not by SM alone: engines of two cards of one SM load on each other, but are tuned for one.
        return {
            "runtime": settings.runtime,
            "gpu": settings.gpu.name,
            "sm": settings.gpu.sm,
            "build": dataclasses.asdict(settings.build),
        }

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        return {}

    def tools(self, settings: Settings) -> dict[str, str]:
        return load_backend(settings.runtime).tool_versions()

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        checkpoint = Checkpoint(path=job.inputs["checkpoint"])
        backend = load_backend(settings.runtime)
        engine = backend.build(checkpoint, job.out, settings.build, settings.gpu, job.log)
        accuracy = None
        if "accuracy" in job.inputs:
            measured = read_json(job.inputs["accuracy"] / JSON_NAME, "accuracy")
            accuracy = {name: measured[name] for name in IN_PASSPORT}
        write_passport(
            engine, runtime=settings.runtime, gpu=settings.gpu, versions=backend.tool_versions(), accuracy=accuracy
        )
        return {}


BUILD = Build(("checkpoint",))
# A quantized checkpoint is built after it has passed the accuracy gate.
BUILD_VERIFIED = Build(("checkpoint", "accuracy"))
