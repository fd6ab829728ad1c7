"""Conversations in closed and open loops: a turn follows the answer before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic_ns

import pytest

from tests.support.driving import (
    FAR,
    MS,
    Letters,
    Quick,
    Sender,
    Sessions,
    Simulated,
    by_session,
    closed,
    drive,
    end_of,
    measured,
    of_place,
    opened,
    turn_of,
)
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.results.records import settle
from trtpipe.pipeline.bench.results.window import closed_window


def test_a_place_serves_a_conversation_to_its_end_and_then_the_next(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Simulated(unit_ns=MS // 100)
    load = Closed(concurrency=2, requests=4, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(4)), follow=work.follow))
    assert sorted(turn_of(exchange) for exchange in ended) == [
        (session, turn) for session in range(4) for turn in range(3)
    ]
    assert sender.most == 2
    for session in by_session(ended).values():
        assert len({exchange.slot for exchange in session}) == 1
        assert [exchange.message for exchange in session] == [b"once", b"once and so on", b"once and so on and so on"]
        for number, (before, after) in enumerate(pairwise(session), start=1):
            assert after.due_ns == end_of(before) + number * MS
            assert sender.left_ns[after.id] >= after.due_ns
    for place in range(2):
        mine = of_place(ended, place)
        assert [turn_of(exchange)[1] for exchange in mine] == [0, 1, 2, 0, 1, 2]
        assert mine[3].due_ns == mine[2].end_ns


def test_a_conversation_is_found_in_its_records(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(2)
    load = Closed(concurrency=2, requests=4, warmup=0)
    ended = drive(loop, closed(Simulated(unit_ns=MS // 100), load, measured=iter(work.first(2)), follow=work.follow))
    found = list(settle(ended, Letters().decode, len).objects())
    told = [(line["session"], line["turn"], line["due_ns"]) for line in found]
    assert sorted(told) == sorted((exchange.session, exchange.turn, exchange.due_ns) for exchange in ended)
    assert {(session, turn) for session, turn, _ in told} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_a_failed_turn_ends_the_conversation(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(3)
    sender = Simulated(unit_ns=MS // 100, failing=lambda exchange: turn_of(exchange) in ((0, 1), (1, 0)))
    load = Closed(concurrency=1, requests=3, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(3)), follow=work.follow))
    assert [turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    for last, following in ((1, 2), (2, 3)):
        assert ended[following].due_ns == ended[last].end_ns


def test_a_warm_up_request_begins_no_conversation(loop: asyncio.AbstractEventLoop) -> None:
    asked: list[InFlightRequest] = []

    def follow(exchange: InFlightRequest) -> None:
        asked.append(exchange)

    ended = drive(loop, closed(Quick(), Closed(concurrency=2, requests=4), follow=follow))
    assert len(ended) == 7
    assert {exchange.id for exchange in asked} == {"r0", "r1", "r2", "r3"}


def test_a_turn_that_is_due_after_the_duration_is_not_sent(loop: asyncio.AbstractEventLoop) -> None:
    # An answer takes 4 ms of the 10, and the next turn is due 1 ms later, then 2, then 3.
    work, sender = Sessions(9), Simulated(unit_ns=MS // 10)
    load = Closed(concurrency=1, duration_s=0.01, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(9)), follow=work.follow))
    # At 0, 5 and 11 ms: the third is too late, and no other conversation begins while the user thinks.
    assert [turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1)]


class Slow(Sender):
    """Answers after a millisecond."""

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        super().start(batch)
        for exchange in batch:
            asyncio.get_running_loop().call_later(0.001, self.answer, exchange)


def test_the_time_is_over_whoever_still_thinks(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(2)

    def follow(exchange: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        following = work.follow(exchange)
        return following and (following[0], FAR)

    load = Closed(concurrency=2, duration_s=0.02, warmup=0)
    begun = work.first(50)
    driver = closed(Quick(), load, measured=iter(begun[:25]), follow=follow, fillers=iter(begun[25:]))
    ended = drive(loop, driver)
    assert [turn_of(exchange) for exchange in ended] == [(0, 0), (1, 0)]
    # Two requests in 20 ms: all places were at their conversations until then.
    begin = max(exchange.due_ns for exchange in ended)
    assert driver.deadline == begin + 20 * MS
    window = closed_window(settle(ended, Letters().decode, len), 2, driver.deadline)
    assert window is not None
    assert window.seconds == pytest.approx(0.02)


def test_the_time_is_over_for_a_turn_that_was_due_before_it_began_to_count(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(2)

    def follow(exchange: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        following = work.follow(exchange) if exchange.session == 0 else None
        return following and (following[0], FAR)

    # The first place thinks for an hour when the second one begins.
    load = Closed(concurrency=2, duration_s=0.02, warmup=0, ramp_s=0.04)
    ended = drive(loop, closed(Slow(), load, measured=iter(work.first(1000)), follow=follow))
    assert [turn_of(exchange) for exchange in of_place(ended, 0)] == [(0, 0)]
    assert len(of_place(ended, 1)) > 0


def test_while_a_measured_conversation_goes_on_other_places_talk_too(loop: asyncio.AbstractEventLoop) -> None:
    # A conversation of four turns at one place; at the other a single request, and then only what is not measured.
    work = Sessions(4)

    def follow(exchange: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        return None if turn_of(exchange)[0] == 1 else work.follow(exchange)

    load = Closed(concurrency=2, requests=4, warmup=0)
    begun = work.first(50)
    ended = drive(loop, closed(Slow(), load, measured=iter(begun[:2]), follow=follow, fillers=iter(begun[2:])))
    talked = [exchange for exchange in measured(ended) if turn_of(exchange)[0] == 0]
    single, *others = of_place(ended, 1 - talked[0].slot)
    assert [turn_of(exchange)[1] for exchange in talked] == [0, 1, 2, 3]
    assert turn_of(single) == (1, 0)
    assert not single.warmup
    assert all(exchange.warmup for exchange in others)
    # Conversations too, one after the other, whose users think as those of the measured one: no more is asked for.
    turns = [turn_of(exchange) for exchange in others]
    assert turns == [(2 + number // 4, number % 4) for number in range(len(others))]
    assert [after.due_ns - end_of(before) for before, after in pairwise([single, *others])] == [
        turn * MS for _, turn in turns
    ]
    assert others[-1].due_ns < end_of(talked[-1])


def test_nobody_waits_for_a_turn_that_is_not_measured(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(2)

    def follow(exchange: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        session, _ = turn_of(exchange)
        if session == 1:
            return None
        following = work.follow(exchange)
        return following and (following[0], FAR if session > 1 else following[1])

    load = Closed(concurrency=2, requests=4, warmup=0)
    begun = work.first(50)
    ended = drive(loop, closed(Slow(), load, measured=iter(begun[:2]), follow=follow, fillers=iter(begun[2:])))
    assert sorted(turn_of(exchange) for exchange in ended) == [(0, 0), (0, 1), (1, 0), (2, 0)]


def test_a_conversation_of_the_ramp_gives_way_to_a_measured_one(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(50)
    load = Closed(concurrency=2, requests=4, warmup=0, ramp_s=0.02)
    # Both places are late. The first talks from the start, its turns 1, 2, 3 and 4 ms after one another: the fifth is
    # due at 12 ms, when the second place has begun.
    begun = work.first(4)
    driver = closed(
        Simulated(unit_ns=MS // 100), load, measured=iter(begun[:2]), follow=work.follow, fillers=iter(begun[2:])
    )
    start = monotonic_ns() - 10_000 * MS
    driven = of_place(drive(loop, driver, start), 0)
    turns = [(turn_of(exchange), exchange.warmup) for exchange in driven[:6]]
    assert turns == [*(((2, turn), True) for turn in range(5)), ((1, 0), False)]


def test_conversations_of_an_open_loop(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Simulated(unit_ns=MS // 10)
    ended = drive(loop, opened(sender, [0, 2, 3], requests=work.first(3), follow=work.follow))
    assert sorted(turn_of(exchange) for exchange in ended) == [
        (session, turn) for session in range(3) for turn in range(3)
    ]
    sessions = by_session(ended)
    start = sessions[0][0].due_ns
    assert [session[0].due_ns - start for session in sessions.values()] == [0, 2 * MS, 3 * MS]
    for session in sessions.values():
        for number, (before, after) in enumerate(pairwise(session), start=1):
            assert after.due_ns == end_of(before) + number * MS
            assert sender.left_ns[after.id] >= after.due_ns
            assert not after.warmup


def test_a_turn_that_is_due_outside_the_window_is_not_measured(loop: asyncio.AbstractEventLoop) -> None:
    # A turn is due 4 + 1 ms after the one before, when the window of 5 ms is over.
    work, sender = Sessions(2), Simulated(unit_ns=MS // 10)
    driver = opened(sender, [0], requests=work.first(1), follow=work.follow, window_ns=(0, 5 * MS))
    assert [(turn_of(exchange), exchange.warmup) for exchange in drive(loop, driver)] == [
        ((0, 0), False),
        ((0, 1), True),
    ]


def test_turns_of_an_open_loop_wait_for_room_too(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Quick()
    drive(loop, opened(sender, [0] * 4, requests=work.first(4), follow=work.follow, max_in_flight=1))
    assert sender.most == 1
    assert len(sender.started) == 12
