"""Interface of executors, which run a toolchain's program, and the task that they run.

The executors are in `trtpipe.pipeline.execution`; an engine backend only passes a task to one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run of one program. Every path is absolute and valid wherever the program runs."""

    # Program name or path, and its arguments; not interpreted by a shell.
    command: tuple[str, ...]
    # Folders that the program may read. A container mounts only these, so a link that leaves them is broken there.
    reads: tuple[Path, ...]
    # Working directory of the program and the folder that it writes. No other run writes there.
    out: Path
    # Name of the program in messages: "trtllm-build".
    what: str
    # GPUs that the program may use, by nvidia-smi's index or the UUID of a MIG slice: () for none, None for all that
    # CUDA_VISIBLE_DEVICES leaves visible.
    gpus: tuple[int | str, ...] | None
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    # Whether the program needs the machine's network: a server does, a build does not.
    network: bool = False
    # Seconds between the request to end and the kill.
    grace: float = 10.0


class Executor(Protocol):
    """Runs a task to its end, writes its output to the log and passes each line to `show`."""

    name: str

    def prepare(self, progress: Callable[[int, int], None] = ...) -> None:
        """Fetch what the program needs; calls `progress` with (bytes done, bytes in all). Raises HostError."""
        ...

    def run(self, task: Task, show: Callable[[str], None] = ...) -> dict[str, str]:
        """Return facts about where the task ran, for the manifest. Raises HostError when it cannot start, else
        StageFailed. All processes of the task have ended when this returns or raises, also after Ctrl-C.
        """
        ...
