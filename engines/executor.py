"""Where a toolchain's program runs: what an executor is given, and what it owes.

The executors themselves are the pipeline's (`trtpipe.pipeline.execution`); an engine backend only hands them a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one program. Every path is absolute, and means the same wherever the program runs."""

    # The program's name or path, and its arguments; never read by a shell.
    command: tuple[str, ...]
    # Folders it may read, nothing around them: a link that leads out of one leads nowhere in a container.
    reads: tuple[Path, ...]
    # The folder it writes, and its working directory. No other run writes there.
    out: Path
    # What it is called in messages: "trtllm-build".
    what: str
    # Indices of the GPUs it may use: none for (), all for None.
    gpus: tuple[int, ...] | None
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    # Whether it needs the machine's network: a server does, a build does not.
    network: bool = False
    # Seconds that it has to end when it is asked to.
    grace: float = 10.0


class Executor(Protocol):
    """Runs a task to its end, with its whole output in the log and each line of it passed to `show`."""

    name: str

    def prepare(self, progress: Callable[[int, int], None] = ...) -> None:
        """Fetch what the program needs and is not here, telling (bytes done, bytes in all). Raises HostError."""
        ...

    def run(self, task: Task, show: Callable[[str], None] = ...) -> dict[str, str]:
        """Return facts about where it ran, for the manifest. Raises HostError when it cannot start, else StageFailed.

        What it started has ended when this returns or raises, Ctrl-C included.
        """
        ...
