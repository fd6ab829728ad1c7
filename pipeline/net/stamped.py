"""Sockets whose reads are stamped by the kernel: when the last byte reached this machine, not when Python read it.

SO_TIMESTAMPNS gives a time of day with each read; it is converted to `time.monotonic_ns` with both clocks at that very
read, so that a step of the time of day does no harm. Plain TCP, Linux. Of several packets the last one's stamp counts.
Linux enables its stamps in the background when a socket first asks for them: a packet that arrives before that is
stamped when it is read, as without the kernel's stamps.

`dial` connects and `listen` accepts; both make StampedTransports.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic_ns, time_ns
from typing import Any, Protocol, TypeVar

_SO_TIMESTAMPNS = 35
_SOL_SOCKET = socket.SOL_SOCKET
_TIMESPEC = struct.Struct("@qq")
_unpack = _TIMESPEC.unpack
_ANCILLARY = socket.CMSG_SPACE(_TIMESPEC.size)
# Most bytes of one read. All of them have one stamp.
_MOST = 64 << 10
# Pause after a failed accept: the socket stays readable, and the missing resource may be available again later.
_ACCEPT_AGAIN_S = 0.05


class _Room(threading.local):
    """Buffer of a thread's reads. Bytes are copied out of it: an object allocated for the largest read and cut to the
    bytes received would leave a hole that no later read fits into."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(_MOST))


_room = _Room()


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
        _prepare(sock)
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    """Set socket options; accepted sockets inherit those of a listening socket, from the first packet on."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def listen(
    loop: asyncio.AbstractEventLoop, factory: Callable[[], Fed], host: str, port: int, *, backlog: int
) -> Listener:
    """`loop.create_server`, with stamps of the kernel. Raises OSError."""
    sockets: list[socket.socket] = []
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for family, address in dict.fromkeys((one[0], one[4]) for one in found):
            sockets.append(socket.create_server(address, family=family, backlog=backlog))
            _prepare(sockets[-1])
    except BaseException:
        for sock in sockets:
            sock.close()
        raise
    return Listener(loop, factory, sockets)


class Listener:
    """Listening sockets. Made by `listen`; `port` is that of the first address."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, factory: Callable[[], Fed], sockets: Sequence[socket.socket]
    ) -> None:
        self.port: int = sockets[0].getsockname()[1]
        self._loop = loop
        self._factory = factory
        self._sockets = sockets
        for sock in sockets:
            self._watch(sock)

    def close(self) -> None:
        """Accept no more connections; existing ones continue."""
        for sock in self._sockets:
            if sock.fileno() >= 0:
                self._loop.remove_reader(sock.fileno())
                sock.close()

    def _watch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            self._loop.add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        """Accept one connection, so that other events of this loop do not wait for all of them."""
        try:
            accepted, _ = sock.accept()
        except BlockingIOError:  # the client has left again
            return
        except OSError:
            self._loop.remove_reader(sock.fileno())
            self._loop.call_later(_ACCEPT_AGAIN_S, self._watch, sock)
            return
        accepted.setblocking(False)
        StampedTransport(self._loop, accepted, self._factory())


class StampedTransport(asyncio.Transport):
    """A connected socket that does not block."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Fed) -> None:
        super().__init__({"socket": sock})
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._unsent = bytearray()
        self._closing = False
        self._lost = False
        self._last = 0
        self._room = _room.view
        self._rooms = [self._room]
        protocol.connection_made(self)
        if not self._closing:
            loop.add_reader(sock.fileno(), self._read)

    def is_closing(self) -> bool:
        return self._closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Does nothing: bytes are sent when they are written."""

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
        """Stop reading, and end the connection once all written bytes have been sent."""
        if self._closing:
            return
        self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        if not self._unsent:
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
        if self._unsent:
            return
        self._loop.remove_writer(self._sock.fileno())
        if self._closing:
            self._lose(None)
        else:
            self._protocol.resume_writing()

    def _read(self) -> None:
        # One read: remaining bytes wake the loop again, and a second read that finds nothing costs half a read.
        try:
            size, ancillary, _, _ = self._sock.recvmsg_into(self._rooms, _ANCILLARY)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if not size:
            self.close()
            return
        # In this order: a pause between the two makes a stamp later, up to the time of the read, and never too early.
        wall, now = time_ns(), monotonic_ns()
        stamp = now
        for level, kind, value in ancillary:
            if kind == _SO_TIMESTAMPNS and level == _SOL_SOCKET:
                seconds, nanoseconds = _unpack(value)
                stamp = seconds * 1_000_000_000 + nanoseconds + now - wall
                # Comparisons: this runs for each read, and `min` and `max` would cost as much as all other code here.
                if stamp > now:
                    stamp = now
                elif stamp < self._last:
                    stamp = self._last
        self._last = stamp
        try:
            self._protocol.feed(bytes(self._room[:size]), stamp)
        except Exception as error:
            self._loop.call_exception_handler({"message": "a protocol failed on what it was fed", "exception": error})
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
