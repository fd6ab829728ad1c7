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
    from trtpipe.pipeline.bench.load.workload import RequestSpec


# Bytes that an answer may have: these, as many as were sent (a server may echo the prompt or name it in an error), and
# so many for each token that was asked for. Servers send 100 to 400 for a token, chunk lengths and JSON included.
ANSWER_BYTES = 64 << 10
TOKEN_BYTES = 4 << 10
# The same for one event or message, which may hold the whole text: a token is seldom more than 16 bytes of it.
RESPONSE_TOKEN_BYTES = 64
# Reads of a request in flight that are kept apart; more of them are put together.
PIECES = 4096
# Characters of a failure's message.
MOST_WORDS = 400


def answer_limit(sent: int, max_tokens: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Bytes that an answer may have to a request of `sent` bytes for `max_tokens`."""
    return ANSWER_BYTES + sent + token_bytes * max_tokens


@dataclass(frozen=True)
class Failure:
    """Why a request does not count. `kind` is the class that the report counts by.

    Kinds: ConnectFailed, ConnectionLost, TruncatedStream, ServerError (an error told inside the stream),
    MalformedResponse, OversizedResponse (more bytes than `Exchange.limit`), EmptyOutput, WrongLength (by the server's
    own count, where a length was asked for), Timeout, Stalled, `http NNN`, `grpc STATUS`.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, kind: str, message: str) -> Failure:
        # One line each, and not a long one: a server's traceback belongs in its own log.
        words = " ".join(message.split())
        return cls(kind, words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}...")


class InFlightRequest:
    """One request.

    message       its bytes, made before the clock started
    input_tokens  length of the prompt
    max_tokens    output length asked for
    exact         neither less nor more of it
    limit         bytes that its answer may have
    response_limit  bytes of one event or message of it
    slot          which place of a closed loop it took; -1 in an open loop
    warmup        sent to bring the server into its stride, or to keep it there; in no distribution
    due_ns        it could have left
    sent_ns       just before its first byte; None if it never came to that
    data          what came, a read or a message at a time; empty once the stream has ended
    body, sizes   then all of it, and how many bytes each read had: a third less memory than so many small objects.
                  What is not measured is compressed until it is read; with the rest there is no time for that.
                  Of a failed request nothing is kept
    stamps        of each read
    chunked       the bytes have HTTP/1.1's chunks in them
    mark          what a read has in it that is more than a sign of life; empty: each is
    end_ns        its stream ended or failed
    call          the sender's own
    ask           what it was made from, while a turn may come after it
    session, turn of a conversation, in which each request is a turn; -1 of one that stands alone
    """

    __slots__ = (
        "_compressed", "_heard", "_kept", "ask", "call", "chunked", "data", "due_ns", "end_ns", "exact", "failure",
        "id", "input_tokens", "limit", "mark", "max_tokens", "message", "on_ended", "response_limit", "sent_ns",
        "session", "sizes", "slot", "stamps", "turn", "warmup",
    )  # fmt: skip

    def __init__(self, identity: str, message: bytes, *, input_tokens: int, max_tokens: int) -> None:
        self.id = identity
        self.message = message
        self.input_tokens = input_tokens
        self.max_tokens = max_tokens
        self.limit = answer_limit(len(message), max_tokens)
        self.response_limit = answer_limit(len(message), max_tokens, RESPONSE_TOKEN_BYTES)
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
        self._compressed = False
        self._heard: int | None = None  # of the reads that have been put together
        self.sizes = array("I")
        self.stamps = array("q")
        self.chunked = False
        self.mark = b""
        self.call: Any = None
        self.ask: RequestSpec | None = None
        self.on_ended: Callable[[InFlightRequest], None] | None = None

    def receive(self, data: bytes, stamp_ns: int) -> None:
        self.data.append(data)
        self.stamps.append(stamp_ns)

    def heard_ns(self) -> int | None:
        """When its stream last held more than a sign of life, while it is in flight; None before that."""
        recent = zip(reversed(self.data), reversed(self.stamps), strict=False)
        return next((stamp for data, stamp in recent if self.mark in data), self._heard)

    def compact(self) -> None:
        """Put the reads together where there are many, while it is in flight: an object for each byte would take
        fifty times its memory."""
        if len(self.data) > PIECES:
            self._heard = self.heard_ns()
            self._pack()

    def end(self, stamp_ns: int, failure: Failure | None = None) -> None:
        """Its stream is over. Only the first end counts."""
        if self.end_ns is not None:
            return
        self.end_ns = stamp_ns
        self.failure = failure
        self.call = None
        if self.on_ended is not None:
            self.on_ended(self)
        if failure is not None:
            self.data.clear()
            self.forget()
            return
        self._pack()
        if self.warmup and self._kept:
            self._kept, self._compressed = zlib.compress(self._kept, 1), True

    def fail(self, kind: str, message: str) -> None:
        self.end(monotonic_ns(), Failure.of(kind, message))

    def fail_oversized(self, why: str = "") -> None:
        """Its answer has more bytes than `limit`, or `why` says what else is too large."""
        what = why or f"an answer of more than {self.limit:,} bytes"
        self.fail("OversizedResponse", f"{what}, where {self.max_tokens:,} tokens were asked for")

    def reads(self) -> Iterator[tuple[bytes, int]]:
        """All that came, each read with its stamp."""
        body, start = self.body, 0
        for size, stamp in zip(self.sizes, self.stamps, strict=True):
            yield body[start : start + size], stamp
            start += size

    @property
    def body(self) -> bytes:
        self._pack()
        return zlib.decompress(self._kept) if self._compressed else self._kept

    def forget(self) -> None:
        """Its bytes and stamps: they have been read."""
        self._kept, self._compressed, self.sizes, self.stamps = b"", False, array("I"), array("q")

    def _pack(self) -> None:
        if self.data:
            self._kept += b"".join(self.data)
            self.sizes.extend(map(len, self.data))
            self.data.clear()
