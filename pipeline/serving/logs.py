"""Logs of servers, which stay when a server has ended."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.pipeline.serving.servers import find_running, recorded, running
from trtpipe.pipeline.store.store import Store


def read_log(
    store: Store, name: str | None, *, lines: int, follow: bool, gateway: bool = False
) -> Iterator[str]:  # fmt: skip
    """The last `lines` of a server's log, or of its gateway's, and with `follow` the lines that are added while the
    server runs, also to a log that has been cut or set aside.

    A server that has ended has a log too. Raises UsageError for a name without one, and for an ambiguous None.
    """
    name = name or _whose_log(store)
    path = log_path(store, f"{name}.gateway" if gateway else name)
    if gateway and not path.is_file() and log_path(store, name).is_file():
        raise UsageError(f"{name} has had no gateway", remedy="leave out --gateway")
    if not path.is_file():
        left = _logged(store)
        remedy = suggestion(name, left) if left else "run `trtpipe serve`"
        raise UsageError(f"there is no log of a server named '{name}'", remedy=remedy)
    file = _open(path)
    try:
        yield "".join(collections.deque(file, maxlen=lines))
        while follow:
            piece = file.read()
            if piece:
                yield piece
                continue
            with contextlib.suppress(FileNotFoundError):  # the next one is about to be made
                if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    file.close()
                    file = _open(path)
                    continue
            if os.fstat(file.fileno()).st_size < file.buffer.tell():  # as copytruncate of logrotate leaves it
                file.seek(0)
            elif not any(server.name == name for server in running(store)):
                return
            else:
                time.sleep(0.2)
    finally:
        file.close()


def _open(path: Path) -> TextIO:
    return path.open(encoding="utf-8", errors="replace")


def log_path(store: Store, name: str) -> Path:
    return store.home / "logs" / f"serve-{name}.log"


def _logged(store: Store) -> list[str]:
    """The servers that have a log, running or not."""
    logs = sorted((store.home / "logs").glob("serve-*.log"))
    names = {log.stem.removeprefix("serve-") for log in logs}
    return sorted(name for name in names if name.removesuffix(".gateway") not in names - {name})


def _whose_log(store: Store) -> str:
    """Name of the only running server or, where none runs, of the only one that died, or the only one with a log.
    Raises UsageError."""
    servers = recorded(store)
    if any(server.died is None for server in servers):
        return find_running(store, None).name
    left = [server.name for server in servers] or _logged(store)
    if not left:
        raise UsageError("no server is running, and none has left a log", remedy="run `trtpipe serve`")
    if len(left) > 1:
        raise UsageError(
            "no server is running, and several have left a log", remedy="name one with --server: " + ", ".join(left)
        )
    return left[0]
