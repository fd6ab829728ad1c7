"""The server's side of HTTP/2 framing: frames cut from the bytes of a connection, settings and pings acknowledged."""

from __future__ import annotations

import asyncio
from typing import cast

from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.frames import frame

# Bytes that a client may send on a stream before `received` renews the window.
STREAM_WINDOW = 1 << 24
CONNECTION_WINDOW = 1 << 30


class FrameServer(asyncio.Protocol):
    """One connection. Each frame that a server has to act on is passed to `received`."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._rest = b""
        self._greeted = False
        self._begun: tuple[int, bytes] | None = None  # flags and start of a header block

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Without a dynamic header table, equal header blocks are equal bytes and are decoded once.
        settings = {frames.HEADER_TABLE_SIZE: 0, frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW}
        widen = frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        self.transport.write(frames.settings_frame(settings) + widen)

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        position = 0
        if not self._greeted:
            if not data.startswith(frames.PREFACE):
                self._rest = data
                if not frames.PREFACE.startswith(data):  # not HTTP/2
                    self.transport.close()
                return
            self._greeted, position = True, len(frames.PREFACE)
        while len(data) - position >= 9:
            high, low, kind, flags, number = frames.HEADER.unpack_from(data, position)
            end = position + 9 + (high << 16 | low)
            if end > len(data):
                break
            self._frame(kind, flags, number, data[position + 9 : end])
            position = end
        self._rest = data[position:]

    def received(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        """Act on a frame of the stream `number`; header blocks are complete, and padding is removed."""
        raise NotImplementedError

    def settings(self, values: dict[int, int]) -> None:
        """Act on the client's settings, before they are acknowledged."""

    def _frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind in (frames.SETTINGS, frames.PING):
            if not flags & frames.ACK:
                if kind == frames.SETTINGS:
                    self.settings(dict(frames.SETTING.iter_unpack(payload)))
                self.transport.write(frame(kind, frames.ACK, 0, payload if kind == frames.PING else b""))
            return
        if kind in (frames.DATA, frames.HEADERS) and flags & frames.PADDED:
            payload = payload[1 : len(payload) - payload[0]]
        if kind == frames.HEADERS and flags & frames.HAS_PRIORITY:
            payload = payload[5:]
        if kind == frames.CONTINUATION and self._begun is not None:
            kind, flags, payload = frames.HEADERS, self._begun[0] | flags, self._begun[1] + payload
        if kind == frames.HEADERS and not flags & frames.END_HEADERS:
            self._begun = flags, payload
            return
        self._begun = None
        self.received(kind, flags, number, payload)
