"""HTTP connections of the gateway, with limits on the size, the duration and the number of requests.

uvicorn's httptools protocol reads a request's head without a limit, and starts the application when the head has
arrived. Here a request reaches the application when all of it has arrived. Until then it costs its bytes and some
5 KB, it has to arrive in time, and its key is checked before its body is read.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from trtpipe.pipeline.gateway.failure import Failure, wrong

# Limit of the first line and the headers. Each header counts HEADER_COST bytes more, for its Python objects.
HEAD_BYTES = 32 << 10
HEADER_COST = 128
MOST_HEADERS = 100
# Time from the connection, or from a later request's first byte, to the end of the head.
HEAD_SECONDS = 10.0
# Time from the end of the head to the end of the body: 4 MB at 0.6 Mbit/s.
BODY_SECONDS = 60.0
# Chunks of a body that may be small; further chunks need 64 bytes on average. Each chunk costs a microsecond.
SMALL_CHUNKS = 1024
# A client that reads nothing of its answer for this long is cut off.
UNREAD_SECONDS = 60.0
# A refused client may still be sending: closing at once would destroy the answer before it is read.
LINGER_SECONDS, LINGER_BYTES = 2.0, 8 << 20
# Limit of the bytes of all incomplete requests of this process; beyond it the largest requests are refused.
UNFINISHED_BYTES = 32 << 20
# Connections of this process, where the limit of open files allows them; beyond it the longest idle are closed.
# A connection with TLS takes 50 KB.
MOST_CONNECTIONS, MOST_TLS_CONNECTIONS = 16384, 2048
# Connections that are closed together, because the search for them looks at all connections.
CLOSED_AT_ONCE = 64
SWEEP_SECONDS = 1.0
# Connections ended between two pauses: ten thousand, closed at once, would take a tenth of a second.
ENDED_AT_ONCE, ENDED_PAUSE_SECONDS = 100, 0.01
# Where other processes take new requests, a connection stays open for this long after it is made, or after an answer
# that began before.
SETTLE_SECONDS = 0.5
# Bytes that the parser is given at a time, so that a head is measured before it is much too large.
SLICE_BYTES = 8 << 10

# Key of the body in the request's scope. ASGI's own way, and starlette's, would copy the body five times.
BODY = "trtpipe.body"
# Path and `authorization` of a request with a body -> how many bytes its body may have. Raises Failure.
Admit = Callable[[str, str], int]
# Path and status of a request that does not reach the application.
Count = Callable[[str, int], None]


class Connections:
    """All connections of this process, the bytes they hold together, and the one timer for their deadlines."""

    def __init__(
        self, admit: Admit, count: Count, *,
        most: int = MOST_CONNECTIONS, unfinished_bytes: int = UNFINISHED_BYTES, origins: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`origins`: pages of these may read refusals; * stands for all."""
        self.origins = origins
        self.admit = admit
        self.count = count
        self.held = 0
        self.leaving = False  # this process is about to end
        self.lingers = False  # idle connections then end by their own timer, since their clients may be sending
        self.replaced = False  # other processes take new requests
        self._most = most
        self._unfinished_bytes = unfinished_bytes
        self._open: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        if len(self._open) > self._most:
            self._close_idle(connection)
        if self._timer is None:
            self._timer = connection.loop.call_later(SWEEP_SECONDS, self._sweep, connection.loop)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)

    def hold(self, amount: int) -> None:
        """Count bytes of incomplete requests; a negative amount when a request is given up or complete."""
        self.held += amount
        if amount > 0 and self.held > self._unfinished_bytes:
            for connection in sorted(self._open, key=lambda one: one.held, reverse=True):
                if self.held <= self._unfinished_bytes * 3 // 4:
                    break
                connection.refuse(
                    Failure(429, "too many requests are arriving slowly", code="overloaded", retry_after=1)
                )

    def _close_idle(self, newest: Connection) -> None:
        waiting = [one for one in self._open if not one.answering and one is not newest]
        for connection in heapq.nsmallest(CLOSED_AT_ONCE, waiting, key=lambda one: one.waiting_since):
            connection.drop()
        if not waiting:  # every other connection is being answered
            newest.drop()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        late = [connection for connection in self._open if connection.late(now)]
        for connection in late[:ENDED_AT_ONCE]:
            connection.end()
        pause = SWEEP_SECONDS if len(late) <= ENDED_AT_ONCE else ENDED_PAUSE_SECONDS
        self._timer = loop.call_later(pause, self._sweep, loop) if self._open else None


class Connection(HttpToolsProtocol):
    """One client's connection. The parser's callbacks collect a request and pass it on when it is complete."""

    def __init__(
        self, config: uvicorn.Config, server_state: ServerState, app_state: dict[str, Any], connections: Connections
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self.held = 0  # bytes of an incomplete request
        self.waiting_since = 0.0
        self._all = connections
        self._in_head = False
        self._in_body = False
        self._fields = 0
        self._chunks = 0
        self._body = bytearray()
        self._body_limit = 0
        self._deadline = math.inf
        self._write_deadline = math.inf
        self._closing = False  # further input of this client is discarded
        self._discarded = 0

    @property
    def answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait(HEAD_SECONDS)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._in_body:
            self._all.count(self._path(), 499)
        self._release()
        self._all.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), SLICE_BYTES):
            if self._closing:
                self._discard(len(data) - start)
                return
            self._parse(data[start : start + SLICE_BYTES])

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.time() + UNREAD_SECONDS

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_deadline = math.inf

    # Called by the parser

    def on_message_begin(self) -> None:
        if self._closing:
            return
        if self.answering:
            self._end_after_answer()  # a request that was sent before the last answer: no known client does that
            return
        super().on_message_begin()
        self._in_head = True
        self._fields = self._chunks = 0
        self._wait(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._closing:
            return
        self._fields += 1
        if self._fields > MOST_HEADERS:
            self.refuse(Failure(431, f"the request has more than {MOST_HEADERS} headers", code="headers_too_large"))
        elif self._in_head:  # headers after the body (trailers) are ignored
            self._hold(HEADER_COST)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._closing or self._offers_upgrade():
            return
        self._in_head, self._in_body = False, True
        self._wait(BODY_SECONDS)
        fields = dict(reversed(self.headers))  # the first of several equal names, as the application reads them
        length = int(fields.get(b"content-length", b"0"))
        self._body_limit = 0
        if length or b"transfer-encoding" in fields:
            try:
                self._body_limit = self._all.admit(self._path(), fields.get(b"authorization", b"").decode("latin-1"))
                _check_type(fields)
            except Failure as failure:
                self.refuse(failure)
            self._check_length(length)
        if self.expect_100_continue and not self._closing:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.expect_100_continue = False  # the application finds the body in the scope

    def on_body(self, body: bytes) -> None:
        if self._closing:
            return
        self._chunks += 1
        self._body += body
        self._check_length(len(self._body))
        if self._chunks > SMALL_CHUNKS + len(self._body) // 64:
            self.refuse(wrong("the body is sent in too many small chunks", code="invalid_request"))

    def on_message_complete(self) -> None:
        if self._closing or self._offers_upgrade():
            return
        body = self._body
        self._release()
        self._deadline = math.inf
        self.scope[BODY] = body  # type: ignore[literal-required]
        super().on_headers_complete()  # starts the application
        super().on_message_complete()

    # Called by uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.url = b""  # unset until the next request
        idle = SETTLE_SECONDS if self._all.replaced else self.timeout_keep_alive
        self._wait(UNREAD_SECONDS if self.transport.is_closing() else idle)

    def shutdown(self) -> None:
        if self._all.replaced:
            # Whoever has just connected or got an answer may be sending a request: that is answered, as one that is
            # arriving is, and its answer ends the connection.
            busy = self.answering or self._in_head or self._in_body
            if not busy and self.waiting_since + SETTLE_SECONDS <= self.loop.time():
                super().shutdown()
            elif not busy:
                self._wait(SETTLE_SECONDS)
        elif self.answering or not self._all.lingers:
            super().shutdown()

    # Called by `Connections`

    def late(self, now: float) -> bool:
        """Whether the client has taken too long, or output of a connection that uvicorn has closed is still unsent."""
        if self._deadline == math.inf and self.transport.is_closing():
            self._deadline = now + UNREAD_SECONDS
        return now > min(self._deadline, self._write_deadline)

    def end(self) -> None:
        """End a connection that has taken too long."""
        if self._closing or self.transport.is_closing() or self.answering:
            self.transport.abort()
        elif self._in_head or self._in_body:
            part, seconds = ("head", HEAD_SECONDS) if self._in_head else ("body", BODY_SECONDS)
            late = f"the request's {part} did not arrive within {seconds:g} s"
            self.refuse(Failure(408, late, code="request_timeout"))
        else:
            self._closing = True
            self._wait(LINGER_SECONDS)
            self.transport.close()

    def refuse(self, failure: Failure) -> None:
        """Answer without the application, give up the bytes of the request, and close."""
        if self._closing:
            return
        if self.answering:
            self._end_after_answer()
            return
        self._all.count(self._path(), failure.status)
        self._release()
        self._closing = True
        self._wait(LINGER_SECONDS)
        body = failure.json()
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        fields += [(name.encode(), value.encode()) for name, value in failure.headers().items()]
        origin = dict(self.headers or ()).get(b"origin", b"")
        exposed = (b"access-control-expose-headers", b"retry-after")
        if "*" in self._all.origins:
            fields += [(b"access-control-allow-origin", b"*"), exposed]
        elif origin.decode("latin-1") in self._all.origins:
            fields += [(b"access-control-allow-origin", origin), (b"vary", b"Origin"), exposed]
        fields += [(b"connection", b"close"), *self.server_state.default_headers]
        lines = [STATUS_LINE[failure.status], *(b"%s: %s\r\n" % field for field in fields), b"\r\n", body]
        self.transport.write(b"".join(lines))
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def drop(self) -> None:
        """Close at once, because room is needed for another connection."""
        self._all.discard(self)
        self._release()
        self._closing = True
        self.transport.abort()

    def _parse(self, piece: bytes) -> None:
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            self.refuse(wrong("this is not an HTTP/1.1 request", code="invalid_request"))
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes whatever follows the head for another protocol. Servers may ignore an offer (RFC 9110,
            # 7.8), and clients such as Java's HttpClient offer HTTP/2 in each request without TLS.
            if self._in_head:
                (end,) = upgrade.args
                head = self._head_without_offer()
                self._release()
                self.parser = httptools.HttpRequestParser(self)
                self._parse(head + piece[end:])
                return
        if self._in_head or self._in_body:
            self._hold(len(piece))

    def _offers_upgrade(self) -> bool:
        """Whether the request, whose head has arrived, offers to upgrade to another protocol; False for CONNECT."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _head_without_offer(self) -> bytes:
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([first, *fields, b"", b""])

    def _discard(self, amount: int) -> None:
        self._discarded += amount
        if self._discarded > LINGER_BYTES:
            self.flow.pause_reading()

    def _end_after_answer(self) -> None:
        self._closing = True
        self.cycle.keep_alive = False

    def _check_length(self, length: int) -> None:
        if length > self._body_limit:
            large = f"the request is larger than {self._body_limit} bytes"
            self.refuse(Failure(413, large, code="request_too_large"))

    def _hold(self, amount: int) -> None:
        self.held += amount
        self._all.hold(amount)
        if self._in_head and self.held > HEAD_BYTES:
            self.refuse(Failure(431, f"the head is larger than {HEAD_BYTES} bytes", code="headers_too_large"))
        elif self._in_body:  # counts the overhead of its chunks too
            self._check_length((self.held - HEAD_BYTES) // 2)

    def _release(self) -> None:
        self._all.hold(-self.held)
        self.held = 0
        self._in_head = self._in_body = False
        self._body = bytearray()

    def _wait(self, seconds: float) -> None:
        self.waiting_since = self.loop.time()
        self._deadline = self.waiting_since + seconds

    def _path(self) -> str:
        """The path as it was sent: a name that is written with % never equals one that needs no key."""
        try:
            return str(httptools.parse_url(self.url).path.decode("latin-1"))
        except (AttributeError, httptools.HttpParserError):  # no request, or an unanswerable one
            return ""


def _check_type(fields: dict[bytes, bytes]) -> None:
    """Raise Failure 415 for a body that is not said to be JSON, or is compressed.

    A browser lets any page send text to any address, but asks first before it sends JSON.
    """
    kind = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
    encoding = fields.get(b"content-encoding", b"identity").strip().lower()
    if kind != b"application/json":
        what = "send the header 'Content-Type: application/json', with JSON as the body"
    elif encoding != b"identity":
        what = "the body is compressed: send it without the header 'Content-Encoding'"
    else:
        return
    raise Failure(415, what, code="unsupported_media_type")
