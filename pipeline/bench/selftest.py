"""Measurement of the load generator's own errors and capacity on this machine, against the mock server.

The mock server runs on another core where there is one, so that only the client's own work can make it late. Every
figure compares what was reported with what that server did in the same run.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.bench.options import BenchOptions, Target
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.bench.results.records import NONE, Records
from trtpipe.pipeline.bench.results.report import BenchReport
from trtpipe.pipeline.bench.run import run

TTFT_S = 0.05
OUTPUT_TOKENS, FEW_TOKENS = 64, 16
# Longest token gap of the mock server after a run. The error of the client does not grow with longer gaps.
LONGEST_GAP_MS = 50.0
# 238,000 tokens a second: about as much as a server of one core can send.
FLOOD, FLOOD_STREAMS, FLOOD_TOKENS = Timing(ttft_s=0.02, itl_s=0.001), 256, 256


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one protocol at one number of streams. Errors are reported values minus the server's own, in ms.

    itl_p99_said, itl_p99_true  99th percentile of the token gaps, as reported and as sent
    reached                tokens/s, as a share of what this many streams would give without any delay
    cpu_s_per_1000_tokens  CPU time of the client
    """

    protocol: str
    streams: int
    ttft_p50: float
    ttft_p99: float
    itl_mean: float
    itl_p99_said: float
    itl_p99_true: float
    reached: float
    cpu_s_per_1000_tokens: float


def check(protocol: str, streams: int, wiring: Wiring) -> None:
    """Raises UsageError for what `measure` could not measure, before a server is started."""
    try:
        _options(protocol, "", Path(), Closed(concurrency=streams), OUTPUT_TOKENS, wiring)
    except UsageError as error:
        raise UsageError(error.what.replace("concurrency", "--streams"), why=error.why, remedy=error.remedy) from None


def measure(protocol: str, streams: int, itl_s: float, wiring: Wiring) -> Finding:
    """Measure one protocol with `streams` in flight. Raises HostError when the server does not start, KeyboardInterrupt
    or Ended where a signal ends it."""
    return _measure(protocol, streams, Timing(ttft_s=TTFT_S, itl_s=itl_s), OUTPUT_TOKENS, wiring)


def ceiling(protocol: str, wiring: Wiring) -> float:
    """Tokens per second that would fill a core of the client, from its CPU time per token when many come at once."""
    found = _measure(protocol, FLOOD_STREAMS, FLOOD, FLOOD_TOKENS, wiring, requests=8 * FLOOD_STREAMS)
    return 1000 / found.cpu_s_per_1000_tokens


def state_error(report: BenchReport, options: BenchOptions) -> None:
    """Write `measured_error` of each endpoint into a report: the client's error on this host, with the peak number of
    streams in flight and the token gaps of that run, at most LONGEST_GAP_MS. Takes some seconds. Raises HostError."""
    for endpoint, target in zip(report.endpoints, options.targets, strict=True):
        mine = [result for result in report.results if result.protocol == target.protocol]
        gaps = [result.metrics["inter_chunk_latency"]["p50"] for result in mine]
        known = [gap for gap in gaps if gap]
        if not known:
            continue
        streams = max(result.client["in_flight"]["reached"] for result in mine)
        gap = min(*known, LONGEST_GAP_MS)
        timing = Timing(ttft_s=TTFT_S, itl_s=gap / 1e3)
        found = _measure(target.protocol, streams, timing, FEW_TOKENS, options.wiring, requests=max(8, 2 * streams))
        endpoint["measured_error"] = {
            "streams": streams, "itl_ms": gap, "ttft_p50_ms": found.ttft_p50, "ttft_p99_ms": found.ttft_p99,
            "itl_mean_ms": found.itl_mean, "itl_p99_ms": found.itl_p99_said - found.itl_p99_true,
        }  # fmt: skip


def _options(
    protocol: str, url: str, tokenizer: Path, load: Closed, tokens: int, wiring: Wiring
) -> BenchOptions:  # fmt: skip
    return BenchOptions(
        targets=(Target(protocol=protocol, url=url, model="ensemble"),), tokenizer=tokenizer, loads=(load,),
        work=Work(input_tokens=32, output_tokens=tokens), wiring=wiring,
    )  # fmt: skip


def _measure(
    protocol: str, streams: int, timing: Timing, tokens: int, wiring: Wiring, *, requests: int | None = None
) -> Finding:
    with tempfile.TemporaryDirectory() as scratch, _apart() as core:
        folder = Path(scratch)
        server = MockServerProcess.start(timing, folder / "truth.jsonl", cpu=core)
        try:
            url = f"127.0.0.1:{server.grpc_port}" if protocol == "grpc" else f"http://127.0.0.1:{server.http_port}"
            api = "/v1" if protocol in ("completions", "chat") else ""
            load = Closed(concurrency=streams, requests=requests)
            report = run(_options(protocol, url + api, write_tokenizer(folder), load, tokens, wiring), None, None)
        finally:
            truth = {one.id: one for one in server.stop()}
    if report.interrupted:
        raise report.interruption()
    (result,), (records,) = report.results, report.records
    first, said, true = errors(records, truth)
    throughput = result.metrics["output_token_throughput"]["value"] or 0.0
    full = streams * tokens / (timing.ttft_s + (tokens - 1) * timing.itl_s)
    ttft_p50, ttft_p99 = _percentiles(first, 50, 99)
    return Finding(
        protocol=protocol,
        streams=streams,
        ttft_p50=ttft_p50,
        ttft_p99=ttft_p99,
        itl_mean=float(said.mean() - true.mean()),
        itl_p99_said=_percentiles(said, 99)[0],
        itl_p99_true=_percentiles(true, 99)[0],
        reached=throughput / full,
        cpu_s_per_1000_tokens=result.client["cpu_s_per_1000_tokens"],
    )


def errors(
    records: Records, truth: Mapping[str, Truth]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(time to first token minus the server's own, gaps as reported, gaps as sent), in ms, of good requests."""
    first: list[float] = []
    said: list[NDArray[np.int64]] = []
    true: list[NDArray[np.int64]] = []
    for i in np.flatnonzero(records.good()).tolist():
        known = truth[records.ids[i]]
        stamps = records.stamps[records.offsets[i] : records.offsets[i + 1]]
        assert records.sent[i] != NONE
        first.append((int(stamps[0] - records.sent[i]) - (known.stamps_ns[0] - known.arrival_ns)) / 1e6)
        said.append(np.diff(stamps))
        true.append(np.diff(np.array(known.stamps_ns, dtype=np.int64)))
    return np.array(first), np.concatenate(said) / 1e6, np.concatenate(true) / 1e6


def _percentiles(values: NDArray[np.float64], *points: float) -> Sequence[float]:
    return [float(value) for value in np.percentile(values, points)]


@contextlib.contextmanager
def _apart() -> Iterator[int | None]:
    """Keep this process on one core; yield another core for the server, None where there is none."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield None
        return
    os.sched_setaffinity(0, {cores[0]})
    try:
        yield cores[1]
    finally:
        os.sched_setaffinity(0, cores)


def write_tokenizer(folder: Path) -> Path:
    """Write a word-level tokenizer for the client; the mock server reads none."""
    letters = "abcdefghijklmnop"
    words = [a + b + c for a in letters for b in letters for c in letters]
    made: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(["?", *words])}, "unk_token": "?"},
    }  # fmt: skip
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    return path
