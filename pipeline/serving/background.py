"""Background run of a command's work: the command returns once the work is under way."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from trtpipe.launch import end_with, outlive_parent

Ready = Callable[[Path], None]


def run(work: Callable[[Ready], None]) -> int | None:
    """Call `work(ready)` in a child process. The child returns None when `work` has returned. This process returns 0 as
    soon as the child has called `ready(log)`, or the exit status of a child that ended before.

    Until `ready` the child shares the terminal and its Ctrl-C, and gets SIGTERM where this process is killed; from then
    on it has a session of its own, and its output is appended to `log`.
    """
    parent = os.getpid()
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(told)
        end_with(parent)
        work(lambda log: _leave(log, tell))
        return None
    os.close(tell)
    # The terminal's signals reach both processes; the child ends what it has started, and this one reports its status.
    previous = signal.signal(signal.SIGTERM, lambda number, frame: os.kill(child, number))
    try:
        with os.fdopen(told, "rb") as pipe:
            ready = pipe.read()
    except KeyboardInterrupt:
        os.waitpid(child, 0)  # the child got the Ctrl-C as well, and ends what it has started
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
    return 0 if ready else os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _leave(log: Path, tell: int) -> None:
    """Leave the terminal, then let the parent return."""
    sys.stdout.flush()
    sys.stderr.flush()
    outlive_parent()
    os.setsid()
    for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)):
        descriptor = os.open(path, mode | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.write(tell, b"ready")
    os.close(tell)
