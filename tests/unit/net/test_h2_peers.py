"""The HTTP/2 reader against servers that break off, fall silent or speak something else, and ways to connect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop

from tests.support.h2 import Call, run
from tests.support.wires import HEAD, Wire, answer_bytes
from trtpipe.pipeline.net.h2 import connection as connection_module
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.frames import frame
from trtpipe.pipeline.net.h2.status import Code, ConnectFailed, ConnectionLost, ConnectTimeout, NotHttp2


class Peer:
    """A server's end of one TCP connection, in the test's hands."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.received = bytearray()
        self.writer: asyncio.StreamWriter

    async def answer(self, stream: int, messages: list[bytes]) -> None:
        self.writer.write(answer_bytes(stream, messages))
        await self.writer.drain()


@contextlib.asynccontextmanager
async def serving_bytes(*, greet: bool = False, first: bytes = b"") -> AsyncIterator[tuple[int, Peer]]:
    peer = Peer()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.writer = writer
        if greet or first:
            writer.write(first or frames.settings_frame({}))
        peer.connected.set()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                peer.received += data
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], peer
    finally:
        server.close()
        if peer.connected.is_set():
            peer.writer.close()


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("first", "telling"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n", r"speaks HTTP/1\.1, not gRPC \(HTTP/1.1 400 Bad"),
        (b"HTTP/1.0", r"speaks HTTP/1\.1"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "speaks TLS"),
        (b"\x16\x03\x01\x00\x02\x02\x46\x00\x00\x00", "speaks TLS"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", "does not begin with HTTP/2 settings"),
        (frame(frames.PING, 0, 0, b"12345678"), "does not begin with HTTP/2 settings"),
        (frame(frames.SETTINGS, frames.ACK, 0), "does not begin with HTTP/2 settings"),
        (b"\x00", "closed the connection without"),
    ],
)
def test_a_peer_that_speaks_something_else_is_named(first: bytes, telling: str) -> None:
    async def scenario() -> None:
        async with serving_bytes(first=first) as (port, peer):
            opening = asyncio.ensure_future(Connection.open("127.0.0.1", port))
            await peer.connected.wait()
            await asyncio.sleep(0.02)
            peer.writer.close()
            with pytest.raises(NotHttp2, match=telling):
                await opening

    run(scenario())


@pytest.mark.loopback
def test_a_peer_that_accepts_and_says_nothing() -> None:
    async def scenario() -> None:
        async with serving_bytes() as (port, _):
            with pytest.raises(ConnectTimeout, match=r"sent no HTTP/2 settings within 0\.1 s"):
                await Connection.open("127.0.0.1", port, connect_timeout=0.1)

    run(scenario())


@pytest.mark.loopback
def test_a_silent_peer_is_pinged_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "SILENCE_S", 0.05)
    monkeypatch.setattr(connection_module, "PING_ANSWER_S", 0.1)
    monkeypatch.setattr(connection_module, "WATCH_S", 0.01)

    async def scenario() -> None:
        async with serving_bytes(greet=True) as (port, peer):
            connection = await Connection.open("127.0.0.1", port)
            call = Call(connection)
            ping = frame(frames.PING, 0, 0, b"trtpipe?")
            while ping not in peer.received:
                await asyncio.sleep(0.01)
            peer.writer.write(frame(frames.PING, frames.ACK, 0, b"trtpipe?"))
            await asyncio.sleep(0.3)
            assert peer.received.count(ping) == 1, "pings without data in between are abuse to a gRPC server"
            assert not call.ended.done()
            peer.writer.write(frames.header_frames(1, HEAD, 16384))
            status = await call.ended
            assert status.code is Code.UNAVAILABLE
            assert "answers no ping" in status.message
            assert not connection.usable

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_connection_lost_in_mid_stream_ends_every_call(how: str) -> None:
    async def scenario() -> None:
        async with serving_bytes(greet=True) as (port, peer):
            connection = await Connection.open("127.0.0.1", port)
            calls = [Call(connection) for _ in range(3)]
            await asyncio.sleep(0.02)
            if how == "reset":
                peer.writer.transport.abort()
            else:
                peer.writer.close()
            for call in calls:
                status = await call.ended
                assert (status.code, status.lost, status.retry) == (Code.UNAVAILABLE, True, False)
            with pytest.raises(ConnectionLost):
                Call(connection)

    run(scenario())


@pytest.mark.loopback
def test_uvloop_is_as_good_a_loop() -> None:
    async def scenario() -> None:
        async with serving_bytes(greet=True) as (port, peer):
            connection = await Connection.open("127.0.0.1", port)
            call = Call(connection)
            await peer.answer(call.stream.number, [b"one", b"two"])
            assert (await call.ended).ok
            assert call.messages == [b"one", b"two"]
            connection.close()
        with pytest.raises(ConnectFailed):
            await Connection.open("127.0.0.1", port)

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(), 20))
    finally:
        loop.close()


def test_what_a_dial_is_given() -> None:
    async def scenario() -> None:
        seen: list[Any] = []
        wire = Wire()

        async def dial(loop: Any, factory: Callable[[], Connection], host: str, port: int) -> None:
            seen.append((loop is asyncio.get_running_loop(), host, port))
            made = factory()
            made.connection_made(wire)
            made.feed(frames.settings_frame({frames.MAX_CONCURRENT_STREAMS: 7}), 1)

        connection = await Connection.open("::1", 8001, dial=dial)
        assert seen == [(True, "::1", 8001)]
        assert (connection.authority, connection.max_concurrent_streams) == ("[::1]:8001", 7)
        assert wire.take().startswith(frames.PREFACE)

    run(scenario())


def test_a_dial_that_fails_and_one_that_never_ends() -> None:
    async def fail(loop: Any, factory: Any, host: str, port: int) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    ended: list[str] = []

    async def hang(loop: Any, factory: Any, host: str, port: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cancelled")

    with pytest.raises(ConnectFailed, match="nowhere:1: Connection refused"):
        run(Connection.open("nowhere", 1, dial=fail))
    with pytest.raises(ConnectTimeout, match=r"nowhere:1 did not accept the connection within 0\.01 s"):
        run(Connection.open("nowhere", 1, dial=hang, connect_timeout=0.01))
    assert ended == ["cancelled"]
