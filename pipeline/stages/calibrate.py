"""Calibration of an HFSnapshot: ModelOpt finds a recipe's scales on samples, for any mapping and format."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from trtpipe.engines.base import CalibrationConfig, DataType, Mapping
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.quantize import job as quantizing
from trtpipe.pipeline.sources import calibration
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import ON_TORCH, Job, Resources, Stage
from trtpipe.pipeline.store.digests import Digests

SCALES = "scales.safetensors"


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: QuantRecipe
    dtype: DataType
    calibration: CalibrationConfig
    # Not part of the result: what the next stage requires is checked before the work.
    layout: quantizing.Layout


class Calibrate(Stage):
    name = "calibrate"
    makes = "scales"
    version = 1
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.quantization.calibrated and not spec.precision.stored

    def resources(self, spec: BuildSpec) -> Resources:
        return ON_TORCH

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def settings(self, spec: BuildSpec) -> Settings:
        assert spec.precision.recipe is not None
        return Settings(
            recipe=spec.precision.recipe,
            dtype=spec.precision.dtype,
            calibration=spec.calibration,
            layout=layout_of(spec),
        )

    def hashed(self, settings: Settings) -> dict[str, Any]:
        chosen = dataclasses.asdict(settings.calibration)
        del chosen["data"]  # the key depends on the data's content, not on its name
        return {
            "dtype": settings.dtype.value,
            "modelopt": settings.recipe.modelopt,
            **hashed_quantization(settings.recipe),
            "calibration": chosen,
        }

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        return {"calibration": calibration.digest(settings.calibration.data, digests)}

    def tools(self, settings: Settings) -> dict[str, str]:
        quantizing.require_modelopt()
        return {name: importlib.metadata.version(name) for name in ("nvidia-modelopt", "transformers")}

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        quantizing.check(job.inputs["model"], settings.recipe, settings.layout)
        notices = quantizing.quantize(
            job.inputs["model"],
            None,
            settings.recipe,
            layout=settings.layout,
            dtype=settings.dtype,
            samples=calibration.samples(job.inputs["model"], settings.calibration),
            save_scales=job.out / SCALES,
            log=job.log,
            progress=job.progress,
        )
        return {"notices": [*calibration.unread(settings.calibration.data), *notices]}


def layout_of(spec: BuildSpec) -> quantizing.Layout:
    """The layout of the spec's checkpoint. The loader of a Hugging Face folder splits it into ranks."""
    mapping = spec.mapping if spec.form == "trtllm" else Mapping()
    return quantizing.Layout(form=spec.form, mapping=mapping, toolchain=spec.toolchain.name)


def hashed_quantization(recipe: QuantRecipe) -> dict[str, Any]:
    """The fields of a recipe that the bytes depend on."""
    quantization = recipe.quantization
    algo, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    return {
        "quant_algo": algo and algo.value,
        "kv_cache_quant_algo": cache and cache.value,
        "group_size": quantization.group_size if quantization.packed else None,
    }


CALIBRATE = Calibrate()
