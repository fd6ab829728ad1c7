"""Closed loops: what is in flight, what is measured, and when each request is due."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from time import monotonic_ns
from typing import Any

import pytest

from tests.support.driving import (
    MS,
    Quick,
    Sender,
    Simulated,
    closed,
    drive,
    end_of,
    fillers,
    measured,
    of_place,
    opened,
)
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Answer
from trtpipe.pipeline.bench.results.records import settle
from trtpipe.pipeline.bench.results.statistics import load_point_metrics
from trtpipe.pipeline.bench.results.window import closed_window


def test_never_more_than_n_in_flight_and_n_throughout_the_window(loop: asyncio.AbstractEventLoop) -> None:
    sender = Simulated()
    driver = closed(sender, Closed(concurrency=4, requests=20))
    ended = drive(loop, driver)
    assert sender.most == 4
    assert driver.client is not None
    assert driver.client.peak == 4
    records = settle(ended, lambda exchange: Answer(list(exchange.stamps), [1] * len(exchange.stamps)), len)
    window = closed_window(records, 4)
    assert window is not None
    # From the very first request until the window ends, warm-up included, every moment has four in flight.
    for moment in range(int(records.due.min()), window.stop_ns, 5 * MS):
        assert ((records.sent <= moment) & (moment < records.end)).sum() == 4
    metrics = load_point_metrics(records, window)
    assert metrics["effective_concurrency"]["value"] == pytest.approx(4, abs=1e-9)
    assert metrics["time_to_first_token"]["p99"] == pytest.approx(40)
    assert metrics["inter_token_latency"]["p99"] == pytest.approx(10)


@pytest.mark.parametrize("end", [{"requests": 21}, {"duration_s": 0.6}], ids=["requests", "duration"])
def test_the_load_is_whole_until_the_last_measured_request_has_ended(
    loop: asyncio.AbstractEventLoop, end: dict[str, Any]
) -> None:
    ended = drive(loop, closed(Simulated(), Closed(concurrency=4, **end), fillers=fillers()))
    last = max(end_of(exchange) for exchange in measured(ended))
    for moment in range(min(exchange.due_ns for exchange in ended), last, 5 * MS):
        assert sum(exchange.due_ns <= moment < end_of(exchange) for exchange in ended) == 4
    cooling = [exchange for exchange in ended if exchange.id.startswith("f")]
    # The other places end 20, 40 and 60 ms or more before the last one, and a request takes 110 ms: one each.
    assert len(cooling) == 3
    assert all(exchange.warmup and exchange.due_ns < last < end_of(exchange) for exchange in cooling)


def test_places_that_end_together_rest_together(loop: asyncio.AbstractEventLoop) -> None:
    sender = Simulated()
    drive(loop, closed(sender, Closed(concurrency=3, requests=6, warmup=0), fillers=fillers()))
    assert [len(batch) for batch in sender.batches] == [3, 3]


def test_throughput_of_a_steady_server_is_its_true_rate(loop: asyncio.AbstractEventLoop) -> None:
    ended = drive(loop, closed(Simulated(), Closed(concurrency=4, requests=400)))
    records = settle(ended, lambda exchange: Answer(list(exchange.stamps), [1] * len(exchange.stamps)), len)
    metrics = load_point_metrics(records, closed_window(records, 4))
    # Four places, each with eight tokens in 40 + 7 x 10 ms.
    assert metrics["output_token_throughput"]["value"] == pytest.approx(4 * 8 / 0.110, rel=0.005)
    assert metrics["request_throughput"]["value"] == pytest.approx(4 / 0.110, rel=0.02)


def test_measured_requests_are_as_many_as_asked_for_and_each_is_used_once(loop: asyncio.AbstractEventLoop) -> None:
    sender = Simulated()
    ended = drive(loop, closed(sender, Closed(concurrency=4, requests=20)))
    assert sorted(exchange.id for exchange in measured(ended)) == sorted(f"r{number}" for number in range(20))
    # One full warm-up of each place and a shortened one of all but the first.
    assert sorted(exchange.id for exchange in ended if exchange.warmup) == [
        "w0.0", "w1.0", "w1.1", "w2.0", "w2.1", "w3.0", "w3.1",
    ]  # fmt: skip
    assert len({exchange.id for exchange in sender.started}) == len(sender.started) == 27


@pytest.mark.parametrize(
    ("load", "output_tokens", "lengths"),
    [
        (Closed(concurrency=4), 8, [[8], [2, 8], [4, 8], [6, 8]]),
        (Closed(concurrency=3, warmup=2), 5, [[5, 5], [2, 5, 5], [4, 5, 5]]),
        (Closed(concurrency=2), 1, [[1], [1, 1]]),
        (Closed(concurrency=2, warmup=0), 8, [[], []]),
    ],
)
def test_the_first_warm_up_of_a_place_is_shortened_by_its_number(
    load: Closed, output_tokens: int, lengths: list[list[int]]
) -> None:
    assert [load.warmup_lengths(place, output_tokens) for place in range(load.concurrency)] == lengths


def test_places_begin_to_measure_spread_over_a_request(loop: asyncio.AbstractEventLoop) -> None:
    ended = drive(loop, closed(Simulated(), Closed(concurrency=4, requests=20)))
    start = min(exchange.due_ns for exchange in ended)
    first = {place: measured(of_place(ended, place))[0].due_ns - start for place in range(4)}
    # Eight tokens take 40 + 7 x 10 = 110 ms. Places 1, 2, 3 first ask for 2, 4 and 6 tokens: 50, 70 and 90 ms.
    assert first == {0: 110 * MS, 1: 160 * MS, 2: 180 * MS, 3: 200 * MS}


def test_warm_up_hands_over_without_a_pause_or_a_drain(loop: asyncio.AbstractEventLoop) -> None:
    ended = drive(loop, closed(Simulated(), Closed(concurrency=4, requests=20, warmup=2)))
    for place in range(4):
        mine = of_place(ended, place)
        assert [exchange.warmup for exchange in mine[:4]] == [True, True, place > 0, False]
        for before, after in pairwise(mine):
            assert after.due_ns == before.end_ns
    # So the first place was measured while the last one still warmed up.
    assert measured(of_place(ended, 0))[0].due_ns < end_of(of_place(ended, 3)[2])


def test_without_warm_up_the_burst_is_measured(loop: asyncio.AbstractEventLoop) -> None:
    sender = Simulated()
    ended = drive(loop, closed(sender, Closed(concurrency=3, requests=6, warmup=0)))
    assert [len(batch) for batch in sender.batches] == [3, 3]
    assert len({exchange.due_ns for exchange in sender.batches[0]}) == 1
    assert not any(exchange.warmup for exchange in ended)


def test_places_start_over_the_ramp(loop: asyncio.AbstractEventLoop) -> None:
    class Together(Sender):
        """Answers nobody before all places have begun."""

        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            if len(self.started) >= 3:
                for exchange in batch if len(self.started) > 3 else list(self.flying):
                    asyncio.get_running_loop().call_soon(self.answer, exchange)

    sender = Together()
    ended = drive(loop, closed(sender, Closed(concurrency=3, requests=6, warmup=0, ramp_s=0.06)))
    first = sender.started[:3]
    assert [exchange.slot for exchange in first] == [0, 1, 2]
    assert [exchange.due_ns - first[0].due_ns for exchange in first] == [0, 20 * MS, 40 * MS]
    assert all((exchange.sent_ns or 0) >= exchange.due_ns for exchange in first)
    assert len(ended) == 6


def test_nothing_is_measured_before_the_last_place_of_a_ramp_has_begun(loop: asyncio.AbstractEventLoop) -> None:
    # All places are late, as on a machine that stalls: what counts is when they were to begin.
    start = monotonic_ns() - 1000 * MS
    load = Closed(concurrency=3, requests=6, warmup=0, ramp_s=0.6)
    ended = drive(loop, closed(Simulated(), load, fillers=fillers()), start)
    due = {
        place: [(exchange.due_ns - start, exchange.warmup) for exchange in of_place(ended, place)] for place in range(3)
    }
    # Answers of 110 ms, one after the other: a place that has begun is never idle.
    assert due[0][:6] == [(0, True), (110 * MS, True), (220 * MS, True), (330 * MS, True), (440 * MS, False),
                          (550 * MS, False)]  # fmt: skip
    assert due[1][:4] == [(200 * MS, True), (310 * MS, True), (420 * MS, False), (530 * MS, False)]
    assert due[2][:2] == [(400 * MS, False), (510 * MS, False)]
    assert len(measured(ended)) == 6


def test_a_duration_counts_from_the_moment_the_last_place_has_warmed_up(loop: asyncio.AbstractEventLoop) -> None:
    ended = drive(loop, closed(Simulated(), Closed(concurrency=4, duration_s=1.0)))
    start = min(exchange.due_ns for exchange in ended)
    # The last place began at 200 ms. Nothing is sent from 1200 ms on, and until then no place is idle.
    for place in range(4):
        mine = of_place(ended, place)
        assert mine[-1].due_ns - start < 1200 * MS <= end_of(mine[-1]) - start
    records = settle(ended, lambda exchange: Answer(list(exchange.stamps), [1] * len(exchange.stamps)), len)
    window = closed_window(records, 4)
    assert window is not None
    assert 1.0 <= window.seconds < 1.11


def test_a_request_that_ends_as_the_duration_does_is_the_last(loop: asyncio.AbstractEventLoop) -> None:
    # One place, 110 ms a request: its warm-up, and five within 550 ms.
    ended = drive(loop, closed(Simulated(), Closed(concurrency=1, duration_s=0.55)))
    assert [exchange.warmup for exchange in ended] == [True] + [False] * 5


def test_requests_that_end_in_one_turn_are_followed_by_one_batch_after_all_reads(
    loop: asyncio.AbstractEventLoop,
) -> None:
    class Piped(Sender):
        """An answer is a byte in a pipe; all of a batch come at once."""

        def __init__(self) -> None:
            super().__init__()
            self.pipes = [os.pipe() for _ in range(3)]
            self.log: list[str] = []

        def start(self, batch: Sequence[InFlightRequest]) -> None:
            super().start(batch)
            self.log += [f"send {len(batch)}"] * bool(batch)
            for exchange in batch:
                here, there = self.pipes[exchange.slot]
                loop.add_reader(here, self.read, here, exchange)
                os.write(there, b"x")

        def read(self, here: int, exchange: InFlightRequest) -> None:
            os.read(here, 1)
            loop.remove_reader(here)
            self.log.append("read")
            self.answer(exchange)

    sender = Piped()
    try:
        drive(loop, closed(sender, Closed(concurrency=3, requests=9, warmup=0)))
    finally:
        for here, there in sender.pipes:
            os.close(here)
            os.close(there)
    assert sender.log == ["send 3", "read", "read", "read"] * 3


def test_the_next_request_is_due_when_the_last_one_ended_and_not_when_it_is_sent(
    loop: asyncio.AbstractEventLoop,
) -> None:
    class Late(Quick):
        """Holds the loop up between the end of a request and the next one's turn."""

        def reply(self, exchange: InFlightRequest) -> None:
            super().reply(exchange)
            time.sleep(0.002)

    ended = drive(loop, closed(Late(), Closed(concurrency=1, requests=4)))
    for before, after in pairwise(ended):
        assert after.due_ns == before.end_ns
        assert after.sent_ns is not None
        assert after.sent_ns - after.due_ns >= 2 * MS


@pytest.mark.parametrize("kind", ["closed", "open"])
def test_a_sender_is_called_only_with_something_to_send(loop: asyncio.AbstractEventLoop, kind: str) -> None:
    sizes: list[int] = []

    class Sized(Quick):
        def start(self, batch: Sequence[InFlightRequest]) -> None:
            sizes.append(len(batch))
            super().start(batch)

    sender = Sized()
    driver = closed(sender, Closed(concurrency=2, requests=4)) if kind == "closed" else opened(sender, [0, 1, 2])
    drive(loop, driver)
    assert sum(sizes) == len(sender.started)
    assert 0 not in sizes
