"""HFSnapshot and scales -> Checkpoint, quantized, for one mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines.base import DataType, Mapping
from engines.hf_folder import read_model_config
from engines.quant import QuantRecipe
from engines.quantize import job as quantizing
from engines.tensorrt_llm.checkpoint import notices
from pipeline.digests import Digests
from pipeline.plan import Plan
from pipeline.stages.base import Job
from pipeline.stages.calibrate import SCALES, hashed_quantization


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: QuantRecipe
    dtype: DataType
    mapping: Mapping


class Quantize:
    name = "quantize"
    makes = "checkpoint"
    version = 1

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs

    def settings(self, plan: Plan) -> Settings:
        assert plan.precision.recipe is not None
        return Settings(recipe=plan.precision.recipe, dtype=plan.precision.dtype, mapping=plan.mapping)

    def hashed(self, settings: Settings) -> dict[str, Any]:
        return {
            "dtype": settings.dtype.value,
            "tp_size": settings.mapping.tp_size,
            "pp_size": settings.mapping.pp_size,
            **hashed_quantization(settings.recipe),
        }

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        return {}

    def tools(self, settings: Settings) -> dict[str, str]:
        return {}

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        quantizing.quantize(
            job.inputs["model"],
            job.out,
            settings.recipe,
            layout=quantizing.Layout(mapping=settings.mapping),
            dtype=settings.dtype,
            scales=job.inputs["scales"] / SCALES if "scales" in job.inputs else None,
            log=job.log,
            progress=job.progress,
        )
        return {"notices": notices(read_model_config(job.inputs["model"]))}


# A recipe whose scales depend on weights alone needs none found before.
QUANTIZE = Quantize(("model",))
QUANTIZE_CALIBRATED = Quantize(("model", "scales"))
