"""One request while the clock runs: bytes and stamps as they come. Nothing is parsed before the run is over.

All stamps are integers in nanoseconds of `time.monotonic_ns`.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.bench.work.workload import Ask


@dataclass(frozen=True)
class Failure:
    """Why a request does not count. `kind` is the class that the report counts by.

    Kinds: ConnectFailed, ConnectionLost, TruncatedStream, ServerError (an error told inside the stream),
    MalformedResponse, EmptyOutput, WrongLength (by the server's own count, where a length was asked for), Timeout,
    Stalled, `http NNN`, `grpc STATUS`.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, kind: str, message: str) -> Failure:
        # One line each: a server's traceback belongs in its own log.
        return cls(kind, " ".join(message.split()))


class Exchange:
    """One request.

    message       its bytes, made before the clock started
    input_tokens  length of the prompt
    max_tokens    output length asked for
    exact         neither less nor more of it
    slot          which place of a closed loop it took; -1 in an open loop
    warmup        sent to bring the server into its stride, or to keep it there; in no distribution
    due_ns        it could have left
    sent_ns       just before its first byte; None if it never came to that
    data          what came, a read or a message at a time; empty once the stream has ended
    body, sizes   then all of it, and how many bytes each read had: a third less memory than so many small objects.
                  What is not measured is compressed until it is read; with the rest there is no time for that
    stamps        of each read
    chunked       the bytes have HTTP/1.1's chunks in them
    mark          what a read has in it that is more than a sign of life; empty: each is
    end_ns        its stream ended or failed
    call          the sender's own
    ask           what it was made from, while a turn may come after it
    session, turn of a conversation, in which each request is a turn; -1 of one that stands alone
    """

    __slots__ = (
        "_kept", "ask", "call", "chunked", "data", "due_ns", "end_ns", "exact", "failure", "id", "input_tokens",
        "mark", "max_tokens", "message", "on_ended", "sent_ns", "session", "sizes", "slot", "stamps",
        "turn", "warmup",
    )  # fmt: skip

    def __init__(self, identity: str, message: bytes, *, input_tokens: int, max_tokens: int) -> None:
        self.id = identity
        self.message = message
        self.input_tokens = input_tokens
        self.max_tokens = max_tokens
        self.exact = False
        self.slot = -1
        self.session = self.turn = -1
        self.warmup = False
        self.due_ns = 0
        self.sent_ns: int | None = None
        self.end_ns: int | None = None
        self.failure: Failure | None = None
        self.data: list[bytes] = []
        self._kept = b""
        self.sizes = array("I")
        self.stamps = array("q")
        self.chunked = False
        self.mark = b""
        self.call: Any = None
        self.ask: Ask | None = None
        self.on_ended: Callable[[Exchange], None] | None = None

    def receive(self, data: bytes, stamp_ns: int) -> None:
        self.data.append(data)
        self.stamps.append(stamp_ns)

    def heard_ns(self) -> int | None:
        """When its stream last held more than a sign of life, while it is in flight; None before that."""
        recent = zip(reversed(self.data), reversed(self.stamps), strict=False)
        return next((stamp for data, stamp in recent if self.mark in data), None)

    def end(self, stamp_ns: int, failure: Failure | None = None) -> None:
        """Its stream is over. Only the first end counts."""
        if self.end_ns is not None:
            return
        self.end_ns = stamp_ns
        self.failure = failure
        self.call = None
        if self.on_ended is not None:
            self.on_ended(self)
        self._pack()

    def fail(self, kind: str, message: str) -> None:
        self.end(monotonic_ns(), Failure.of(kind, message))

    def reads(self) -> Iterator[tuple[bytes, int]]:
        """All that came, each read with its stamp."""
        body, start = self.body, 0
        for size, stamp in zip(self.sizes, self.stamps, strict=True):
            yield body[start : start + size], stamp
            start += size

    @property
    def body(self) -> bytes:
        self._pack()
        return self._unpacked()

    def forget(self) -> None:
        """Its bytes: they have been read."""
        self._kept, self.sizes = b"", array("I")

    def _pack(self) -> None:
        if not self.data:
            return
        body = self._unpacked() + b"".join(self.data)
        self._kept = zlib.compress(body, 1) if self.warmup else body
        self.sizes.extend(map(len, self.data))
        self.data.clear()

    def _unpacked(self) -> bytes:
        return zlib.decompress(self._kept) if self.warmup and self._kept else self._kept
