"""Monitor of Triton's Python model processes. Triton never restarts a dead one, and still calls itself ready."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from pathlib import Path

from trtpipe.engines.process import words_of

_INSTANCE = re.compile(rb"([^\0]+)_\d+_\d+")
# Interval of the search for newly started processes.
_LOOK_SECONDS = 0.5
# Triton collects a process that it has ended itself at once. A failed process that is uncollected after the first of
# these times has died; one whose status is 0 was told to leave, and a busy machine may take longer.
_FAILED_SECONDS, _LEFT_SECONDS = 0.05, 1.0


class Stubs:
    """The Python processes of one server on this machine."""

    def __init__(self, server: int) -> None:
        self._tasks = Path(f"/proc/{server}/task")
        self._poll = select.poll()
        self._server = os.pidfd_open(server)
        self._poll.register(self._server, select.POLLIN)
        self._found: dict[int, tuple[int, str]] = {}  # descriptor -> process and its model
        self._look()

    def wait(self) -> None:
        """Return when the server or a process has ended, and after half a second in any case."""
        self._poll.poll(_LOOK_SECONDS * 1000)

    def died(self) -> dict[int, str]:
        """The processes that have died since the last call: process -> its model."""
        self._look()
        out = {}
        # Again until none is left: those that die together are told together, however long one of them was looked at.
        while ended := [descriptor for descriptor, _ in self._poll.poll(0) if descriptor != self._server]:
            for descriptor in ended:
                pid, model = self._forget(descriptor)
                if _uncollected(pid):
                    out[pid] = model
        return out

    def close(self) -> None:
        for descriptor in list(self._found):
            self._forget(descriptor)
        os.close(self._server)

    def _look(self) -> None:
        known = {pid for pid, _ in self._found.values()}
        for pid in self._children() - known:
            if (model := _model(pid)) is not None:
                with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
                    descriptor = os.pidfd_open(pid)
                    self._found[descriptor] = pid, model
                    self._poll.register(descriptor, select.POLLIN)

    def _forget(self, descriptor: int) -> tuple[int, str]:
        self._poll.unregister(descriptor)
        os.close(descriptor)
        return self._found.pop(descriptor)

    def _children(self) -> set[int]:
        out: set[int] = set()
        with contextlib.suppress(OSError):  # the server or one of its threads has ended
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError):
                    out.update(map(int, _read(f"{task}/children").split()))
        return out


def _read(path: str) -> bytes:
    """A small file of /proc. A server has hundreds of threads: Python's own files take three times as long."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 2**16)
    finally:
        os.close(descriptor)


def is_zombie(pid: int) -> bool:
    """Whether a process has ended and its parent has not collected it."""
    return _stat(pid)[0] == "Z"


def _uncollected(pid: int) -> bool:
    state, status = _stat(pid)
    deadline = time.monotonic() + (_FAILED_SECONDS if status else _LEFT_SECONDS)
    while state == "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
        state, _ = _stat(pid)
    return state == "Z"


def _stat(pid: int) -> tuple[str, int]:
    """State and exit status of a process; an empty state for one that does not exist."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return words[0], int(words[-1])
    return "", 0


def _model(pid: int) -> str | None:
    """The model of a stub, from the name of the instance on its command line; None for another process."""
    words = words_of(pid)
    if not words or not words[0].endswith(b"triton_python_backend_stub"):
        return None
    return next((found[1].decode() for word in words[1:] if (found := _INSTANCE.fullmatch(word))), None)
