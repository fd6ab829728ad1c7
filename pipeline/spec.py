"""BuildSpec: everything a run needs to know, every value with its source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target, checkpoint_form
from trtpipe.engines.base import CalibrationConfig, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.adapter import located_pairs, read_adapter
from trtpipe.engines.hf.adapter_check import checked_adapter
from trtpipe.engines.hf.draft import check_draft
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.model_source import ModelRef
from trtpipe.engines.precision import Precision
from trtpipe.engines.quantization import UNQUANTIZED, Quantization
from trtpipe.engines.short_repr import short_repr
from trtpipe.engines.toolchain import Toolchain
from trtpipe.pipeline.planner.judgement import judge
from trtpipe.pipeline.sources.calibration import require_length
from trtpipe.triton_repo.serving import ServingConfig


@dataclass(frozen=True)
class Value:
    """One resolved setting: dotted name, value, its source (a layer or a reason), and its meaning."""

    name: str
    value: Any
    source: str
    meaning: str = ""


@dataclass(frozen=True, kw_only=True)
class BuildSpec:
    """Everything a run needs to know.

    usual_runtime  runtime of the GPU's targets where neither a setting nor the model's family decides
    settings       resolves to this plan again on any machine: scalars as they were given, groups as they were resolved
    adapters       names of LoRA adapters, and their folders
    """

    __repr__ = short_repr("target")

    model: ModelRef
    gpu: GpuSpec
    precision: Precision
    calibration: CalibrationConfig
    accept_accuracy: bool
    tasks: tuple[str, ...]
    runtime: str
    usual_runtime: str
    toolchain: Toolchain
    executor: str
    mapping: Mapping
    build: BuildConfig
    serving: ServingConfig
    settings: dict[str, Any]
    values: tuple[Value, ...]
    adapters: tuple[tuple[str, Path], ...] = ()

    @property
    def quantization(self) -> Quantization:
        return self.precision.recipe.quantization if self.precision.recipe else UNQUANTIZED

    @property
    def sms(self) -> tuple[int, ...] | None:
        """The compute capabilities that can run the engine; None when any machine can run it."""
        return load_backend(self.runtime).runs_on(self.engine_target, self.precision.sms)

    @property
    def engine_target(self) -> Target:
        """The target of the engine, in the engine backend's terms."""
        return Target(
            gpu=self.gpu, mapping=self.mapping, quantization=self.quantization, toolchain=self.toolchain,
            stored=self.precision.stored, dtype=self.precision.dtype,
        )  # fmt: skip

    @property
    def target(self) -> str:
        """The identifier used for folders, logs and reports: model.gpu.dtype, then values other than the defaults: tp,
        pp and ep (groups of experts) above 1, another runtime or toolchain."""
        parts = [self.model.name, self.gpu.name, self.precision.name]
        parts += [
            f"{name}{size}"
            for name, size in (
                ("tp", self.mapping.tp_size), ("pp", self.mapping.pp_size), ("ep", self.mapping.moe_ep_size),
            )
            if size > 1
        ]  # fmt: skip
        parts += [self.runtime] if self.runtime != self.usual_runtime else []
        parts += [f"trtllm-{self.toolchain.name}"] if self.toolchain.name != facts.DEFAULT_TOOLCHAIN else []
        return ".".join(parts)

    @property
    def form(self) -> str:
        """The checkpoint format that the runtime is given; that of a model which came quantized is left as it is."""
        stored, algo = self.precision.stored, self.quantization.quant_algo
        return load_backend(self.runtime).FORM if stored else checkpoint_form(self.runtime, algo)

    def judge(self, model: ModelConfig) -> None:
        """Raises UsageError for what `model`, the config of the spec's model, makes impossible. It costs nothing."""
        judge(
            model, self.model.name, self.engine_target, self.precision.dtype, self.build, self.serving,
            runtime=self.runtime, form=self.form,
        )  # fmt: skip
        if self.quantization.calibrated and not self.precision.stored:
            require_length(model, self.calibration)

    def judge_draft(self, model: ModelConfig) -> None:
        """Raises InputDataError for a draft model that is none for `model`. It reads the config of its folder."""
        mode, folder = self.build.speculative_decoding_mode, self.build.speculative_model
        if mode is not None and folder is not None:
            check_draft(Path(folder), mode, model)

    def judge_adapters(self, model: ModelConfig) -> None:
        """Raises InputDataError for an adapter of another model. It reads the heads of the adapters' files."""
        for _, folder in self.adapters:
            located_pairs(read_adapter(folder), model)

    def check_adapters(self, model: ModelConfig) -> None:
        """Raises UsageError for an adapter of too high a rank, InputDataError for one of another model or with numbers
        that are not finite. It reads the adapters' files."""
        for _, folder in self.adapters:
            checked_adapter(folder, model, self.build.max_lora_rank, self.precision.dtype)

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "model": self.model.to_json(),
            "settings": self.settings,
            "values": [{"name": v.name, "value": v.value, "source": v.source} for v in self.values],
        }
