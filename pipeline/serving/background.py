"""Background run of a command's work: the command returns once the work is under way."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from trtpipe.launch import end_with, outlive_parent

Ready = Callable[[Path], None]


def run(work: Callable[[Ready], None]) -> int | None:
    """Call `work(ready)` in a child process. The child returns None when `work` has returned. This process returns 0 as
    soon as the child has called `ready(log)`, or the exit status of a child that ended before.

    Until `ready` this process passes Ctrl-C and SIGTERM on to the child, which gets SIGTERM where this process is
    killed; from then on the child's output is appended to `log`. The child has a session of its own, so that Ctrl-C
    in a terminal reaches it once.
    """
    parent = os.getpid()
    told, tell = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.setsid()
        end_with(parent)
        work(lambda log: _leave(log, tell))
        return None
    os.close(tell)
    passed: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        passed.append(number)
        with contextlib.suppress(ProcessLookupError):  # it has just been collected
            os.kill(child, number)

    # The child ignores what this process ignores, such as SIGINT in the background of a shell without job control.
    taken = [one for one in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(one) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, pass_on) for number in taken}
    try:
        with os.fdopen(told, "rb") as pipe:
            ready = pipe.read()
        if ready and not passed:
            return 0
        # The child ends what it has started, also where it became ready just before it was told to end.
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return status or (128 + passed[0] if passed else 0)


def _leave(log: Path, tell: int) -> None:
    """Leave the terminal, then let the parent return."""
    sys.stdout.flush()
    sys.stderr.flush()
    outlive_parent()
    for stream, path, mode in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY), (2, log, os.O_WRONLY)):
        descriptor = os.open(path, mode | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.write(tell, b"ready")
    os.close(tell)
