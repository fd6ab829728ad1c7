"""Upload of a file to a registry of images, chunk by chunk; an interrupted upload continues where it was.

The registry gives the address of the next chunk. That address is kept in `home`/uploads until the upload is complete.
A registry keeps an incomplete upload for some days: a later push asks how much of it there is.
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
# Bytes of a chunk that are held in memory.
PIECE = 1 << 18
# Bytes per second that a registry may copy and hash once it has the whole file.
VERIFIED_PER_SECOND = 10_000_000
# Interruptions without a byte of progress before the push gives up.
TRIES = 3
# Like OciRegistry's `_ask`: (method, URL, **request's fields); HostError for a refusal, except the statuses `also`.
Ask = Callable[..., Any]


class Upload:
    """Upload of `path` to the repository whose uploads begin at the URL `begin`."""

    def __init__(self, ask: Ask, begin: str, blob: Blob, path: Path, home: Path) -> None:
        self._ask = ask
        self._begin = begin
        self._blob = blob
        self._path = path
        self._kept = home / "uploads" / hashlib.sha256(f"{begin} {blob.sha256}".encode()).hexdigest()
        self._place = begin

    def upload(self, moved: Moved) -> None:
        """`moved` is also called for bytes that are there already. Raises HostError."""
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
        """Bytes that an earlier push has uploaded; None where there was none, or the registry has forgotten it."""
        with contextlib.suppress(OSError, UnicodeDecodeError, HostError):
            self._place = self._kept.read_text(encoding="utf-8")
            return self._there()
        self._place = self._begin
        return None

    def _there(self) -> int | None:
        """Bytes of the file that the registry has; None where it does not say."""
        answer = self._ask("GET", self._place, also=(404,))
        told = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", "0-0"))
        if answer.status_code == 404 or told is None:
            return None
        last = int(told[1])
        self._follow(answer)
        if last >= self._blob.size:
            return None
        return last + 1 if last else 0  # 0-0 means no bytes

    def _follow(self, answer: Any) -> None:
        self._place = joined(self._place, answer.headers.get("Location", self._place))
        self._kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._kept, self._place)


class _Part(Iterable[bytes]):
    """Bytes [start, start + size) of a file, which can be iterated again."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._path, self._start, self.size = path, start, size

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            left = self.size
            while piece := file.read(min(PIECE, left)):
                left -= len(piece)
                yield piece
