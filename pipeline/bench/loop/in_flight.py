"""Request in flight: its bytes and stamps as they arrive. Nothing is parsed before the run is over.

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


# Byte limit of an answer: this constant, the bytes of the request (a server may echo the prompt or quote it in an
# error), and a number for each requested token. Servers send 100 to 400 for a token, chunk lengths and JSON included.
ANSWER_BYTES = 64 << 10
TOKEN_BYTES = 4 << 10
# The same per token for one event or message, which may hold the whole text: a token seldom takes more than 16 bytes.
RESPONSE_TOKEN_BYTES = 64
# Most reads of a request in flight that are kept apart; beyond that they are joined.
PIECES = 4096
# Most characters of a failure's message.
MOST_WORDS = 400


def answer_limit(sent: int, max_tokens: int, token_bytes: int = TOKEN_BYTES) -> int:
    """Most bytes of an answer to a request of `sent` bytes for `max_tokens` tokens."""
    return ANSWER_BYTES + sent + token_bytes * max_tokens


@dataclass(frozen=True)
class Failure:
    """Reason why a request has failed. The report counts failures by `kind`.

    Kinds: ConnectFailed, ConnectionLost, TruncatedStream, ServerError (an error inside the stream),
    MalformedResponse, OversizedResponse (more bytes than `InFlightRequest.limit`), EmptyOutput, WrongLength (by the
    server's own count, where a length was requested), Timeout, Stalled, `http NNN`, `grpc STATUS`.
    """

    kind: str
    message: str

    @classmethod
    def of(cls, kind: str, message: str) -> Failure:
        # One short line: a server's traceback belongs in the server's log.
        words = " ".join(message.split())
        return cls(kind, words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]}...")


class InFlightRequest:
    """One request with its response bytes.

    message       bytes of the request, made before the clock started
    input_tokens  length of the prompt
    max_tokens    requested output length
    exact         the answer must have exactly that length
    limit         most bytes of the answer
    response_limit  most bytes of one event or message of the answer
    slot          slot of a closed loop that sent it; -1 in an open loop
    warmup        sent to bring the server to its steady load, or to keep it there; not measured
    due_ns        earliest time at which it could have been sent
    sent_ns       time just before its first byte was sent; None if it never was
    data          response bytes, one entry per read or message; empty once the stream has ended
    body, sizes   after the end: all response bytes, and the size of each read: a third less memory than many small
                  objects. The body of an unmeasured request is compressed until it is read; for measured requests
                  there is no time to compress. Nothing is kept of a failed request
    stamps        stamp of each read
    chunked       whether the bytes contain HTTP/1.1 chunk framing
    mark          bytes that occur in each read that is more than a keep-alive; empty: every read counts
    end_ns        when its stream ended or failed
    call          private data of the sender
    ask           its specification, while another turn may follow
    session, turn of a conversation, in which each request is a turn; -1 for a single request
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
        self._heard: int | None = None  # stamp among the reads that have been joined
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
        """When its stream last held more than a keep-alive, while the request is in flight; None before that."""
        recent = zip(reversed(self.data), reversed(self.stamps), strict=False)
        return next((stamp for data, stamp in recent if self.mark in data), self._heard)

    def compact(self) -> None:
        """Join the reads of a request in flight where there are many: an object per byte would take fifty times the
        memory."""
        if len(self.data) > PIECES:
            self._heard = self.heard_ns()
            self._pack()

    def end(self, stamp_ns: int, failure: Failure | None = None) -> None:
        """Mark the stream as ended. Only the first call counts."""
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
        """Fail the request: its answer has more bytes than `limit`, or `why` says what else is too large."""
        what = why or f"an answer of more than {self.limit:,} bytes"
        self.fail("OversizedResponse", f"{what}, where {self.max_tokens:,} tokens were asked for")

    def reads(self) -> Iterator[tuple[bytes, int]]:
        """All reads, each with its stamp."""
        body, start = self.body, 0
        for size, stamp in zip(self.sizes, self.stamps, strict=True):
            yield body[start : start + size], stamp
            start += size

    @property
    def body(self) -> bytes:
        self._pack()
        return zlib.decompress(self._kept) if self._compressed else self._kept

    def forget(self) -> None:
        """Free bytes and stamps, after they have been decoded."""
        self._kept, self._compressed, self.sizes, self.stamps = b"", False, array("I"), array("q")

    def _pack(self) -> None:
        if self.data:
            self._kept += b"".join(self.data)
            self.sizes.extend(map(len, self.data))
            self.data.clear()
