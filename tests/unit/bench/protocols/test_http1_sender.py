"""The sender of HTTP/1.1 and its connections, with servers of bytes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator

import pytest

from tests.support.loops import run
from tests.support.wires import Asked
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.bench.protocols.http1 import HttpSender
from trtpipe.pipeline.bench.protocols.http_setup import Site


class Server:
    """Answers every request by `answer`, or closes where that is empty."""

    def __init__(self) -> None:
        self.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\ndata: a\n\n"
        self.requests: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.greets = True  # otherwise it closes what it has accepted
        self.idle_close = asyncio.Event()
        self.port = 0

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while self.greets:
                    head = await reader.readuntil(b"\r\n\r\n")
                    self.requests.append(head)
                    writer.write(self.answer)
                    if not self.answer or b"close" in self.answer:
                        break
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, HttpSender]]:
    made = Server()
    server = await asyncio.start_server(made._accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    sender = HttpSender(Site.of(f"http://127.0.0.1:{made.port}"))
    try:
        yield made, sender
    finally:
        await sender.close()
        server.close()
        for writer in made.connections:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


async def answered(sender: HttpSender, *asked: Asked) -> None:
    sender.start(asked)
    await asyncio.gather(*(one.over.wait() for one in asked))


@pytest.mark.loopback
def test_as_many_connections_as_requests_at_once() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            for count, connections in [(1, 1), (1, 1), (3, 3), (2, 3), (3, 3), (130, 130)]:
                asked = [Asked() for _ in range(count)]
                await answered(sender, *asked)
                assert [one.failure for one in asked] == [None] * count
                assert len(server.connections) == connections
            assert len(server.requests) == 140

    run(scenario())


@pytest.mark.loopback
def test_connections_are_there_before_the_requests() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            await sender.warm(70)
            await sender.warm(5)
            while len(server.connections) < 70:  # accepted by the kernel, perhaps not yet by the server
                await asyncio.sleep(0.001)
            asked = [Asked() for _ in range(70)]
            sender.start(asked)
            assert None not in [one.sent_ns for one in asked], "with a connection at hand a request leaves at once"
            await asyncio.gather(*(one.over.wait() for one in asked))
            assert len(server.connections) == 70

    run(scenario())


@pytest.mark.loopback
def test_a_server_that_closes_after_each_answer() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: a\n\n"
            for _ in range(3):
                asked = Asked()
                await answered(sender, asked)
                assert asked.failure is None
            assert len(server.connections) == 3
            server.answer = b""
            await answered(sender, asked := Asked())
            assert asked.failed == ("ConnectionLost", "the server closed it (after 0 reads)")

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("connections", [0, 2])
def test_connections_that_the_server_closed_while_nobody_looked_are_not_used(connections: int) -> None:
    """Servers close what is idle; prompts of the next load point are made meanwhile, and the loop does not turn."""

    async def scenario() -> None:
        async with serving() as (server, sender):
            await sender.warm(2)
            while len(server.connections) < 2:
                await asyncio.sleep(0.001)
            for writer in server.connections:
                with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as own:
                    own.shutdown(socket.SHUT_RDWR)
            await sender.warm(connections)
            asked = [Asked(), Asked()]
            await answered(sender, *asked)
            assert [one.failure for one in asked] == [None, None]

    run(scenario())


@pytest.mark.loopback
def test_a_server_that_closes_what_it_accepts_does_not_hold_us_for_ever() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.greets = False
            with contextlib.suppress(HostError):
                await asyncio.wait_for(sender.warm(200), 20)
            await answered(sender, asked := Asked())
            assert asked.failed[0] == "ConnectionLost"

    run(scenario())


@pytest.mark.loopback
def test_a_request_cancelled_before_it_has_a_connection_is_never_sent() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            given_up = Asked(b"the first\r\n\r\n")
            sender.start([given_up])
            sender.cancel(given_up)
            await answered(sender, Asked(b"the second\r\n\r\n"))
            assert server.requests == [b"the second\r\n\r\n"]
            assert (given_up.ends, given_up.sent_ns) == (0, None)

    run(scenario())


@pytest.mark.loopback
def test_a_refused_connection_fails_its_request() -> None:
    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        sender = HttpSender(Site.of(f"http://127.0.0.1:{port}"))
        await answered(sender, asked := Asked())
        assert asked.failed[0] == "ConnectFailed"
        assert "refused" in asked.failed[1]
        with pytest.raises(HostError, match=rf"http://127\.0\.0\.1:{port} takes no connections any more: .*refused"):
            await sender.warm(2)
        await sender.close()

    run(scenario())


@pytest.mark.loopback
def test_what_is_in_flight_at_the_close_is_abandoned() -> None:
    async def scenario() -> None:
        async with serving() as (server, sender):
            server.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\ndata: a\n\n"  # and no end
            asked, late = Asked(), Asked()
            sender.start([asked])
            while not asked.data:
                await asyncio.sleep(0.001)
            sender.start([late])
            await sender.close()
            await asked.over.wait()
            assert asked.failed[0] == "ConnectionLost"
            assert late.sent_ns is None

    run(scenario())


def test_tls_is_for_the_library() -> None:
    with pytest.raises(UsageError, match=r"https://x is TLS, .*; use --transport tritonclient"):
        HttpSender(Site.of("https://x"))
