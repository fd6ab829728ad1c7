"""Open loops: each request at its time, whatever the server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from time import monotonic_ns

import pytest

from tests.support.driving import FAR, MS, Quick, Sender, drive, end_of, opened
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest


def test_an_open_loop_sends_at_its_times_and_never_before(loop: asyncio.AbstractEventLoop) -> None:
    due_ms = [0, 1, 1, 7, 7.5, 30]
    sender = Quick()
    ended = drive(loop, opened(sender, due_ms))
    assert [exchange.id for exchange in sender.started] == [f"r{number}" for number in range(6)]
    start = sender.started[0].due_ns
    assert [exchange.due_ns - start for exchange in sender.started] == [round(due * MS) for due in due_ms]
    assert all((exchange.sent_ns or 0) >= exchange.due_ns for exchange in ended)
    # Those that are due together leave together.
    assert any({"r1", "r2"} <= {exchange.id for exchange in batch} for batch in sender.batches)


def test_a_share_without_requests_is_over_with_the_measured_part(loop: asyncio.AbstractEventLoop) -> None:
    driver = opened(Quick(), [], window_ns=(0, 50 * MS))
    assert drive(loop, driver) == []
    assert driver.client is not None
    assert driver.client.wall_ns >= 50 * MS


def test_the_schedule_stays_whatever_the_delay(loop: asyncio.AbstractEventLoop) -> None:
    class Slow(Quick):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            time.sleep(0.03)

    due_ms = [0, 5, 10, 15, 50]
    sender = Slow()
    drive(loop, opened(sender, due_ms))
    start = sender.started[0].due_ns
    assert [exchange.due_ns - start for exchange in sender.started] == [due * MS for due in due_ms]
    # What came due meanwhile left late, and at once: the first send took 30 ms, in which at least three did.
    assert sum(len(batch) for batch in sender.batches[:2]) >= 4


def test_a_server_that_answers_nothing_stops_no_request_of_an_open_loop(loop: asyncio.AbstractEventLoop) -> None:
    class Silent(Sender):
        """Answers when the last one has come."""

        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            if len(self.started) == 50:
                for exchange in list(self.flying):
                    asyncio.get_running_loop().call_soon(self.answer, exchange)

    sender = Silent()
    driver = opened(sender, [number / 10 for number in range(50)])
    assert len(drive(loop, driver)) == 50
    assert sender.most == 50
    assert driver.client is not None
    assert driver.client.peak == 50


def test_beyond_the_most_in_flight_requests_wait_and_their_delay_says_so(loop: asyncio.AbstractEventLoop) -> None:
    class OneByOne(Sender):
        """Ends the oldest in each turn of the loop."""

        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            if self.started == list(batch):
                loop.call_soon(self.turn)

        def turn(self) -> None:
            self.answer(self.flying[0])
            if len(self.started) < 6 or self.flying:
                loop.call_soon(self.turn)

    sender = OneByOne()
    drive(loop, opened(sender, [0] * 6, max_in_flight=2))
    assert [len(batch) for batch in sender.batches] == [2, 1, 1, 1, 1]
    assert sender.most == 2
    assert len({exchange.due_ns for exchange in sender.started}) == 1
    for number, exchange in enumerate(sender.started[2:]):
        assert exchange.sent_ns is not None
        assert exchange.sent_ns >= end_of(sender.started[number]) > exchange.due_ns


def test_what_is_due_outside_the_window_is_not_measured(loop: asyncio.AbstractEventLoop) -> None:
    sender = Quick()
    drive(loop, opened(sender, [0, 1, 2, 3, 4], window_ns=(1 * MS, 3 * MS)))
    assert [exchange.warmup for exchange in sender.started] == [True, False, False, True, True]


def test_requests_that_wait_are_measured_by_when_they_were_due(loop: asyncio.AbstractEventLoop) -> None:
    sender = Quick()
    drive(loop, opened(sender, [0, 0, 1, 1], window_ns=(0, 1 * MS), max_in_flight=1))
    assert [exchange.warmup for exchange in sender.started] == [False, False, True, True]


@pytest.mark.parametrize("how", ["interrupted", "stopped"])
def test_the_window_of_an_open_loop_that_ends_early_ends_with_it(loop: asyncio.AbstractEventLoop, how: str) -> None:
    class Ends(Quick):
        def reply(self, exchange: InFlightRequest) -> None:
            super().reply(exchange)
            if how == "interrupted":
                driver.interrupt()

    driver = opened(Ends(lambda _: how == "stopped"), [0] * 5 + [3_600_000], window_ns=(0, 2 * FAR))
    before = monotonic_ns()
    drive(loop, driver)
    start, stop = driver.window
    # Rates would otherwise be of an hour in which nothing was sent.
    assert before <= start <= stop <= monotonic_ns()


def test_the_window_of_an_open_loop_that_ends_by_itself_is_the_schedules(loop: asyncio.AbstractEventLoop) -> None:
    driver = opened(Quick(), [0, 1, 2], window_ns=(1 * MS, FAR))
    first, *_ = drive(loop, driver)
    assert driver.window == (first.due_ns + 1 * MS, first.due_ns + FAR)


def test_a_time_of_day_that_is_set_meanwhile_is_told(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter((0, -2_500 * MS))  # as the load_point begins and as it ends
    monkeypatch.setattr("trtpipe.pipeline.bench.loop.driver.time_ns", lambda: monotonic_ns() + next(looks))
    driver = opened(Quick(), [0, 1])
    drive(loop, driver)
    assert driver.client is not None
    assert driver.client.clock_step_ns == pytest.approx(-2_500 * MS, abs=100 * MS)
