"""Base class of a stage, and the job that a stage receives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from trtpipe.engines.model_config import ModelConfig
from trtpipe.pipeline.execution.diagnosis import Where
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.store.digests import Digests
from trtpipe.pipeline.store.manifest import Record, differences

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage's work: its slice of the spec, the folders of the stages it reads, and an empty folder to fill.

    digests   content digests of the artefacts it reads, under the names of `inputs`
    progress  called with (bytes done, bytes in all)
    show      called with each line that a program prints
    """

    settings: Any
    inputs: dict[str, Path]
    digests: dict[str, str]
    out: Path
    log: Path
    progress: Progress
    show: Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a stage uses of a machine.

    cores   CPU cores that it keeps busy
    memory  bytes, in addition to what it maps of its input
    gpu     "faster": it uses a GPU where there is one; "target": it needs the GPU that the spec names
    """

    cores: int = 1
    memory: int = GIB // 4
    gpu: Literal["", "faster", "target"] = ""


# Of a stage that computes with torch.
ON_TORCH = Resources(cores=4, memory=8 * GIB, gpu="faster")


class Stage(ABC):
    """A step of the pipeline. To add one, write a module here and name it in STAGES.

    name      what a user calls it, as in `--until`
    makes     name of its artefact, in the run folder and for the stages that read it
    version   raised by hand when the output for the same input changes
    travels   whether `export` and `push` may carry its artefact: only data does, never code
    local     whether it reads folders that the settings name, which only the machine of the command may have
    failures  file of configs/failures that explains its log when it fails; None where there is none
    """

    name: ClassVar[str]
    makes: ClassVar[str]
    version: int
    travels: ClassVar[bool] = False
    local: ClassVar[bool] = False
    failures: ClassVar[Where | None] = None

    def applies(self, spec: BuildSpec) -> bool:
        """Whether the pipeline of this spec has the stage."""
        return True

    @abstractmethod
    def inputs(self, spec: BuildSpec) -> tuple[str, ...]:
        """Names of the artefacts that it reads."""

    def resources(self, spec: BuildSpec) -> Resources:
        return Resources()

    def check(self, spec: BuildSpec, later: Sequence[Stage], home: Path) -> None:  # noqa: B027  # most see nothing early
        """Raise, before `run`, what can be known at little cost. `later` run afterwards; `home` is the store's."""

    def disk(self, spec: BuildSpec, model: ModelConfig) -> int:
        """Bytes that the artefact for a model adds to the store; 0 for one that is small, or links to others."""
        return 0

    def settings(self, spec: BuildSpec) -> Any:
        """The stage's part of the spec: a frozen dataclass, the only settings that the stage sees."""
        return None

    def hashed(self, settings: Any) -> dict[str, Any]:
        """The settings that the output depends on, as plain JSON values."""
        return {}

    def other_settings(self, spec: BuildSpec, record: Record) -> list[str]:
        """Settings in which a record differs from the spec, a phrase each; none for another stage version."""
        if record.stage_version != self.version:
            return []
        return differences(record, replace(record, settings=self.hashed(self.settings(spec))))

    def sources(self, settings: Any, digests: Digests) -> dict[str, str]:
        """Digests of inputs from outside the store: name -> digest. May ask the network for a commit."""
        return {}

    def tools(self, settings: Any) -> dict[str, str]:
        """Versions of the programs and libraries that produce the bytes."""
        return {}

    def require(self, settings: Any) -> None:  # noqa: B027  # most need no more than `tools` names
        """Raise HostError where a library that `run` needs is not installed. The store key does not depend on it."""

    @abstractmethod
    def run(self, job: Job) -> dict[str, Any]:
        """Fill `job.out`; return notes for the manifest."""
