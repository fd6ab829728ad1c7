"""Conversion of an HFSnapshot to an unquantized checkpoint, in the checkpoint format that the runtime reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.memory import checkpoint_bytes
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.export import export
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.model_config import ModelConfig
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import GIB, Job, Resources, Stage


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`form` is the runtime's checkpoint format: TensorRT-LLM's, for the loader of `toolchain`, or a HF folder."""

    form: str
    dtype: DataType
    mapping: Mapping
    toolchain: str


class Convert(Stage):
    name = "convert"
    makes = "checkpoint"
    version = 3
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.precision.recipe is None

    def resources(self, spec: BuildSpec) -> Resources:
        return Resources(cores=2, memory=GIB)

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        return checkpoint_disk(spec, model)

    def settings(self, spec: BuildSpec) -> Settings:
        return Settings(
            form=load_backend(spec.runtime).FORM,
            dtype=spec.precision.dtype,
            mapping=spec.mapping,
            toolchain=spec.toolchain.name,
        )

    def hashed(self, settings: Settings) -> dict[str, Any]:
        return {"dtype": settings.dtype.value, **hashed_form(settings.form, settings.mapping, settings.toolchain)}

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        source = job.inputs["model"]
        if settings.form == "hf":
            export(source, job.out, dtype=settings.dtype, progress=job.progress)
            return {}
        convert(
            source, job.out, dtype=settings.dtype, mapping=settings.mapping, toolchain=settings.toolchain,
            progress=job.progress,
        )  # fmt: skip
        model = read_model_config(source)
        return {"notices": family_of(model).notices(model)}


def checkpoint_disk(spec: BuildSpec, model: ModelConfig) -> int:
    """Bytes of the spec's checkpoint; 0 for a Hugging Face folder in the type of its source, which is linked."""
    form, dtype = load_backend(spec.runtime).FORM, spec.precision.dtype
    if form == "hf" and spec.precision.recipe is None and dtype is model.dtype:
        return 0
    mapping = spec.mapping if form == "trtllm" else Mapping()
    return checkpoint_bytes(model, dtype, mapping, spec.quantization)


def hashed_form(form: str, mapping: Mapping, toolchain: str) -> dict[str, Any]:
    """The values that a checkpoint depends on: a Hugging Face folder is the same for every mapping and release."""
    if form != "trtllm":
        return {"form": form}
    return {"form": form, "tp_size": mapping.tp_size, "pp_size": mapping.pp_size, "toolchain": toolchain}


CONVERT = Convert()
