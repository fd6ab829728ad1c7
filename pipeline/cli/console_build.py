"""Output of a build: a line for each stage, what is done or reused and why, and its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.cli import console
from trtpipe.pipeline.cli.console_progress import Work, working

if TYPE_CHECKING:
    from trtpipe.pipeline.run_folder import RunFolder
    from trtpipe.pipeline.runner import StageResult


def note_other_versions(run: RunFolder, told: Any = None) -> None:
    """Print a remark on what another version of trtpipe made of a target, as `outdated` finds it."""
    from trtpipe.pipeline.registry.provenance import outdated

    if found := outdated(run, told):
        console.note(found)


class BuildReporter:
    """Prints the stages of one target."""

    def stage(self, name: str, reason: str) -> contextlib.AbstractContextManager[Work]:
        return working(name, reason)

    def finished(self, result: StageResult) -> None:
        _finished(result, style=None if result.reused else "green")

    def line(self, text: str) -> None:
        console.note(f"  {text}")

    def note(self, text: str) -> None:
        console.note(text)


class ClusterReporter:
    """Prints the stages of several targets that are built at once, with the target's name on each line."""

    def __init__(self, target: str) -> None:
        self._target = target

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Callable[[int, int], None]]:
        self.told(self._target, name, "begins", f"here  ({reason})")
        yield lambda done, total: None

    def finished(self, result: StageResult) -> None:
        _finished(result, f"{self._target}: ")

    def line(self, text: str) -> None:
        console.note(f"{self._target}:   {text}")

    def note(self, text: str) -> None:
        console.note(f"{self._target}: {text}")

    @staticmethod
    def told(target: str, stage: str, kind: str, text: str) -> None:
        """Print what a machine of the cluster reports while it runs a stage."""
        if kind == "begins":
            console.say(f"{target}: {stage:<9} running  {text}")
        elif kind == "ends":
            console.say(f"{target}: {stage:<9} {text}, cleaning up")
        elif kind == "progress":
            done, total = map(int, text.split("/"))
            console.note(f"{target}: {stage:<9} running  {console.size(done)} of {console.size(total)}")
        else:
            console.note(f"{target}:   {text}")


def _finished(result: StageResult, target: str = "", style: str | None = None) -> None:
    manifest = result.artefact.manifest
    made = "reused" if result.reused else f"{manifest.seconds:.1f} s"
    console.say(f"{target}{result.stage:<9} {made:<8} {console.size(manifest.size):>9}  ({result.reason})", style)
    for notice in manifest.notes.get("notices", ()):
        console.note(f"{target}note: {notice}")
