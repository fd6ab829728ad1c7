"""One protocol under one load: its requests made, driven, read and judged."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from pipeline.bench.asking import Asker
from pipeline.bench.driver import ClosedLoop, Driver, Limits, Live, OpenLoop
from pipeline.bench.exchange import Exchange
from pipeline.bench.metrics import Window, closed_window
from pipeline.bench.records import Records, settle
from pipeline.bench.report import LevelResult, level_result
from pipeline.bench.server_side import Scraper, summarise
from pipeline.bench.slo import Objective
from pipeline.bench.verdict import examine
from pipeline.bench.wire.transport import Client
from pipeline.bench.work.arrivals import schedule, slot_starts
from pipeline.bench.work.loads import Closed, Load, Open, Replay, Staged
from pipeline.bench.work.workload import Ask, Workload

# Requests of each place that are made before the clock starts where nobody knows how many there will be.
AHEAD = 4
# Connections that an open loop has before the clock starts.
OPENED = 64


class LevelRun:
    """A load over one protocol, from its preparation to its result. `seed` fixes an open loop's times."""

    def __init__(
        self, load: Load, client: Client, asker: Asker, workload: Workload, *, limits: Limits, seed: int = 0,
        metrics_url: str | None = None, watch: Callable[[Live], None] | None = None,
    ) -> None:  # fmt: skip
        self.load = load
        self.client = client
        self._asker = asker
        self._asks = workload.asks()
        self._limits = limits
        self._seed = seed
        self._watch = watch
        self._scraper = None if metrics_url is None else Scraper(metrics_url)
        self._driver: Driver | None = None

    async def run(self) -> None:
        """Drive it. Whatever ends it, `result` has what there is."""
        # Made before connections are: an interrupt meanwhile is to find it.
        if isinstance(self.load, Closed):
            self._driver, calls = self._closed(self.load), self.load.concurrency
        else:
            self._driver, calls = self._open(self.load), min(self.load.max_in_flight or OPENED, OPENED)
        await self.client.sender.warm(calls)
        if self._scraper is not None:
            self._scraper.start()
        try:
            with _undisturbed():
                await self._driver.run()
        finally:
            if self._scraper is not None:
                self._scraper.stop()

    def interrupt(self) -> None:
        if self._driver is not None:
            self._driver.interrupt()

    def result(
        self, count_tokens: Callable[[str], int], objectives: list[Objective], repeat: int
    ) -> tuple[LevelResult, Records]:
        """Evaluate what was driven. Once."""
        driver, load = self._driver, self.load
        assert driver is not None
        assert driver.client is not None
        records = settle(driver.ended, self.client.codec.decode, count_tokens)
        good = records.good()
        first = (records.stamps[records.offsets[:-1][good]] - records.sent[good]) / 1e6
        if isinstance(load, Closed):
            window = closed_window(records, load.concurrency)
        else:
            assert isinstance(driver, OpenLoop)
            start, stop = driver.window
            window = Window(start_ns=start, stop_ns=stop) if stop > start else None
        check = examine(
            records,
            driver.client,
            ttft_p50_ms=float(sorted(first)[len(first) // 2]) if len(first) else None,
            asked=load.concurrency if isinstance(load, Closed) else None,
            bounded=not isinstance(load, Closed) and load.max_in_flight is not None,
        )
        made = level_result(
            records,
            window,
            check,
            protocol=self.client.codec.protocol,
            label=load.label,
            load=load.entry(),
            repeat=repeat,
            cut=driver.cut,
            server=self._server_said(records, driver.cut),
            objectives=objectives,
            stopped=driver.stopped,
            interrupted=driver.interrupted,
        )
        return made, records

    def _server_said(self, records: Records, cut: int) -> dict[str, Any] | None:
        if self._scraper is None or len(records) == 0:
            return None
        # What a request that failed or was abandoned cost the server nobody here knows.
        whole = not cut and not records.failed.any()
        tokens = int(records.output_tokens.sum()) if whole else None
        return summarise(self._scraper.pages, tokens, int(records.due.min()))

    def _closed(self, load: Closed) -> ClosedLoop:
        ready = [next(self._asks) for _ in range(load.measured_requests or AHEAD * load.concurrency)]
        lengths = [load.warmup_lengths(place, ready[0].output_tokens) for place in range(load.concurrency)]
        # Drawn after the measured ones, so that those are the same whatever the warm-up is.
        warmups = [[self._make(next(self._asks), length) for length in mine] for mine in lengths]
        measured: Iterator[Exchange] = iter([self._make(ask) for ask in ready])
        if load.measured_requests is None:
            # One by one from then on: what that takes shows as dispatch_delay.
            measured = chain(measured, map(self._make, self._asks))
        return ClosedLoop(
            self.client.sender, self._limits, warmups=warmups, measured=measured,
            starts_ns=slot_starts(load).tolist(), duration_s=load.duration_s, follow=self._follow, watch=self._watch,
        )  # fmt: skip

    def _open(self, load: Open | Staged | Replay) -> OpenLoop:
        plan = schedule(load, self._seed)
        exchanges = [self._make(next(self._asks)) for _ in plan.due_ns]
        return OpenLoop(
            self.client.sender, self._limits, exchanges=exchanges, due_ns=plan.due_ns.tolist(), window_ns=plan.window,
            max_in_flight=load.max_in_flight, follow=self._follow, watch=self._watch,
        )  # fmt: skip

    def _make(self, ask: Ask, max_tokens: int | None = None) -> Exchange:
        return self._asker.make(self.client.codec, ask, max_tokens)

    def _follow(self, exchange: Exchange) -> tuple[Exchange, int] | None:
        return self._asker.follow(self.client.codec, self._asks, exchange)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection while the clock runs: it would stop reads for milliseconds. What is kept has no cycles."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
