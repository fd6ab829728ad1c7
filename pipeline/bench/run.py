"""One run: connect, try one request, then measure every target under every load, or search for the highest load."""

from __future__ import annotations

import asyncio
import datetime
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic_ns
from typing import Any, TypeVar

from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.pipeline.bench.load.loads import Closed, Load
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.load.workload import Render
from trtpipe.pipeline.bench.loop.driver import NOTHING, Live
from trtpipe.pipeline.bench.loop.load_point import Driven, evaluate
from trtpipe.pipeline.bench.options import BenchOptions, Progress, Target
from trtpipe.pipeline.bench.results.digest import digest
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult, SearchResult
from trtpipe.pipeline.bench.search import BEHIND, Found, Search, Trial, Unmeasurable, find
from trtpipe.pipeline.bench.workers.share import Share
from trtpipe.pipeline.bench.workers.worker import LocalWorker, Watch, Worker

_T = TypeVar("_T")

# Requests, sent one after the other, that determine where a search begins.
ALONE = 8
# Several workers start this long after the last one gets its start time, so that none starts alone.
TOGETHER_NS = 200_000_000


def run(
    options: BenchOptions, render: Render | None, progress: Callable[[Progress], None] | None,
    begun: Callable[[Callable[[int], None]], None] = lambda interrupt: None,
) -> BenchReport:  # fmt: skip
    """Run a benchmark.

    render  the model's chat template; with several workers it is pickled
    begun   called with a function that ends the run as a signal of that number does, for a run in another thread than
            the main one, which gets no signals

    Raises a worker's error before the first load point has a result; later the report has the results, and `broken`.
    """
    import uvloop

    report = BenchReport(
        command=sys.argv,
        options=options.to_json(),
        tokenizer_sha256=digest(options.tokenizer),
        work_sha256={str(file): digest(file) for file in options.work.files},
        started=_now(),
    )
    session = _Session(options, report, render, progress)
    loop = uvloop.new_event_loop()

    def interrupt(number: int, frame: object = None) -> None:
        report.interrupted, report.ended_by = True, number
        if not loop.is_closed():
            loop.call_soon_threadsafe(session.interrupt)

    begun(interrupt)
    # Not `loop.add_signal_handler`: that loses a signal before the loop runs or after, and then leaves SIGTERM to the
    # system, which ends what is around a measurement without its clean-up.
    main = threading.current_thread() is threading.main_thread()  # others cannot handle signals
    # Under nohup the end of the terminal is ignored.
    endings = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        endings.append(signal.SIGHUP)
    before = {ending: signal.signal(ending, interrupt) for ending in endings if main}
    try:
        loop.run_until_complete(session.run())
    except TrtpipeError as error:
        if not report.results:
            raise
        report.broken = error
    finally:
        loop.close()
        for ending, handler in before.items():
            signal.signal(ending, handler or signal.SIG_DFL)
    report.finished = _now()
    return report


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class _Session:
    """One run with its workers, which an interrupt can reach."""

    def __init__(
        self, options: BenchOptions, report: BenchReport, render: Render | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self._options = options
        self._report = report
        self._render = render
        self._progress = progress
        self._workers: list[Worker] = []
        self._over = False

    def interrupt(self) -> None:
        self._report.interrupted = True
        self._end()

    def _end(self) -> None:
        """End the load point that runs. No other begins."""
        self._over = True
        for worker in self._workers:
            worker.interrupt()

    async def run(self) -> None:
        options = self._options
        try:
            self._take_hands()
            self._report.endpoints += (await _all(worker.connect() for worker in self._workers))[0]
            for number, target in enumerate(options.targets):
                if options.search is not None:
                    await self._search(number, target, options.search)
                    continue
                for load in options.loads:
                    for repeat in range(options.repeat):
                        if self._report.interrupted:
                            return
                        await self._measure(number, target, load, repeat)
        finally:
            await _all(worker.close() for worker in self._workers)

    def _take_hands(self) -> None:
        options, render = self._options, self._render
        shares = [Share(index, options.shares) for index in range(options.shares)]
        if options.hosts:
            from trtpipe.pipeline.bench.workers.ray import RayWorker, check_reach, nodes

            chosen = nodes(options.ray, options.hosts)
            check_reach(options, chosen)
            self._report.hosts = [node.address for node in chosen]
            for share in shares:
                self._workers.append(RayWorker(chosen[share.index % len(chosen)], options, render, share))
        elif len(shares) == 1:
            self._workers.append(LocalWorker(options, render))
        else:
            from trtpipe.pipeline.bench.workers.processes import ProcessWorker

            for share in shares:
                self._workers.append(ProcessWorker(options, render, share))

    async def _search(self, number: int, target: Target, search: Search) -> None:
        if self._report.interrupted or self._over:
            return
        search = replace(search, unit=self._options.work.rate_unit)
        if search.limit_s is not None:
            asyncio.get_running_loop().call_later(search.limit_s, self._end)

        async def measure(load: Load, repeat: int, workers: int | None = None) -> tuple[LoadPointResult, Trial]:
            for _ in range(search.repeats):  # a busy moment of the client is no reason to end the search
                result = await self._measure(number, target, load, repeat, workers)
                if self._report.interrupted:
                    raise Unmeasurable("it was interrupted")
                if self._over:
                    raise Unmeasurable(f"its {search.limit_s:.0f} s were over")
                if not result.verdict["reasons"]:
                    answered = served(result, self._report.records[-1])
                    return result, search.trial(result.slo, result.stopped is not None, answered)
            reason = result.verdict["reasons"][0]
            raise Unmeasurable(
                f"at {self._options.work.label(load)} the client was the limit: {reason['what']}, {reason['why']}"
            )

        async def at(rate: float, repeat: int) -> Trial:
            try:
                return (await measure(replace(search.load, rate=rate), repeat))[1]
            except UsageError as error:  # at so low a rate no request is due
                raise Unmeasurable(f"at {rate:g} {search.unit} {error.what}") from None

        async def alone() -> LoadPointResult:
            # One worker sends its share of these, and no other sends.
            result, trial = await measure(Closed(concurrency=1, requests=ALONE * self._options.shares), 0, 1)
            if not trial.passed and trial.clear:
                raise Unmeasurable("one request at a time does not meet the objectives")
            return result

        try:
            if search.known:
                found = await find(search, search.load.rate, at, alone)
            else:
                rate = (await alone()).metrics["request_throughput"]["value"] or search.load.rate
                found = await find(search, rate * self._report.records[-1].first_share(), at)
        except Unmeasurable as why:
            found = Found(ended=str(why))
        self._report.searches.append(SearchResult(protocol=target.protocol, search=search, found=found))

    async def _measure(
        self, number: int, target: Target, load: Load, repeat: int, only: int | None = None
    ) -> LoadPointResult:
        """Measure a load point, or the shares that the first `only` workers have of it."""
        # Imported here, while the server is known to answer: the first request does not wait for it.
        from trtpipe.pipeline.bench.monitors.server import ServerMonitor

        workers = self._workers[:only]
        watching = None
        watches: Sequence[Watch | None] = [None] * len(workers)
        if self._progress is not None:
            part = len(workers) / len(self._workers)
            watching = _Watching(self._progress, target.protocol, load, self._options.work, part)
            watches = watching.of(len(workers))
        pairs = list(zip(workers, watches, strict=True))
        await _all(worker.prepare(number, load, repeat, watch) for worker, watch in pairs)
        if watching is not None and not self._report.interrupted:
            watching.begin()
        beside = ServerMonitor(target.url, target.metrics_url)
        with beside:
            start = monotonic_ns() + TOGETHER_NS if len(workers) > 1 else 0
            driven, broken = await self._drive(workers, start)
        if beside.unread and target.metrics_url is not None:
            self._report.unread_metrics[target.metrics_url] = beside.unread
        result = evaluate(
            load, driven, protocol=target.protocol, label=self._options.work.label(load),
            objectives=self._options.objectives, repeat=repeat, beside=beside,
        )  # fmt: skip
        self._report.results.append(result)
        self._report.records.append(driven.records)
        self._report.distinct = driven.distinct
        if watching is not None:
            watching.end(result)
        if broken is not None:
            raise broken
        return result

    async def _drive(self, workers: Sequence[Worker], start_ns: int) -> tuple[Driven, TrtpipeError | None]:
        """Drive the workers. Where one fails the others end too; the load point has what they got, and the error."""
        drives = [asyncio.ensure_future(worker.drive(start_ns)) for worker in workers]
        await asyncio.wait(drives, return_when=asyncio.FIRST_EXCEPTION)
        if not all(drive.done() for drive in drives) and not self._report.interrupted:
            for worker in workers:
                worker.interrupt()
        await asyncio.wait(drives)
        errors = [error for error in (drive.exception() for drive in drives) if error is not None]
        parts = [drive.result() for drive in drives if drive.exception() is None]
        if not errors:
            return Driven.merged(parts), None
        if not parts or not isinstance(errors[0], TrtpipeError):
            raise errors[0]
        merged = Driven.merged(parts)
        return replace(merged, stopped=str(errors[0]), interrupted=self._report.interrupted), errors[0]


def served(result: LoadPointResult, records: Records) -> float | None:
    """Requests/s that were answered, as the load's rate counts them: of a conversation the first alone. None for a load
    point so short that many of its requests end after it."""
    usual = result.metrics["request_latency"]["p10"]
    if usual is None or result.window_s is None or result.window_s * (1 - BEHIND) < usual / 1e3:
        return None
    rate: float | None = result.metrics["request_throughput"]["value"]
    return None if rate is None else rate * records.first_share()


async def _all(calls: Any) -> list[_T]:
    """Wait for all calls, also where one fails; then raise the first failure."""
    answers: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


class _Watching:
    """Reports the progress of a load point: when it begins, while it runs, and when it has ended."""

    def __init__(
        self, progress: Callable[[Progress], None], protocol: str, load: Load, work: Work, part: float = 1.0
    ) -> None:
        """`part`: share of the load that is sent."""
        self._progress = progress
        self._protocol = protocol
        self._label = work.label(load)
        # The load gives the number of conversations, not the number of their turns.
        total = load.measured_requests if isinstance(load, Closed) and work.sessions is None else None
        self._total = None if total is None else round(total * part)
        self._began_ns = 0

    def of(self, workers: int) -> Sequence[Watch]:
        """A callback for each worker; the sum of their progress is passed on."""
        last: list[Live | None] = [None] * workers

        def watch(index: int, live: Live) -> None:
            last[index] = live
            self.tell("running", Live.sum(filter(None, last)))

        return [partial(watch, index) for index in range(workers)]

    def tell(self, state: str, live: Live, result: LoadPointResult | None = None) -> None:
        self._progress(
            Progress(
                protocol=self._protocol, label=self._label, total=self._total, live=live, state=state, result=result
            )
        )

    def begin(self) -> None:
        self.tell("begun", NOTHING)
        self._began_ns = monotonic_ns()

    def end(self, result: LoadPointResult) -> None:
        if not self._began_ns:
            return
        succeeded, failed = (result.requests[name] for name in ("succeeded", "failed"))
        took = (monotonic_ns() - self._began_ns) / 1e9
        self.tell("ended", replace(NOTHING, elapsed_s=took, done=succeeded + failed, failed=failed), result)
