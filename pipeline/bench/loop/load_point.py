"""Load point: one protocol under one load.

LoadPointRun makes and drives the requests, a share of them in each process. evaluate() computes and judges the results
of all shares.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from time import monotonic
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.load.arrivals import schedule, slot_starts
from trtpipe.pipeline.bench.load.loads import Closed, Load, Open, Replay, Staged
from trtpipe.pipeline.bench.load.room import check_memory
from trtpipe.pipeline.bench.load.workload import RequestSpec, Workload
from trtpipe.pipeline.bench.loop.closed import ClosedLoop
from trtpipe.pipeline.bench.loop.driver import NOTHING, Driver, Limits, Live
from trtpipe.pipeline.bench.loop.driver import Client as ClientFigures
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.loop.open import OpenLoop
from trtpipe.pipeline.bench.loop.request_factory import RequestFactory
from trtpipe.pipeline.bench.protocols.transport import Client, ReadIds
from trtpipe.pipeline.bench.results.records import Records, joined, settle
from trtpipe.pipeline.bench.results.report import LoadPointResult, load_point_result
from trtpipe.pipeline.bench.results.samples import Samples
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.bench.results.verdict import examine
from trtpipe.pipeline.bench.results.window import Window, closed_window
from trtpipe.pipeline.bench.workers.share import WHOLE, Share

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.monitors.server import ServerMonitor

# Requests per slot made before the clock starts, where their total number is unknown, or more than MOST_AHEAD.
AHEAD = 4
MOST_AHEAD = 10_000
# Requests made in one turn of the event loop, which takes some milliseconds; seconds between reports of progress.
AT_ONCE = 64
TOLD_S = 0.25
# Connections that an open loop opens before the clock starts.
OPENED = 64


@dataclass(frozen=True, kw_only=True)
class Driven:
    """Raw results of a load point.

    clients    measurements of each process that drove a share of it
    window_ns  measured part of an open loop's schedule, by the clock; None for a closed loop, whose window follows from
               its records, and where nothing was measured
    until_ns   when the duration of a closed loop was over, by the clock; None where a number of requests ended it
    distinct   number of prompts in a file, after which it began again; None for synthetic prompts
    samples    as `samples.Samples` gives them
    """

    records: Records
    clients: tuple[ClientFigures, ...]
    window_ns: tuple[int, int] | None
    cut: int
    stopped: str | None
    interrupted: bool
    distinct: int | None = None
    until_ns: int | None = None
    samples: Sequence[dict[str, Any]] = ()

    def shifted(self, by_ns: int) -> Driven:
        """The same results by a clock that is ahead by `by_ns`."""
        window = self.window_ns
        return replace(
            self,
            records=self.records.shifted(by_ns),
            window_ns=None if window is None else (window[0] + by_ns, window[1] + by_ns),
            until_ns=None if self.until_ns is None else self.until_ns + by_ns,
        )

    @classmethod
    def merged(cls, parts: Sequence[Driven]) -> Driven:
        """Combine shares that were driven side by side into one load point."""
        windows = [part.window_ns for part in parts if part.window_ns is not None]
        start, stop = max((w[0] for w in windows), default=0), min((w[1] for w in windows), default=0)
        return cls(
            records=joined([part.records for part in parts]),
            clients=tuple(client for part in parts for client in part.clients),
            window_ns=(start, stop) if len(windows) == len(parts) and stop > start else None,
            cut=sum(part.cut for part in parts),
            stopped=next((part.stopped for part in parts if part.stopped is not None), None),
            interrupted=any(part.interrupted for part in parts),
            distinct=parts[0].distinct,
            until_ns=min((part.until_ns for part in parts if part.until_ns is not None), default=None),
            samples=next((part.samples for part in parts if part.samples), ()),
        )


class LoadPointRun:
    """A share of a load over one protocol: `prepare`, `drive`, `collect`. `seed` determines an open loop's times;
    `sampled`: keep samples of prompts and answers."""

    def __init__(
        self, load: Load, client: Client, asker: RequestFactory, workload: Workload, *, limits: Limits, seed: int = 0,
        share: Share = WHOLE, watch: Callable[[Live], None] | None = None, sampled: bool = False,
    ) -> None:  # fmt: skip
        self.load = load
        self.client = client
        self._asker = asker
        self._asks = workload.asks(share)
        self._distinct = workload.distinct
        self._limits = limits
        self._seed = seed
        self._share = share
        self._watch = watch
        self._samples = Samples() if sampled else None
        self._driver: Driver | None = None
        self._interrupted = False

    async def prepare(self) -> None:
        """Make requests and connections. Raises UsageError where the requests have no room in memory."""
        # Requests first: an interrupt during `warm` must find the driver.
        if isinstance(self.load, Closed):
            self._driver, calls = await self._closed(self.load), self._share.count(self.load.concurrency)
        else:
            self._driver = await self._open(self.load)
            calls = min(self._share.count(self.load.max_in_flight or OPENED), OPENED)
        if self._interrupted:
            self._driver.interrupt()
            return
        await self.client.sender.warm(calls)

    async def drive(self, start_ns: int = 0) -> None:
        """Begin at `start_ns`, or now where it is 0. However it ends, `collect` returns the results so far."""
        assert self._driver is not None
        with _undisturbed():
            await self._driver.run(start_ns)

    def interrupt(self) -> None:
        self._interrupted = True
        if self._driver is not None:
            self._driver.interrupt()

    def collect(self, count_tokens: Callable[[str], int], read_ids: ReadIds | None = None) -> Driven:
        """Decode the results. Call once."""
        driver = self._driver
        assert driver is not None
        assert driver.client is not None
        window = driver.window if isinstance(driver, OpenLoop) else (0, 0)
        for request in driver.ended:
            if request.slot >= 0:  # slot number within the whole load, not within this share
                request.slot = self._share.index + self._share.of * request.slot
        text = partial(self.client.codec.text, read_ids=read_ids)
        samples = self._samples.read(text) if self._samples is not None else ()  # before the bytes are freed
        records = settle(driver.ended, self.client.codec.decode, count_tokens)
        _give_back()
        return Driven(
            records=records,
            clients=(driver.client,),
            window_ns=window if window[1] > window[0] else None,
            cut=driver.cut,
            stopped=driver.stopped,
            interrupted=driver.interrupted,
            distinct=self._distinct,
            until_ns=driver.deadline if isinstance(driver, ClosedLoop) else None,
            samples=samples,
        )

    async def _closed(self, load: Closed) -> ClosedLoop:
        share = self._share
        total, slots = load.measured_requests, share.count(load.concurrency)
        left = None if total is None else share.count(total)
        ahead = AHEAD * slots if left is None else min(left, max(MOST_AHEAD, AHEAD * slots))
        ready = await self._made(ahead)
        length = ready[0].max_tokens if ready else 0
        # Drawn after the measured requests, so that those are the same for any warm-up.
        lengths = [load.warmup_lengths(p, length) for p in share.take(range(load.concurrency))]
        warmups = [[self._make(next(self._asks), length) for length in mine] for mine in lengths]
        # Further requests are made one at a time while the clock runs: the time shows as dispatch_delay.
        rest = map(self._make_measured, self._asks)
        measured = chain(ready, rest if left is None else islice(rest, left - ahead))
        fillers: Iterator[InFlightRequest] | None = None
        if load.cooldown:
            fillers = chain([self._make(next(self._asks)) for _ in lengths], map(self._make, self._asks))
        return ClosedLoop(
            self.client.sender, self._limits, warmups=warmups, measured=measured, fillers=fillers,
            starts_ns=list(share.take(slot_starts(load).tolist())), duration_s=load.duration_s, follow=self._follow,
            watch=self._watch,
        )  # fmt: skip

    async def _open(self, load: Open | Staged | Replay) -> OpenLoop:
        plan = schedule(load, self._seed)
        due_ns = list(self._share.take(plan.due_ns.tolist()))
        requests = await self._made(len(due_ns))
        most = load.max_in_flight
        return OpenLoop(
            self.client.sender, self._limits, requests=requests, due_ns=due_ns, window_ns=plan.window,
            max_in_flight=None if most is None else self._share.count(most), follow=self._follow, watch=self._watch,
        )  # fmt: skip

    async def _made(self, count: int) -> list[InFlightRequest]:
        """Make requests, fewer where it is interrupted. Between turns an interrupt is heard and progress reported."""
        made: list[InFlightRequest] = []
        told = monotonic()
        while len(made) < count and not self._interrupted:
            made += [self._make_measured(ask) for ask in islice(self._asks, min(AT_ONCE, count - len(made)))]
            if len(made) == AT_ONCE:
                check_memory(count, sum(len(request.message) for request in made) / AT_ONCE)
            if self._watch is not None and monotonic() - told > TOLD_S:
                told = monotonic()
                self._watch(replace(NOTHING, made=len(made), to_make=count))
            await asyncio.sleep(0)
        return made

    def _make(self, ask: RequestSpec, max_tokens: int | None = None) -> InFlightRequest:
        return self._asker.make(self.client.codec, ask, max_tokens)

    def _make_measured(self, ask: RequestSpec) -> InFlightRequest:
        request = self._make(ask)
        if self._samples is not None:
            self._samples.note(request, ask.prompt)
        return request

    def _follow(self, request: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        return self._asker.follow(self.client.codec, self._asks, request)


def evaluate(
    load: Load, driven: Driven, *, protocol: str, label: str, objectives: Sequence[Objective] = (), repeat: int = 0,
    beside: ServerMonitor | None = None,
) -> LoadPointResult:  # fmt: skip
    """Judge a load point. `beside` is the monitor that ran during it."""
    records = driven.records
    good = records.good()
    first = (records.stamps[records.offsets[:-1][good]] - records.sent[good]) / 1e6
    window = None
    if isinstance(load, Closed):
        whole = driven.stopped is None and not driven.interrupted
        window = closed_window(records, load.concurrency, driven.until_ns if whole else None)
    elif driven.window_ns is not None:
        window = Window(start_ns=driven.window_ns[0], stop_ns=driven.window_ns[1])
    check = examine(
        records,
        driven.clients,
        ttft_p50_ms=float(sorted(first)[len(first) // 2]) if len(first) else None,
        asked=load.concurrency if isinstance(load, Closed) else None,
        bounded=not isinstance(load, Closed) and load.max_in_flight is not None,
        whole=driven.stopped is None and not driven.interrupted,
        window=window,
    )
    return load_point_result(
        records,
        window,
        check,
        protocol=protocol,
        label=label,
        load=load.entry(),
        repeat=repeat,
        cut=driven.cut,
        server=None if beside is None else _server_said(driven, beside),
        objectives=objectives,
        stopped=driven.stopped,
        interrupted=driven.interrupted,
        samples=driven.samples,
    )


def _server_said(driven: Driven, beside: ServerMonitor) -> dict[str, Any] | None:
    records = driven.records
    if len(records) == 0:
        return None
    # The tokens that the server spent on failed or abandoned requests are unknown.
    whole = not driven.cut and not records.failed.any()
    tokens = int(records.output_tokens.sum()) if whole else None
    return beside.said(tokens, int(records.due.min()))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collection while the clock runs: it delays reads by milliseconds. Kept data has no cycles."""
    gc.collect()
    theirs = gc.get_freeze_count()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not theirs:  # what a caller has frozen stays so
            gc.unfreeze()


def _give_back() -> None:
    """Return freed memory to the system. The allocator keeps memory of decoded bytes, while records and pages need
    blocks of other sizes: both together would set the peak memory of a run."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(0)
