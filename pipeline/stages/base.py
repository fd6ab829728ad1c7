"""Protocol of a stage, and the job that a stage receives."""

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


class Stage(Protocol):
    """A step of the pipeline. `version` is raised by hand when the output for the same input changes.

    makes   name of its artefact, in the run folder and for the stages that read it
    inputs  names of the artefacts that it reads
    """

    name: str
    makes: str
    version: int
    inputs: tuple[str, ...]

    def settings(self, plan: BuildSpec) -> Any:
        """The stage's part of the plan: a frozen dataclass, the only settings that the stage sees."""

    def hashed(self, settings: Any) -> dict[str, Any]:
        """The settings that the output depends on, as plain JSON values."""

    def sources(self, settings: Any, digests: Digests) -> dict[str, str]:
        """Digests of inputs from outside the store: name -> digest. May ask the network for a commit."""

    def tools(self, settings: Any) -> dict[str, str]:
        """Versions of the programs and libraries that produce the bytes."""

    def run(self, job: Job) -> dict[str, Any]:
        """Fill `job.out`; return notes for the manifest."""
