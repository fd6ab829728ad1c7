"""gRPC requests over HTTP/2 connections whose other ends the test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.support.loops import run
from tests.support.wires import Wire, answer_bytes, prefixed
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.h2_sender import H2Sender
from trtpipe.pipeline.net.h2 import frames
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.frames import ErrorCode


class Dialled:
    """Connections over wires of the test's own, whose server allows `most` calls at once."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.wires: list[Wire] = []
        self.connections: list[Connection] = []
        self.refuses = False

    async def dial(self, loop: Any, factory: Callable[[], Connection], host: str, port: int) -> None:
        if self.refuses:
            raise ConnectionRefusedError(111, "Connection refused")
        wire = Wire()
        connection = factory()
        connection.connection_made(wire)
        connection.feed(frames.settings_frame({frames.MAX_CONCURRENT_STREAMS: self.most}), 1)
        wire.take()
        self.wires.append(wire)
        self.connections.append(connection)

    def in_flight(self) -> list[int]:
        return [connection.in_flight for connection in self.connections]

    def answer(self, place: int, stream: int) -> None:
        self.connections[place].feed(answer_bytes(stream, [b"x"]), 2)


def exchanges(count: int) -> list[InFlightRequest]:
    return [
        InFlightRequest(f"{number}", b"request %d" % number, input_tokens=1, max_tokens=1) for number in range(count)
    ]


def with_sender(scenario: Callable[[H2Sender, Dialled], Coroutine[Any, Any, None]], **options: int) -> None:
    async def whole() -> None:
        dialled = Dialled(options.pop("most", 1000))
        sender = await H2Sender.open("host:8001", dial=dialled.dial, **options)
        await scenario(sender, dialled)
        await sender.close()

    run(whole())


def test_requests_of_a_batch_are_one_write_and_share_its_stamp() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        (wire,) = dialled.wires
        assert wire.high == 0, "a write buffer would make the stamp a lie"
        batch = exchanges(40)
        sender.start(batch)
        assert len(wire.writes) == 1
        assert {one.sent_ns for one in batch} == {batch[0].sent_ns}
        assert batch[0].sent_ns is not None
        assert batch[0].sent_ns <= wire.moments[0]
        sent = [payload for kind, _, _, payload in wire.frames() if kind == frames.DATA]
        assert sent == [prefixed(b"request %d" % number) for number in range(40)]
        sender.start(later := exchanges(1))
        assert len(wire.writes) == 1
        assert later[0].sent_ns is not None
        assert later[0].sent_ns >= batch[0].sent_ns

    with_sender(scenario)


def test_requests_are_shared_out_among_the_connections() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        sender.start(exchanges(7))
        assert sorted(dialled.in_flight()) == [2, 2, 3] or sorted(dialled.in_flight()) == [1, 3, 3]
        assert [len(wire.writes) for wire in dialled.wires] == [1, 1, 1]
        for _ in range(3 * 5):  # one by one they go round
            sender.start(exchanges(1))
        assert max(dialled.in_flight()) - min(dialled.in_flight()) <= 2

    with_sender(scenario, connections=3)


def test_no_request_waits_while_any_connection_has_room() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        sender.start(exchanges(8))
        assert dialled.in_flight() == [4, 4]
        for stream in (1, 3, 5, 7):
            dialled.answer(1, stream)
        assert dialled.in_flight() == [4, 0]
        batch = exchanges(5)
        sender.start(batch)
        assert dialled.in_flight() == [4, 4]
        assert [one.sent_ns is None for one in batch] == [False] * 4 + [True]
        dialled.answer(0, 1)
        assert batch[4].sent_ns is not None

    with_sender(scenario, connections=2, most=4)


def test_enough_connections_are_made_beforehand_for_all_requests_at_once() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        await sender.warm(4)
        assert len(dialled.wires) == 1
        await sender.warm(17)
        assert len(dialled.wires) == 5
        batch = exchanges(17)
        sender.start(batch)
        assert None not in [one.sent_ns for one in batch]
        dialled.refuses = True
        with pytest.raises(HostError, match=r"takes no further connection: .*refused"):
            await sender.warm(21)

    with_sender(scenario, most=4)


def test_a_request_that_waits_for_room_can_be_abandoned() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        batch = exchanges(4)
        sender.start(batch)
        sender.cancel(batch[2])
        sender.cancel(batch[2])
        dialled.answer(0, 1)
        dialled.answer(0, 3)
        assert [one.sent_ns is None for one in batch] == [False, False, True, False]
        sender.cancel(batch[3])
        assert dialled.in_flight() == [0]
        assert [one.end_ns is None for one in batch] == [False, False, True, True]

    with_sender(scenario, most=2)


def test_a_lost_connection_is_made_up_for() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        batch = exchanges(4)
        sender.start(batch)
        dialled.connections[0].connection_lost(None)
        assert {one.failure.kind for one in batch if one.failure is not None} == {"ConnectionLost"}
        assert sum(one.failure is not None for one in batch) == 2
        sender.start(exchanges(3))
        assert dialled.in_flight() == [0, 5], "what is left takes all"
        await sender.warm(1)
        assert len(dialled.connections) == 3
        dialled.connections[1].connection_lost(None)
        dialled.connections[2].connection_lost(None)
        sender.start(last := exchanges(4))
        while last[3].sent_ns is None:
            await asyncio.sleep(0)
        assert sorted(dialled.in_flight()) == [0, 0, 0, 2, 2]

    with_sender(scenario, connections=2)


def test_whoever_is_told_that_nothing_answers_may_ask_again() -> None:
    """A closed loop does, in the next turn of the event loop."""

    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        loop = asyncio.get_running_loop()
        for at_once in (True, False):
            dialled.connections[0].connection_lost(None)
            dialled.refuses = True
            first, second = exchanges(2)

            def again(ended: InFlightRequest, second: InFlightRequest = second, at_once: bool = at_once) -> None:
                if at_once:
                    sender.start([second])
                else:
                    loop.call_soon(sender.start, [second])

            first.on_ended = again
            sender.start([first])
            for _ in range(100):
                await asyncio.sleep(0)
            assert [one.failure and one.failure.kind for one in (first, second)] == ["ConnectFailed"] * 2

    with_sender(scenario)


def test_nothing_is_left_to_connect_to() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        dialled.connections[0].connection_lost(None)
        dialled.refuses = True
        batch = exchanges(3)
        sender.start(batch)
        while batch[2].failure is None:
            await asyncio.sleep(0)
        assert [(one.failure.kind, one.sent_ns) for one in batch if one.failure] == [("ConnectFailed", None)] * 3
        assert "refused" in batch[0].failure.message  # type: ignore[union-attr]
        with pytest.raises(HostError, match=r"refused"):
            await sender.warm(1)
        dialled.refuses = False
        sender.start(again := exchanges(1))
        while again[0].sent_ns is None:
            await asyncio.sleep(0)

    with_sender(scenario)


def test_a_request_that_the_server_has_not_begun_goes_out_again() -> None:
    """A limit of calls may be lowered, and a server may still count a call that has ended here."""

    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        refused, other, given_back = exchanges(3)
        sender.start([refused, other, given_back])
        dialled.wires[0].take()
        dialled.connections[0].feed(frames.reset(1, ErrorCode.REFUSED_STREAM), 2)
        dialled.connections[0].feed(frames.goaway(3, ErrorCode.NO_ERROR), 2)
        while dialled.in_flight() != [1, 2]:  # what the first one had begun stays there
            await asyncio.sleep(0.001)
        assert refused.sent_ns == other.sent_ns, "it left when it first left"
        sent = [payload for kind, _, _, payload in dialled.wires[1].frames() if kind == frames.DATA]
        assert sorted(sent) == [prefixed(b"request 0"), prefixed(b"request 2")]
        dialled.answer(0, 3)
        dialled.answer(1, 1)
        dialled.answer(1, 3)
        assert [one.failure for one in (refused, other, given_back)] == [None] * 3
        assert [one.message for one in (refused, other, given_back)] == [b""] * 3, "they are not kept"

    with_sender(scenario)


def test_a_request_that_goes_out_again_can_be_abandoned_before_it_does() -> None:
    async def scenario(sender: H2Sender, dialled: Dialled) -> None:
        (refused,) = exchanges(1)
        sender.start([refused])
        dialled.connections[0].feed(frames.reset(1, ErrorCode.REFUSED_STREAM), 2)
        sender.cancel(refused)
        await asyncio.sleep(0.02)
        assert dialled.in_flight() == [0]
        assert refused.end_ns is None

        first, other = exchanges(2)
        sender.start([first])
        dialled.connections[0].feed(frames.reset(3, ErrorCode.REFUSED_STREAM), 2)
        sender.start([other])  # takes the room
        await asyncio.sleep(0.02)
        sender.cancel(first)
        dialled.answer(0, 5)
        assert other.end_ns == 2
        assert dialled.in_flight() == [0]
        assert first.end_ns is None

    with_sender(scenario, most=1)
