"""Conversations in closed and open loops: a turn follows the answer before it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from pipeline.bench.exchange import Exchange
from pipeline.bench.work.loads import Closed
from tests.driving import (
    MS,
    Quick,
    Sender,
    Sessions,
    Simulated,
    closed,
    drive,
    end_of,
    fillers,
    measured,
    of_place,
    opened,
)


def test_a_place_serves_a_conversation_to_its_end_and_then_the_next(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Simulated(unit_ns=MS // 100)
    load = Closed(concurrency=2, requests=4, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(4)), follow=work.follow))
    assert sorted(work.turn_of(exchange) for exchange in ended) == [
        (session, turn) for session in range(4) for turn in range(3)
    ]
    assert sender.most == 2
    for session in work.by_session(ended).values():
        assert len({exchange.slot for exchange in session}) == 1
        assert [exchange.message for exchange in session] == [b"once", b"once and so on", b"once and so on and so on"]
        for number, (before, after) in enumerate(pairwise(session), start=1):
            assert after.due_ns == end_of(before) + number * MS
            assert sender.left_ns[after.id] >= after.due_ns
    for place in range(2):
        mine = of_place(ended, place)
        assert [work.turn_of(exchange)[1] for exchange in mine] == [0, 1, 2, 0, 1, 2]
        assert mine[3].due_ns == mine[2].end_ns


def test_a_failed_turn_ends_the_conversation(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(3)
    sender = Simulated(unit_ns=MS // 100, failing=lambda exchange: work.turn_of(exchange) in ((0, 1), (1, 0)))
    load = Closed(concurrency=1, requests=3, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(3)), follow=work.follow))
    assert [work.turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    for last, following in ((1, 2), (2, 3)):
        assert ended[following].due_ns == ended[last].end_ns


def test_a_warm_up_request_begins_no_conversation(loop: asyncio.AbstractEventLoop) -> None:
    asked: list[Exchange] = []

    def follow(exchange: Exchange) -> None:
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
    assert [work.turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1)]


def test_while_a_measured_conversation_goes_on_other_places_do_too(loop: asyncio.AbstractEventLoop) -> None:
    class Slow(Sender):
        def start(self, batch: Sequence[Exchange]) -> None:
            super().start(batch)
            for exchange in batch:
                asyncio.get_running_loop().call_later(0.001, self.answer, exchange)

    # A conversation of four turns at one place; at the other a single request, and then only what is not measured.
    work = Sessions(4)

    def follow(exchange: Exchange) -> tuple[Exchange, int] | None:
        return work.follow(exchange) if work.turn_of(exchange)[0] == 0 else None

    load = Closed(concurrency=2, requests=4, warmup=0)
    ended = drive(loop, closed(Slow(), load, measured=iter(work.first(2)), follow=follow, fillers=fillers()))
    talked = [exchange for exchange in measured(ended) if work.turn_of(exchange)[0] == 0]
    other = of_place(ended, 1 - talked[0].slot)
    assert [work.turn_of(exchange)[1] for exchange in talked] == [0, 1, 2, 3]
    assert [exchange.warmup for exchange in other] == [False] + [True] * (len(other) - 1)
    # Without a pause from the first turn to the last one's end, the time in which the user thinks included.
    assert other[-1].due_ns < end_of(talked[-1])
    assert end_of(talked[-1]) - end_of(other[-1]) < MS  # of those that end in one turn of the loop neither goes on
    assert all(after.due_ns == before.end_ns for before, after in pairwise(other))


def test_conversations_of_an_open_loop(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Simulated(unit_ns=MS // 10)
    ended = drive(loop, opened(sender, [0, 2, 3], exchanges=work.first(3), follow=work.follow))
    assert sorted(work.turn_of(exchange) for exchange in ended) == [
        (session, turn) for session in range(3) for turn in range(3)
    ]
    sessions = work.by_session(ended)
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
    driver = opened(sender, [0], exchanges=work.first(1), follow=work.follow, window_ns=(0, 5 * MS))
    assert [(work.turn_of(exchange), exchange.warmup) for exchange in drive(loop, driver)] == [
        ((0, 0), False),
        ((0, 1), True),
    ]


def test_turns_of_an_open_loop_wait_for_room_too(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Quick()
    drive(loop, opened(sender, [0] * 4, exchanges=work.first(4), follow=work.follow, max_in_flight=1))
    assert sender.most == 1
    assert len(sender.started) == 12
