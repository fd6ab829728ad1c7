"""Upload of a file to a registry of images, in one request as Docker sends it: many registries refuse chunks.

The registry gives the address where the upload goes on. That address is kept in `home`/uploads until the upload is
complete. A registry may keep an interrupted upload for some days: this push, or a later one, asks how much of it there
is and sends the rest; where nothing is there the file begins again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.net.http_limits import patience
from trtpipe.pipeline.registry.base import Blob, Moved
from trtpipe.pipeline.registry.oci_client import joined
from trtpipe.pipeline.registry.streams import WAITS
from trtpipe.pipeline.store.folders import write_whole

# Bytes of a file that are held in memory.
PIECE = 1 << 18
# Bytes per second that a registry may copy and hash once it has the whole file.
VERIFIED_PER_SECOND = 10_000_000
# Interruptions without a byte of progress before the push gives up.
TRIES = 3
# Statuses with which registries refuse the rest of a file: GitHub's takes at most 4 MiB of it, and Google's nothing.
NO_RANGE = (400, 404, 405, 413, 416, 501)
# Like OciRegistry's `_ask`: (method, URL, **request's fields); HostError for a refusal, except the statuses `also`.
Ask = Callable[..., Any]


class Upload:
    """Upload of `path` to the repository whose uploads begin at the URL `begin`."""

    def __init__(self, ask: Ask, begin: str, blob: Blob, path: Path, home: Path) -> None:
        self._ask = ask
        self._begin = begin
        self._blob = blob
        self._path = path
        name = hashlib.sha256(f"{begin} {blob.sha256}".encode()).hexdigest()
        self._kept = home / "uploads" / name
        self._lock = home / "locks" / f"upload-{name}.lock"
        self._keeps = False
        self._place = begin
        self._position = 0

    def upload(self, moved: Moved) -> None:
        """Upload the file. `moved` is also called for bytes that are there already, and with a negative number for
        bytes that are to be sent again. Raises HostError.

        While another push from this home uploads the same file, this upload is one of its own, whose address is not
        kept.
        """
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._lock)
        with contextlib.suppress(TimeoutError):
            lock.acquire(timeout=0)
        self._keeps = lock.is_locked
        try:
            self._upload(moved)
            if self._keeps:
                self._kept.unlink(missing_ok=True)
        finally:
            lock.release()

    def _upload(self, moved: Moved) -> None:
        size = self._blob.size
        done = furthest = self._goes_on()
        tries = 0
        while True:
            self._count(done, moved)
            whole = done == 0
            if whole:
                self._place = self._begin
                self._follow(self._ask("POST", self._begin))
            try:
                taken = done == size or self._send(done, moved)
            except HostError:
                time.sleep(WAITS[tries])  # until the registry, too, sees that the connection has ended
                there = self._there()
                tries = 0 if there > furthest else tries + 1
                if tries == TRIES:
                    raise
                done, furthest = there, max(furthest, there)
                continue
            try:
                if taken:
                    self._finish()
                    return
            except HostError:  # the digest is another, where a registry does not join what several requests brought
                if whole:
                    raise
            done, furthest = 0, size

    def _send(self, start: int, moved: Moved) -> bool:
        """Send the file from the byte `start` on. False where the registry takes no upload that goes on."""
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(self._blob.size - start)}
        if start:
            headers["Content-Range"] = f"{start}-{self._blob.size - 1}"
        rest = _Rest(self._path, start, self._blob.size, lambda position: self._count(position, moved))
        with patience(self._blob.size / VERIFIED_PER_SECOND):
            answer = self._ask("PATCH", self._place, content=rest, headers=headers, also=NO_RANGE if start else ())
        if answer.status_code in NO_RANGE:
            return False
        self._follow(answer)
        return True

    def _finish(self) -> None:
        mark = "&" if "?" in self._place else "?"
        with patience(self._blob.size / VERIFIED_PER_SECOND):
            self._ask("PUT", f"{self._place}{mark}digest=sha256:{self._blob.sha256}")

    def _goes_on(self) -> int:
        """Bytes that an earlier push has uploaded; 0 where there was none, or the registry has forgotten it."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self._keeps:
                self._place = self._kept.read_text(encoding="utf-8")
                return self._there()
        return 0

    def _there(self) -> int:
        """Bytes of the file that the registry has kept; 0 where it does not say."""
        with contextlib.suppress(HostError):
            answer = self._ask("GET", self._place)
            told = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", "0-0"))
            last = 0 if told is None else int(told[1])  # 0-0 means no bytes
            if 0 < last < self._blob.size:
                self._follow(answer)
                return last + 1
        return 0

    def _follow(self, answer: Any) -> None:
        self._place = joined(self._place, answer.headers.get("Location", self._place))
        if self._keeps:
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._kept, self._place)

    def _count(self, position: int, moved: Moved) -> None:
        moved(position - self._position)
        self._position = position


class _Rest(Iterable[bytes]):
    """Bytes [start, stop) of a file, which can be iterated again. `at` is called with each position that is reached."""

    def __init__(self, path: Path, start: int, stop: int, at: Callable[[int], None]) -> None:
        self._path, self._start, self._stop, self._at = path, start, stop, at

    def __iter__(self) -> Iterator[bytes]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            position = self._start
            while piece := file.read(min(PIECE, self._stop - position)):
                self._at(position)
                yield piece
                position += len(piece)
            self._at(position)
