"""Build of an engine from a checkpoint, for one kind of GPU, with its passport."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target, Workshop, settings_of
from trtpipe.engines.base import Checkpoint, DataType
from trtpipe.engines.build_config import NOT_IN_ENGINE, BuildConfig
from trtpipe.engines.executor import Executor
from trtpipe.engines.hf.draft import lay_out_draft
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import FolderSource, GgufSource
from trtpipe.engines.passport import WEIGHTS, Passport, make_passport
from trtpipe.engines.trtllm_build import DISK_FACTOR
from trtpipe.pipeline.accuracy.gate import JSON_NAME
from trtpipe.pipeline.execution import hardware
from trtpipe.pipeline.execution.diagnosis import disabled_features
from trtpipe.pipeline.execution.executors import LocalExecutor
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.base import Job, Resources, Stage
from trtpipe.pipeline.stages.convert import checkpoint_disk, hashed_mapping
from trtpipe.pipeline.store.store import Artefact

# Fields of the accuracy gate's result. A failed gate was accepted by the user, or there would be no engine.
IN_PASSPORT = ("passed", "failures", "perplexity_ratio", "mean_kl", "top1_agreement")

# Raised when the config.json of a Hugging Face folder in an engine is written otherwise.
CONFIG_JSON = "2"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`sms` are the compute capabilities that run the engine; None for any machine. `weights` are the passport's."""

    runtime: str
    target: Target
    sms: tuple[int, ...] | None
    dtype: DataType
    build: BuildConfig
    executor: str
    weights: dict[str, str]


class Build(Stage):
    name = "build"
    makes = "engine"
    version = 3
    travels = True
    failures = "build"

    def resources(self, spec: BuildSpec) -> Resources:
        return Resources(cores=2, gpu="target" if load_backend(spec.runtime).COMPILED else "")

    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        # A quantized checkpoint is built after it has passed the accuracy gate.
        gate = () if spec.precision.recipe is None else ("accuracy",)
        return ("checkpoint", *gate, *(("draft",) if spec.build.speculative_model is not None else ()))

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        # Other runtimes link the checkpoint's files.
        return round(DISK_FACTOR * checkpoint_disk(spec, model)) if load_backend(spec.runtime).COMPILED else 0

    def settings(self, spec: BuildSpec) -> Settings:
        return Settings(
            runtime=spec.runtime,
            target=spec.engine_target,
            sms=spec.sms,
            dtype=spec.precision.dtype,
            build=spec.build,
            executor=spec.executor,
            weights=_weights(spec),
        )

    def hashed(self, settings: Settings) -> dict[str, Any]:
        # The GPU's name, not only its SM: cards of one SM load each other's engines, but an engine is tuned for one.
        gpu, mapping = settings.target.gpu, settings.target.mapping
        choices = dataclasses.asdict(settings.build)
        known = settings_of(settings.build, load_backend(settings.runtime).SETTINGS)
        return {
            "runtime": settings.runtime,
            "gpu": gpu.name,
            "sm": gpu.sm,
            **hashed_mapping(mapping),
            "build": {name: choices[name] for name in known if name not in NOT_IN_ENGINE},
        }

    def tools(self, settings: Settings) -> dict[str, str]:
        backend = load_backend(settings.runtime)
        has_config = backend.FORM == "hf" or settings.build.speculative_model is not None
        return {
            **backend.tool_versions(settings.target.toolchain),
            **({"config_json": CONFIG_JSON} if has_config else {}),
        }

    def run(self, job: Job) -> dict[str, Any]:
        settings: Settings = job.settings
        checkpoint = Checkpoint(path=job.inputs["checkpoint"])
        backend = load_backend(settings.runtime)
        target, rank_bytes = settings.target, _rank_bytes(checkpoint.path, backend.FORM)
        made: dict[str, str] = {}
        executor: Executor = LocalExecutor()
        devices: tuple[str, ...] = ()
        if backend.COMPILED:
            # trtllm-build takes the first of the GPUs that it sees, or as many as it builds ranks at a time.
            at_once = min(settings.build.workers, target.mapping.world_size)
            gpus = hardware.require_gpus(target, rank_bytes, at_once)
            devices, made = tuple(gpu.device for gpu in gpus), hardware.facts(gpus[0])
            executor = hardware.choose_executor(settings.executor, target.toolchain)
            executor.prepare(job.progress)
        workshop = Workshop(executor=executor, log=job.log, show=job.show, gpus=devices)
        engine, where = backend.build(checkpoint, job.out, settings.build, target, workshop)
        if "draft" in job.inputs:
            lay_out_draft(job.inputs["draft"], engine.path)
        accuracy = None
        if "accuracy" in job.inputs:
            measured = read_json(job.inputs["accuracy"] / JSON_NAME, "accuracy")
            accuracy = {name: measured[name] for name in IN_PASSPORT}
            accuracy |= {"tasks": measured["tasks"]} if measured.get("tasks") else {}
        passport = _passport(settings, checkpoint.path, job.digests["checkpoint"], {**made, **where}, accuracy)
        passport.write(engine.path)
        off = disabled_features(job.log.read_text(encoding="utf-8", errors="replace")) if backend.COMPILED else ()
        return {"notices": [f"trtllm-build turned a feature off: {line}" for line in off]}


def draft_passport(spec: BuildSpec, checkpoint: Artefact) -> Passport:
    """The passport that the spec's engine will have, without the facts of the build machine and the measurements."""
    return _passport(BUILD.settings(spec), checkpoint.path, checkpoint.manifest.content, {}, None)


def _passport(
    settings: Settings, checkpoint: Path, digest: str, made: dict[str, str], accuracy: dict[str, Any] | None
) -> Passport:
    backend = load_backend(settings.runtime)
    return make_passport(
        settings.target,
        settings.build,
        runtime=settings.runtime,
        sms=settings.sms,
        versions=backend.tool_versions(settings.target.toolchain),
        dtype=settings.dtype.value,
        rank_bytes=_rank_bytes(checkpoint, backend.FORM),
        checkpoint=digest,
        settings=settings_of(settings.build, backend.SETTINGS),
        made=made,
        accuracy=accuracy,
        weights=settings.weights,
    )


def _weights(spec: BuildSpec) -> dict[str, str]:
    """Settings that name the model's source; {} for a folder or file, which another machine does not have."""
    if isinstance(spec.model.source, FolderSource | GgufSource):
        return {}
    return {name: spec.settings[name] for name in WEIGHTS if name in spec.settings}


def _rank_bytes(checkpoint: Path, form: str) -> int:
    """Bytes of the largest rank file, or of all weights where the loader splits them into ranks."""
    sizes = [path.stat().st_size for path in checkpoint.glob("*.safetensors")]
    return max(sizes) if form == "trtllm" else sum(sizes)


BUILD = Build()
