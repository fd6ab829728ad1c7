"""Read of a blob over connections that may break: never more than its size, continued where one broke off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator

import httpx

from trtpipe.engines.errors import HostError, InputDataError
from trtpipe.pipeline.registry.base import Blob, translated

# Seconds to wait before each further connection; then the read gives up.
WAITS = (0.5, 1.0, 2.0)
# A connection that brought this many bytes counts as working.
PROGRESS = 1 << 20


class Interrupted(HostError):
    """A connection that broke in the middle of a body, which another may continue."""


def continued(
    blob: Blob, start: int, open_at: Callable[[int], Generator[bytes, None, None]], url: str
) -> Iterator[bytes]:
    """The bytes of a blob from `start` on.

    open_at  returns the bytes from a position on, over a new connection; raises Interrupted where that breaks

    Raises as `open_at` does, and InputDataError where it repeatedly gives fewer bytes than the blob has.
    """
    position = good = start
    failed = 0
    while position < blob.size:
        broken: Interrupted | None = None
        with contextlib.closing(open_at(position)) as pieces:
            try:
                for piece in pieces:
                    kept = piece[: blob.size - position]
                    position += len(kept)
                    yield kept
                    if position == blob.size:
                        return
            except Interrupted as error:
                broken = error
        failed = 0 if position - good >= PROGRESS else failed
        good = position
        if failed == len(WAITS):
            raise broken or InputDataError(
                f"{url} ends the file sha256:{blob.sha256[:12]} early",
                why=f"it sends {position:,} of {blob.size:,} bytes",
                remedy="push the target again",
            )
        time.sleep(WAITS[failed])
        failed += 1


def body(answer: httpx.Response, position: int, url: str) -> Generator[bytes, None, None]:
    """The bytes of an HTTP answer to a request for the bytes from `position` on. Closes the answer.

    Raises Interrupted where the connection breaks, HostError for an answer with another part of the blob.
    """
    try:
        part = answer.status_code == 206
        if part and not answer.headers.get("content-range", "").startswith(f"bytes {position}-"):
            raise another_part(url)
        with translated(url):
            try:
                yield from skip(answer.iter_raw(), 0 if part else position)
            except (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ReadTimeout) as error:
                raise Interrupted(f"{url} broke off", why=str(error)) from None
    finally:
        answer.close()


def another_part(url: str) -> HostError:
    return HostError(f"{url} sends another part of a file than asked for")


def skip(pieces: Iterator[bytes], count: int) -> Generator[bytes, None, None]:
    """The pieces without their first `count` bytes, for a server that ignores ranges and sends the whole file."""
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
        count = max(0, count - len(piece))
