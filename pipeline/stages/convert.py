"""Conversion of an HFSnapshot to the checkpoint format that the runtime reads; no number is quantized here.

A folder that is quantized already is linked for the runtimes that read such folders, and written as a TensorRT-LLM
checkpoint for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.memory import checkpoint_bytes
from trtpipe.engines.families import family_of
from trtpipe.engines.files import copy_files, place
from trtpipe.engines.hf.chat_template import TOOL_TEMPLATE
from trtpipe.engines.hf.export import export
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.stored import read_stored
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.process import require_torch
from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.quantize.stored import convert_stored
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import GIB, Job, Resources, Stage


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`form` is the runtime's checkpoint format: TensorRT-LLM's, for the loader of `toolchain`, or a HF folder.

    stored       method by which the snapshot is quantized already; "" for none
    nvfp4_cache  whether it has scales of an NVFP4 KV cache
    """

    form: str
    stored: str
    nvfp4_cache: bool
    dtype: DataType
    mapping: Mapping
    toolchain: str


class Convert(Stage):
    name = "convert"
    makes = "checkpoint"
    version = 4
    travels = True

    def applies(self, spec: BuildSpec) -> bool:
        return spec.precision.recipe is None or spec.precision.stored != ""

    def resources(self, spec: BuildSpec) -> Resources:
        # Scales of a quantized folder are made alike by torch, a layer at a time.
        return Resources(cores=2, memory=4 * GIB if spec.precision.stored else GIB)

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        return checkpoint_disk(spec, model)

    def settings(self, spec: BuildSpec) -> Settings:
        return Settings(
            form=load_backend(spec.runtime).FORM,
            stored=spec.precision.stored,
            nvfp4_cache=spec.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4,
            dtype=spec.precision.dtype,
            mapping=spec.mapping,
            toolchain=spec.toolchain.name,
        )

    def hashed(self, settings: Settings) -> dict[str, Any]:
        stored: dict[str, Any] = {"stored": settings.stored} if settings.stored else {}
        if settings.stored and settings.form == "trtllm" and settings.nvfp4_cache:
            # Raised when the scales are computed otherwise. A setting, so that `pull` and `import` refuse the old ones.
            stored["cache_scales"] = 2
        return {
            "dtype": settings.dtype.value,
            **stored,
            **hashed_form(settings.form, settings.mapping, settings.toolchain),
        }

    def require(self, settings: Settings) -> None:
        if settings.stored and settings.form != "hf":
            require_torch("converting a quantized model")

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        source = job.inputs["model"]
        if settings.stored:
            return self._run_stored(job)
        if settings.form == "hf":
            export(source, job.out, dtype=settings.dtype, progress=job.progress)
            return {}
        convert(
            source, job.out, dtype=settings.dtype, mapping=settings.mapping, toolchain=settings.toolchain,
            progress=job.progress,
        )  # fmt: skip
        model = read_model_config(source)
        return {"notices": family_of(model).notices(model)}

    def _run_stored(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        source, model = job.inputs["model"], read_model_config(job.inputs["model"], quantized=True)
        if settings.form == "hf":
            stored = read_stored(source)
            assert stored is not None
            stored.check(str(source), model, locate_tensors(source))
            for path in sorted(path for path in source.iterdir() if path.is_file()):
                place(path, job.out / path.name)
            copy_files(source, job.out, (TOOL_TEMPLATE,))
            return {}
        notices = convert_stored(
            source, job.out, mapping=settings.mapping, toolchain=settings.toolchain, log=job.log, progress=job.progress
        )
        return {"notices": [*family_of(model).notices(model), *notices]}


def checkpoint_disk(spec: BuildSpec, model: ModelConfig) -> int:
    """Bytes of the spec's checkpoint; 0 for a Hugging Face folder in the type of its source, which is linked."""
    form, dtype = load_backend(spec.runtime).FORM, spec.precision.dtype
    if form == "hf" and (spec.precision.stored or (spec.precision.recipe is None and dtype is model.dtype)):
        return 0
    mapping = spec.mapping if form == "trtllm" else Mapping()
    return checkpoint_bytes(model, dtype, mapping, spec.quantization)


def hashed_form(form: str, mapping: Mapping, toolchain: str | None) -> dict[str, Any]:
    """The values that a checkpoint depends on: a Hugging Face folder is the same for every mapping and release."""
    if form != "trtllm":
        return {"form": form}
    return {"form": form, **hashed_mapping(mapping), "toolchain": toolchain}


def hashed_mapping(mapping: Mapping) -> dict[str, int]:
    """The values of a mapping; groups of experts only where there are several, as keys have been without them."""
    groups = {"moe_ep_size": mapping.moe_ep_size} if mapping.moe_ep_size > 1 else {}
    return {"tp_size": mapping.tp_size, "pp_size": mapping.pp_size, **groups}


CONVERT = Convert()
