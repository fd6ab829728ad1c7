"""What closed and open loops have in common: giving up, the end, and what there is to see meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from tests.support.driving import (
    FAR,
    MS,
    NOBODY,
    PATIENT,
    Letters,
    Quick,
    Sender,
    Sessions,
    asks,
    closed,
    drive,
    end_of,
    opened,
)
from trtpipe.pipeline.bench.load.loads import Closed, Open
from trtpipe.pipeline.bench.loop import load_point
from trtpipe.pipeline.bench.loop.driver import Driver, Limits, Live
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.loop.load_point import LoadPointRun, evaluate
from trtpipe.pipeline.bench.loop.request_factory import RequestFactory
from trtpipe.pipeline.bench.protocols.transport import Client
from trtpipe.pipeline.bench.workers.share import WHOLE

# Giving up


def test_a_request_without_an_end_times_out_and_its_place_goes_on(loop: asyncio.AbstractEventLoop) -> None:
    class Hangs(Sender):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            for exchange in batch:
                if exchange.id == "r0":
                    exchange.receive(b"x", monotonic_ns() + FAR)  # it goes on and on
                else:
                    self.answer(exchange)

    sender = Hangs()
    limits = Limits(request_s=0.01, token_s=3600, failures=5)
    ended = drive(loop, closed(sender, Closed(concurrency=1, requests=3, warmup=0), limits))
    first, *others = ended
    assert first.failure == Failure("Timeout", "not over within 0.01 s, after 1 responses")
    assert end_of(first) - (first.sent_ns or 0) > 10 * MS
    assert sender.cancelled == [first]
    assert [exchange.failure for exchange in others] == [None, None]
    assert others[0].due_ns == first.end_ns


def test_a_stream_that_stops_is_stalled_and_one_that_goes_on_is_not(loop: asyncio.AbstractEventLoop) -> None:
    class Stops(Sender):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            if batch:
                _, stops, goes_on = batch
                stops.receive(b"x", monotonic_ns())
                goes_on.receive(b"x", monotonic_ns() + FAR)

        def cancel(self, exchange: InFlightRequest) -> None:
            super().cancel(exchange)
            if len(self.cancelled) == 2:
                asyncio.get_running_loop().call_soon(self.answer, self.flying[0])

    sender = Stops()
    limits = Limits(request_s=3600, token_s=0.01, failures=5)
    drive(loop, opened(sender, [0, 0, 0], limits))
    silent, stops, goes_on = sender.started
    assert silent.failure == Failure("Stalled", "nothing more within 0.01 s, after 0 responses")
    assert stops.failure == Failure("Stalled", "nothing more within 0.01 s, after 1 responses")
    assert goes_on.failure is None
    assert sender.cancelled == [silent, stops]


def test_a_stream_of_comments_is_stalled(loop: asyncio.AbstractEventLoop) -> None:
    class Pings(Sender):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            for exchange in batch:
                exchange.mark = b"data"
                exchange.receive(b"data: a\n\n", monotonic_ns())
                exchange.receive(b": ping\n\n", monotonic_ns() + FAR)

    limits = Limits(request_s=3600, token_s=0.01, failures=5)
    (exchange,) = drive(loop, opened(Pings(), [0], limits))
    assert exchange.failure == Failure("Stalled", "nothing more within 0.01 s, after 1 responses")


def test_a_request_that_is_never_sent_times_out_too(loop: asyncio.AbstractEventLoop) -> None:
    class NoConnection(Sender):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            self.flying += batch

    sender = NoConnection()
    (exchange,) = drive(loop, opened(sender, [0], Limits(request_s=0.3, token_s=0.01, failures=5)))
    # Not Stalled at the first sweep: no server owes it a token yet.
    assert exchange.failure == Failure("Timeout", "not over within 0.3 s, after 0 responses")
    assert exchange.sent_ns is None
    assert sender.cancelled == [exchange]


def test_an_end_that_comes_after_the_request_was_given_up_changes_nothing(loop: asyncio.AbstractEventLoop) -> None:
    class TooLate(Sender):
        def cancel(self, exchange: InFlightRequest) -> None:
            super().cancel(exchange)
            asyncio.get_running_loop().call_soon(exchange.end, monotonic_ns())

    driver = opened(TooLate(), [0], Limits(request_s=0.01, token_s=3600, failures=5))
    (exchange,) = drive(loop, driver)
    assert exchange.failure is not None
    assert exchange.failure.kind == "Timeout"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_load_point_ends_when_everything_fails(loop: asyncio.AbstractEventLoop, concurrency: int) -> None:
    driver = closed(Quick(lambda _: True), Closed(concurrency=concurrency, duration_s=3600))
    ended = drive(loop, driver)
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"
    assert not driver.interrupted
    # Those that failed in the same turn are known; none was sent after the fifth.
    assert len(ended) + driver.cut in range(5, 5 + concurrency)


def test_a_server_that_takes_no_connections_ends_a_load_point_at_once(loop: asyncio.AbstractEventLoop) -> None:
    patient = Limits(request_s=3600, token_s=3600, failures=100)
    driver = opened(Quick(lambda _: True), [0, 0, 0, 0, 0, 3_600_000], patient)
    assert len(drive(loop, driver)) == 5
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"

    class Refusing(Quick):
        def reply(self, exchange: InFlightRequest) -> None:
            if exchange in self.flying:
                self.answer(exchange, Failure("http 429", "slow down"))

    refused = opened(Refusing(), [0] * 20, patient)
    assert len(drive(loop, refused)) == 20
    assert refused.stopped is None


def test_an_open_loop_ends_when_everything_fails(loop: asyncio.AbstractEventLoop) -> None:
    driver = opened(Quick(lambda _: True), [0, 0, 0, 0, 0, 3_600_000])
    assert len(drive(loop, driver)) == 5
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"


def test_failures_between_successes_do_not_end_a_load_point(loop: asyncio.AbstractEventLoop) -> None:
    driver = closed(Quick(lambda exchange: int(exchange.id[1:]) % 5 > 0), Closed(concurrency=1, requests=40, warmup=0))
    ended = drive(loop, driver)
    assert driver.stopped is None
    assert [exchange.failure is None for exchange in ended] == [True, False, False, False, False] * 8


@pytest.mark.parametrize(
    "make",
    [
        lambda sender: closed(sender, Closed(concurrency=4, requests=16, warmup=0)),
        lambda sender: opened(sender, [number / 10 for number in range(16)], max_in_flight=4),
    ],
    ids=["closed", "open"],
)
def test_a_request_may_fail_before_start_returns(
    loop: asyncio.AbstractEventLoop, make: Callable[[Sender], Driver]
) -> None:
    class Refuses(Quick):
        """Every second one cannot be sent at all."""

        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start([exchange for exchange in batch if int(exchange.id[1:]) % 2])
            for exchange in batch:
                if int(exchange.id[1:]) % 2 == 0:
                    exchange.fail("ConnectFailed", "nobody\n there")

    sender = Refuses()
    ended = drive(loop, make(sender))
    assert sorted(exchange.id for exchange in ended) == sorted(f"r{number}" for number in range(16))
    failed = [exchange for exchange in ended if exchange.failure]
    assert len(failed) == 8
    assert {exchange.failure for exchange in failed} == {NOBODY}
    assert {exchange.sent_ns for exchange in failed} == {None}
    assert sender.most <= 4


# The end


def test_an_interrupted_load_point_keeps_what_has_ended_and_counts_the_rest(loop: asyncio.AbstractEventLoop) -> None:
    class Interrupts(Quick):
        """After the second answer."""

        def reply(self, exchange: InFlightRequest) -> None:
            if len(driver.ended) == 2:
                driver.interrupt()  # twice is once
            else:
                super().reply(exchange)

    sender = Interrupts()
    driver = closed(sender, Closed(concurrency=3, duration_s=3600, warmup=0))
    ended = drive(loop, driver)
    assert driver.interrupted
    assert driver.stopped is None
    assert len(ended) == 2
    abandoned = [exchange for exchange in sender.started if exchange not in ended]
    assert abandoned == sender.cancelled
    assert driver.cut == len(abandoned) == 1
    assert {exchange.end_ns for exchange in abandoned} == {None}
    # A sender that did not hear of it in time is not listened to any more.
    abandoned[0].end(monotonic_ns())
    assert len(driver.ended) == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda sender: closed(sender, Closed(concurrency=1, duration_s=3600)),
        lambda sender: opened(sender, [0, 3_600_000]),
    ],
    ids=["closed", "open"],
)
def test_a_load_point_interrupted_before_it_began_sends_nothing(
    loop: asyncio.AbstractEventLoop, make: Callable[[Sender], Driver]
) -> None:
    # Ctrl-C while connections are opened.
    sender = Sender()
    driver = make(sender)
    driver.interrupt()
    assert drive(loop, driver) == []
    assert driver.interrupted
    assert driver.client is not None
    assert len(sender.started) == driver.cut == len(sender.cancelled)


@pytest.mark.parametrize(
    "load", [Closed(concurrency=2, requests=4), Open(rate=1000, requests=4)], ids=["closed", "open"]
)
def test_an_interrupt_while_connections_are_made_is_not_lost(
    loop: asyncio.AbstractEventLoop, load: Closed | Open
) -> None:
    class Connecting(Quick):
        async def warm(self, calls: int) -> None:
            point.interrupt()

    sender, work = Connecting(), Sessions(1)
    point = LoadPointRun(load, Client(Letters(), sender), RequestFactory(), work, limits=PATIENT)  # type: ignore[arg-type]
    loop.run_until_complete(point.prepare())
    loop.run_until_complete(point.drive())
    driven = point.collect(len)
    result = evaluate(load, driven, protocol="grpc", label=load.label)
    assert sender.started == []
    assert result.interrupted
    assert result.window_s is None
    assert len(driven.records) == 0


def test_an_interrupt_while_requests_are_made_is_not_lost(loop: asyncio.AbstractEventLoop) -> None:
    told: list[Live] = []

    def watch(live: Live) -> None:
        told.append(live)
        point.interrupt()

    load, work = Open(rate=1e5, requests=1_000_000), Sessions(1)
    point = LoadPointRun(
        load,
        Client(Letters(), Quick()),
        RequestFactory(),
        work,  # type: ignore[arg-type]
        limits=PATIENT,
        watch=watch,
    )
    loop.run_until_complete(point.prepare())
    loop.run_until_complete(point.drive())
    assert [live.to_make for live in told] == [1_200_000]
    assert 0 < told[0].made < 1_200_000
    assert len(point.collect(len).records) == 0


def test_a_long_closed_loop_makes_its_last_requests_while_it_runs(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_point, "MOST_AHEAD", 20)
    sender, work = Quick(), Sessions(1)
    load = Closed(concurrency=2, requests=100, cooldown=False, warmup=0)
    point = LoadPointRun(load, Client(Letters(), sender), RequestFactory(), work, limits=PATIENT)  # type: ignore[arg-type]
    loop.run_until_complete(point.prepare())
    assert next(work.asks(WHOLE)).session == 20
    loop.run_until_complete(point.drive())
    assert next(work.asks(WHOLE)).session == 101  # one was taken above
    assert len(point.collect(len).records) == 100


class Fault(Exception):
    pass


def faulty(*_: Any) -> Any:
    raise Fault


def raising(after: int) -> Iterator[InFlightRequest]:
    yield from islice(asks(), after)
    raise Fault


class Broken(Quick):
    def start(self, batch: Sequence[InFlightRequest]) -> None:
        super().start(batch)
        if len(self.started) > 3:
            raise Fault


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Quick, lambda sender: closed(sender, Closed(concurrency=2, duration_s=3600), measured=raising(5))),
        (Quick, lambda sender: closed(sender, Closed(concurrency=2, requests=9), follow=faulty)),
        (Quick, lambda sender: opened(sender, [0, 0, 3_600_000], follow=faulty)),
        (Sender, lambda sender: closed(sender, Closed(concurrency=2, requests=9), watch=faulty)),
        (Broken, lambda sender: closed(sender, Closed(concurrency=2, requests=9))),
        (Broken, lambda sender: opened(sender, [0, 1, 2, 3, 4, 3_600_000])),
    ],
    ids=["prompts run out", "no next turn", "no next turn, open", "no view", "no sender", "no sender, open"],
)
def test_a_fault_of_ours_ends_the_load_point_and_is_raised(
    loop: asyncio.AbstractEventLoop, kind: type[Sender], make: Callable[[Sender], Driver]
) -> None:
    sender = kind()
    with pytest.raises(Fault):
        drive(loop, make(sender))
    assert sender.flying == []


class Counting(asyncio.SelectorEventLoop):
    """Knows its timers."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[asyncio.TimerHandle] = []

    def call_at(self, *arguments: Any, **options: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        handle = super().call_at(*arguments, **options)
        self.timers.append(handle)
        return handle


@pytest.mark.parametrize("how", ["by itself", "stopped", "interrupted", "cancelled"])
@pytest.mark.parametrize("kind", ["closed", "open"])
def test_nothing_is_left_however_a_load_point_ends(kind: str, how: str) -> None:
    class Watched(Quick):
        def reply(self, exchange: InFlightRequest) -> None:
            super().reply(exchange)
            if len(driver.ended) == 7:
                if how == "stopped":
                    self.failing = lambda _: True
                elif how == "interrupted":
                    driver.interrupt()
                elif how == "cancelled":
                    task.cancel()

    sender, work, loop = Watched(), Sessions(2), Counting()
    driver: Driver
    if kind == "closed":
        load = Closed(concurrency=3, requests=30, warmup=0)
        driver = closed(sender, load, measured=iter(work.first(30)), follow=work.follow)
    else:
        due = [number / 20 for number in range(30)]
        driver = opened(sender, due, requests=work.first(30), follow=work.follow, max_in_flight=3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        task = loop.create_task(driver.run())
        loop.run_until_complete(asyncio.wait({task}))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert loop.timers
        assert all(timer.cancelled() or timer.when() <= loop.time() for timer in loop.timers)
        assert task.cancelled() == (how == "cancelled")
        assert driver.interrupted == (how == "interrupted")
        assert (driver.stopped is not None) == (how == "stopped")
        started = len(sender.started)
        assert (started == 60) == (how == "by itself")
        assert driver.cut == len(sender.cancelled)
        assert len(driver.ended) + driver.cut == started
        for _ in range(5):
            loop.run_until_complete(asyncio.sleep(0))
        assert sender.flying == []
        assert len(sender.started) == started
    finally:
        loop.close()


def test_a_sender_may_lose_others_with_the_one_that_is_cancelled(loop: asyncio.AbstractEventLoop) -> None:
    class OneConnection(Sender):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            loop.call_soon(driver.interrupt)

        def cancel(self, exchange: InFlightRequest) -> None:
            super().cancel(exchange)
            for other in self.flying:
                other.fail("ConnectionLost", "it is closed")

    driver = closed(OneConnection(), Closed(concurrency=3, requests=6))
    assert drive(loop, driver) == []
    assert driver.cut == 3


# What there is to see


def test_the_live_view(loop: asyncio.AbstractEventLoop) -> None:
    class Some(Quick):
        """Answers the first two, fails the third, and begins to answer the fourth."""

        def reply(self, exchange: InFlightRequest) -> None:
            if exchange.id == "r2":
                for _ in range(3):
                    exchange.receive(b"x", monotonic_ns())
            else:
                super().reply(exchange)

    seen: list[Live] = []

    def watch(live: Live) -> None:
        if sender.flying and len(sender.flying[0].stamps) == 3:
            seen.append(live)
            sender.answer(sender.flying[0])

    sender = Some(lambda exchange: exchange.id == "r1")
    drive(loop, closed(sender, Closed(concurrency=1, requests=3), watch=watch))
    (live,) = seen
    assert (live.warmed, live.done, live.failed, live.in_flight, live.responses) == (1, 2, 1, 1, 5)
    # Of those that have ended well.
    ended = [exchange for exchange in sender.started if exchange.id in ("w0.0", "r0")]
    first = [exchange.stamps[0] - (exchange.sent_ns or 0) for exchange in ended]
    assert list(live.first_ns)[:2] == first


def test_a_loop_that_was_held_up_was_late_for_as_long_as_it_took(loop: asyncio.AbstractEventLoop) -> None:
    class Slow(Quick):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            time.sleep(0.3)
            super().start(batch)

    driver = opened(Slow(), [0])
    drive(loop, driver)
    assert driver.client is not None
    lateness = np.array(driver.client.lateness_ns)
    # A beat was due every 10 ms of the 300: whatever was to be read then waited as long as that beat. Were it one
    # value, a percentile would not see it.
    assert lateness.max() >= 280 * MS
    assert (lateness >= 100 * MS).sum() >= 18
    assert driver.client.wall_ns >= 300 * MS
    assert driver.client.cpu_ns >= 0
