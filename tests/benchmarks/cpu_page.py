"""The page of `tests.benchmarks.cpu`, docs/measurements/cpu.md."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# Share of vLLM's speed that the reference runtime is to reach.
GOAL = 0.8
RUNTIMES, DTYPES, LEVELS = ("reference", "vllm"), ("bf16", "fp32"), (1, 8, 32)
TOKENS = 64
# Requests in flight whose steps are profiled, and those of a server.
PROFILED, SERVED_LEVELS = 8, (1, 8)


def processor() -> str:
    """Name of the processor, and which of the wide instructions it has."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    told = {name.strip(): text.strip() for name, _, text in lines}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if flag in told.get("flags", "").split()]
    return f"{told.get('model name', platform.machine())} ({', '.join(wide)})"


def page(
    found: dict[tuple[str, str], list[dict[str, Any]]], fronts: dict[str, dict[str, list[float]]], threads: int
) -> str:
    """The page: a table of tokens per second, load and memory, one of a step's time, and one of the fronts."""
    versions = {name: text for rounds in found.values() for name, text in rounds[0]["versions"].items()}
    rounds = max(len(results) for results in found.values())
    told = "one round" if rounds == 1 else f"the best of {rounds} rounds in turn"
    lines = [
        "# On a CPU: the reference runtime beside vLLM",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {processor()}, {threads} threads,",
        f"{', '.join(f'{name} {text}' for name, text in sorted(versions.items()))}.",
        "SmolLM2-135M-Instruct, without a server: a closed loop of requests with 64 random tokens in and 64 out, no",
        f"prompt twice. Output tokens a second, {told}; threads stay on their",
        "processors. Written by `make bench-cpu`.",
        "",
        "| runtime | type | " + " | ".join(f"{level} in flight" for level in LEVELS) + " | load, s | peak memory, GB |",
        "|---|---|" + "---|" * (len(LEVELS) + 2),
    ]
    for (runtime, dtype), results in found.items():
        best = [max(result["tokens_per_s"][str(level)] for result in results) for level in LEVELS]
        load, peak = min(result["load_s"] for result in results), max(result["peak_gb"] for result in results)
        speeds = " | ".join(f"{speed:.1f}" for speed in best)
        lines.append(f"| {runtime} | {dtype} | {speeds} | {load:.1f} | {peak:.2f} |")
    return "\n".join([*lines, "", *_ratios(found), *_steps(found), *_fronts(found, fronts)])


def _best(results: list[dict[str, Any]], level: int) -> float:
    return float(max(result["tokens_per_s"][str(level)] for result in results))


def _ratios(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    """The reference runtime's speed as a share of vLLM's, and whether the goal of GOAL is met."""
    lines = []
    for dtype in DTYPES:
        pair = [found.get((runtime, dtype)) for runtime in RUNTIMES]
        if all(pair):
            shares = [_best(pair[0] or [], level) / _best(pair[1] or [], level) for level in LEVELS]
            below = [str(level) for level, share in zip(LEVELS, shares, strict=True) if share < GOAL]
            told = f"missed at {' and '.join(below)}" if below else "met"
            words = " / ".join(f"{share:.2f}" for share in shares)
            levels = ", ".join(map(str, LEVELS))
            lines.append(
                f"In {dtype} the reference runtime has {words} of vLLM's speed at {levels} (goal {GOAL}: {told})."
            )
    return [*lines, ""]


def _steps(found: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    """Table of a step of the reference runtime: milliseconds of products, attention and the rest."""
    lines = [
        f"A step of {PROFILED} requests in the reference runtime, in milliseconds by torch's profiler, which slows it:",
        "",
        "| type | matrix products | conversions and copies | attention and its cache | everything else |",
        "|---|---|---|---|---|",
    ]
    for (runtime, dtype), results in found.items():
        if runtime == "reference":
            parts = min((result["step_ms"] for result in results), key=lambda parts: sum(parts.values()))
            lines.append(f"| {dtype} | {' | '.join(f'{part:.1f}' for part in parts.values())} |")
    return [*lines, ""]


def _fronts(found: dict[tuple[str, str], list[dict[str, Any]]], fronts: dict[str, dict[str, list[float]]]) -> list[str]:
    """vLLM behind its fronts, beside vLLM without a server."""
    if not fronts:
        return []
    lines = [
        "## vLLM behind its fronts",
        "",
        f"Output tokens a second with the load tester on the same processors, {TOKENS} tokens in and {TOKENS} out.",
        "`vllm serve` is what `trtpipe serve --front native` starts.",
        "",
        "| type | way in | " + " | ".join(f"{level} in flight" for level in SERVED_LEVELS) + " |",
        "|---|---|" + "---|" * len(SERVED_LEVELS),
    ]
    for dtype, ways in fronts.items():
        alone = found.get(("vllm", dtype))
        rows = {"none, in its process": [_best(alone, level) for level in SERVED_LEVELS]} if alone else {}
        for name, speeds in (rows | ways).items():
            lines.append(f"| {dtype} | {name} | {' | '.join(f'{speed:.1f}' for speed in speeds)} |")
    return [*lines, ""]
