"""HFSnapshot -> Checkpoint, unquantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.base import DataType, Mapping
from engines.hf_folder import read_model_config
from engines.tensorrt_llm.checkpoint import notices
from engines.tensorrt_llm.convert import convert
from pipeline.digests import Digests
from pipeline.plan import Plan
from pipeline.stages.base import Job


@dataclass(frozen=True, kw_only=True)
class Settings:
    dtype: DataType
    mapping: Mapping


class Convert:
    name = "convert"
    makes = "checkpoint"
    version = 2
    inputs: tuple[str, ...] = ("model",)

    def settings(self, plan: Plan) -> Settings:
        return Settings(dtype=plan.precision.dtype, mapping=plan.mapping)

    def hashed(self, settings: Settings) -> dict[str, Any]:
        mapping = settings.mapping
        return {"dtype": settings.dtype.value, "tp_size": mapping.tp_size, "pp_size": mapping.pp_size}

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        return {}

    def tools(self, settings: Settings) -> dict[str, str]:
        return {}

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        convert(job.inputs["model"], job.out, dtype=settings.dtype, mapping=settings.mapping, progress=job.progress)
        return {"notices": notices(read_model_config(job.inputs["model"]))}


CONVERT = Convert()
