"""Triton's gRPC endpoint of the mock server: prebuilt responses, sent within the client's HTTP/2 windows.

A token is one DATA frame, the same bytes for every token of a request. Where a window or the frame size is too small
for a message, the message waits and is sent in pieces; its stamp is that of its last piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from urllib.parse import quote

from hpack import Encoder, NeverIndexedHeaderTuple

from trtpipe.pipeline.bench.mock_server import triton
from trtpipe.pipeline.bench.mock_server.frames import FrameServer
from trtpipe.pipeline.bench.mock_server.link import Answer, Hub, Link
from trtpipe.pipeline.bench.mock_server.script import Script, Then, Truth, script_of
from trtpipe.pipeline.bench.mock_server.triton import Asked, Refused
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import DEFAULT_MAX_FRAME, frame
from trtpipe.pipeline.net.h2.headers import HeaderBlocks
from trtpipe.pipeline.net.h2.status import Code, ProtocolViolation
from trtpipe.pipeline.net.h2.triton import STREAM_INFER

Tell = Callable[[int], None]

_GARBAGE = b"\xff\xff\xff"
# The server renews the client's window each time it has received this many bytes.
_RENEW = 1 << 20


def _block(*headers: tuple[str, str]) -> bytes:
    return Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in headers])


_HEAD = _block((":status", "200"), ("content-type", "application/grpc"))
_TAIL = _block(("grpc-status", "0"))


class Stream:
    """One call: the answers to its requests, and the messages that flow control holds back."""

    def __init__(self, link: GrpcLink, number: int, method: str) -> None:
        self.number = number
        self.method = method
        self.window = link.peer_window
        self.held: deque[tuple[bytes, tuple[Tell, ...]]] = deque()
        self.answers: set[GrpcAnswer] = set()
        self.unread = 0  # bytes received since the window was last renewed
        self._link = link
        self._begun = False
        self._all_read = False
        self._incoming = bytearray()
        self._tail = b""

    def read(self, data: bytes, last: bool) -> list[bytes]:
        """The messages that `data` completes. Raises Refused."""
        self._all_read = self._all_read or last
        incoming = self._incoming
        incoming += data
        out = []
        while len(incoming) >= 5:
            compressed, length = frames.PREFIX.unpack_from(incoming)
            if compressed:
                raise Refused("compressed messages are not understood", Code.UNIMPLEMENTED)
            if len(incoming) < 5 + length:
                break
            out.append(bytes(incoming[5 : 5 + length]))
            del incoming[: 5 + length]
        return out

    def begin(self) -> None:
        """Send the response headers, once."""
        if not self._begun:
            self._begun = True
            self._link.put(self._link.header_frame(self.number, _HEAD))

    def send(self, message: bytes, *tell: Tell) -> None:
        """Queue a message; each `tell` gets the stamp of the write of its last byte."""
        self.begin()
        self.held.append((frames.PREFIX.pack(0, len(message)) + message, tell))
        self.pump()

    def pump(self) -> None:
        """Put queued messages as far as the windows allow, and the end of the call after the last of them."""
        link = self._link
        while self.held:
            body, tell = self.held[0]
            room = min(self.window, link.window, DEFAULT_MAX_FRAME)
            if room <= 0:
                return
            piece, rest = body[:room], body[room:]
            self.window -= len(piece)
            link.window -= len(piece)
            if rest:
                self.held[0] = rest, tell
                link.put(frame(frames.DATA, 0, self.number, piece))
            else:
                self.held.popleft()
                link.put(frame(frames.DATA, 0, self.number, piece), *tell)
        if self._tail:
            link.put(self._tail)
            link.streams.pop(self.number, None)

    def finish(self) -> None:
        """End the call once the client has ended its side and every request is answered."""
        if self._all_read and not self.answers:
            self._end(_TAIL)

    def fail(self, code: Code, words: str, *tell: Tell) -> None:
        """End the call now."""
        for answer in self.answers:
            answer.stop()
        self.answers.clear()
        self._end(_block(("grpc-status", str(int(code))), ("grpc-message", quote(words, safe=" '(),:;="))))
        self._link.told += tell

    def _end(self, block: bytes) -> None:
        if not self._tail:
            self.begin()
            self._tail = self._link.header_frame(self.number, block, last=True)
            self.pump()


class GrpcAnswer(Answer):
    """A request of a ModelStreamInfer call."""

    __slots__ = ("_chunk", "_closing", "_link", "_size", "_stream")

    def __init__(self, link: GrpcLink, stream: Stream, request: Asked, truth: Truth, script: Script) -> None:
        super().__init__(truth, script)
        full = triton.response(request, truth.tokens_per_response)
        body = frames.PREFIX.pack(0, len(full)) + full
        self._link = link
        self._stream = stream
        self._chunk = frame(frames.DATA, 0, stream.number, body)
        # A message longer than one frame is never sent as one frame.
        self._size = len(body) if len(body) <= DEFAULT_MAX_FRAME else frames.LARGEST_WINDOW + 1
        self._closing = self._last_messages(request, full)
        stream.answers.add(self)

    def open(self) -> None:
        self._stream.begin()

    def tick(self) -> None:
        link = self._link
        stream = self._stream
        size = self._size
        # Nothing is queued in this case: messages are queued only once a window is used up.
        if size <= link.window and size <= stream.window:
            link.window -= size
            stream.window -= size
            link.put(self._chunk, self.tell)
        else:
            stream.send(self._chunk[14:], self.tell)

    def end(self) -> None:
        if self.script.then is Then.CUT:
            self._link.leave()
        elif self.script.then is not Then.STALL:
            for message, tell in self._closing:
                self._stream.send(message, *tell)
            self._stream.answers.discard(self)
            self._stream.finish()

    def _last_messages(self, request: Asked, full: bytes) -> list[tuple[bytes, tuple[Tell, ...]]]:
        """The last messages of the answer, each with the callbacks that get its stamp."""
        then, rest, ended = self.script.then, self.truth.rest, self.truth.ended
        if then is Then.ERROR:
            return [(triton.error(self.script.words), (ended,))]
        if then is Then.GARBAGE:
            return [(_GARBAGE, (ended,))]
        if rest and not request.alone:
            return [(triton.response(request, rest, final=True), (self.tell, ended))]
        final = (triton.response(request, 0, final=True), (ended,))
        if not rest:
            return [final]
        last = full if rest == self.truth.tokens_per_response else triton.response(request, rest)
        return [(last, (self.tell,)), final]


class GrpcLink(Link, FrameServer):
    """One HTTP/2 connection.

    window       bytes of DATA that the client still takes on the whole connection
    peer_window  bytes of DATA that the client takes on a new stream
    """

    def __init__(self, hub: Hub) -> None:
        Link.__init__(self, hub)
        FrameServer.__init__(self)
        self.window = self.peer_window = frames.DEFAULT_WINDOW
        self.streams: dict[int, Stream] = {}
        self._headers = HeaderBlocks("")
        self._shrink = b"\x20"  # the first header block sets the size of the dynamic table to 0
        self._unread = 0
        self._stamp = 0

    def header_frame(self, number: int, block: bytes, *, last: bool = False) -> bytes:
        shrink, self._shrink = self._shrink, b""
        return frames.header_frames(number, shrink + block, DEFAULT_MAX_FRAME, end_stream=last)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        Link.connection_made(self, transport)
        FrameServer.connection_made(self, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for number in list(self.streams):
            self._forget(number)

    def feed(self, data: bytes, stamp: int) -> None:
        self._stamp = stamp
        try:
            FrameServer.data_received(self, data)
        except ProtocolViolation as error:
            self.put(frames.goaway(0, error.code, str(error)))
            self.leave()
        self.hub.schedule.flush()

    def settings(self, values: dict[int, int]) -> None:
        opened = values.get(frames.INITIAL_WINDOW_SIZE, self.peer_window) - self.peer_window
        self.peer_window += opened
        for stream in list(self.streams.values()):
            stream.window += opened  # below zero is legal
            stream.pump()

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        stream = self.streams.get(number)
        if kind == frames.WINDOW_UPDATE:
            self._window_update(number, stream, frames.NUMBER.unpack(payload)[0])
        elif kind == frames.RST_STREAM:
            self._forget(number)
        elif kind == frames.HEADERS:
            path = self._headers.decode(payload).get(b":path", b"").decode("latin-1")
            if stream is None:
                stream = self.streams[number] = Stream(self, number, path)
            if flags & frames.END_STREAM:
                self._read(stream, b"", last=True)
        elif kind == frames.DATA:
            self._renew(stream, len(payload))
            if stream is not None:
                self._read(stream, payload, last=bool(flags & frames.END_STREAM))

    def _read(self, stream: Stream, data: bytes, *, last: bool) -> None:
        try:
            for message in stream.read(data, last):
                if stream.method == STREAM_INFER:
                    self._request(stream, message)
                else:
                    stream.send(triton.describe(stream.method.rpartition("/")[2], message))
        except Refused as refused:
            stream.fail(refused.code, str(refused))
        else:
            stream.finish()

    def _request(self, stream: Stream, message: bytes) -> None:
        try:
            request = triton.asked(message)
        except Refused as refused:
            stream.send(triton.error(str(refused)))  # as Triton does: the stream goes on
            return
        asked = script_of(request.prompt, request.max_tokens)
        truth = self.hub.remember(request.id, "grpc", self._stamp, asked)
        if asked.then is Then.STATUS:
            stream.fail(Code.UNAVAILABLE, f"the prompt asked for status {asked.words}", truth.ended)
        else:
            self.hub.schedule.add(GrpcAnswer(self, stream, request, truth, asked), self._stamp)

    def _window_update(self, number: int, stream: Stream | None, opened: int) -> None:
        if number:
            if stream is not None:
                stream.window += opened
                stream.pump()
            return
        self.window += opened
        for held in list(self.streams.values()):
            held.pump()

    def _renew(self, stream: Stream | None, size: int) -> None:
        self._unread += size
        if self._unread > _RENEW:
            self.put(frames.window_update(0, self._unread))
            self._unread = 0
        if stream is not None:
            stream.unread += size
            if stream.unread > _RENEW:
                self.put(frames.window_update(stream.number, stream.unread))
                stream.unread = 0

    def _forget(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.held.clear()
            for answer in stream.answers:
                answer.stop()
