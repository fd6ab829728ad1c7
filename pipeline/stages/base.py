"""What a stage is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.store.digests import Digests

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One stage's work: its slice of the plan, the folders of the stages it reads, and an empty folder to fill.

    digests   content digests of what it reads, under the names of `inputs`
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


class Stage(Protocol):
    """A step of the pipeline. `version` is raised by hand when the output for the same input changes.

    makes   what its artefact is called, in the run folder and by the stages that read it
    inputs  what it reads
    """

    name: str
    makes: str
    version: int
    inputs: tuple[str, ...]

    def settings(self, plan: BuildSpec) -> Any:
        """The stage's slice of the plan: a frozen dataclass, and all that the stage gets to see."""

    def hashed(self, settings: Any) -> dict[str, Any]:
        """What of the settings the output depends on, as plain JSON values."""

    def sources(self, settings: Any, digests: Digests) -> dict[str, str]:
        """Digests of what comes from outside the store: name -> digest. May ask the network for a commit."""

    def tools(self, settings: Any) -> dict[str, str]:
        """Versions of the programs and libraries that produce the bytes."""

    def run(self, job: Job) -> dict[str, Any]:
        """Fill `job.out`; return notes for the manifest."""
