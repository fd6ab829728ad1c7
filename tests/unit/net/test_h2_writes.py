"""What the HTTP/2 reader writes together, and the stamps of what it reads."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from time import monotonic_ns

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from tests.support.h2 import METHOD, Bench, Call
from tests.support.wires import HEAD, answer_bytes, prefixed
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.frames import frame
from trtpipe.pipeline.net.h2.status import Code


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
