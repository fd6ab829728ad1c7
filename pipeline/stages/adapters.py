"""Stage that checks LoRA adapters against the model and writes them as the runtime loads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.adapter import CONFIG, WEIGHTS, lay_out, read_adapter
from trtpipe.engines.hf.adapter_check import checked_adapter
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.lora_arrays import require_type, write_arrays
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Stage
from trtpipe.pipeline.store.digests import Digests, combined


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the stage.

    adapters  (name, folder that PEFT has saved) of each
    most      highest rank that the engine takes
    dtype     type of the model, whose range must hold the adapters
    arrays    whether the runtime loads adapters from NumPy arrays
    """

    adapters: tuple[tuple[str, Path], ...]
    most: int
    dtype: DataType
    arrays: bool


class Adapters(Stage):
    name = "adapters"
    makes = "adapters"
    version = 1
    travels = True
    local = True

    def applies(self, spec: BuildSpec) -> bool:
        return bool(spec.adapters)

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        return ("model",)

    def settings(self, spec: BuildSpec) -> Settings:
        return Settings(
            adapters=spec.adapters,
            most=spec.build.max_lora_rank,
            dtype=spec.precision.dtype,
            arrays=load_backend(spec.runtime).ARRAYS,
        )

    def hashed(self, settings: Settings) -> dict[str, Any]:
        return {"arrays": settings.arrays}

    def sources(self, settings: Settings, digests: Digests) -> dict[str, str]:
        out = {}
        for name, folder in settings.adapters:
            read_adapter(folder)
            files = [folder / CONFIG, folder / WEIGHTS]
            out[f"adapter {name}"] = combined((path.name, digests.file(path)) for path in files)
        return out

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        model = read_model_config(job.inputs["model"], quantized=True)
        for done, (name, folder) in enumerate(settings.adapters):
            if settings.arrays:
                require_type(settings.dtype)
            adapter = checked_adapter(folder, model, settings.most, settings.dtype)
            made = lay_out(adapter, name, job.out)
            if settings.arrays:
                write_arrays(adapter, model, made)
            job.progress(done + 1, len(settings.adapters))
        if len(list(job.out.iterdir())) != len(settings.adapters):
            raise InputDataError(
                "two adapters have the same number", why="it is a hash of name and content", remedy="rename one of them"
            )
        return {"adapters": [name for name, _ in settings.adapters]}


ADAPTERS = Adapters()
