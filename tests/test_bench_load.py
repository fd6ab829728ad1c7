"""The closed loop against an in-memory server, in virtual time: stamps are exact and nothing waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from pipeline.bench.client import Endpoint
from pipeline.bench.load import ClosedLoop, ClosedLoopDriver
from pipeline.bench.metrics import level_metrics, measured_window
from pipeline.bench.record import RequestFailed, RequestRecord, Response, settle

MS = 1_000_000


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._selector.select = self._jump  # type: ignore[method-assign]

    def time(self) -> float:
        return self.now

    def clock(self) -> int:
        # Whole microseconds: what timers sum up to in floating point is not exact.
        return round(self.now * 1e6) * 1000

    def _jump(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "every task waits for something that never comes"
        self.now += max(timeout, 0)
        return []


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    yield made
    made.run_until_complete(made.shutdown_asyncgens())
    made.close()


class FakeTransport:
    """First token after 40 ms, then one every 10 ms, whatever the load."""

    endpoint = Endpoint(
        protocol="fake",
        url="",
        server_name="",
        server_version="",
        model="",
        model_versions=(),
        ranks={},
        outputs=frozenset(),
    )

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.in_flight = 0
        self.most = 0
        self.prompts: list[str] = []

    async def send(self, prompt: str, record: RequestRecord) -> None:
        record.sent_ns = self.loop.clock()
        self.prompts.append(prompt)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await self.answer(record)
        finally:
            self.in_flight -= 1

    async def answer(self, record: RequestRecord) -> None:
        for number in range(record.max_tokens):
            await asyncio.sleep(0.01 if number else 0.04)
            record.responses.append(Response(self.loop.clock(), 1, "x"))

    async def close(self) -> None:
        pass


def driver(loop: VirtualLoop, load: ClosedLoop, transport: FakeTransport, *, timeout_s: float = 60) -> ClosedLoopDriver:
    return ClosedLoopDriver(
        load,
        transport,
        (f"prompt {number}" for number in itertools.count()),
        input_tokens=2,
        output_tokens=8,
        timeout_s=timeout_s,
        clock=loop.clock,
    )


def drive(loop: VirtualLoop, made: ClosedLoopDriver) -> list[RequestRecord]:
    run: Coroutine[Any, Any, None] = made.run()
    loop.run_until_complete(run)
    for record in made.records:
        settle(record, lambda text: len(text))
    return made.records


def test_never_more_than_n_in_flight_and_n_throughout_the_window(loop: VirtualLoop) -> None:
    transport = FakeTransport(loop)
    records = drive(loop, driver(loop, ClosedLoop(concurrency=4, requests=20), transport))
    assert transport.most == 4
    assert level_metrics(records, 4)["effective_concurrency"]["value"] == pytest.approx(4, abs=1e-9)


def test_measured_requests_are_as_many_as_asked_for_and_prompts_are_used_once(loop: VirtualLoop) -> None:
    transport = FakeTransport(loop)
    load = ClosedLoop(concurrency=4, requests=20)
    records = drive(loop, driver(loop, load, transport))
    assert sum(not record.warmup for record in records) == 20
    # One full warm-up for each slot and a shortened one for all but the first.
    assert sum(record.warmup for record in records) == 7
    assert load.total_requests(8) == len(records) == 27
    assert len(set(transport.prompts)) == 27


def test_slots_enter_the_measured_window_spread_over_a_request(loop: VirtualLoop) -> None:
    records = drive(loop, driver(loop, ClosedLoop(concurrency=4, requests=20), FakeTransport(loop)))
    first = {slot: min(r.due_ns for r in records if r.slot == slot and not r.warmup) for slot in range(4)}
    # Eight tokens take 40 + 7 x 10 = 110 ms. Slots 1, 2, 3 first ask for 2, 4 and 6 tokens: 50, 70 and 90 ms.
    assert first == {0: 110 * MS, 1: 160 * MS, 2: 180 * MS, 3: 200 * MS}


def test_a_slot_goes_from_warm_up_to_measurement_without_a_pause_or_a_drain(loop: VirtualLoop) -> None:
    records = drive(loop, driver(loop, ClosedLoop(concurrency=4, requests=20), FakeTransport(loop)))
    for slot in range(4):
        own = [record for record in records if record.slot == slot]
        for before, after in itertools.pairwise(own):
            assert after.due_ns == after.sent_ns == before.end_ns
    window = measured_window(records, 4)
    assert window is not None
    # From the very first request until the window ends, warm-up included, every moment has four in flight.
    for moment in range(0, window.stop_ns, 5 * MS):
        busy = sum(record.sent_ns <= moment < record.end_ns for record in records)  # type: ignore[operator]
        assert busy == 4, moment
    # So slot 0 was measured while slot 3 still warmed up; only the window waits for all of them.
    assert window.start_ns == 200 * MS


def test_throughput_of_a_steady_server_is_its_true_rate(loop: VirtualLoop) -> None:
    records = drive(loop, driver(loop, ClosedLoop(concurrency=4, requests=400), FakeTransport(loop)))
    metrics = level_metrics(records, 4)
    assert metrics["output_token_throughput"]["value"] == pytest.approx(4 * 8 / 0.110, rel=0.005)
    assert metrics["request_throughput"]["value"] == pytest.approx(4 / 0.110, rel=0.02)
    assert metrics["time_to_first_token"]["p99"] == pytest.approx(40)
    assert metrics["inter_token_latency"]["p99"] == pytest.approx(10)


def test_without_warm_up_the_burst_is_measured(loop: VirtualLoop) -> None:
    records = drive(loop, driver(loop, ClosedLoop(concurrency=3, requests=6, warmup=0), FakeTransport(loop)))
    assert [record.due_ns for record in records[:3]] == [0, 0, 0]
    assert not any(record.warmup for record in records)


def test_a_duration_counts_from_the_last_warm_up(loop: VirtualLoop) -> None:
    load = ClosedLoop(concurrency=4, duration_s=1.0)
    records = drive(loop, driver(loop, load, FakeTransport(loop)))
    measured = [record for record in records if not record.warmup]
    window = measured_window(records, 4)
    assert load.total_requests(8) is None
    assert window is not None
    # The last slot began at 200 ms. Nothing is sent from 1200 ms on, and the window is never shorter than asked for.
    assert max(record.due_ns for record in measured) < 1200 * MS
    assert 1.0 <= window.seconds < 1.11


def test_a_request_without_an_end_times_out_and_its_slot_goes_on(loop: VirtualLoop) -> None:
    class Stalls(FakeTransport):
        async def answer(self, record: RequestRecord) -> None:
            if len(self.prompts) == 3:
                await asyncio.Event().wait()
            await super().answer(record)

    transport = Stalls(loop)
    records = drive(loop, driver(loop, ClosedLoop(concurrency=1, requests=4, warmup=1), transport, timeout_s=2))
    failures = [record.failure.kind if record.failure else None for record in records if not record.warmup]
    assert failures == [None, "Timeout", None, None]
    assert transport.in_flight == 0
    assert records[2].end_ns - records[2].due_ns == 2000 * MS  # type: ignore[operator]


def test_a_level_ends_early_when_everything_fails(loop: VirtualLoop) -> None:
    class Dead(FakeTransport):
        async def answer(self, record: RequestRecord) -> None:
            raise RequestFailed("ConnectFailed", "nobody\n there")

    made = driver(loop, ClosedLoop(concurrency=1, duration_s=3600), Dead(loop))
    records = drive(loop, made)
    assert len(records) == 5
    assert made.stopped == "5 requests in a row failed, the last by ConnectFailed"
    assert records[0].failure is not None
    assert records[0].failure.message == "nobody there"


def test_failures_between_successes_do_not_end_a_level(loop: VirtualLoop) -> None:
    class Flaky(FakeTransport):
        async def answer(self, record: RequestRecord) -> None:
            await super().answer(record)
            if len(self.prompts) % 4:
                raise RequestFailed("ServerError", "no")

    made = driver(loop, ClosedLoop(concurrency=1, requests=40, warmup=0), Flaky(loop))
    records = drive(loop, made)
    assert made.stopped is None
    assert sum(record.failure is None for record in records) == 10


def test_a_fault_of_ours_ends_the_run_and_leaves_nothing_in_flight(loop: VirtualLoop) -> None:
    class Broken(FakeTransport):
        async def answer(self, record: RequestRecord) -> None:
            if record.slot == 1:
                raise ZeroDivisionError
            await asyncio.Event().wait()

    transport = Broken(loop)
    with pytest.raises(ZeroDivisionError):
        drive(loop, driver(loop, ClosedLoop(concurrency=3, requests=9), transport))
    assert transport.in_flight == 0
    assert loop.now == 0  # the others were abandoned, not waited for


def test_a_load_ends_by_requests_or_by_time() -> None:
    with pytest.raises(ValueError, match="requests or by duration_s"):
        ClosedLoop(concurrency=1)
