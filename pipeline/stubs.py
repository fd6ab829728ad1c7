"""The processes in which Triton runs Python models. It never starts a dead one again, and calls itself ready."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_INSTANCE = re.compile(rb"([^\0]+)_\d+_\d+")


class Stubs:
    """Those of one server on this machine."""

    def __init__(self, server: int) -> None:
        self._tasks = Path(f"/proc/{server}/task")
        self._models: dict[int, str] = {}
        self.died()  # who is there

    def died(self) -> set[str]:
        """Models that have lost a process since the last call."""
        out = set()
        for pid in self._children():
            if _is_zombie(pid):  # Triton collects those that it has ended itself
                if pid in self._models:
                    out.add(self._models.pop(pid))
            elif pid not in self._models and (model := _model(pid)) is not None:
                self._models[pid] = model
        return out

    def _children(self) -> set[int]:
        out: set[int] = set()
        with contextlib.suppress(OSError):  # the server has ended, or a thread of it
            for task in self._tasks.iterdir():
                with contextlib.suppress(OSError):
                    out.update(map(int, (task / "children").read_text().split()))
        return out


def _is_zombie(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return False


def _model(pid: int) -> str | None:
    """Whose stub it is: the name of the instance is on its command line."""
    words: list[bytes] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    if not words or not words[0].endswith(b"triton_python_backend_stub"):
        return None
    return next((found[1].decode() for word in words[1:] if (found := _INSTANCE.fullmatch(word))), None)
