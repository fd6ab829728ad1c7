"""Interface of an engine backend; `engines.BACKENDS` names the modules that implement it."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtpipe.engines.base import Checkpoint, DataType, Engine, Mapping
from trtpipe.engines.build_config import BuildConfig, changed
from trtpipe.engines.errors import UsageError
from trtpipe.engines.executor import Executor
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import Quantization
from trtpipe.engines.toolchain import Toolchain


@dataclass(frozen=True, kw_only=True)
class Target:
    """Target of an engine build: GPU, mapping, quantization, toolchain, and the type of what is not quantized."""

    gpu: GpuSpec
    mapping: Mapping
    quantization: Quantization
    toolchain: Toolchain
    dtype: DataType = DataType.BFLOAT16


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where an engine is built: executor of the build program, its log file, callback for each line of the log."""

    executor: Executor
    log: Path
    show: Callable[[str], None] = lambda line: None


class ServedBy(str, enum.Enum):
    """Program that executes an engine under tritonserver."""

    # NVIDIA's C++ backend `tensorrtllm`; each rank is a server under mpirun.
    TENSORRTLLM = "tensorrtllm"
    # NVIDIA's Python model of the LLM API, which takes text and starts its own ranks.
    LLM_API = "llmapi"
    # A process of ours, which the stubs of our Python backend share, and which starts its own ranks.
    ENGINE_PROCESS = "engine process"


@dataclass(frozen=True, kw_only=True)
class NativeServer:
    """How a runtime's own OpenAI-compatible server is started.

    program      a program of the toolchain's image, or a Python module of the environment with the runtime
    command      its arguments
    in_image     which of the two
    environment  variables that it needs
    """

    program: str
    command: tuple[str, ...]
    in_image: bool
    environment: dict[str, str]

    @property
    def name(self) -> str:
        """Name of the program in messages: "vllm" for a module of it."""
        return self.program.partition(".")[0]


class EngineBackend(Protocol):
    """Engine backend of one runtime.

    FORM      checkpoint format it reads: "trtllm", or "hf" for a Hugging Face folder
    SETTINGS  the settings of BuildConfig that it uses; any other setting that is changed is refused
    COMPILED  whether an engine holds code for one GPU, so that only a machine with that GPU can build it
    ANYWHERE  whether its engines run on any machine, with or without a GPU
    ON_CPU    whether it makes engines for `--gpu cpu`
    SERVED_BY program that executes its engines under tritonserver
    PROCESS   module that an engine process executes engines with; "" for another SERVED_BY
    SEQUENCES_PER_STUB  sequences whose tokens one stub can forward; None where one stub is enough for any number
    ATTENTION_WINDOW    whether tokens can be made to attend to the last ones only
    ONE_NODE  why its ranks must be on one node; "" where they can be on several
    """

    FORM: str
    SETTINGS: tuple[str, ...]
    COMPILED: bool
    ANYWHERE: bool
    ON_CPU: bool
    SERVED_BY: ServedBy
    PROCESS: str
    SEQUENCES_PER_STUB: int | None
    ATTENTION_WINDOW: bool
    ONE_NODE: str

    def tool_versions(self, toolchain: Toolchain) -> dict[str, str]:
        """Versions that determine the engine's bytes; part of the artefact's key."""

    def resolve(self, build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
        """Return `build` with every None resolved, and a reason for each choice made here. Raises UsageError for an
        impossible combination, before anything is downloaded."""

    def rendered(self, build: BuildConfig, target: Target) -> dict[str, str]:
        """Settings files of the engine, name -> text; they depend on `build` and `target` alone."""

    def build(
        self, checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
    ) -> tuple[Engine, dict[str, str]]:
        """Write the engine folder, without its passport, into the existing empty folder `out`. Returns the engine and
        facts about where it was built."""

    def native_server(
        self, engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
    ) -> NativeServer:
        """The runtime's own server of an engine folder, which calls the model by `names`; `engine` has the first as its
        own name. Raises UsageError for a runtime without one."""


def refuse_others(build: BuildConfig, settings: tuple[str, ...], runtime: str, why: str) -> None:
    """Raises UsageError when `build` changes a setting that `runtime` does not use."""
    for name in changed(build):
        if name not in settings:
            raise UsageError(f"build.{name} is not for the {runtime} runtime", why=why, remedy="leave it out")
