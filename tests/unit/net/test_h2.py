"""The HTTP/2 reader: against a real gRPC server on loopback, and against frames made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from time import monotonic_ns
from typing import Any, TypeVar

import grpc
import pytest
import uvloop
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.support.wires import HEAD, TAIL, Wire, answer_bytes, prefixed
from trtpipe.pipeline.net.h2 import connection as connection_module
from trtpipe.pipeline.net.h2 import frames, triton
from trtpipe.pipeline.net.h2.connection import OWN_MAX_FRAME, STREAM_WINDOW, Connection, Stream
from trtpipe.pipeline.net.h2.frames import ErrorCode, frame
from trtpipe.pipeline.net.h2.pool import Pool
from trtpipe.pipeline.net.h2.status import (
    CallFailed,
    Code,
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    Draining,
    NotHttp2,
    Status,
    TooManyStreams,
    of_reset,
    of_trailers,
)
from trtpipe.pipeline.net.stamped import dial as stamped_dial

METHOD = "/test.Test/Ask"
T = TypeVar("T")
Answer = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 60))


class Call:
    """A call, and what came of it."""

    def __init__(self, connection: Connection, message: bytes = b"", method: str = METHOD, **options: Any) -> None:
        self.messages: list[bytes] = []
        self.stamps: list[int] = []
        self.ended: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()
        self.stream: Stream = connection.start(
            method, message, on_data=self._data, on_end=lambda status, stamp: self.ended.set_result(status), **options
        )

    def _data(self, data: bytes, stamp: int) -> None:
        self.messages.append(data)
        self.stamps.append(stamp)
        self.first.set()


# A real server


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


# A server of bytes


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


# Frames without a socket


class Bench:
    """A connection on a wire of the test's own, past its settings."""

    def __init__(self, settings: dict[int, int] | None = None) -> None:
        self.loop = asyncio.new_event_loop()
        self.problems: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda loop, context: self.problems.append(context))
        self.connection = Connection("test", self.loop)
        self.wire = Wire()
        self.connection.connection_made(self.wire)
        self.connection.data_received(frames.settings_frame(settings or {}))
        self.wire.frames()
        self.streams: list[Stream] = []
        self.got: dict[int, list[bytes]] = {}
        self.status: dict[int, Status] = {}

    def start(self, message: bytes = b"", **options: Any) -> Stream:
        mine: list[bytes] = []
        stream: Stream

        def ended(status: Status, stamp: int) -> None:
            assert stream.number not in self.status, "a call ended twice"
            self.status[stream.number] = status

        stream = self.connection.start(
            METHOD, message, on_data=lambda data, stamp: mine.append(data), on_end=ended, **options
        )
        self.streams.append(stream)
        self.got[stream.number] = mine
        return stream

    def feed(self, *data: bytes) -> None:
        for piece in data:
            self.connection.data_received(piece)


@pytest.fixture
def bench() -> Any:
    made = Bench()
    yield made
    made.connection.abort()
    made.loop.close()


def test_the_first_bytes_and_a_request_as_frames() -> None:
    bench = Bench({frames.MAX_FRAME_SIZE: 16384})
    bench.start(b"hello")
    (head, data) = bench.wire.frames()
    assert head[:3] == (frames.HEADERS, frames.END_HEADERS, 1)
    assert data == (frames.DATA, frames.END_STREAM, 1, prefixed(b"hello"))
    # The first block says that the table is empty for good; the next ones are the same bytes each time.
    assert head[3][0] == 0x20
    bench.start(b"again")
    second = bench.wire.frames()[0][3]
    bench.start(b"again")
    assert bench.wire.frames()[0][3] == second == head[3][1:]
    bench.loop.close()


RECORDED = b"".join(
    [
        frames.header_frames(1, b"\x20" + HEAD, 16384),
        frame(frames.DATA, 0, 1, prefixed(b"one")),
        frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 70_000, 0x99: 1}),
        # Two messages in a frame and a third over three of them, padding and all.
        frame(frames.DATA, 0, 1, prefixed(b"two") + prefixed(b"") + prefixed(b"three" * 20)[:40]),
        frame(frames.PING, 0, 0, b"abcdefgh"),
        frame(0x77, 0xFF, 3, b"an unknown frame"),
        frame(frames.DATA, frames.PADDED, 1, b"\x05" + prefixed(b"three" * 20)[40:60] + b"12345"),
        frames.header_frames(3, HEAD, 16384),
        frame(frames.PRIORITY, 0, 3, b"12345"),
        frame(frames.DATA, 0, 3, prefixed(b"other")),
        frame(frames.DATA, frames.PADDED, 1, b"\x00" + prefixed(b"three" * 20)[60:]),
        frame(frames.DATA, 0, 1, b""),
        frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 10)),
        # A header block in parts, with padding and priority, which end up as one.
        frame(frames.HEADERS, frames.END_STREAM | 0x28, 1, b"\x0212345" + TAIL[:3] + b"--"),
        frame(frames.CONTINUATION, 0, 1, b""),
        frame(frames.CONTINUATION, 0, 1, TAIL[3:5]),
        frame(frames.CONTINUATION, frames.END_HEADERS, 1, TAIL[5:]),
        frame(frames.DATA, 0, 3, prefixed(b"last")),
        frames.header_frames(3, TAIL, 16384, end_stream=True),
    ]
)  # fmt: skip


@given(cuts=st.lists(st.integers(0, len(RECORDED)), max_size=40))
def test_any_cutting_of_the_bytes_gives_the_same_messages(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(RECORDED)]
    check_recorded([RECORDED[start:end] for start, end in itertools.pairwise(places) if start < end])


def test_one_byte_at_a_time() -> None:
    check_recorded([RECORDED[place : place + 1] for place in range(len(RECORDED))])


def check_recorded(pieces: list[bytes]) -> None:
    bench = Bench()
    bench.start()
    bench.start()
    bench.wire.frames()
    bench.feed(*pieces)
    assert bench.got == {1: [b"one", b"two", b"", b"three" * 20], 3: [b"other", b"last"]}
    assert {number: status.code for number, status in bench.status.items()} == {1: Code.OK, 3: Code.OK}
    assert bench.wire.frames() == [
        (frames.SETTINGS, frames.ACK, 0, b""),
        (frames.PING, frames.ACK, 0, b"abcdefgh"),
    ]
    assert bench.connection.usable
    bench.connection.abort()
    bench.loop.close()


@given(noise=st.binary(min_size=1, max_size=300), begun=st.booleans())
def test_garbage_ends_in_a_status_or_waits_for_more_and_never_raises(noise: bytes, begun: bool) -> None:
    bench = Bench()
    stream = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384) if begun else b"", noise)
    assert stream.ended == (1 in bench.status)
    bench.connection.connection_lost(None)
    assert 1 in bench.status
    assert bench.problems == []
    bench.loop.close()


@given(
    seen=st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 255), st.integers(0, 4), st.binary(max_size=40)), max_size=8
    )
)
def test_well_formed_frames_in_a_senseless_order_never_raise(seen: list[tuple[int, int, int, bytes]]) -> None:
    bench = Bench()
    bench.start()
    bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384), *(frame(*parts) for parts in seen))
    bench.connection.connection_lost(None)
    assert set(bench.status) == {1, 3}
    assert bench.problems == []
    bench.loop.close()


def test_a_broken_protocol_ends_all_calls_and_the_peer_is_told_why(bench: Bench) -> None:
    broken: list[tuple[bytes, ErrorCode]] = [
        (frame(frames.DATA, 0, 0, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 2, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, 0, 5, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b"\x05abcd"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.DATA, frames.PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 7, HEAD), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x40\x7f"), ErrorCode.COMPRESSION_ERROR),
        (frame(frames.HEADERS, frames.END_HEADERS | frames.HAS_PRIORITY, 1, b"abc"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.PING, 0, 0, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.DATA, 0, 1, prefixed(b"x" * 9)), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.HEADERS, 0, 1, HEAD) + frame(frames.CONTINUATION, 0, 1) * 99, ErrorCode.ENHANCE_YOUR_CALM),
        (frame(frames.CONTINUATION, frames.END_HEADERS, 1, HEAD), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PUSH_PROMISE, frames.END_HEADERS, 1, b"\0\0\0\2"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.PING, 0, 0, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.PING, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.RST_STREAM, 0, 1, b"123"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.RST_STREAM, 0, 9, b"1234"), ErrorCode.PROTOCOL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\0\0\0\0"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.WINDOW_UPDATE, 0, 0, b"\0"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 0, b"12345"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, frames.ACK, 0, b"123456"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.SETTINGS, 0, 1), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame({frames.MAX_FRAME_SIZE: 5}), ErrorCode.PROTOCOL_ERROR),
        (frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 2**31}), ErrorCode.FLOW_CONTROL_ERROR),
        (frame(frames.GOAWAY, 0, 0, b"1234"), ErrorCode.FRAME_SIZE_ERROR),
        (frame(frames.GOAWAY, 0, 1, b"12345678"), ErrorCode.PROTOCOL_ERROR),
        (frames.HEADER.pack(0x7F, 0, frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    ]
    for data, code in broken:
        made = Bench()
        made.start()
        made.start()
        made.wire.frames()
        made.feed(data)
        assert {status.code for status in made.status.values()} == {Code.INTERNAL}, data
        assert len(made.status) == 2
        last = made.wire.frames()[-1]
        assert (last[0], struct.unpack(">LL", last[3][:8])[1]) == (frames.GOAWAY, code), data
        assert made.wire.closed
        assert not made.connection.usable
        made.loop.close()


def test_a_stream_s_own_fault_leaves_the_others_alone(bench: Bench) -> None:
    wrong = {
        frames.header_frames(1, Encoder().encode([(":status", "404"), ("content-type", "text/html")]), 16384): (
            Code.UNIMPLEMENTED, "HTTP status 404"
        ),
        frames.header_frames(1, Encoder().encode([(":status", "200"), ("content-type", "text/html")]), 16384): (
            Code.UNKNOWN, "answered text/html, not gRPC"
        ),
        frame(frames.DATA, 0, 1, prefixed(b"early")): (Code.INTERNAL, "data before headers"),
        frames.header_frames(1, HEAD, 16384) * 2: (Code.INTERNAL, "headers twice"),
        frames.header_frames(1, HEAD, 16384) + frames.header_frames(1, TAIL, 16384): (Code.INTERNAL, "do not end"),
        frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, b"\x01\0\0\0\0"): (Code.INTERNAL, "compressed"),
        frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, b"\0\xff\xff\xff\xff"): (
            Code.RESOURCE_EXHAUSTED, "a message of 4,294,967,295 bytes"
        ),
        frame(frames.WINDOW_UPDATE, 0, 1, b"\0\0\0\0"): (Code.INTERNAL, "opened the stream's window by 0"),
    }  # fmt: skip
    for data, (code, telling) in wrong.items():
        stream = bench.start()
        neighbour = bench.start()
        bench.wire.frames()
        moved = _renumbered(data, stream.number)
        bench.feed(moved)
        assert bench.status[stream.number].code is code
        assert telling in bench.status[stream.number].message
        assert bench.wire.frames()[0][:3] == (frames.RST_STREAM, 0, stream.number)
        bench.feed(answer_bytes(neighbour.number, [b"fine"]))
        assert bench.status[neighbour.number].ok


def _renumbered(data: bytes, number: int) -> bytes:
    out = b""
    while data:
        high, low, kind, flags, _ = frames.HEADER.unpack_from(data)
        end = 9 + (high << 16 | low)
        out += frames.HEADER.pack(high, low, kind, flags, number) + data[9:end]
        data = data[end:]
    return out


def test_ends_that_say_too_little(bench: Bench) -> None:
    first, second, third, fourth = (bench.start().number for _ in range(4))
    bench.feed(frames.header_frames(first, HEAD, 16384), frame(frames.DATA, frames.END_STREAM, first, prefixed(b"x")))
    assert bench.status[first] == Status(Code.UNKNOWN, "the stream ended without a grpc-status")
    assert bench.got[first] == [b"x"]
    cut = frame(frames.DATA, 0, second, prefixed(b"long message")[:9])
    bench.feed(frames.header_frames(second, HEAD, 16384), cut)
    bench.feed(frames.header_frames(second, TAIL, 16384, end_stream=True))
    assert "within a message" in bench.status[second].message
    odd = Encoder().encode([(":status", "200"), ("grpc-status", "many"), ("grpc-message", "a%20b%zz")])
    bench.feed(frames.header_frames(third, odd, 16384, end_stream=True))
    assert bench.status[third] == Status(Code.UNKNOWN, "grpc-status b'many': a b%zz")
    informational = Encoder().encode([(":status", "103")])
    bench.feed(frames.header_frames(fourth, informational, 16384), answer_bytes(fourth, [b"y"]))
    assert bench.status[fourth].ok


def test_resets_and_what_they_mean(bench: Bench) -> None:
    for code, meaning in [
        (ErrorCode.REFUSED_STREAM, Code.UNAVAILABLE),
        (ErrorCode.CANCEL, Code.CANCELLED),
        (ErrorCode.ENHANCE_YOUR_CALM, Code.RESOURCE_EXHAUSTED),
        (ErrorCode.INTERNAL_ERROR, Code.INTERNAL),
        (ErrorCode.NO_ERROR, Code.INTERNAL),
    ]:
        stream = bench.start()
        bench.feed(frames.reset(stream.number, code), frames.reset(stream.number, code))
        assert bench.status[stream.number].code is meaning
        assert bench.status[stream.number].retry == (code is ErrorCode.REFUSED_STREAM)
    assert of_reset(77).message == "the server reset the stream (error 77)"


def test_goaway_finishes_what_is_below_and_gives_back_what_is_above(bench: Bench) -> None:
    below, above = bench.start(), bench.start()
    bench.feed(frames.goaway(below.number, ErrorCode.NO_ERROR))
    given_back = bench.status[above.number]
    assert (given_back.code, given_back.retry) == (Code.UNAVAILABLE, True)
    assert below.number not in bench.status
    with pytest.raises(Draining):
        bench.start()
    assert not bench.wire.closed
    bench.feed(answer_bytes(below.number, [b"end"]))
    assert bench.status[below.number].ok
    assert bench.wire.closed


def test_goaway_in_anger_says_why(bench: Bench) -> None:
    stream = bench.start()
    bench.feed(frames.goaway(0, ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings"))
    assert "ENHANCE_YOUR_CALM too_many_pings" in bench.status[stream.number].message


def test_data_waits_for_the_stream_s_window_and_for_the_connection_s() -> None:
    bench = Bench({frames.INITIAL_WINDOW_SIZE: 10})
    stream = bench.start(b"x" * 95)
    assert [entry[3] for entry in bench.wire.frames()[1:]] == [prefixed(b"x" * 95)[:10]]
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 20)))
    assert [len(entry[3]) for entry in bench.wire.frames()] == [20]
    bench.feed(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 5}))  # 5 less than it was: the window is negative
    bench.wire.frames()
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">L", 5)))
    assert bench.wire.frames() == []
    bench.feed(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 65_535}))
    rest = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in rest) == 70
    assert rest[-1][1] == frames.END_STREAM
    bench.feed(answer_bytes(stream.number, []))
    assert bench.status[1].ok

    large = bench.start(b"y" * 200_000)  # the connection's window is 65,535 less 100
    bench.feed(frame(frames.WINDOW_UPDATE, 0, large.number, struct.pack(">L", 1 << 20)))
    sent = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in sent) == 65_435
    assert max(len(entry[3]) for entry in sent) == 16_384
    behind = bench.start(b"z")
    assert [entry[0] for entry in bench.wire.frames()] == [frames.HEADERS]
    bench.feed(frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">L", 1 << 20)))
    sent = [entry for entry in bench.wire.frames() if entry[0] == frames.DATA]
    assert sum(len(entry[3]) for entry in sent if entry[2] == large.number) == 200_005 - 65_435
    assert sum(len(entry[3]) for entry in sent if entry[2] == behind.number) == 6
    bench.loop.close()


def test_a_full_socket_holds_data_back(bench: Bench) -> None:
    bench.connection.pause_writing()
    stream = bench.start(b"x" * 50)
    assert [entry[0] for entry in bench.wire.frames()] == [frames.HEADERS]
    bench.connection.resume_writing()
    assert sum(len(entry[3]) for entry in bench.wire.frames()) == 55
    stream.cancel()


def test_both_windows_are_renewed_by_half_and_a_peer_that_ignores_them_is_refused(bench: Bench) -> None:
    stream = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384))
    bench.wire.frames()
    message = frame(frames.DATA, 0, 1, prefixed(b"x" * (OWN_MAX_FRAME - 5)))
    renewed = 0
    total = 0
    while total < STREAM_WINDOW * 2:
        bench.feed(message)
        total += OWN_MAX_FRAME
        renewed += sum(struct.unpack(">L", entry[3])[0] for entry in bench.wire.frames() if entry[2] == 1)
        assert STREAM_WINDOW + renewed - total + OWN_MAX_FRAME > STREAM_WINDOW // 2
    assert len(bench.got[1]) == total // OWN_MAX_FRAME
    assert renewed >= total - STREAM_WINDOW // 2
    # The connection's is two gigabytes: as if it had been used.
    bench.connection._window_left = connection_module.CONNECTION_WINDOW // 2 + 10
    bench.feed(message)
    ((kind, _, number, payload),) = [entry for entry in bench.wire.frames() if entry[2] == 0]
    assert (kind, number) == (frames.WINDOW_UPDATE, 0)
    assert struct.unpack(">L", payload)[0] == (1 << 30) - 10 + OWN_MAX_FRAME
    stream._renew_in = -(STREAM_WINDOW // 2)
    bench.feed(message)
    assert bench.status[1].code is Code.INTERNAL
    assert "window" in bench.status[1].message


def test_frames_of_a_cancelled_call_are_passed_over(bench: Bench) -> None:
    stream, other = bench.start(), bench.start()
    stream.cancel()
    assert bench.wire.frames()[-1] == (frames.RST_STREAM, 0, 1, struct.pack(">L", ErrorCode.CANCEL))
    bench.feed(answer_bytes(1, [b"late"]), answer_bytes(other.number, [b"fine"]))
    assert bench.got == {1: [], 3: [b"fine"]}
    assert set(bench.status) == {3}


def test_header_tables_of_the_peer_are_followed(bench: Bench) -> None:
    """A server that uses the dynamic table, as it may before it has read our settings."""
    encoder = Encoder()
    for _ in range(3):
        stream = bench.start()
        head = encoder.encode([(":status", "200"), ("content-type", "application/grpc"), ("x-own", "value")])
        tail = encoder.encode([("grpc-status", "5"), ("grpc-message", "no such model")])
        bench.feed(frames.header_frames(stream.number, head, 16384))
        bench.feed(frames.header_frames(stream.number, tail, 16384, end_stream=True))
        assert bench.status[stream.number] == Status(Code.NOT_FOUND, "no such model")
    assert not bench.connection._headers_of.known
    encoder.header_table_size = 0
    for _ in range(2):
        stream = bench.start()
        bench.feed(frames.header_frames(stream.number, encoder.encode([(":status", "200"), ("content-type", "application/grpc")]), 16384))  # fmt: skip # noqa: E501
        tail = encoder.encode([("grpc-status", "5"), ("grpc-message", "none")])
        bench.feed(frames.header_frames(stream.number, tail, 16384, end_stream=True))
        assert bench.status[stream.number] == Status(Code.NOT_FOUND, "none")
    assert bench.connection._headers_of.known


def test_a_callback_that_fails_ends_its_own_call(bench: Bench) -> None:
    ends: list[Status] = []

    def broken(data: bytes, stamp: int) -> None:
        raise ZeroDivisionError("in the caller")

    bench.connection.start(METHOD, b"", on_data=broken, on_end=lambda status, stamp: ends.append(status))
    other = bench.start()
    bench.feed(frames.header_frames(1, HEAD, 16384) + frame(frames.DATA, 0, 1, prefixed(b"long enough")) * 2)
    bench.feed(answer_bytes(other.number, [b"fine"]))
    assert len(ends) == 1
    assert "in the caller" in ends[0].message
    assert bench.status[other.number].ok
    assert len(bench.problems) == 1


def test_a_callback_may_cancel_and_close(bench: Bench) -> None:
    seen: list[bytes] = []

    def once(data: bytes, stamp: int) -> None:
        seen.append(data)
        stream.cancel()

    stream = bench.connection.start(METHOD, b"", on_data=once, on_end=lambda status, stamp: seen.append(b"end"))
    bench.feed(frames.header_frames(1, HEAD, 16384))
    bench.feed(frame(frames.DATA, 0, 1, prefixed(b"a long message") * 2) + answer_bytes(1, [b"a long message"]))
    assert seen == [b"a long message"]

    def leave(data: bytes, stamp: int) -> None:
        bench.connection.close()

    bench.connection.start(
        METHOD, b"", on_data=leave, on_end=lambda status, stamp: seen.append(status.code.name.encode())
    )
    bench.feed(answer_bytes(3, [b"a long message"] * 3))
    assert seen[1:] == [b"CANCELLED"]


def test_stream_numbers_run_out(bench: Bench) -> None:
    bench.connection._next = frames.LARGEST_STREAM_ID - 2
    stream = bench.start()
    with pytest.raises(Draining, match="used up"):
        bench.start()
    bench.feed(answer_bytes(stream.number, [b"last"]))
    assert bench.wire.closed


def test_trailers_of_all_codes() -> None:
    for code in Code:
        assert of_trailers({b"grpc-status": b"%d" % code}).code is code
    assert str(of_trailers({b"grpc-status": b"8", b"grpc-message": b"full%21"})) == "RESOURCE_EXHAUSTED: full!"


# What goes out together, and when it came


def test_calls_begun_under_a_cork_are_one_write_and_share_the_moment_before_it(bench: Bench) -> None:
    before = monotonic_ns()
    bench.connection.cork()
    numbers = [bench.start(b"%d" % place).number for place in range(5)]
    assert bench.wire.writes == []
    sent = bench.connection.uncork()
    assert len(bench.wire.writes) == 1
    assert before <= sent <= bench.wire.moments[0]
    sides = [(kind, number, payload) for kind, _, number, payload in bench.wire.frames() if kind == frames.DATA]
    assert sides == [(frames.DATA, number, prefixed(b"%d" % place)) for place, number in enumerate(numbers)]
    bench.start(b"by itself")
    bench.start(b"by itself")
    assert len(bench.wire.writes) == 2


Step = Callable[[Bench], object]
STEPS: st.SearchStrategy[Step] = st.one_of(
    st.integers(0, 90_000).map(lambda size: lambda bench: bench.start(b"x" * size)),
    st.just(lambda bench: bench.start(b"first", half_close=False).send(b"second")),
    st.integers(0, 3).map(lambda place: lambda bench: [stream.cancel() for stream in bench.streams[place:][:1]]),
    st.just(lambda bench: bench.feed(frame(frames.PING, 0, 0, b"abcdefgh"))),
    st.just(lambda bench: bench.feed(frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">L", 70_000)))),
    st.just(lambda bench: bench.feed(frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 90_000}))),
)


@given(st.lists(STEPS, max_size=8))
def test_a_cork_changes_the_writes_and_not_the_bytes(steps: list[Step]) -> None:
    plain, corked = Bench(), Bench()
    corked.connection.cork()
    for made in (plain, corked):
        for step in steps:
            step(made)
    assert corked.wire.writes == []
    corked.connection.uncork()
    assert len(corked.wire.writes) == bool(plain.wire.writes)
    assert corked.wire.take() == plain.wire.take()
    for made in (plain, corked):
        made.connection.abort()
        made.loop.close()


def test_a_cork_with_nothing_under_it_writes_nothing(bench: Bench) -> None:
    bench.connection.cork()
    before = monotonic_ns()
    assert before <= bench.connection.uncork() <= monotonic_ns()
    assert bench.wire.writes == []


def test_a_connection_lost_under_a_cork_ends_its_calls(bench: Bench) -> None:
    bench.connection.cork()
    stream = bench.start(b"never sent")
    bench.connection.abort()
    bench.connection.uncork()
    assert bench.wire.writes == []
    assert bench.status[stream.number].code is Code.CANCELLED


def test_the_stamp_that_a_read_is_given_is_that_of_its_messages_and_of_the_end(bench: Bench) -> None:
    stamps: list[int] = []
    bench.connection.start(
        METHOD, b"", on_data=lambda data, stamp: stamps.append(stamp), on_end=lambda status, stamp: stamps.append(stamp)
    )
    whole = answer_bytes(1, [b"a long message", b"", b"another one"])
    second = len(frames.header_frames(1, HEAD, 16384)) + 2 * (9 + 5) + 14
    bench.connection.feed(whole[: second - 1], 1_000)
    bench.connection.feed(whole[second - 1 : second + 20], 2_000)  # the end of the second, and of the third the start
    bench.connection.feed(whole[second + 20 : -1], 3_000)
    bench.connection.feed(whole[-1:], 4_000)
    assert stamps == [1_000, 2_000, 3_000, 4_000]


def test_bytes_that_asyncio_brings_are_stamped_when_they_come(bench: Bench) -> None:
    stamps: list[int] = []
    bench.connection.start(
        METHOD, b"", on_data=lambda data, stamp: stamps.append(stamp), on_end=lambda status, stamp: stamps.append(stamp)
    )
    before = monotonic_ns()
    bench.connection.data_received(answer_bytes(1, [b"a", b"a long message"]))
    assert before <= stamps[0] <= monotonic_ns()
    assert stamps == [stamps[0]] * 3


def test_whoever_waits_for_room_is_told_of_it() -> None:
    bench = Bench({frames.MAX_CONCURRENT_STREAMS: 1})
    rooms: list[bool] = []
    bench.connection.on_room = lambda: rooms.append(bench.connection.has_room)
    first = bench.start()
    assert not bench.connection.has_room
    bench.feed(answer_bytes(first.number, [b"x"]))
    assert rooms[-1:] == [True]
    second = bench.start()
    rooms.clear()
    second.cancel()
    assert rooms[-1:] == [True]
    bench.start()
    rooms.clear()
    bench.feed(frames.settings_frame({frames.MAX_CONCURRENT_STREAMS: 2}))
    assert rooms[-1:] == [True]
    rooms.clear()
    bench.connection.connection_lost(None)
    assert rooms[-1:] == [False]
    bench.loop.close()


def test_room_may_be_taken_by_whoever_is_told_of_it() -> None:
    bench = Bench({frames.MAX_CONCURRENT_STREAMS: 2})
    left = [b"%d" % number for number in range(6)]

    def begin() -> None:
        while left and bench.connection.has_room:
            bench.start(left.pop(0))

    bench.connection.on_room = begin
    begin()
    for number in range(1, 12, 2):
        assert bench.connection.in_flight == min(2, 6 - number // 2)
        bench.feed(answer_bytes(number, [b"x"]))
    assert [status.ok for status in bench.status.values()] == [True] * 6
    bench.loop.close()


def test_a_write_buffer_is_done_without_only_where_that_is_asked_for(bench: Bench) -> None:
    assert bench.wire.high is None
    bench.connection.write_at_once()
    assert bench.wire.high == 0


@pytest.mark.loopback
def test_written_at_once_the_bytes_are_there_before_the_loop_turns() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            opening = asyncio.ensure_future(Connection.open(*server.getsockname()))
            peer, _ = await loop.sock_accept(server)
            with peer:
                await loop.sock_sendall(peer, frames.settings_frame({}))
                connection = await opening
                peer.settimeout(20)
                greeting = b""
                while not greeting.endswith(frame(frames.SETTINGS, frames.ACK, 0)):
                    greeting += peer.recv(1000)
                connection.write_at_once()
                call = Call(connection, b"hello")
                assert prefixed(b"hello") in peer.recv(1000)
                connection.close()
                await call.ended

    loop = uvloop.new_event_loop()  # writes at the end of its turn, unless told otherwise
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(), 60))
    finally:
        loop.close()


# Another way to connect


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


# Triton's messages


def response(outputs: list[tuple[str, bytes]], *, final: bool | None = None, error: str = "", name: str = "m") -> bytes:
    out = service_pb2.ModelStreamInferResponse(error_message=error)
    out.infer_response.model_name = name
    if final is not None:
        out.infer_response.parameters[triton.FINAL].bool_param = final
    for output, data in outputs:
        out.infer_response.outputs.add(name=output, datatype="INT32", shape=[1, 1])
        out.infer_response.raw_output_contents.append(data)
    return bytes(out.SerializeToString())


messages = st.builds(
    response,
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([b"", b"1234", b"5678", b"x" * 200])), max_size=3),
    final=st.sampled_from([None, False, True]),
    error=st.sampled_from(["", "", "", "it failed"]),
    name=st.sampled_from(["m", "n"]),
)  # fmt: skip


@given(st.lists(messages, min_size=1, max_size=12))
def test_the_fast_reader_agrees_with_protobuf(stream: list[bytes]) -> None:
    reader = triton.Reader()
    for message in stream:
        assert reader.read(message) == triton.parse(message)


@given(st.data())
def test_the_fast_reader_agrees_on_damaged_messages(data: Any) -> None:
    whole = response([("a", b"1234"), ("b", b"x" * 130)], final=False)
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    reader = triton.Reader()
    reader.read(whole)

    def attempt(read: Callable[[bytes], triton.Reply]) -> triton.Reply | str:
        try:
            return read(bytes(damaged))
        except triton.MalformedMessage:
            return "malformed"

    assert attempt(reader.read) == attempt(triton.parse)


def test_a_response_s_parts() -> None:
    reply = triton.parse(response([("output_ids", b"\1\0\0\0"), ("sequence_length", b"\1\0\0\0")], final=True))
    assert reply == ({"output_ids": b"\1\0\0\0", "sequence_length": b"\1\0\0\0"}, True, "")
    assert triton.parse(response([], error="no")).error == "no"
    with pytest.raises(triton.MalformedMessage):
        triton.parse(b"\xff\xff\xff")
    odd = service_pb2.ModelStreamInferResponse()
    odd.infer_response.outputs.add(name="x")
    with pytest.raises(triton.MalformedMessage, match="1 outputs and 0 raw contents"):
        triton.parse(odd.SerializeToString())


def test_a_request_is_what_triton_reads() -> None:
    data = triton.infer_request(
        "tensorrt_llm",
        [triton.Tensor("input_ids", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0")],
        ["output_ids"],
        request_id="r",
        parameters={"flag": True, "number": 3, "word": "w"},
    )
    request = service_pb2.ModelInferRequest.FromString(data)
    assert (request.model_name, request.id, list(request.raw_input_contents)) == (
        "tensorrt_llm", "r", [b"\1\0\0\0\2\0\0\0"]
    )  # fmt: skip
    assert request.inputs[0].name == "input_ids"
    assert list(request.inputs[0].shape) == [1, 2]
    assert [output.name for output in request.outputs] == ["output_ids"]
    assert request.parameters[triton.EMPTY_FINAL].bool_param
    assert request.parameters["flag"].bool_param
    assert request.parameters["number"].int64_param == 3
    assert request.parameters["word"].string_param == "w"


def test_strings_on_the_wire() -> None:
    packed = triton.pack_strings(["é", b"", "ab"])
    assert packed == b"\2\0\0\0\xc3\xa9\0\0\0\0\2\0\0\0ab"
    assert triton.unpack_strings(packed) == ["é".encode(), b"", b"ab"]
    for cut in (1, 5, len(packed) - 1):
        with pytest.raises(triton.MalformedMessage):
            triton.unpack_strings(packed[:cut])
