"""A transport without a socket, for protocols that a test feeds by hand, and a gRPC server's answer as bytes."""

from __future__ import annotations

import asyncio
import struct
from time import monotonic_ns
from typing import Any

from hpack import Encoder

from pipeline.h2 import frames
from pipeline.h2.frames import frame

HEAD = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")], huffman=True)
TAIL = Encoder().encode([("grpc-status", "0"), ("grpc-message", "")])


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
