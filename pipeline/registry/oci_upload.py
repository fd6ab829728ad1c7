"""A file to a registry of images, chunk by chunk; one that breaks off goes on where it was.

The registry says where the next chunk goes. That address is kept in `home`/uploads until the file is there, and a
registry keeps what it has for some days: a later push asks how much that is.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.net.http_limits import patience
from trtpipe.pipeline.registry.base import Blob, Moved
from trtpipe.pipeline.registry.oci_client import joined
from trtpipe.pipeline.store.folders import write_whole

CHUNK = 32 << 20
# Of a chunk, held in memory.
PIECE = 1 << 18
# Bytes of a file that a registry may copy and hash in a second, when all of it is there.
VERIFIED_PER_SECOND = 10_000_000
# How often it breaks off without a byte more before the push gives up.
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
        tries = furthest = 0
        while done < self._blob.size:
            chunk = _Part(self._path, done, min(CHUNK, self._blob.size - done))
            headers = {
                "Content-Range": f"{done}-{done + chunk.size - 1}", "Content-Type": "application/octet-stream",
                "Content-Length": str(chunk.size),
            }  # fmt: skip
            try:
                self._follow(self._ask("PATCH", self._place, content=chunk, headers=headers))
            except HostError:
                tries += 1
                there = self._there() if tries < TRIES else None
                if there is None:
                    raise
                moved(there - done)
                done = there
                continue
            done += chunk.size
            moved(chunk.size)
            if done > furthest:
                tries, furthest = 0, done
        mark = "&" if "?" in self._place else "?"
        with patience(self._blob.size / VERIFIED_PER_SECOND):
            self._ask("PUT", f"{self._place}{mark}digest=sha256:{self._blob.sha256}")
        self._kept.unlink(missing_ok=True)

    def _goes_on(self) -> int | None:
        """How much of it is there of an earlier push; None where there was none, or the registry knows it no longer."""
        with contextlib.suppress(OSError, UnicodeDecodeError, HostError):
            self._place = self._kept.read_text(encoding="utf-8")
            return self._there()
        self._place = self._begin
        return None

    def _there(self) -> int | None:
        """How many bytes of it the registry has; None where it does not say."""
        answer = self._ask("GET", self._place, also=(404,))
        told = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", "0-0"))
        if answer.status_code == 404 or told is None:
            return None
        last = int(told[1])
        self._follow(answer)
        if last >= self._blob.size:
            return None
        return last + 1 if last else 0  # nothing is told as 0-0

    def _follow(self, answer: Any) -> None:
        self._place = joined(self._place, answer.headers.get("Location", self._place))
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._kept, self._place)


class _Part(Iterable[bytes]):
    """Bytes [start, start + size) of a file, as often as somebody asks."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._path, self._start, self.size = path, start, size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            left = self.size
            while piece := file.read(min(PIECE, left)):
                left -= len(piece)
                yield piece
