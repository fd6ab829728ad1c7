"""The HTTP/2 reader against a real gRPC server on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from tests.support.h2 import METHOD, Call, T, run
from trtpipe.pipeline.net.h2.connection import STREAM_WINDOW, Connection
from trtpipe.pipeline.net.h2.pool import Pool
from trtpipe.pipeline.net.h2.status import (
    CallFailed,
    Code,
    ConnectFailed,
    ConnectionLost,
    Draining,
    Status,
    TooManyStreams,
)
from trtpipe.pipeline.net.stamped import dial as stamped_dial

Answer = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


@contextlib.asynccontextmanager
async def serving(answer: Answer, **settings: int) -> AsyncIterator[tuple[int, grpc.aio.Server]]:
    handler = grpc.stream_stream_rpc_method_handler(answer)
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(options=[*unlimited, *((f"grpc.{name}", value) for name, value in settings.items())])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", {"Ask": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, server
    finally:
        await server.stop(None)


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def count(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """As many messages as the request says."""
    async for request in requests:
        for number in range(int(request)):
            yield b"%d" % number


def with_server(answer: Answer, scenario: Callable[[Connection], Awaitable[T]], **settings: int) -> T:
    async def whole() -> T:
        async with serving(answer, **settings) as (port, _):
            connection = await Connection.open("127.0.0.1", port)
            try:
                return await scenario(connection)
            finally:
                connection.close()

    return run(whole())


@pytest.mark.loopback
def test_messages_of_a_stream_come_whole_in_order_and_stamped() -> None:
    async def scenario(connection: Connection) -> Call:
        call = Call(connection, b"500")
        assert (await call.ended).ok
        return call

    call = with_server(count, scenario)
    assert call.messages == [b"%d" % number for number in range(500)]
    assert call.stamps == sorted(call.stamps)


@pytest.mark.loopback
def test_many_streams_at_once_and_one_after_the_other() -> None:
    async def scenario(connection: Connection) -> None:
        for _ in range(3):
            calls = [Call(connection, b"20") for _ in range(256)]
            assert connection.in_flight == 256
            assert all([(await call.ended).ok for call in calls])
            assert all(len(call.messages) == 20 for call in calls)
            assert connection.in_flight == 0

    with_server(count, scenario)


@pytest.mark.loopback
def test_messages_larger_than_the_windows_in_both_directions() -> None:
    large = bytes(range(256)) * (STREAM_WINDOW // 256 * 2 + 7)

    async def scenario(connection: Connection) -> Call:
        call = Call(connection, large)
        await call.ended
        return call

    call = with_server(echo, scenario)
    assert call.ended.result().ok
    assert call.messages == [large]


@pytest.mark.loopback
def test_a_stream_that_receives_more_than_its_window_in_small_messages() -> None:
    async def flood(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        for _ in range(STREAM_WINDOW * 3 // 60_000):
            yield b"x" * 60_000

    async def scenario(connection: Connection) -> tuple[Status, int]:
        call = Call(connection)
        return await call.ended, sum(map(len, call.messages))

    status, received = with_server(flood, scenario)
    assert status.ok
    assert received == STREAM_WINDOW * 3 // 60_000 * 60_000


@pytest.mark.loopback
def test_a_conversation_on_one_stream() -> None:
    async def scenario(connection: Connection) -> Call:
        call = Call(connection, b"one", half_close=False)
        await call.first.wait()
        call.stream.send(b"two" * 50_000)
        while len(call.messages) < 2:
            await asyncio.sleep(0.01)
        call.stream.close()
        with pytest.raises(ValueError, match="closed"):
            call.stream.send(b"three")
        await call.ended
        return call

    call = with_server(echo, scenario)
    assert call.messages == [b"one", b"two" * 50_000]
    assert call.ended.result().ok


@pytest.mark.loopback
def test_an_answer_that_ends_before_the_question() -> None:
    async def brief(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"enough"

    async def scenario(connection: Connection) -> None:
        call = Call(connection, b"one", half_close=False)
        assert (await call.ended).ok
        call.stream.send(b"nobody hears this")
        assert (await Call(connection, b"one").ended).ok

    with_server(brief, scenario)


@pytest.mark.loopback
def test_the_server_s_status_and_words() -> None:
    async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"begun"
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "100 % full, café\nlater")

    async def scenario(connection: Connection) -> tuple[Status, list[bytes], Status]:
        call = Call(connection)
        unknown = Call(connection, method="/test.Test/Nothing")
        return await call.ended, call.messages, await unknown.ended

    status, messages, unknown = with_server(refuse, scenario)
    assert status == Status(Code.RESOURCE_EXHAUSTED, "100 % full, café\nlater")
    assert messages == [b"begun"]
    assert unknown.code is Code.UNIMPLEMENTED


@pytest.mark.loopback
def test_a_cancelled_call_ends_at_the_server_and_its_neighbour_goes_on() -> None:
    async def whole() -> None:
        cancelled = asyncio.Event()

        async def endless(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.001)
            except (asyncio.CancelledError, GeneratorExit):
                cancelled.set()
                raise

        async with serving(endless) as (port, _):
            connection = await Connection.open("127.0.0.1", port)
            first, second = Call(connection), Call(connection)
            await first.first.wait()
            first.stream.cancel()
            first.stream.cancel()
            await cancelled.wait()
            seen = len(first.messages), len(second.messages)
            await asyncio.sleep(0.05)
            assert len(first.messages) == seen[0]
            assert len(second.messages) > seen[1]
            assert not first.ended.done()
            assert connection.in_flight == 1
            connection.close()
            assert (await second.ended).code is Code.CANCELLED

    run(whole())


@pytest.mark.loopback
def test_metadata_reaches_the_server() -> None:
    async def tell(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        found = dict(context.invocation_metadata())
        yield f"{found['x-mine']} {found['user-agent']}".encode()

    async def scenario(connection: Connection) -> list[bytes]:
        calls = [Call(connection, metadata=(("x-mine", value),)) for value in ("a", "b" * 40_000, "a")]
        for call in calls:
            assert (await call.ended).ok
        return [call.messages[0][:1] for call in calls]

    # 40,000 bytes of headers take a CONTINUATION frame.
    assert with_server(tell, scenario, max_metadata_size=100_000) == [b"a", b"b", b"a"]


@pytest.mark.loopback
def test_unary_calls_and_how_they_fail() -> None:
    async def scenario(connection: Connection) -> None:
        assert await connection.unary(METHOD, b"one", 5) == b"one"
        with pytest.raises(CallFailed, match="UNIMPLEMENTED"):
            await connection.unary("/test.Test/Nothing", b"", 5)
        with pytest.raises(CallFailed, match=r"UNIMPLEMENTED|UNKNOWN|INTERNAL"):
            await connection.unary("/none", b"", 5)

    with_server(echo, scenario)

    async def slow(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(30)
        yield b""

    async def late(connection: Connection) -> None:
        with pytest.raises(CallFailed, match=r"DEADLINE_EXCEEDED: no answer within 0\.1 s"):
            await connection.unary(METHOD, b"", 0.1)
        assert connection.in_flight == 0

    with_server(slow, late)

    async def chatty(connection: Connection) -> None:
        with pytest.raises(CallFailed, match="more than one message answered"):
            await connection.unary(METHOD, b"2", 5)

    with_server(count, chatty)


@pytest.mark.loopback
def test_the_server_s_limit_of_streams_is_kept_and_a_pool_waits() -> None:
    most = [0]
    running = [0]

    async def busy(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        yield b"x"
        running[0] -= 1

    async def whole() -> None:
        async with serving(busy, max_concurrent_streams=4) as (port, _):
            connection = await Connection.open("127.0.0.1", port)
            assert connection.max_concurrent_streams == 4
            calls = [Call(connection) for _ in range(4)]
            with pytest.raises(TooManyStreams, match="allows 4 calls at once"):
                Call(connection)
            for call in calls:
                assert (await call.ended).ok
            connection.close()

            pool = Pool("127.0.0.1", port, connections=2)
            answers = await asyncio.gather(*(pool.unary(METHOD, b"", 20) for _ in range(60)))
            assert answers == [b"x"] * 60
            await pool.close()
            with pytest.raises(ConnectionLost):
                await pool.connection()

    run(whole())
    assert 4 < most[0] <= 8


@pytest.mark.loopback
def test_one_that_gives_up_waiting_hands_its_place_on() -> None:
    async def slow(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            await asyncio.sleep(float(request))
            yield b"x"

    async def whole() -> None:
        async with serving(slow, max_concurrent_streams=1) as (port, _):
            pool = Pool("127.0.0.1", port)
            first = asyncio.ensure_future(pool.unary(METHOD, b"0.2", 5))
            await asyncio.sleep(0.05)
            second = asyncio.ensure_future(pool.unary(METHOD, b"0", 5))
            third = asyncio.ensure_future(pool.unary(METHOD, b"0", 5))
            await asyncio.sleep(0.05)
            second.cancel()
            assert await first == await third == b"x"
            await pool.close()

    run(whole())


@pytest.mark.loopback
def test_a_server_that_stops_gracefully_lets_running_calls_finish() -> None:
    async def whole() -> None:
        go = asyncio.Event()

        async def patient(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            yield b"begun"
            await go.wait()
            yield b"done"

        async with serving(patient) as (port, server):
            connection = await Connection.open("127.0.0.1", port)
            call = Call(connection)
            await call.first.wait()
            stopping = asyncio.ensure_future(server.stop(10))
            while connection.usable:
                await asyncio.sleep(0.01)
            with pytest.raises(Draining, match="going away"):
                Call(connection)
            go.set()
            assert (await call.ended).ok
            assert call.messages == [b"begun", b"done"]
            await stopping

    run(whole())


@pytest.mark.loopback
def test_a_pool_makes_a_lost_connection_again() -> None:
    async def whole() -> None:
        async with serving(echo) as (port, server):
            pool = Pool("127.0.0.1", port, connections=2)
            assert await pool.unary(METHOD, b"a", 5) == b"a"
            assert await pool.unary(METHOD, b"b", 5) == b"b"
            (await pool.connection()).abort()
            for _ in range(4):
                assert await pool.unary(METHOD, b"c", 5) == b"c"
            await server.stop(None)
        with pytest.raises((ConnectFailed, CallFailed)):
            await pool.unary(METHOD, b"d", 5)
        with pytest.raises(ConnectFailed):
            await pool.unary(METHOD, b"d", 5)
        await pool.close()

    run(whole())


@pytest.mark.loopback
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_refused_connection_names_host_and_port(host: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConnectFailed, match=rf"{host}:{port}: .*(refused|failed)"):
        run(Connection.open(host, port))


@pytest.mark.loopback
def test_a_connection_that_was_dialled_by_other_means() -> None:
    async def scenario() -> None:
        async with serving(count) as (port, _):
            connection = await Connection.open("127.0.0.1", port, dial=stamped_dial)
            call = Call(connection, b"50")
            assert (await call.ended).ok
            assert call.messages == [b"%d" % number for number in range(50)]
            assert call.stamps == sorted(call.stamps)
            connection.close()

    run(scenario())
