"""One run: connect, try one request, then every protocol at every concurrency."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice

from engines.errors import StageFailed
from pipeline.bench.client import Transport
from pipeline.bench.load import ClosedLoop, ClosedLoopDriver
from pipeline.bench.options import BenchOptions, Progress
from pipeline.bench.record import RequestRecord, settle
from pipeline.bench.report import BenchReport, level_result
from pipeline.bench.transports import connect
from pipeline.bench.workload import count_tokens, load_tokenizer, prompts

# Nanoseconds between two reports of progress: they are made in the loop that measures.
PROGRESS_EVERY_NS = 250_000_000


def run(options: BenchOptions, progress: Callable[[Progress], None] | None) -> BenchReport:
    tokenizer = load_tokenizer(options.tokenizer)
    report = BenchReport(
        options={**asdict(options), "tokenizer": str(options.tokenizer)},
        tokenizer_sha256=hashlib.sha256(options.tokenizer.read_bytes()).hexdigest(),
        started=_now(),
    )
    # One source for the whole run: no prompt of a level has been seen, and cached, in an earlier one.
    source = prompts(tokenizer, tokens=options.input_tokens, seed=options.seed)
    session = _Session(options, source, partial(count_tokens, tokenizer), report, progress)
    try:
        asyncio.run(session.run())
    except KeyboardInterrupt:
        report.interrupted = True
        session.finish_level(interrupted=True)
    report.finished = _now()
    return report


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


class _Session:
    """Holds the level in progress, so that an interrupt finds it."""

    def __init__(
        self,
        options: BenchOptions,
        source: Iterator[str],
        count: Callable[[str], int],
        report: BenchReport,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._options = options
        self._prompts = source
        self._count = count
        self._report = report
        self._progress = progress
        self._level: tuple[str, ClosedLoopDriver] | None = None

    async def run(self) -> None:
        transports: list[Transport] = []
        try:
            # All of them first: a wrong second URL should not cost the time of the first.
            for protocol in self._options.chosen_protocols():
                transport = await connect(protocol, self._options.url(protocol) or "", self._options.model)
                transports.append(transport)
                await self._try_one(transport)
                self._report.endpoints.append(_endpoint_entry(transport))
            for transport in transports:
                for concurrency in self._options.concurrency:
                    await self._run_level(transport, concurrency)
        finally:
            for transport in transports:
                await transport.close()

    async def _try_one(self, transport: Transport) -> None:
        """A model that is ready may still fail on its first request; then nothing is worth measuring."""
        load = ClosedLoop(concurrency=1, requests=1, warmup=0)
        driver = self._driver(load, transport, self._prompts)
        await driver.run()
        (record,) = driver.records
        settle(record, self._count)
        if record.failure is not None:
            raise StageFailed(
                f"the first request to '{transport.endpoint.model}' at {transport.endpoint.url} failed",
                why=f"{record.failure.kind}: {record.failure.message}",
                remedy="see the server's log",
            )

    async def _run_level(self, transport: Transport, concurrency: int) -> None:
        options = self._options
        load = ClosedLoop(
            concurrency=concurrency,
            requests=options.requests_at(concurrency),
            duration_s=options.duration_s,
            warmup=options.warmup,
        )
        total = load.total_requests(options.output_tokens)
        # Made before the clock starts where their number is known. With a duration they are made one by one, and
        # what that takes (0.2 ms for 64 tokens) shows as dispatch_delay.
        source = self._prompts if total is None else iter(list(islice(self._prompts, total)))
        driver = self._driver(load, transport, source)
        self._level = (transport.endpoint.protocol, driver)
        await driver.run()
        self.finish_level(interrupted=False)

    def _driver(self, load: ClosedLoop, transport: Transport, source: Iterator[str]) -> ClosedLoopDriver:
        return ClosedLoopDriver(
            load,
            transport,
            source,
            input_tokens=self._options.input_tokens,
            output_tokens=self._options.output_tokens,
            timeout_s=self._options.timeout_s,
            finished=self._reporter(load, transport.endpoint.protocol),
        )

    def _reporter(self, load: ClosedLoop, protocol: str) -> Callable[[RequestRecord], None] | None:
        callback = self._progress
        if callback is None:
            return None
        warmed = done = failed = 0
        shown_ns = 0

        def finished(record: RequestRecord) -> None:
            nonlocal warmed, done, failed, shown_ns
            warmed += record.warmup
            done += not record.warmup
            failed += record.failure is not None
            now = time.perf_counter_ns()
            if now - shown_ns >= PROGRESS_EVERY_NS or done == load.requests:
                shown_ns = now
                callback(
                    Progress(
                        protocol=protocol,
                        concurrency=load.concurrency,
                        warmed=warmed,
                        done=done,
                        total=load.requests,
                        failed=failed,
                    )
                )

        return finished

    def finish_level(self, *, interrupted: bool) -> None:
        """Turn the level in progress, if any, into a result."""
        if self._level is None:
            return
        protocol, driver = self._level
        self._level = None
        for record in driver.records:
            settle(record, self._count)
        self._report.results.append(
            level_result(
                driver.records,
                protocol=protocol,
                concurrency=driver.load.concurrency,
                stopped=driver.stopped,
                interrupted=interrupted,
            )
        )


def _endpoint_entry(transport: Transport) -> dict[str, object]:
    endpoint = transport.endpoint
    return {
        "protocol": endpoint.protocol,
        "url": endpoint.url,
        "server": f"{endpoint.server_name} {endpoint.server_version}",
        "model": endpoint.model,
        "model_versions": list(endpoint.model_versions),
        "inputs_not_declared": endpoint.undeclared_inputs,
    }
