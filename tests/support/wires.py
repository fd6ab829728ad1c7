"""A transport without a socket and a request, for protocols that a test feeds by hand, and a gRPC server's answer."""

from __future__ import annotations

import asyncio
import itertools
import struct
from time import monotonic_ns
from typing import Any

from hpack import Encoder

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import frame

HEAD = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")], huffman=True)
TAIL = Encoder().encode([("grpc-status", "0"), ("grpc-message", "")])


def cut(wire: bytes, places: list[int]) -> list[bytes]:
    """In reads, none of which is empty."""
    ends = sorted({0, len(wire), *(place % len(wire) for place in places)})
    return [wire[start:end] for start, end in itertools.pairwise(ends)]


class Asked(InFlightRequest):
    """A request that counts its ends."""

    __slots__ = ("ends", "over")

    def __init__(self, message: bytes = b"POST / HTTP/1.1\r\n\r\n") -> None:
        super().__init__("r", message, input_tokens=1, max_tokens=8)
        self.ends = 0
        self.over = asyncio.Event()
        self.on_ended = self._end

    def _end(self, exchange: InFlightRequest) -> None:
        self.ends += 1
        self.over.set()

    @property
    def failed(self) -> tuple[str, str]:
        assert self.ends == 1
        assert self.failure is not None
        return self.failure.kind, self.failure.message


class Wire(asyncio.Transport):
    """Keeps what is written.

    writes  since the last look
    moments  at which they came
    high    the last limit of the write buffer that was set
    """

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.moments: list[int] = []
        self.closed = False
        self.high: int | None = None

    def write(self, data: Any) -> None:
        assert not self.closed
        self.writes.append(bytes(data))
        self.moments.append(monotonic_ns())

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high

    def close(self) -> None:
        self.closed = True

    abort = close

    def take(self) -> bytes:
        """Everything written since the last look."""
        data = b"".join(self.writes)
        self.writes.clear()
        self.moments.clear()
        return data

    def frames(self) -> list[tuple[int, int, int, bytes]]:
        """The same as HTTP/2: (type, flags, stream, payload) of each frame."""
        data = self.take().removeprefix(frames.PREFACE)
        out = []
        while data:
            high, low, kind, flags, number = frames.HEADER.unpack_from(data)
            end = 9 + (high << 16 | low)
            out.append((kind, flags, number, data[9:end]))
            data = data[end:]
        return out


def prefixed(message: bytes) -> bytes:
    return struct.pack(">BL", 0, len(message)) + message


def answer_bytes(stream: int, messages: list[bytes], *, tail: bytes = TAIL) -> bytes:
    head = frames.header_frames(stream, HEAD, 16384)
    body = b"".join(frame(frames.DATA, 0, stream, prefixed(message)) for message in messages)
    return head + body + frames.header_frames(stream, tail, 16384, end_stream=True)
