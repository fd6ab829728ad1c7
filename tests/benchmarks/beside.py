"""A load tester beside the server of known timing: how a benchmark runs one, and how wrong it finds what it reported.

The server keeps to one core and the load tester, whatever processes it has, to another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import Truth

COMMAND = [str(Path(sys.executable).with_name("trtpipe")), "bench"]


@dataclass(frozen=True)
class Run:
    """One run of a command: what the server did meanwhile, when the command began and ended, how, and what it said.

    status  its exit status; None when it was ended for having taken too long
    """

    truth: list[Truth]
    began_ns: int
    ended_ns: int
    status: int | None
    words: str

    @property
    def start_s(self) -> float:
        """From its start to the arrival of its first request."""
        return (min(known.arrival_ns for known in self.truth) - self.began_ns) / 1e9


def run(
    timing: Timing,
    words: Callable[[MockServerProcess], Sequence[str]],
    scratch: Path,
    *,
    watch: Callable[[subprocess.Popen[bytes]], None],
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Run:
    """Run the command that `words` gives for a server; `watch` looks at it meanwhile, in a thread of its own."""
    client, *_, core = sorted(os.sched_getaffinity(0)) * 2
    server = MockServerProcess.start(timing, scratch / "truth.jsonl", cpu=core)
    said = scratch / "said.log"
    # As an installed command has it: its modules are compiled once. Where Python may not keep them every start does it.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with said.open("wb") as log:
        began = time.monotonic_ns()
        # A session of its own, so that all of its processes can be ended.
        process = subprocess.Popen(
            ["taskset", "-c", str(client), *words(server)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**kept, **(environment or {})},
            start_new_session=True,
        )
    threading.Thread(target=watch, args=(process,), daemon=True).start()
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        ended = time.monotonic_ns()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Run(server.stop(), began, ended, status, said.read_text(encoding="utf-8", errors="replace"))


def bench_words(protocol: str, grpc: str, http: str, tokenizer: Path, report: Path, tokens: int) -> list[str]:
    """`trtpipe bench` over `protocol`, without its load. `grpc` is host:port, `http` a URL."""
    where = {"grpc": ["--grpc-url", grpc], "http": ["--http-url", http]}.get(
        protocol, ["--openai-url", f"{http}/v1", "--openai-model", "ensemble"]
    )
    options = ["--protocol", protocol, *where, "--tokenizer", str(tokenizer), "--input-tokens", "32"]
    return [*COMMAND, *options, "--output-tokens", str(tokens), "--report", str(report)]


def good(requests: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that were measured and answered, of requests in the form of report.requests.jsonl."""
    return [one for one in requests if not one["warmup"] and one["failure"] is None and len(one["stamps_ns"])]


def errors(requests: Iterable[Mapping[str, Any]], truth: Mapping[str, Truth]) -> dict[str, float]:
    """What good requests were reported to be less what they were, by the server's stamps of the same requests; ms."""
    first, said, true = [], [], []
    for one in requests:
        known = truth[one["id"]]
        first.append((one["stamps_ns"][0] - one["sent_ns"] - (known.stamps_ns[0] - known.arrival_ns)) / 1e6)
        said.append(np.diff(one["stamps_ns"]) / 1e6)
        true.append(np.diff(np.array(known.stamps_ns)) / 1e6)
    gaps, real = np.concatenate(said), np.concatenate(true)
    return {
        "ttft_p50": float(np.percentile(first, 50)),
        "ttft_p99": float(np.percentile(first, 99)),
        "itl_mean": float(gaps.mean() - real.mean()),
        "itl_p99_said": float(np.percentile(gaps, 99)),
        "itl_p99_true": float(np.percentile(real, 99)),
    }


def median(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}
