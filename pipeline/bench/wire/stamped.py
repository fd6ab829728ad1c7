"""Reads stamped by the kernel: when the last byte of a read reached this machine, not when Python came to look.

SO_TIMESTAMPNS gives a time of day with each read; it becomes one of `time.monotonic_ns` by both clocks at that very
read, so that a step of the time of day does no harm. Plain TCP, Linux. Of several packets the last one's stamp counts.
Linux switches its stamps on when some socket first asks, a moment later, in the background: a packet of that moment is
stamped when it is read, as without the kernel's help.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from time import monotonic_ns, time_ns
from typing import Any, Protocol, TypeVar

_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("@qq")
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
_MOST = 256 << 10


class Fed(Protocol):
    """An asyncio.Protocol that takes bytes with their stamp."""

    def feed(self, data: bytes, stamp: int) -> None: ...
    def connection_made(self, transport: asyncio.BaseTransport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


FedProtocol = TypeVar("FedProtocol", bound=Fed)


async def dial(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], FedProtocol], host: str, port: int
) -> tuple[asyncio.Transport, FedProtocol]:
    """`loop.create_connection`, with stamps of the kernel. Raises OSError."""
    failed = OSError(f"{host} has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            sock = await _connected(loop, family, address)
        except OSError as error:
            failed = error
        else:
            protocol = factory()
            return StampedTransport(loop, sock, protocol), protocol
    raise failed


async def _connected(loop: asyncio.AbstractEventLoop, family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


class StampedTransport(asyncio.Transport):
    """A connected socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Fed) -> None:
        super().__init__({"socket": sock})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._unsent = bytearray()
        self._closing = False
        self._last = 0
        protocol.connection_made(self)
        if not self._closing:
            loop.add_reader(sock.fileno(), self._read)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing to set: bytes leave when they are written."""

    def write(self, data: Any) -> None:
        if self._closing:
            return
        if not self._unsent:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._lose(error)
                return
        if data:
            if not self._unsent:
                self._loop.add_writer(self._sock.fileno(), self._write_rest)
                self._protocol.pause_writing()
            self._unsent += data

    def close(self) -> None:
        self._lose(None)

    def abort(self) -> None:
        self._lose(None)

    def _write_rest(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())
            self._protocol.resume_writing()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_MOST, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not data:
            self._lose(None)
            return
        # In this order: a stop between the two makes a stamp later, up to the read's own, and never too early.
        wall, now = time_ns(), monotonic_ns()
        stamp = now
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(value)
                stamp = min(now, max(self._last, now - (wall - seconds * 1_000_000_000 - nanoseconds)))
        self._last = stamp
        self._protocol.feed(data, stamp)

    def _lose(self, error: Exception | None) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
