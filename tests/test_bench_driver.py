"""Closed and open loops against senders of the test's own, which answer on the event loop.

Where a moment matters it is a stamp that the sender gives, so a machine that stalls changes nothing: Simulated keeps a
time of its own, the others answer when the test says so.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import Path
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest
import uvloop

from pipeline.bench.asking import Asker
from pipeline.bench.driver import ClosedLoop, Driver, Limits, Live, OpenLoop
from pipeline.bench.exchange import Exchange, Failure
from pipeline.bench.level import LevelRun, evaluate
from pipeline.bench.metrics import closed_window, level_metrics
from pipeline.bench.records import settle
from pipeline.bench.share import Share
from pipeline.bench.wire.transport import Answer, Client
from pipeline.bench.work.arrivals import slot_starts
from pipeline.bench.work.loads import Closed, Open
from pipeline.bench.work.workload import Ask, Asks, ReadAnswer

MS = 1_000_000
FAR = 3600 * 10**9
PATIENT = Limits(request_s=3600, token_s=3600, failures=5)
NOBODY = Failure("ConnectFailed", "nobody there")


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    made: asyncio.AbstractEventLoop = request.param()
    faults: list[dict[str, Any]] = []
    made.set_exception_handler(lambda _, context: faults.append(context))
    yield made
    made.close()
    assert faults == []


def drive(loop: asyncio.AbstractEventLoop, driver: Driver, start_ns: int = 0) -> list[Exchange]:
    # The limit is for a level that never ends; none of them waits for anything.
    loop.run_until_complete(asyncio.wait_for(driver.run(start_ns), 30))
    return driver.ended


class Sender:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[Exchange]] = []
        self.flying: list[Exchange] = []
        self.cancelled: list[Exchange] = []
        self.most = 0

    @property
    def started(self) -> list[Exchange]:
        return [exchange for batch in self.batches for exchange in batch]

    def described(self) -> dict[str, Any]:
        return {}

    async def warm(self, calls: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def start(self, batch: Sequence[Exchange]) -> None:
        now = monotonic_ns()
        if batch:
            self.batches.append(list(batch))
        for exchange in batch:
            exchange.sent_ns = now
            self.flying.append(exchange)
        self.most = max(self.most, len(self.flying))

    def cancel(self, exchange: Exchange) -> None:
        self.flying.remove(exchange)
        self.cancelled.append(exchange)

    def answer(self, exchange: Exchange, failure: Failure | None = None) -> None:
        """End a request with one response, or with a failure."""
        stamp = monotonic_ns()
        self.flying.remove(exchange)
        if failure is None:
            exchange.receive(b"x", stamp)
        exchange.end(stamp, failure)


class Quick(Sender):
    """Answers in the next turn of the loop, one after the other; `failing` says which fail."""

    def __init__(self, failing: Callable[[Exchange], bool] = lambda _: False) -> None:
        super().__init__()
        self.failing = failing

    def start(self, batch: Sequence[Exchange]) -> None:
        super().start(batch)
        for exchange in batch:
            asyncio.get_running_loop().call_soon(self.reply, exchange)

    def reply(self, exchange: Exchange) -> None:
        if exchange in self.flying:
            self.answer(exchange, NOBODY if self.failing(exchange) else None)


class Simulated(Sender):
    """First token after 40 ms, then one every 10 ms, whatever the load, in a time of its own.

    A request leaves when it is due, and each turn of the loop ends those that end next; what follows them is sent
    before the turn after it.
    """

    def __init__(self, *, unit_ns: int = MS, failing: Callable[[Exchange], bool] = lambda _: False) -> None:
        super().__init__()
        self.left_ns: dict[str, int] = {}  # by the clock
        self._unit_ns = unit_ns
        self._failing = failing
        self._ends: list[tuple[int, int, Exchange]] = []
        self._numbers = count()
        self._wound = False

    def start(self, batch: Sequence[Exchange]) -> None:
        super().start(batch)
        for exchange in batch:
            assert exchange.sent_ns is not None
            self.left_ns[exchange.id] = exchange.sent_ns
            exchange.sent_ns = exchange.due_ns
            end = exchange.due_ns + (30 + 10 * exchange.max_tokens) * self._unit_ns
            heapq.heappush(self._ends, (end, next(self._numbers), exchange))
        self._wind()

    def _wind(self) -> None:
        if self._ends and not self._wound:
            self._wound = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._wound = False
        while self._ends:
            end, _, exchange = heapq.heappop(self._ends)
            if exchange in self.flying:
                self.flying.remove(exchange)
                exchange.stamps.extend(
                    [end - 10 * left * self._unit_ns for left in reversed(range(exchange.max_tokens))]
                )
                exchange.end(end, NOBODY if self._failing(exchange) else None)
            if self._ends and self._ends[0][0] > end:
                break
        self._wind()


def asks(max_tokens: int = 8) -> Iterator[Exchange]:
    for number in count():
        yield Exchange(f"r{number}", b"", input_tokens=2, max_tokens=max_tokens)


def closed(sender: Sender, load: Closed, limits: Limits = PATIENT, **changes: Any) -> ClosedLoop:
    """A driver as a level makes it, for answers of eight tokens."""
    warmups = [
        [
            Exchange(f"w{place}.{number}", b"", input_tokens=2, max_tokens=length)
            for number, length in enumerate(lengths)
        ]
        for place, lengths in enumerate(load.warmup_lengths(place, 8) for place in range(load.concurrency))
    ]
    settings: dict[str, Any] = {"measured": islice(asks(), load.measured_requests), **changes}
    return ClosedLoop(
        sender, limits, warmups=warmups, starts_ns=slot_starts(load).tolist(), duration_s=load.duration_s, **settings
    )


def opened(sender: Sender, due_ms: Sequence[float], limits: Limits = PATIENT, **changes: Any) -> OpenLoop:
    settings: dict[str, Any] = {"window_ns": (0, FAR), "exchanges": list(islice(asks(), len(due_ms))), **changes}
    return OpenLoop(sender, limits, due_ns=[round(due * MS) for due in due_ms], **settings)


def of_place(ended: Sequence[Exchange], place: int) -> list[Exchange]:
    return sorted((exchange for exchange in ended if exchange.slot == place), key=lambda exchange: exchange.due_ns)


def end_of(exchange: Exchange) -> int:
    assert exchange.end_ns is not None
    return exchange.end_ns


def measured(ended: Sequence[Exchange]) -> list[Exchange]:
    return [exchange for exchange in ended if not exchange.warmup]


# Closed loop


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
    metrics = level_metrics(records, window)
    assert metrics["effective_concurrency"]["value"] == pytest.approx(4, abs=1e-9)
    assert metrics["time_to_first_token"]["p99"] == pytest.approx(40)
    assert metrics["inter_token_latency"]["p99"] == pytest.approx(10)


def fillers() -> Iterator[Exchange]:
    return (Exchange(f"f{number}", b"", input_tokens=2, max_tokens=8) for number in count())


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
    metrics = level_metrics(records, closed_window(records, 4))
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

        def start(self, batch: Sequence[Exchange]) -> None:
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

        def start(self, batch: Sequence[Exchange]) -> None:
            super().start(batch)
            self.log += [f"send {len(batch)}"] * bool(batch)
            for exchange in batch:
                here, there = self.pipes[exchange.slot]
                loop.add_reader(here, self.read, here, exchange)
                os.write(there, b"x")

        def read(self, here: int, exchange: Exchange) -> None:
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

        def reply(self, exchange: Exchange) -> None:
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
        def start(self, batch: Sequence[Exchange]) -> None:
            sizes.append(len(batch))
            super().start(batch)

    sender = Sized()
    driver = closed(sender, Closed(concurrency=2, requests=4)) if kind == "closed" else opened(sender, [0, 1, 2])
    drive(loop, driver)
    assert sum(sizes) == len(sender.started)
    assert 0 not in sizes


# Open loop


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


def test_the_schedule_stays_whatever_the_delay(loop: asyncio.AbstractEventLoop) -> None:
    class Slow(Quick):
        def start(self, batch: Sequence[Exchange]) -> None:
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

        def start(self, batch: Sequence[Exchange]) -> None:
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

        def start(self, batch: Sequence[Exchange]) -> None:
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
        def reply(self, exchange: Exchange) -> None:
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
    looks = iter((0, -2_500 * MS))  # as the level begins and as it ends
    monkeypatch.setattr("pipeline.bench.driver.time_ns", lambda: monotonic_ns() + next(looks))
    driver = opened(Quick(), [0, 1])
    drive(loop, driver)
    assert driver.client is not None
    assert driver.client.clock_step_ns == pytest.approx(-2_500 * MS, abs=100 * MS)


# Conversations


class Letters:
    """A codec of nothing: what is said does not matter here."""

    protocol = "letters"

    def described(self) -> dict[str, Any]:
        return {}

    def encode(self, identity: str, prompt: str, max_tokens: int, options: Any, messages: Any = None) -> bytes:
        return prompt.encode()

    def decode(self, exchange: Exchange) -> Answer:
        return Answer(list(exchange.stamps), [1] * len(exchange.stamps))

    def text(self, exchange: Exchange) -> str:
        return " and so on"


class Sessions:
    """Conversations of so many turns, the answers' ends 1, 2, 3... ms before the next turn is due."""

    distinct = None

    def __init__(self, turns: int) -> None:
        self._asker, self._codec = Asker(), Letters()
        self._asks = Asks((Ask("once", 2, 1, number, last=False) for number in count()), self._next)
        self._turns = turns

    def _next(self, ask: Ask, answer: ReadAnswer) -> Ask | None:
        turn = ask.turn + 1
        prompt = ask.prompt + answer()
        if turn == self._turns:
            return None
        return Ask(prompt, 2, 1, ask.session, turn=turn, think_s=turn / 1000, last=False)

    def asks(self, share: Share) -> Asks:
        return self._asks

    def first(self, number: int) -> list[Exchange]:
        return [noted(self._asker.make(self._codec, ask)) for ask in islice(self._asks, number)]

    def follow(self, exchange: Exchange) -> tuple[Exchange, int] | None:
        following = self._asker.follow(self._codec, self._asks, exchange)
        return following and (noted(following[0]), following[1])


TURNS: dict[str, tuple[int, int]] = {}  # an exchange itself forgets what it was made from


def noted(exchange: Exchange) -> Exchange:
    assert exchange.ask is not None
    TURNS[exchange.id] = exchange.ask.session, exchange.ask.turn
    return exchange


def turn_of(exchange: Exchange) -> tuple[int, int]:
    return TURNS[exchange.id]


def by_session(ended: Sequence[Exchange]) -> dict[int, list[Exchange]]:
    found: dict[int, list[Exchange]] = {}
    for exchange in sorted(ended, key=turn_of):
        found.setdefault(turn_of(exchange)[0], []).append(exchange)
    return found


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


def test_a_failed_turn_ends_the_conversation(loop: asyncio.AbstractEventLoop) -> None:
    work = Sessions(3)
    sender = Simulated(unit_ns=MS // 100, failing=lambda exchange: turn_of(exchange) in ((0, 1), (1, 0)))
    load = Closed(concurrency=1, requests=3, warmup=0)
    ended = drive(loop, closed(sender, load, measured=iter(work.first(3)), follow=work.follow))
    assert [turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
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
    assert [turn_of(exchange) for exchange in ended] == [(0, 0), (0, 1)]


def test_while_a_measured_conversation_goes_on_other_places_do_too(loop: asyncio.AbstractEventLoop) -> None:
    class Slow(Sender):
        def start(self, batch: Sequence[Exchange]) -> None:
            super().start(batch)
            for exchange in batch:
                asyncio.get_running_loop().call_later(0.001, self.answer, exchange)

    # A conversation of four turns at one place; at the other a single request, and then only what is not measured.
    work = Sessions(4)

    def follow(exchange: Exchange) -> tuple[Exchange, int] | None:
        return work.follow(exchange) if turn_of(exchange)[0] == 0 else None

    load = Closed(concurrency=2, requests=4, warmup=0)
    ended = drive(loop, closed(Slow(), load, measured=iter(work.first(2)), follow=follow, fillers=fillers()))
    talked = [exchange for exchange in measured(ended) if turn_of(exchange)[0] == 0]
    other = of_place(ended, 1 - talked[0].slot)
    assert [turn_of(exchange)[1] for exchange in talked] == [0, 1, 2, 3]
    assert [exchange.warmup for exchange in other] == [False] + [True] * (len(other) - 1)
    # Without a pause from the first turn to the last one's end, the time in which the user thinks included.
    assert other[-1].due_ns < end_of(talked[-1])
    assert end_of(talked[-1]) - end_of(other[-1]) < MS  # of those that end in one turn of the loop neither goes on
    assert all(after.due_ns == before.end_ns for before, after in pairwise(other))


def test_conversations_of_an_open_loop(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Simulated(unit_ns=MS // 10)
    ended = drive(loop, opened(sender, [0, 2, 3], exchanges=work.first(3), follow=work.follow))
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
    driver = opened(sender, [0], exchanges=work.first(1), follow=work.follow, window_ns=(0, 5 * MS))
    assert [(turn_of(exchange), exchange.warmup) for exchange in drive(loop, driver)] == [
        ((0, 0), False),
        ((0, 1), True),
    ]


def test_turns_of_an_open_loop_wait_for_room_too(loop: asyncio.AbstractEventLoop) -> None:
    work, sender = Sessions(3), Quick()
    drive(loop, opened(sender, [0] * 4, exchanges=work.first(4), follow=work.follow, max_in_flight=1))
    assert sender.most == 1
    assert len(sender.started) == 12


# Giving up


def test_a_request_without_an_end_times_out_and_its_place_goes_on(loop: asyncio.AbstractEventLoop) -> None:
    class Hangs(Sender):
        def start(self, batch: Sequence[Exchange]) -> None:
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
        def start(self, batch: Sequence[Exchange]) -> None:
            super().start(batch)
            if batch:
                _, stops, goes_on = batch
                stops.receive(b"x", monotonic_ns())
                goes_on.receive(b"x", monotonic_ns() + FAR)

        def cancel(self, exchange: Exchange) -> None:
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


def test_a_request_that_is_never_sent_times_out_too(loop: asyncio.AbstractEventLoop) -> None:
    class NoConnection(Sender):
        def start(self, batch: Sequence[Exchange]) -> None:
            self.flying += batch

    sender = NoConnection()
    (exchange,) = drive(loop, opened(sender, [0], Limits(request_s=0.3, token_s=0.01, failures=5)))
    # Not Stalled at the first sweep: no server owes it a token yet.
    assert exchange.failure == Failure("Timeout", "not over within 0.3 s, after 0 responses")
    assert exchange.sent_ns is None
    assert sender.cancelled == [exchange]


def test_an_end_that_comes_after_the_request_was_given_up_changes_nothing(loop: asyncio.AbstractEventLoop) -> None:
    class TooLate(Sender):
        def cancel(self, exchange: Exchange) -> None:
            super().cancel(exchange)
            asyncio.get_running_loop().call_soon(exchange.end, monotonic_ns())

    driver = opened(TooLate(), [0], Limits(request_s=0.01, token_s=3600, failures=5))
    (exchange,) = drive(loop, driver)
    assert exchange.failure is not None
    assert exchange.failure.kind == "Timeout"


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_level_ends_when_everything_fails(loop: asyncio.AbstractEventLoop, concurrency: int) -> None:
    driver = closed(Quick(lambda _: True), Closed(concurrency=concurrency, duration_s=3600))
    ended = drive(loop, driver)
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"
    assert not driver.interrupted
    # Those that failed in the same turn are known; none was sent after the fifth.
    assert len(ended) + driver.cut in range(5, 5 + concurrency)


def test_a_server_that_takes_no_connections_ends_a_level_at_once(loop: asyncio.AbstractEventLoop) -> None:
    patient = Limits(request_s=3600, token_s=3600, failures=100)
    driver = opened(Quick(lambda _: True), [0, 0, 0, 0, 0, 3_600_000], patient)
    assert len(drive(loop, driver)) == 5
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"

    class Refusing(Quick):
        def reply(self, exchange: Exchange) -> None:
            if exchange in self.flying:
                self.answer(exchange, Failure("http 429", "slow down"))

    refused = opened(Refusing(), [0] * 20, patient)
    assert len(drive(loop, refused)) == 20
    assert refused.stopped is None


def test_an_open_loop_ends_when_everything_fails(loop: asyncio.AbstractEventLoop) -> None:
    driver = opened(Quick(lambda _: True), [0, 0, 0, 0, 0, 3_600_000])
    assert len(drive(loop, driver)) == 5
    assert driver.stopped == "5 requests in a row failed, the last by ConnectFailed: nobody there"


def test_failures_between_successes_do_not_end_a_level(loop: asyncio.AbstractEventLoop) -> None:
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

        def start(self, batch: Sequence[Exchange]) -> None:
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


def test_an_interrupted_level_keeps_what_has_ended_and_counts_the_rest(loop: asyncio.AbstractEventLoop) -> None:
    class Interrupts(Quick):
        """After the second answer."""

        def reply(self, exchange: Exchange) -> None:
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
def test_a_level_interrupted_before_it_began_sends_nothing(
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
            level.interrupt()

    sender, work = Connecting(), Sessions(1)
    level = LevelRun(load, Client(Letters(), sender), Asker(), work, limits=PATIENT)  # type: ignore[arg-type]
    loop.run_until_complete(level.prepare())
    loop.run_until_complete(level.drive())
    driven = level.collect(len)
    result = evaluate(load, driven, protocol="grpc")
    assert sender.started == []
    assert result.interrupted
    assert result.window_s is None
    assert len(driven.records) == 0


class Fault(Exception):
    pass


def faulty(*_: Any) -> Any:
    raise Fault


def raising(after: int) -> Iterator[Exchange]:
    yield from islice(asks(), after)
    raise Fault


class Broken(Quick):
    def start(self, batch: Sequence[Exchange]) -> None:
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
def test_a_fault_of_ours_ends_the_level_and_is_raised(
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
def test_nothing_is_left_however_a_level_ends(kind: str, how: str) -> None:
    class Watched(Quick):
        def reply(self, exchange: Exchange) -> None:
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
        driver = opened(sender, due, exchanges=work.first(30), follow=work.follow, max_in_flight=3)
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
        def start(self, batch: Sequence[Exchange]) -> None:
            super().start(batch)
            loop.call_soon(driver.interrupt)

        def cancel(self, exchange: Exchange) -> None:
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

        def reply(self, exchange: Exchange) -> None:
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
        def start(self, batch: Sequence[Exchange]) -> None:
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
