"""HTTP/2 connection of a gRPC client, and the calls on it.

Every read of the socket is stamped once (`time.monotonic_ns`) and every message of that read gets this stamp: the
earliest time at which this process could know of it. A DATA frame that holds exactly one whole message, as servers
send tokens, takes a short path through `data_received`; all other bytes are parsed frame by frame. Callbacks run inside
the read and must not block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic_ns
from typing import cast

from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import ErrorCode, frame
from trtpipe.pipeline.net.h2.headers import MAX_BLOCK, HeaderBlocks, Metadata
from trtpipe.pipeline.net.h2.peer import foreign, tune
from trtpipe.pipeline.net.h2.status import (
    CallFailed,
    Code,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    Draining,
    H2Error,
    NotHttp2,
    ProtocolViolation,
    Status,
    TooManyStreams,
    of_http,
    of_reset,
    of_trailers,
)

OnData = Callable[[bytes, int], None]
OnEnd = Callable[[Status, int], None]
Dial = Callable[[asyncio.AbstractEventLoop, "Callable[[], Connection]", str, int], Awaitable[object]]

# Bytes that a peer may send on a stream before its window is renewed, by half. Far above what tokens need, so that a
# late reader never stops the server; far below what would let one runaway stream fill the memory.
STREAM_WINDOW = 8 << 20
# The connection's window is renewed by half as well; it need not limit anything, since each stream has its own window.
CONNECTION_WINDOW = frames.LARGEST_WINDOW
OWN_MAX_FRAME = 64 << 10
MAX_MESSAGE = 64 << 20
# Byte limit of a response where the caller sets none.
UNBOUNDED = 1 << 63
# Most informational header blocks of a stream before the response's own.
MAX_INTERIM = 100
# Most frames in a row that bring neither a message nor a header block of an open call.
MAX_IDLE = 100_000
# Most frames (PING, SETTINGS) that a peer may send while it reads none of the answers.
MAX_UNREAD = 10_000

# A peer that is silent while calls wait gets a PING. gRPC servers treat pings as abuse when they come without data in
# between and more often than every 300 s, so one ping is sent in each silence, and further ones seldom.
SILENCE_S = 20.0
PING_ANSWER_S = 10.0
PING_AGAIN_S = 310.0
WATCH_S = 2.5
_PING = b"trtpipe?"

_unpack = frames.DATA_AND_PREFIX.unpack_from


class Stream:
    """One call. Made by `Connection.start`."""

    __slots__ = (
        "_buffer",
        "_close_when_sent",
        "_connection",
        "_interim",
        "_left",
        "_max_bytes",
        "_max_message",
        "_outgoing",
        "_plain",
        "_renew_in",
        "_send_window",
        "_sent_all",
        "ended",
        "number",
        "on_data",
        "on_end",
    )

    def __init__(
        self, connection: Connection, number: int, on_data: OnData, on_end: OnEnd, max_bytes: int, max_message: int
    ) -> None:
        self.number = number
        self.on_data = on_data
        self.on_end = on_end
        self.ended = False
        self._connection = connection
        self._buffer = bytearray()  # start of a message whose rest has not arrived
        self._plain = False  # headers have arrived, no message is begun: the short path is possible
        self._renew_in = min(STREAM_WINDOW // 2, max_bytes)  # bytes until the window is renewed, if more may come
        self._left = max_bytes - self._renew_in  # bytes that may follow those
        self._max_bytes = max_bytes
        self._max_message = max_message
        self._interim = 0  # informational header blocks so far
        self._send_window = 0  # relative to the peer's initial window, which may change for all streams at once
        self._outgoing = bytearray()  # bytes held back by flow control
        self._close_when_sent = False
        self._sent_all = False

    def send(self, message: bytes) -> None:
        """Send another message of this call."""
        if self._close_when_sent or self._sent_all:
            raise ValueError("this side of the stream is closed")
        if not self.ended:
            self._outgoing += frames.PREFIX.pack(0, len(message)) + message
            self._connection._flush(self)

    def close(self) -> None:
        """Send no more messages (half-close); the response continues."""
        if not (self.ended or self._sent_all):
            self._close_when_sent = True
            self._connection._flush(self)

    def cancel(self) -> None:
        """End the call now, on both sides. No callback is called afterwards."""
        if not self.ended:
            self._connection._reset(self, ErrorCode.CANCEL)


class Connection(asyncio.Protocol):
    """Calls over one TCP connection. Made by `open`; belongs to one event loop, like everything in asyncio."""

    def __init__(self, authority: str, loop: asyncio.AbstractEventLoop) -> None:
        self.authority = authority
        self.max_concurrent_streams = frames.LARGEST_STREAM_ID
        self.error: H2Error | None = None  # why no call can be started any more; None while calls can
        self.on_room: Callable[[], None] | None = None  # called when a call may fit that did not before
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._has_settings = False
        self._closed = False
        self._streams: dict[int, Stream] = {}
        self._lookup = self._streams  # empty while a header block is incomplete: no other frame may come in between
        self._waiting: dict[int, Stream] = {}  # streams held back by flow control or by the socket
        self._paused = False
        self._idle = 0  # frames since the last useful one
        self._unread = 0  # frames answered since the socket stopped taking bytes
        self._held: list[bytes] | None = None  # bytes written while corked
        self._next = 1
        self._rest = b""
        self._block: tuple[int, bool, bytearray, int] | None = None  # stream, END_STREAM, bytes, frames so far
        self._headers_of = HeaderBlocks(authority)
        self._window_left = CONNECTION_WINDOW
        self._send_window = frames.DEFAULT_WINDOW
        self._peer_window = frames.DEFAULT_WINDOW
        self._peer_max_frame = frames.DEFAULT_MAX_FRAME
        self._timer: asyncio.TimerHandle | None = None
        self._last_read = monotonic_ns()
        self._pinged: int | None = None  # when a PING was sent, while its answer is awaited
        self._last_ping = 0
        self._answered = 0

    @classmethod
    async def open(
        cls, host: str, port: int, *, loop: asyncio.AbstractEventLoop | None = None, connect_timeout: float = 5.0,
        dial: Dial | None = None,
    ) -> Connection:  # fmt: skip
        """Connect and exchange settings; `dial` replaces the event loop's `create_connection`.

        Raises ConnectFailed, ConnectTimeout or NotHttp2.
        """
        loop = loop or asyncio.get_running_loop()
        authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        connection = cls(authority, loop)

        def made() -> Connection:
            return connection

        async def connect() -> None:
            await (loop.create_connection(made, host, port) if dial is None else dial(loop, made, host, port))
            await connection._greeted

        try:
            await asyncio.wait_for(connect(), connect_timeout)
        except asyncio.TimeoutError:
            what = "sent no HTTP/2 settings" if connection._transport else "did not accept the connection"
            connection.abort()
            raise ConnectTimeout(f"{authority} {what} within {connect_timeout:g} s") from None
        except OSError as error:
            raise ConnectFailed(f"{authority}: {error.strerror or error}") from None
        except BaseException:
            connection.abort()
            raise
        return connection

    # Calls

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    @property
    def usable(self) -> bool:
        """Whether calls can be started, now or after others have ended."""
        return self.error is None

    @property
    def has_room(self) -> bool:
        return self.error is None and len(self._streams) < self.max_concurrent_streams

    def start(
        self,
        method: str,
        message: bytes,
        *,
        on_data: OnData,
        on_end: OnEnd,
        half_close: bool = True,
        metadata: Metadata = (),
        max_bytes: int = UNBOUNDED,
        max_message: int = MAX_MESSAGE,
    ) -> Stream:
        """Begin a call of `method` (/package.Service/Method) with its first message.

        on_data  called with each whole message of the response, and the stamp of the read that completed it
        on_end   called once with status and stamp, unless the call is cancelled by this side
        max_bytes, max_message  limits of the response and of each message in it; a larger one ends with `oversized`

        Raises TooManyStreams, Draining or ConnectionLost; once it has returned, every failure goes to `on_end`.
        """
        if self.error is not None:
            raise self.error
        if len(self._streams) >= self.max_concurrent_streams:
            raise TooManyStreams(f"{self.authority} allows {self.max_concurrent_streams} calls at once")
        number = self._next
        self._next = number + 2
        if self._next >= frames.LARGEST_STREAM_ID:
            self.error = Draining("this connection has used up its stream numbers")
        stream = Stream(self, number, on_data, on_end, max_bytes, max_message)
        self._streams[number] = stream
        block = self._headers_of.request(method, metadata)
        head = frames.header_frames(number, block, self._peer_max_frame)
        size = len(message) + 5
        room = min(self._peer_max_frame, self._peer_window, self._send_window)
        if half_close and size <= room and not self._waiting and not self._paused:
            self._send_window -= size
            stream._sent_all = True
            data = frames.DATA_AND_PREFIX.pack(
                size >> 16, size & 0xFFFF, frames.DATA, frames.END_STREAM, number, 0, size - 5
            )
            self._write(head + data + message)
        else:
            self._write(head)
            stream._outgoing += frames.PREFIX.pack(0, len(message)) + message
            stream._close_when_sent = half_close
            self._flush(stream)
        if self._timer is None:
            self._last_read = monotonic_ns()  # silence counts from the moment a response is due
            self._timer = self._loop.call_later(WATCH_S, self._watch)
        return stream

    async def unary(self, method: str, message: bytes, timeout: float, max_bytes: int = MAX_MESSAGE) -> bytes:
        """Make a unary call; the response has at most `max_bytes`. Raises CallFailed with the status."""
        ended: asyncio.Future[Status] = self._loop.create_future()
        answers: list[bytes] = []
        stream = self.start(
            method,
            message,
            on_data=lambda data, stamp: answers.append(data) if len(answers) < 2 else None,
            on_end=lambda status, stamp: None if ended.done() else ended.set_result(status),
            max_bytes=max_bytes + frames.PREFIX.size,
        )
        try:
            status = await asyncio.wait_for(ended, timeout)
        except asyncio.TimeoutError:
            raise CallFailed(Status(Code.DEADLINE_EXCEEDED, f"no answer within {timeout:g} s", lost=True)) from None
        finally:
            stream.cancel()
        if status.ok and len(answers) != 1:
            many = "more than one message" if answers else "no message"
            status = Status(Code.INTERNAL, f"{many} answered a call that has one")
        if not status.ok:
            raise CallFailed(status)
        return answers[0]

    def close(self) -> None:
        """End the connection and, with CANCELLED, the calls on it."""
        self._shut(ConnectionLost("the connection was closed here"), Code.CANCELLED, ErrorCode.NO_ERROR)

    def abort(self) -> None:
        """End the connection without a message to the peer."""
        self._shut(ConnectionLost("the connection was closed here"), Code.CANCELLED, None)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:  # closed while it was being opened
            self._transport.abort()
            return
        tune(transport.get_extra_info("socket"))
        settings = {
            # The peer must not use a dynamic table either: equal header blocks are equal bytes, and decoded once.
            frames.HEADER_TABLE_SIZE: 0,
            frames.ENABLE_PUSH: 0,
            frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            frames.MAX_FRAME_SIZE: OWN_MAX_FRAME,
        }
        widen = frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        self._write(frames.PREFACE + frames.settings_frame(settings) + widen)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._unread = 0
        self._flush_all()

    def eof_received(self) -> bool:
        return False  # a peer that has closed its side cannot answer: connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        why = f"the connection to {self.authority} is lost" + (f": {exc}" if exc else ": the peer closed it")
        if not self._has_settings and self.error is None:
            strange = foreign(self._rest)
            self._refuse(NotHttp2(f"{self.authority} {strange or 'closed the connection without HTTP/2 settings'}"))
        self._shut(ConnectionLost(why), Code.UNAVAILABLE, None)

    def data_received(self, data: bytes) -> None:
        self.feed(data, monotonic_ns())

    def feed(self, data: bytes, stamp: int) -> None:
        """Take bytes of the peer; `stamp` is when they arrived."""
        self._last_read = stamp
        if self._rest:
            data = self._rest + data
            self._rest = b""
        size = len(data)
        position = received = 0
        streams = self._lookup
        stream: Stream | None = None
        while True:
            if size - position >= 14:
                high, low, kind, flags, number, compressed, inner = _unpack(data, position)
                # A DATA frame without flags that holds exactly one whole message.
                if not (kind or flags or compressed):
                    length = high << 16 | low
                    end = position + 9 + length
                    if inner + 5 == length and end <= size:
                        stream = streams.get(number)
                        if stream is not None and stream._plain and length < stream._renew_in:
                            stream._renew_in -= length
                            received += length
                            try:
                                stream.on_data(data[position + 14 : end], stamp)
                            except Exception as error:
                                self._blame(stream, error, stamp)
                            position = end
                            continue
            elif size - position < 9:
                break
            try:
                taken = self._frame(data, position, size, stamp)
            except ProtocolViolation as error:
                self._violated(error)
                return
            if not taken:
                break
            position += taken
            streams = self._lookup
        if self._closed:
            return
        if position < size:
            self._rest = data[position:]
        if received:
            self._idle = 0
            self._renew(received)

    # Frames

    def _frame(self, data: bytes, position: int, size: int, stamp: int) -> int:
        """Handle the frame at `position`; 0 when the frame is incomplete or the connection is closed."""
        if self._closed:
            return 0
        high, low, kind, flags, number = frames.HEADER.unpack_from(data, position)
        length = int(high << 16 | low)
        number &= frames.LARGEST_STREAM_ID
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK or number):
            strange = foreign(data[position:])
            self._refuse(NotHttp2(f"{self.authority} {strange or 'does not begin with HTTP/2 settings'}"))
            return 0
        if length > OWN_MAX_FRAME:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        end = position + 9 + length
        if end > size:
            return 0
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a frame within a header block")
        payload = data[position + 9 : end]
        self._idle += kind != frames.WINDOW_UPDATE  # a large request brings many WINDOW_UPDATEs
        if self._idle > MAX_IDLE:
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"{MAX_IDLE:,} frames in a row without a message")
        if kind == frames.DATA:
            self._data(number, flags, payload, stamp)
        elif kind == frames.HEADERS:
            self._headers(number, flags, payload, stamp)
        elif kind == frames.CONTINUATION:
            self._continuation(flags, payload, stamp)
        elif kind == frames.WINDOW_UPDATE:
            self._window_update(number, payload, stamp)
        elif kind == frames.RST_STREAM:
            self._rst_stream(number, payload, stamp)
        elif kind == frames.SETTINGS:
            self._settings(number, flags, payload, stamp)
        elif kind == frames.PING:
            self._ping(number, flags, payload, stamp)
        elif kind == frames.GOAWAY:
            self._goaway(number, payload, stamp)
        elif kind == frames.PUSH_PROMISE:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "a push, which we have ruled out")
        # PRIORITY is deprecated, and unknown types must be ignored.
        return 9 + length

    def _data(self, number: int, flags: int, payload: bytes, stamp: int) -> None:
        size = len(payload)
        self._require_begun(number, "DATA")
        self._renew(size)
        body = _without_padding(payload) if flags & frames.PADDED else payload
        stream = self._streams.get(number)
        if stream is None:
            return  # the call was cancelled by this side
        stream._renew_in -= size
        if stream._renew_in <= 0 and not self._renew_stream(stream, stamp):
            return
        if not stream._plain and not stream._buffer:
            self._end(stream, Status(Code.INTERNAL, "the server sent data before headers", lost=True), stamp)
            return
        self._messages(stream, body, stamp)
        if flags & frames.END_STREAM and not stream.ended:
            self._end(stream, of_trailers({}), stamp, by_peer=True)

    def _renew_stream(self, stream: Stream, stamp: int) -> bool:
        """Renew a stream's window; False where the peer has sent more than the caller accepts."""
        # The part of the window above `_renew_in` is the half that is still open.
        over = -stream._renew_in
        if over > stream._left:
            why = f"an answer of more than {stream._max_bytes:,} bytes"
            self._end(stream, Status(Code.RESOURCE_EXHAUSTED, why, oversized=True), stamp)
            return False
        if over > STREAM_WINDOW // 2:
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window")
        if stream._left:
            self._write(frames.window_update(stream.number, STREAM_WINDOW // 2 + over))
        stream._left -= over
        stream._renew_in = min(STREAM_WINDOW // 2, stream._left)
        stream._left -= stream._renew_in
        return True

    def _messages(self, stream: Stream, body: bytes, stamp: int) -> None:
        """Pass every message that `body` completes to the caller."""
        buffer = stream._buffer
        buffer += body
        position = 0
        while len(buffer) - position >= 5:
            compressed, length = frames.PREFIX.unpack_from(buffer, position)
            if compressed:
                self._end(stream, Status(Code.INTERNAL, "a compressed message, which was not asked for"), stamp)
                return
            if length > stream._max_message:
                why = f"a message of {length:,} bytes, more than the {stream._max_message:,} that are taken"
                self._end(stream, Status(Code.RESOURCE_EXHAUSTED, why, oversized=True), stamp)
                return
            start, position_after = position + 5, position + 5 + length
            if position_after > len(buffer):
                break
            try:
                stream.on_data(bytes(buffer[start:position_after]), stamp)
            except Exception as error:
                self._blame(stream, error, stamp)
            if stream.ended:
                return
            position = position_after
            self._idle = 0
        del buffer[:position]
        stream._plain = not buffer

    def _headers(self, number: int, flags: int, payload: bytes, stamp: int) -> None:
        self._require_begun(number, "HEADERS")
        block = _without_padding(payload) if flags & frames.PADDED else payload
        if flags & frames.HAS_PRIORITY:
            if len(block) < 5:
                raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without room for its priority")
            block = block[5:]
        last = bool(flags & frames.END_STREAM)
        if flags & frames.END_HEADERS:
            self._header_block(number, last, block, stamp)
        else:
            self._block = (number, last, bytearray(block), 1)
            self._lookup = {}

    def _continuation(self, flags: int, payload: bytes, stamp: int) -> None:
        if self._block is None:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        number, last, block, count = self._block
        block += payload
        # Frames are counted too, since empty ones could continue without end.
        if len(block) > MAX_BLOCK or count > 64:
            raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"a header block of over {len(block)} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._lookup = self._streams
            self._header_block(number, last, bytes(block), stamp)
        else:
            self._block = (number, last, block, count + 1)

    def _header_block(self, number: int, last: bool, block: bytes, stamp: int) -> None:
        headers = self._headers_of.decode(block)  # also for a forgotten stream: the table belongs to the connection
        stream = self._streams.get(number)
        if stream is None:
            return
        self._idle = 0
        status = headers.get(b":status")
        if status is not None:
            if status.startswith(b"1") and not last:  # informational: the response's own headers follow
                stream._interim += 1
                if stream._interim > MAX_INTERIM:
                    endless = Status(Code.INTERNAL, "the server sent informational headers without end", lost=True)
                    self._end(stream, endless, stamp, ErrorCode.ENHANCE_YOUR_CALM)
                return
            if status != b"200":
                self._end(stream, of_http(status.decode("latin-1")), stamp)
                return
            if not last:
                kind = headers.get(b"content-type", b"")
                if not kind.startswith(b"application/grpc"):
                    text = kind[:80].decode("latin-1") or "no content type"
                    self._end(stream, Status(Code.UNKNOWN, f"the server answered {text}, not gRPC"), stamp)
                elif stream._plain or stream._buffer:
                    twice = Status(Code.INTERNAL, "the server sent headers twice", lost=True)
                    self._end(stream, twice, stamp, ErrorCode.PROTOCOL_ERROR)
                else:
                    stream._plain = True
                return
        if not last:
            endless = Status(Code.INTERNAL, "the server sent trailers that do not end the stream", lost=True)
            self._end(stream, endless, stamp, ErrorCode.PROTOCOL_ERROR)
            return
        end = of_trailers(headers)
        if end.ok and stream._buffer:
            end = Status(Code.INTERNAL, "the stream ended within a message", lost=True)
        self._end(stream, end, stamp, by_peer=True)

    def _window_update(self, number: int, payload: bytes, stamp: int) -> None:
        increment = self._number(payload, "WINDOW_UPDATE")
        increment &= frames.LARGEST_WINDOW
        stream = self._streams.get(number)
        if number:
            self._require_begun(number, "WINDOW_UPDATE")
            if stream is None:
                return
            stream._send_window += increment
            if not increment or stream._send_window + self._peer_window > frames.LARGEST_WINDOW:
                why = f"the server opened the stream's window by {increment}"
                self._end(stream, Status(Code.INTERNAL, why, lost=True), stamp, ErrorCode.FLOW_CONTROL_ERROR)
            elif number in self._waiting:
                self._flush(stream)
            return
        self._send_window += increment
        if not increment or self._send_window > frames.LARGEST_WINDOW:
            raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, f"a window opened by {increment}")
        self._flush_all()

    def _rst_stream(self, number: int, payload: bytes, stamp: int) -> None:
        code = self._number(payload, "RST_STREAM")
        self._require_begun(number, "RST_STREAM")
        stream = self._streams.pop(number, None)
        if stream is not None:
            self._finish(stream, of_reset(code), stamp)

    def _settings(self, number: int, flags: int, payload: bytes, stamp: int) -> None:
        if number:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "SETTINGS of a stream")
        if len(payload) % 6 or (flags & frames.ACK and payload):
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
        if flags & frames.ACK:
            return
        for key, value in frames.SETTING.iter_unpack(payload):
            if key == frames.MAX_CONCURRENT_STREAMS:
                self.max_concurrent_streams = value
            elif key == frames.INITIAL_WINDOW_SIZE:
                if value > frames.LARGEST_WINDOW:
                    raise ProtocolViolation(ErrorCode.FLOW_CONTROL_ERROR, f"an initial window of {value}")
                self._peer_window = value  # with it a stream's window may be below zero
            elif key == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_MAX_FRAME <= value < 1 << 24:
                    raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"a largest frame of {value}")
                self._peer_max_frame = value
        self._answer(frame(frames.SETTINGS, frames.ACK, 0))
        self._has_settings = True
        if not self._greeted.done():
            self._greeted.set_result(None)
        self._flush_all()
        self._tell_room()

    def _ping(self, number: int, flags: int, payload: bytes, stamp: int) -> None:
        if number:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "PING of a stream")
        if len(payload) != 8:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes")
        if not flags & frames.ACK:
            self._answer(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _PING:
            self._pinged = None
            self._answered = stamp

    def _goaway(self, number: int, payload: bytes, stamp: int) -> None:
        if number:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "GOAWAY of a stream")
        if len(payload) < 8:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes")
        last, code = frames.LAST_AND_CODE.unpack_from(payload)
        last &= frames.LARGEST_STREAM_ID
        text = payload[8:208].decode("utf-8", "replace")
        why = f"{self.authority} is going away" + (f" ({frames.error_name(code)} {text})".rstrip() if code else "")
        self.error = Draining(why)
        for above in [stream for stream in self._streams.values() if stream.number > last]:
            del self._streams[above.number]
            self._finish(above, Status(Code.UNAVAILABLE, why, retry=True, lost=True), stamp)
        self._tell_room()
        self._leave_if_drained()

    def _number(self, payload: bytes, kind: str) -> int:
        if len(payload) != 4:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
        (value,) = frames.NUMBER.unpack(payload)
        return int(value)

    def _require_begun(self, number: int, kind: str) -> None:
        if not number & 1 or number >= self._next:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"{kind} of stream {number}, which nobody began")

    # Ends

    def _end(
        self, stream: Stream, status: Status, stamp: int, code: ErrorCode = ErrorCode.CANCEL, *, by_peer: bool = False
    ) -> None:
        """End a call: the peer has ended its side, or we no longer listen. An open side is reset."""
        if self._streams.pop(stream.number, None) is None:
            return
        if not by_peer:
            self._write(frames.reset(stream.number, code))
        elif not stream._sent_all:
            self._write(frames.reset(stream.number, ErrorCode.NO_ERROR))
        self._finish(stream, status, stamp)

    def _reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a call without a callback."""
        stream.ended = True
        if self._streams.pop(stream.number, None) is not None:
            self._write(frames.reset(stream.number, code))
        self._waiting.pop(stream.number, None)
        self._tell_room()
        self._leave_if_drained()

    def _finish(self, stream: Stream, status: Status, stamp: int) -> None:
        stream.ended = True
        self._waiting.pop(stream.number, None)
        try:
            stream.on_end(status, stamp)
        except Exception as error:
            self._report("on_end", error)
        self._tell_room()
        self._leave_if_drained()

    def _blame(self, stream: Stream, error: Exception, stamp: int) -> None:
        """End the call whose callback has failed; the others continue."""
        self._report("on_data", error)
        if not stream.ended:
            self._end(stream, Status(Code.INTERNAL, f"on_data failed: {error!r}", lost=True), stamp)

    def _report(self, where: str, error: Exception) -> None:
        self._loop.call_exception_handler({"message": f"{where} of a call to {self.authority}", "exception": error})

    def _leave_if_drained(self) -> None:
        if not self._streams and self.error is not None and not self._closed:
            self._shut(self.error, Code.UNAVAILABLE, ErrorCode.NO_ERROR)

    def _violated(self, error: ProtocolViolation) -> None:
        self._refuse(error)
        self._shut(error, Code.INTERNAL, error.code)

    def _refuse(self, error: H2Error) -> None:
        """Before the settings have arrived, a failure is raised by `open`."""
        if not self._greeted.done():
            self._greeted.set_exception(error)
            self._shut(error, Code.UNAVAILABLE, None)

    def _shut(self, error: H2Error, code: Code, farewell: ErrorCode | None) -> None:
        if self._closed:
            return
        self._closed = True
        self.error = error if self.error is None else self.error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            if farewell is None:
                self._transport.abort()
            else:
                self._transport.write(frames.goaway(0, farewell, "" if farewell is ErrorCode.NO_ERROR else str(error)))
                self._transport.close()
        if not self._greeted.done():
            self._greeted.cancel()
        stamp = monotonic_ns()
        streams = list(self._streams.values())
        self._streams.clear()
        self._waiting.clear()
        for stream in streams:
            self._finish(stream, Status(code, str(error), lost=True), stamp)
        self._tell_room()

    def _tell_room(self) -> None:
        if self.on_room is not None:
            self.on_room()

    # Sending

    def write_at_once(self) -> None:
        """Pass bytes to the socket when they are written. uvloop before 0.23 would do so at the end of its turn, which
        is cheaper for many small writes, but later than their stamps say."""
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=0)

    def cork(self) -> None:
        """Hold back written bytes until `uncork`, so that many calls that begin together are one write."""
        self._held = []

    def uncork(self) -> int:
        """Write the bytes held back; returns the time just before."""
        held, self._held = self._held, None
        stamp = monotonic_ns()
        if held:
            self._write(b"".join(held))
        return stamp

    def _write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
        elif self._transport is not None and not self._closed:
            self._transport.write(data)

    def _answer(self, data: bytes) -> None:
        """Answer a frame, unless the peer does not read: answers would pile up without limit."""
        if self._paused:
            self._unread += 1
            if self._unread > MAX_UNREAD:
                raise ProtocolViolation(ErrorCode.ENHANCE_YOUR_CALM, f"{MAX_UNREAD} frames whose answers are not read")
        self._write(data)

    def _flush(self, stream: Stream) -> None:
        """Send a stream's data as far as the windows and the socket allow."""
        if stream.ended or stream._sent_all:
            return
        data = stream._outgoing
        position = 0
        out = bytearray()
        while position < len(data) and not self._paused:
            room = min(stream._send_window + self._peer_window, self._send_window, self._peer_max_frame)
            if room <= 0:
                break
            piece = data[position : position + room]
            position += len(piece)
            stream._send_window -= len(piece)
            self._send_window -= len(piece)
            out += frame(frames.DATA, 0, stream.number, piece)
            if len(out) > 1 << 18:  # in parts, so that a full socket can pause the writing
                self._write(bytes(out))
                out.clear()
        del data[:position]
        if not data and stream._close_when_sent:
            stream._sent_all = True
            out += frame(frames.DATA, frames.END_STREAM, stream.number)
        if data:
            self._waiting[stream.number] = stream
        else:
            self._waiting.pop(stream.number, None)
        if out:
            self._write(bytes(out))

    def _flush_all(self) -> None:
        for stream in list(self._waiting.values()):
            if self._paused or self._send_window <= 0:
                return
            self._flush(stream)

    def _renew(self, received: int) -> None:
        self._window_left -= received
        if self._window_left < CONNECTION_WINDOW // 2:
            self._write(frames.window_update(0, CONNECTION_WINDOW - self._window_left))
            self._window_left = CONNECTION_WINDOW

    def _watch(self) -> None:
        """Called now and then while calls are open: detects a peer that has gone silently."""
        self._timer = None
        if not self._streams or self._closed:
            return
        now = monotonic_ns()
        if self._pinged is not None:
            if now - self._pinged > PING_ANSWER_S * 1e9:
                silent = (now - self._last_read) / 1e9
                lost = ConnectionLost(f"{self.authority} has been silent for {silent:.0f} s and answers no ping")
                self._shut(lost, Code.UNAVAILABLE, None)
                return
        elif now - self._last_read > SILENCE_S * 1e9 and (
            self._last_read > self._answered or now - self._last_ping > PING_AGAIN_S * 1e9
        ):
            self._pinged = self._last_ping = now
            self._write(frame(frames.PING, 0, 0, _PING))
        self._timer = self._loop.call_later(WATCH_S, self._watch)


def _without_padding(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
