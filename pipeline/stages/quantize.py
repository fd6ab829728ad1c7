"""Quantization of an HFSnapshot with its scales: a checkpoint for one mapping, or a quantized Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.process import require_torch
from trtpipe.engines.quantize import job as quantizing
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import ON_TORCH, Job, Resources, Stage
from trtpipe.pipeline.stages.calibrate import SCALES, hashed_quantization, layout_of
from trtpipe.pipeline.stages.convert import checkpoint_disk, hashed_form


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: QuantRecipe
    dtype: DataType
    layout: quantizing.Layout


class Quantize(Stage):
    name = "quantize"
    makes = "checkpoint"
    version = 3
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.precision.recipe is not None and not spec.precision.stored

    def resources(self, spec: BuildSpec) -> Resources:
        return ON_TORCH

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        # Scales that depend on the weights alone need no calibration before.
        return ("model", "scales") if spec.quantization.calibrated else ("model",)

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        return checkpoint_disk(spec, model)

    def settings(self, spec: BuildSpec) -> Settings:
        assert spec.precision.recipe is not None
        return Settings(recipe=spec.precision.recipe, dtype=spec.precision.dtype, layout=layout_of(spec))

    def hashed(self, settings: Settings) -> dict[str, Any]:
        layout = settings.layout
        return {
            "dtype": settings.dtype.value,
            **hashed_form(layout.form, layout.mapping, layout.toolchain),
            **hashed_quantization(settings.recipe),
        }

    def require(self, settings: Settings) -> None:
        require_torch("quantizing")

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        notices = quantizing.quantize(
            job.inputs["model"],
            job.out,
            settings.recipe,
            layout=settings.layout,
            dtype=settings.dtype,
            scales=job.inputs["scales"] / SCALES if "scales" in job.inputs else None,
            log=job.log,
            progress=job.progress,
        )
        model = read_model_config(job.inputs["model"])
        return {"notices": [*family_of(model).notices(model), *notices]}


QUANTIZE = Quantize()
