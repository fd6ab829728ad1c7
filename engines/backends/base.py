"""What a runtime must offer so that its engines can be built; `engines.BACKENDS` names the modules that do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trtpipe.engines.base import Checkpoint, Engine, Mapping
from trtpipe.engines.build_config import BuildConfig, changed
from trtpipe.engines.errors import UsageError
from trtpipe.engines.executor import Executor
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import Quantization
from trtpipe.engines.toolchain import Toolchain


@dataclass(frozen=True, kw_only=True)
class Target:
    """What an engine is to run on, and what its weights are."""

    gpu: GpuSpec
    mapping: Mapping
    quantization: Quantization
    toolchain: Toolchain


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """Where an engine is built: the executor for a program, the log it writes, and who is shown its lines."""

    executor: Executor
    log: Path
    show: Callable[[str], None] = lambda line: None


class EngineBackend(Protocol):
    """One runtime.

    FORM      the checkpoint it eats: "trtllm", or "hf" for a Hugging Face folder
    SETTINGS  the settings of BuildConfig that mean something to it; another one that is set is refused
    COMPILED  whether an engine holds code for one GPU, and can be built on a machine with that GPU alone
    ANYWHERE  whether its engines run on any machine, with a GPU or without
    """

    FORM: str
    SETTINGS: tuple[str, ...]
    COMPILED: bool
    ANYWHERE: bool

    def tool_versions(self, toolchain: Toolchain) -> dict[str, str]:
        """Versions that the engine's bytes depend on; part of the artefact's key."""

    def resolve(self, build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
        """`build` with every open choice made, and a reason for each one made here. Raises UsageError for what
        cannot work, before anything is downloaded."""

    def rendered(self, build: BuildConfig, target: Target) -> dict[str, str]:
        """The files of an engine that say how to run it, name -> text: written from the settings alone."""

    def build(
        self, checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
    ) -> tuple[Engine, dict[str, str]]:
        """Write the engine folder, without its passport, into the existing empty folder `out`. Returns it, and facts
        about where it was built."""


def refuse_others(build: BuildConfig, settings: tuple[str, ...], runtime: str, why: str) -> None:
    """Raises UsageError for a setting that is set and means nothing to `runtime`."""
    for name in changed(build):
        if name not in settings:
            raise UsageError(f"build.{name} is not for the {runtime} runtime", why=why, remedy="leave it out")
