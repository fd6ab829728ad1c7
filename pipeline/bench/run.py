"""One run: connect, try one request, then every target under every load."""

from __future__ import annotations

import datetime
import hashlib
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import InputDataError, StageFailed
from pipeline.bench.asking import Asker
from pipeline.bench.driver import Limits, Live
from pipeline.bench.level import OPENED, LevelRun
from pipeline.bench.options import BenchOptions, Progress, Target
from pipeline.bench.report import BenchReport, LevelResult, SearchResult
from pipeline.bench.search import Found, Search, Trial, Unmeasurable, find
from pipeline.bench.wire.connect import connect
from pipeline.bench.wire.transport import Client
from pipeline.bench.work.loads import Closed, Load
from pipeline.bench.work.texts import count_tokens, load_tokenizer
from pipeline.bench.work.workload import Render, Workload

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Requests, one after the other, that tell a search where to begin.
ALONE = 8


def run(options: BenchOptions, render: Render | None, progress: Callable[[Progress], None] | None) -> BenchReport:
    import uvloop

    tokenizer = load_tokenizer(options.tokenizer)
    report = BenchReport(
        command=sys.argv,
        options=options.to_json(),
        tokenizer_sha256=digest(options.tokenizer),
        work_sha256={str(file): digest(file) for file in options.work.files},
        started=_now(),
    )
    session = _Session(options, report, tokenizer, render, progress)
    loop = uvloop.new_event_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, session.interrupt)
        loop.run_until_complete(session.run())
    finally:
        loop.close()
    report.finished = _now()
    return report


def digest(file: Path) -> str:
    """Raises InputDataError."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise InputDataError(f"{file} cannot be read", why=error.strerror or str(error)) from None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class _Session:
    """Holds the level in progress, so that an interrupt finds it."""

    def __init__(
        self, options: BenchOptions, report: BenchReport, tokenizer: Tokenizer, render: Render | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:  # fmt: skip
        self._options = options
        self._report = report
        self._count = partial(count_tokens, tokenizer)
        self._tokenize: Callable[[str], list[int]] = lambda text: tokenizer.encode(text).ids
        # One for the whole run: no prompt of a level has been seen, and cached, in an earlier one.
        self._workload = Workload(options.work, tokenizer, options.seed, render)
        self._asker = Asker()
        self._progress = progress
        self._running: LevelRun | None = None

    def interrupt(self) -> None:
        self._report.interrupted = True
        if self._running is not None:
            self._running.interrupt()

    async def run(self) -> None:
        options = self._options
        clients: list[tuple[Client, Target]] = []
        try:
            # All of them first: a wrong second URL should not cost the time of the first.
            for target in options.targets:
                client = await connect(target.protocol, target.url, target.model, self._tokenize, options.wiring)
                clients.append((client, target))
                await self._try_one(client)
                self._report.endpoints.append(client.described())
            for client, target in clients:
                if options.search is not None:
                    await self._search(client, target, options.search)
                    continue
                for load in options.loads:
                    for repeat in range(options.repeat):
                        if self._report.interrupted:
                            return
                        await self._measure(client, target, load, repeat)
        finally:
            for client, _ in clients:
                await client.sender.close()

    async def _try_one(self, client: Client) -> None:
        """A model that is ready may still fail on its first request; then nothing is worth measuring."""
        one = self._level_run(client, Closed(concurrency=1, requests=2, warmup=0), None)
        await one.run()
        _, records = one.result(self._count, [], 0)
        failure = records.failures[0] if records.failures else None
        if failure is not None:
            raise StageFailed(
                f"the first request over {client.codec.protocol} failed",
                why=f"{failure.kind}: {failure.message}",
                remedy="see the server's log",
            )

    async def _search(self, client: Client, target: Target, search: Search) -> None:
        if self._report.interrupted:
            return

        async def measure(load: Load, repeat: int) -> tuple[LevelResult, Trial]:
            for _ in range(search.repeats):  # a busy moment of the client's is no reason to end
                result = await self._measure(client, target, load, repeat)
                if self._report.interrupted:
                    raise Unmeasurable("it was interrupted")
                if not result.verdict["reasons"]:
                    return result, search.trial(result.slo, result.stopped is not None)
            reason = result.verdict["reasons"][0]
            raise Unmeasurable(f"at {load.label} the client was the limit: {reason['what']}, {reason['why']}")

        async def at(rate: float, repeat: int) -> Trial:
            return (await measure(replace(search.load, rate=rate), repeat))[1]

        try:
            start = search.load.rate
            if not search.known:
                alone, trial = await measure(Closed(concurrency=1, requests=ALONE), 0)
                if not trial.passed and trial.clear:
                    raise Unmeasurable("one request at a time does not meet the objectives")
                start = alone.metrics["request_throughput"]["value"] or start
            found = await find(search, start, at)
        except Unmeasurable as why:
            found = Found(ended=str(why))
        self._report.searches.append(SearchResult(protocol=client.codec.protocol, search=search, found=found))

    async def _measure(self, client: Client, target: Target, load: Load, repeat: int) -> LevelResult:
        self._running = self._level_run(client, load, self._reporter(client, load), target.metrics_url, repeat)
        await self._running.run()
        result, records = self._running.result(self._count, list(self._options.objectives), repeat)
        self._running = None
        self._report.results.append(result)
        self._report.records.append(records)
        return result

    def _level_run(
        self,
        client: Client,
        load: Load,
        watch: Callable[[Live], None] | None,
        metrics_url: str | None = None,
        repeat: int = 0,
    ) -> LevelRun:
        options = self._options
        places = load.concurrency if isinstance(load, Closed) else OPENED
        limits = Limits(request_s=options.timeout_s, token_s=options.token_timeout_s, failures=max(5, 2 * places))
        return LevelRun(
            load, client, self._asker, self._workload, limits=limits, seed=options.seed + repeat,
            metrics_url=metrics_url, watch=watch,
        )  # fmt: skip

    def _reporter(self, client: Client, load: Load) -> Callable[[Live], None] | None:
        callback = self._progress
        if callback is None:
            return None
        total = load.measured_requests if isinstance(load, Closed) else None
        protocol = client.codec.protocol
        return lambda live: callback(Progress(protocol=protocol, label=load.label, total=total, live=live))
