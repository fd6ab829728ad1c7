"""How wrong `trtpipe bench` is, what it costs and how fast it is: the command against a server of known timing.

The server keeps to one core and the command to another. Each figure holds what the command's own report says against
what the server did in the same run, and is the median of several runs:

    TTFT error        reported time to first token less the server's own (its write less the request's arrival); ms
    ITL mean error    mean of all reported gaps less the mean of the true ones; ms
    ITL p99           99th percentile of the gaps, reported / true; ms
    load              tokens/s in the window, of what the streams would give without any delay
    CPU s             of the command for 1,000 tokens between its first request and its last token
    start             from the command's start to the arrival of its first request; s
    tail              from the last token to the command's end, reports written; s
    PSS               the most that the command has had up to the last token / to its end, of one more run that is only
                      weighed: for each look at its memory the kernel holds a process up for 2 ms; MB
    ceiling           tokens/s at which a core of the client would be full, by what they cost it (`bench selftest`)

An open loop's arrivals are held against the line of even gaps that fits them best. Its answers have 16 tokens, which do
not fall together with the arrivals: it is the schedule that is looked at, not what the client can read.

    python -m tests.benchmarks.client [--runs 3] [--levels 16:10,256:10,1000:20] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import tempfile
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import beside
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.bench.protocols.connect import Wiring
from trtpipe.pipeline.bench.selftest import ceiling, write_tokenizer

TTFT_S, TOKENS = 0.05, 64
OPEN_TOKENS = 16


@dataclass(frozen=True)
class Run:
    """What one run of the command left: its report, its requests, the truth, how long it took to begin, and its end.

    pss  of the command at moments of the run, in MB; empty of one that was not weighed
    """

    level: dict[str, Any]
    requests: list[dict[str, Any]]
    truth: dict[str, Truth]
    start_s: float
    ended_ns: int
    pss: list[tuple[int, float]]

    def most(self, until_ns: int) -> float:
        """MB."""
        return max((size for at_ns, size in self.pss if at_ns <= until_ns), default=0.0)


def command(
    protocol: str, timing: Timing, words: Sequence[str], scratch: Path, tokens: int = TOKENS, *, weigh: bool = False
) -> Run:
    report = scratch / "report.json"
    report.unlink(missing_ok=True)
    tokenizer = write_tokenizer(scratch)
    sizes: list[tuple[int, float]] = []

    def watch(process: subprocess.Popen[bytes]) -> None:
        while weigh and process.poll() is None:
            sizes.append((time.monotonic_ns(), pss_of(process.pid)))
            time.sleep(0.1)

    run = beside.run(
        timing,
        lambda server: [
            *beside.bench_words(
                protocol,
                f"127.0.0.1:{server.grpc_port}",
                f"http://127.0.0.1:{server.http_port}",
                tokenizer,
                report,
                tokens,
            ),
            *words,
        ],
        scratch,
        watch=watch,
    )
    if not report.is_file():
        raise SystemExit(run.words)
    (level,) = json.loads(report.read_text())["levels"]
    lines = (scratch / "report.requests.jsonl").read_text().splitlines()
    truth = {one.id: one for one in run.truth}
    return Run(level, [json.loads(line) for line in lines], truth, run.start_s, run.ended_ns, sizes)


def pss_of(pid: int, *, files: bool = True) -> float:
    """MiB; 0 of a process that has gone. Without `files` what the process has written alone: the kernel takes pages of
    files back, and reads them again, as it likes."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    except OSError:
        return 0.0
    sizes = {
        name: int(rest.split()[0]) / 1024 for name, _, rest in (line.partition(":") for line in text.splitlines()[1:])
    }
    if not sizes:  # it has ended, and nobody has collected it
        return 0.0
    return sizes["Pss"] if files else sizes["Pss"] - sizes["Pss_File"] + sizes["SwapPss"]


def closed(
    protocol: str, streams: int, itl_s: float, kernel: bool, scratch: Path, *, weigh: bool = False
) -> dict[str, float]:
    """The figures of one closed loop; its memory if it is to be weighed, else all others."""
    words = ["--concurrency", str(streams), "--requests", str(max(128, 128_000 // TOKENS))]
    words.append("--kernel-timestamps" if kernel else "--no-kernel-timestamps")
    run = command(protocol, Timing(ttft_s=TTFT_S, itl_s=itl_s), words, scratch, weigh=weigh)
    good = beside.good(run.requests)
    last = max(one["stamps_ns"][-1] for one in run.requests if one["stamps_ns"])
    if weigh:
        return {"pss": run.most(last), "pss_end": run.most(run.ended_ns)}
    throughput = run.level["metrics"]["output_token_throughput"]["value"] or 0.0
    return {
        **beside.errors(good, run.truth),
        "load": throughput / (streams * TOKENS / (TTFT_S + (TOKENS - 1) * itl_s)),
        "cpu": run.level["client"]["cpu_s_per_1000_tokens"],
        "start": run.start_s,
        "tail": (run.ended_ns - last) / 1e9,
    }


def opened(protocol: str, rate: int, arrivals: str, scratch: Path) -> dict[str, float]:
    """Arrivals of an open loop as the server saw them: rate, CV of the gaps, and how far off an even line."""
    words = ["--rate", str(rate), "--arrivals", arrivals, "--duration", "5"]
    run = command(protocol, Timing(ttft_s=0.005, itl_s=0.0007), words, scratch, OPEN_TOKENS)
    mine = {one["id"] for one in run.requests if not one["warmup"]}
    moments = np.sort([known.arrival_ns for name, known in run.truth.items() if name in mine]) / 1e6
    gaps = np.diff(moments)
    line = moments - np.arange(len(moments)) * 1e3 / rate
    return {
        "rate": float(1e3 / gaps.mean()),
        "cv": float(gaps.std() / gaps.mean()),
        "off": float(np.percentile(np.abs(line - np.median(line)), 99)),
    }


def processor() -> str:
    """Its name, how it runs Python and what it takes to read from a socket: most figures here are as good as those."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    took = min(timeit.repeat("x = 0\nfor _ in range(1_000_000): x += 1", number=1, repeat=5))
    return f"{name}; {1e3 * took:.0f} ms for a million additions, {read_us():.1f} us for a read of TCP"


def read_us() -> float:
    """Microseconds of `recv` for 128 bytes over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as here:
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there, _ = server.accept()
        with there:
            took = []
            for _ in range(5000):
                here.send(bytes(128))
                began = time.perf_counter_ns()
                there.recv(65536)
                took.append(time.perf_counter_ns() - began)
    return statistics.median(took) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--levels", default="16:10,256:10,1000:20", help="streams:ms between tokens")
    parser.add_argument("--protocols", default="grpc,http,chat")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    lines = [
        "# The load tester itself",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {len(os.sched_getaffinity(0))} cores ({processor()}), Python "
        f"{platform.python_version()}; medians of {args.runs} runs. Written by "
        "`python -m tests.benchmarks.client`, which says what the columns mean.",
        "",
        "| protocol | in flight | ms a token | stamps | TTFT error p50 / p99 ms | ITL mean error ms "
        "| ITL p99 said / true ms | load | CPU s / 1,000 tokens | start s | tail s | PSS MB to last token / end |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for protocol in args.protocols.split(","):
            # Compiles what is not compiled yet.
            command(protocol, Timing(ttft_s=TTFT_S, itl_s=0.001), ["--concurrency", "4", "--requests", "8"], scratch)
            for level in args.levels.split(","):
                streams, itl = level.split(":")
                for kernel in (False, True):
                    of = (protocol, int(streams), float(itl) / 1e3, kernel, scratch)
                    one = beside.median([closed(*of) for _ in range(args.runs)]) | closed(*of, weigh=True)
                    lines.append(
                        f"| {protocol} | {streams} | {itl} | {'kernel' if kernel else 'read'} "
                        f"| {one['ttft_p50']:.2f} / {one['ttft_p99']:.2f} | {one['itl_mean']:.3f} "
                        f"| {one['itl_p99_said']:.2f} / {one['itl_p99_true']:.2f} | {one['load']:.1%} "
                        f"| {one['cpu']:.4f} | {one['start']:.2f} | {one['tail']:.2f} "
                        f"| {one['pss']:.0f} / {one['pss_end']:.0f} |"
                    )
                    print(lines[-1], flush=True)
        lines += [
            "",
            "| protocol | asked, requests/s | arrivals | got | CV of gaps | off an even line, p99 ms |",
            "|---|---|---|---|---|---|",
        ]
        for protocol in args.protocols.split(","):
            for rate, arrivals in ((200, "constant"), (2000, "constant"), (200, "poisson")):
                one = beside.median([opened(protocol, rate, arrivals, scratch) for _ in range(args.runs)])
                off = f"{one['off']:.2f}" if arrivals == "constant" else "-"
                lines.append(f"| {protocol} | {rate} | {arrivals} | {one['rate']:.1f} | {one['cv']:.3f} | {off} |")
                print(lines[-1], flush=True)
        lines += ["", "| protocol | stamps | ceiling, tokens/s |", "|---|---|---|"]
        for protocol in args.protocols.split(","):
            for kernel in (False, True):
                found = statistics.median(ceiling(protocol, Wiring(kernel_stamps=kernel)) for _ in range(args.runs))
                lines.append(f"| {protocol} | {'kernel' if kernel else 'read'} | {found:,.0f} |")
                print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    if args.report:
        args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
