"""HTTP/1.1 client for event streams: one request at a time on a connection, each read stamped once and kept.

While the clock runs, only the head of an answer and the lengths of its chunks are parsed, to find its end. `pieces`
removes the chunk framing afterwards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from time import monotonic_ns
from typing import Any, cast

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.net.h2.peer import tune
from trtpipe.pipeline.net.stamped import dial

# Occurs in each read of an event stream that is more than a comment that keeps the connection open.
SSE_DATA = b"data:"
MAX_HEAD = 64 << 10
MAX_INTERIM = 100  # most informational heads (100 Continue, 103 Early Hints) before an answer
MAX_DIGITS = 16  # most digits of a length: 2^63 has 19 digits, or 16 in base 16
MAX_KNOWN = 4096  # most chunk lengths that are remembered
_CLOSE_DELIMITED = -1
_AT_ONCE = 64  # most connections opened at once: a listen queue is finite


class HttpConnection(asyncio.Protocol):
    """One TCP connection of a sender."""

    def __init__(self, sender: HttpSender) -> None:
        self._sender = sender
        self._transport: asyncio.Transport | None = None
        self.request: InFlightRequest | None = None
        self._room = 0  # bytes that the body may still have
        self._interim = 0  # informational heads so far
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray()
        self._in_body = False
        self._status = 0
        self._keep = True
        self._chunked = False
        self._left = 0  # bytes left of the body, or of the chunk and its line end; _CLOSE_DELIMITED
        self._line = b""  # start of a chunk's length line that has no end yet
        self._last_chunk = False

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, request: InFlightRequest) -> None:
        assert self._transport is not None
        self._begin()
        self._room, self._interim = request.limit, 0
        self.request = request
        request.call = self
        request.mark = SSE_DATA
        request.sent_ns = monotonic_ns()
        self._transport.write(request.message)
        request.message = b""

    def cancel(self) -> None:
        """Abandon the request by closing the connection, the only way in HTTP/1.1."""
        self.request = None
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        tune(transport.get_extra_info("socket"))
        self._transport.set_write_buffer_limits(high=0)  # bytes leave when they are written, so their stamp is right

    def data_received(self, data: bytes) -> None:
        self.feed(data, monotonic_ns())

    def feed(self, data: bytes, stamp: int) -> None:
        request = self.request
        if request is None:  # an answer that was not requested
            self.close()
            return
        while not self._in_body:
            rest = self._take_head(data)
            if rest is None:
                return
            data = rest
        size = len(data)
        self._room -= size
        ended: bool | None
        if self._chunked:
            if size:
                request.receive(data, stamp)
            ended = self._follow_chunks(data)
        else:
            if 0 <= self._left < size:
                data, self._keep = data[: self._left], False  # more bytes than the answer has
            if data:
                request.receive(data, stamp)
            ended = self._follow_length(len(data))
        if ended is False:
            if self._room < 0:
                self._stop_oversized()
        elif ended:
            self._finish(stamp)
        else:
            self._fail("MalformedResponse", "a chunk without a length")

    def connection_lost(self, exc: Exception | None) -> None:
        self._sender.lost(self)
        request, self.request = self.request, None
        if request is None:
            return
        if self._in_body and self._left == _CLOSE_DELIMITED and exc is None:
            self._end(request, monotonic_ns())
        else:
            request.fail("ConnectionLost", f"{exc or 'the server closed it'} (after {len(request.stamps)} reads)")

    # The answer

    def _take_head(self, data: bytes) -> bytes | None:
        """Bytes after the head that `data` completes: of the body, or of the next head after an informational one. None
        while the head is incomplete, or where the answer has failed."""
        start = max(0, len(self._head) - 3)
        self._head += data
        end = self._head.find(b"\r\n\r\n", start)
        if end > MAX_HEAD or (end < 0 and len(self._head) > MAX_HEAD):
            self._fail("MalformedResponse", f"a head of more than {MAX_HEAD} bytes")
            return None
        if end < 0:
            return None
        head, rest = bytes(self._head[:end]), bytes(self._head[end + 4 :])
        if not self._read_head(head):
            self._fail("MalformedResponse", f"no HTTP answer: {head[:80]!r}")
            return None
        if self._status >= 200:
            self._in_body = True
            self._head.clear()
            assert self.request is not None
            self.request.chunked = self._chunked
            if self._status == 200 and self._left > self._room:
                self._stop_oversized()
                return None
            return rest
        self._interim += 1
        if self._interim > MAX_INTERIM:
            self._fail("MalformedResponse", f"more than {MAX_INTERIM} informational answers")
            return None
        self._begin()
        return rest or None

    def _read_head(self, head: bytes) -> bool:
        first, *lines = head.split(b"\r\n")
        words = first.split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
            return False
        self._status = int(words[1])
        self._keep = words[0] == b"HTTP/1.1"
        self._left = _CLOSE_DELIMITED
        for line in lines:
            name, _, value = line.partition(b":")
            name, value = name.lower(), value.strip().lower()
            if name == b"transfer-encoding" and value.endswith(b"chunked"):
                self._chunked, self._left = True, 0
            elif name == b"content-length" and not self._chunked:
                if not value.isdigit():
                    return False
                # With more digits the first ones exceed any limit already, and `int` refuses thousands of them.
                self._left = int(value.lstrip(b"0")[:MAX_DIGITS] or b"0")
            elif name == b"connection":
                self._keep = value == b"keep-alive" or (self._keep and value != b"close")
        return True

    def _follow_length(self, size: int) -> bool:
        if self._left == _CLOSE_DELIMITED:
            return False
        self._left -= size
        return self._left <= 0

    def _follow_chunks(self, data: bytes) -> bool | None:
        """Whether the body ends with these bytes; None if they are not valid chunks."""
        position, size = 0, len(data)
        if not (self._line or self._last_chunk):  # the usual case: chunks of a length that came before
            known = self._sender.whole_chunks
            position = self._left
            while position < size:
                whole = known.get(data[position : data.find(b"\n", position) + 1])
                if whole is None:
                    self._left = 0
                    break
                position += whole
            else:
                self._left = position - size
                return False
        while position < size:
            if self._left:
                taken = min(self._left, size - position)
                self._left -= taken
                position += taken
                continue
            end = data.find(b"\n", position)
            if end < 0:
                self._line += data[position:]
                return False if len(self._line) < MAX_HEAD else None
            line = self._line + data[position:end] if self._line else data[position:end]
            self._line = b""
            position = end + 1
            if self._last_chunk:  # trailers, up to an empty line
                if line in (b"", b"\r"):
                    self._keep = self._keep and position == size
                    return True
                continue
            try:
                length = chunk_length(line)
            except ValueError:
                return None
            if length > self._room + size:
                self._room = -1
                return False
            if length:
                self._left = length + 2
                if len(self._sender.whole_chunks) < MAX_KNOWN and len(line) <= MAX_DIGITS:
                    self._sender.whole_chunks[line + b"\n"] = len(line) + 1 + self._left
            else:
                self._last_chunk = True
        return False

    def _finish(self, stamp: int) -> None:
        request, self.request = self.request, None
        assert request is not None
        if self._keep and self.usable:
            self._sender.release(self)
        else:
            self.close()
        self._end(request, stamp)

    def _end(self, request: InFlightRequest, stamp: int) -> None:
        if self._status == 200:
            request.end(stamp)
            return
        body = b"".join(piece for piece, _ in pieces(request))
        request.end(stamp, Failure.of(f"http {self._status}", error_text(body)))

    def _stop_oversized(self) -> None:
        """The answer is larger than any answer to this request can be. For an error status its beginning is enough."""
        request, self.request = self.request, None
        assert request is not None
        self.close()
        if self._status == 200:
            request.fail_oversized()
        else:
            self._end(request, monotonic_ns())

    def _fail(self, kind: str, message: str) -> None:
        request, self.request = self.request, None
        self.close()
        if request is not None:
            request.fail(kind, message)


class HttpSender:
    """Sender over connections to one server: as many as there are concurrent requests."""

    def __init__(self, site: Site, *, kernel_stamps: bool = False) -> None:
        if site.tls:
            raise UsageError(
                f"{site.url} is TLS, which our own reader does not speak", remedy="use --transport tritonclient for it"
            )
        self._site = site
        self._kernel_stamps = kernel_stamps
        self._idle: deque[HttpConnection] = deque()
        self._all: set[HttpConnection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        self.whole_chunks: dict[bytes, int] = {}  # size of a chunk with its framing, by the line with its length

    def described(self) -> dict[str, Any]:
        return {"transport": "own HTTP/1.1", "stamps": "kernel" if self._kernel_stamps else "read"}

    async def warm(self, calls: int) -> None:
        await asyncio.sleep(0.001)  # lets connections that the server has closed meanwhile be lost
        missing = calls - len(self._all)
        for begun in range(0, missing, _AT_ONCE):
            some = min(_AT_ONCE, missing - begun)
            # Wait for all of them: one left over would end only after the loop has.
            opened = await asyncio.gather(*(self._open() for _ in range(some)), return_exceptions=True)
            self._idle.extend(one for one in opened if isinstance(one, HttpConnection))
            error = next((one for one in opened if isinstance(one, BaseException)), None)
            if isinstance(error, OSError):
                held, why = len(self._all), error.strerror or str(error)
                more = f"takes {held} connections and no more" if held else "takes no connections any more"
                raise HostError(f"{self._site.url} {more}", why=why) from None
            if error is not None:
                raise error

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        for request in batch:
            while self._idle:
                connection = self._idle.pop()
                if connection.usable:
                    connection.send(request)
                    break
            else:
                task = request.call = asyncio.ensure_future(self._start_on_a_new_one(request))
                self._opening.add(task)
                task.add_done_callback(self._opening.discard)

    def cancel(self, request: InFlightRequest) -> None:
        if request.call is not None:
            request.call.cancel()

    def release(self, connection: HttpConnection) -> None:
        self._idle.append(connection)

    def lost(self, connection: HttpConnection) -> None:
        self._all.discard(connection)

    async def close(self) -> None:
        self._closed = True
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        for connection in list(self._all):
            connection.close()

    async def _open(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        where = (self._site.host, self._site.port)

        def made() -> HttpConnection:
            return HttpConnection(self)

        if self._kernel_stamps:
            _, connection = await dial(loop, made, *where)
        else:
            _, connection = await loop.create_connection(made, *where)
        self._all.add(connection)
        return connection

    async def _start_on_a_new_one(self, request: InFlightRequest) -> None:
        try:
            connection = await self._open()
        except OSError as error:
            request.fail("ConnectFailed", error.strerror or str(error))
            return
        if request.end_ns is None and not self._closed:
            connection.send(request)
        else:  # the request was cancelled meanwhile
            self._idle.append(connection)


def pieces(request: InFlightRequest) -> Iterable[tuple[bytes, int]]:
    """The body in pieces as they came, each with its stamp. Raises ValueError."""
    return _dechunk(request.reads()) if request.chunked else request.reads()


def _dechunk(reads: Iterable[tuple[bytes, int]]) -> list[tuple[bytes, int]]:
    out: list[tuple[bytes, int]] = []
    left = 0  # bytes left of the chunk and its line end
    line = b""
    for data, stamp in reads:
        position, size = 0, len(data)
        while position < size:
            if left > 2:
                piece = data[position : position + left - 2]
                out.append((piece, stamp))
                left -= len(piece)
                position += len(piece)
            elif left:
                taken = min(left, size - position)
                left -= taken
                position += taken
            else:
                end = data.find(b"\n", position)
                if end < 0:
                    line += data[position:]
                    break
                number = chunk_length(line + data[position:end])
                line = b""
                position = end + 1
                if number == 0:
                    return out
                left = number + 2
    return out


def chunk_length(line: bytes) -> int:
    """Parse the length of a chunk. Raises ValueError."""
    digits = line.split(b";", 1)[0].strip()
    if not digits.isalnum() or len(digits) > MAX_DIGITS:  # `int` would take signs and underscores too
        raise ValueError(f"a chunk of length {digits[:20]!r}")
    return int(digits, 16)


def error_text(body: bytes) -> str:
    """Message of a failed request: the server's error text, else the body."""
    told = told_error(body)
    return body[:200].decode(errors="replace") if told is None else told


def told_error(body: bytes) -> str | None:
    """Text of Triton's {"error": text} or OpenAI's {"error": {"message": text}}; None for any other body."""
    try:
        error = parse_json(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return None
