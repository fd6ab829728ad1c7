"""What the benchmarks' gRPC servers share: frames cut from the bytes of a connection, pings and settings answered."""

from __future__ import annotations

import asyncio

from pipeline.h2 import frames


class FrameServer(asyncio.Protocol):
    """One connection. Each frame a server has to act on is given to `received`."""

    rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 1 << 24}) + frames.window_update(0, 1 << 30))

    def data_received(self, data: bytes) -> None:
        data = self.rest + data
        position = len(frames.PREFACE) if data.startswith(frames.PREFACE) else 0
        while len(data) - position >= 9:
            high, low, kind, flags, number = frames.HEADER.unpack_from(data, position)
            end = position + 9 + (high << 16 | low)
            if end > len(data):
                break
            payload = data[position + 9 : end]
            if kind not in (frames.SETTINGS, frames.PING):
                self.received(kind, flags, number, payload)
            elif not flags & frames.ACK:
                self.transport.write(frames.frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
            position = end
        self.rest = data[position:]

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Act on a frame of the stream `number`."""
        raise AssertionError("a server has to say what it does")
