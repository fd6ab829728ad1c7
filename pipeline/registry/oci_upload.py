"""A file to a registry of images, chunk by chunk; one that breaks off goes on where it was.

The registry says where the next chunk goes. That address is kept in `home`/uploads until the file is there, and a
registry keeps what it has for some days: a later push asks how much that is.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from engines.errors import HostError
from pipeline.folders import write_whole
from pipeline.registry.base import Blob, Moved

CHUNK = 32 << 20
# How often a chunk is sent again before the push gives up.
TRIES = 3
# As OciRegistry's own: (method, URL, **of requests), a HostError for what is refused, but for the statuses `also`.
Ask = Callable[..., Any]


class Upload:
    """Of `path` to the repository whose uploads begin at `begin`."""

    def __init__(self, ask: Ask, begin: str, blob: Blob, path: Path, home: Path) -> None:
        self._ask = ask
        self._begin = begin
        self._blob = blob
        self._path = path
        self._kept = home / "uploads" / hashlib.sha256(f"{begin} {blob.sha256}".encode()).hexdigest()
        self._place = begin

    def upload(self, moved: Moved) -> None:
        """`moved` is told of what is there already, too. Raises HostError."""
        done = self._goes_on()
        if done is None:
            self._follow(self._ask("POST", self._begin))
            done = 0
        moved(done)
        tries = 0
        with self._path.open("rb") as file:
            while done < self._blob.size:
                file.seek(done)
                chunk = file.read(CHUNK)
                where = {"Content-Range": f"{done}-{done + len(chunk) - 1}", "Content-Type": "application/octet-stream"}
                try:
                    self._follow(self._ask("PATCH", self._place, data=chunk, headers=where))
                except HostError:
                    tries += 1
                    there = self._there() if tries < TRIES else None
                    if there is None:
                        raise
                    moved(there - done)
                    done = there
                    continue
                tries = 0
                done += len(chunk)
                moved(len(chunk))
        mark = "&" if "?" in self._place else "?"
        self._ask("PUT", f"{self._place}{mark}digest=sha256:{self._blob.sha256}")
        self._kept.unlink(missing_ok=True)

    def _goes_on(self) -> int | None:
        """How much of it is there of an earlier push; None where there was none, or the registry knows it no longer."""
        with contextlib.suppress(OSError, HostError):
            self._place = self._kept.read_text(encoding="utf-8")
            return self._there()
        return None

    def _there(self) -> int | None:
        answer = self._ask("GET", self._place, also=(404,))
        if answer.status_code == 404:
            return None
        last = int(answer.headers.get("Range", "0-0").rpartition("-")[2])
        self._follow(answer)
        return last + 1 if last else 0  # nothing is told as 0-0

    def _follow(self, answer: Any) -> None:
        self._place = urljoin(self._begin, answer.headers.get("Location", self._place))
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._kept, self._place)
