"""The planner's terms of single operations beside what AIConfigurator's tables measured of TensorRT-LLM's kernels."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.planner.peer import TABLES
from tests.support.published import MEASURED
from trtpipe.configs import facts
from trtpipe.pipeline.planner.cost import all_reduce
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency


def operations(scratch: Path) -> list[str]:
    """Our terms beside AIConfigurator's measured tables of single operations."""
    how = load_efficiency()
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in [*json.loads((scratch / TABLES).read_text()), *_sums()]:
        of = how.of("vllm") if one["what"].startswith("sum") else how
        ratios.setdefault((one["what"], one["gpu"]), []).append(_operation(one, of) / (one["ms"] / 1e3))
    lines = [
        "## Single operations",
        "",
        "The terms of `pipeline/planner/cost.py` over what AIConfigurator's tables measured of TensorRT-LLM's kernels: "
        "median, and the middle half of all sizes. A kernel's start, which the model has in `layer_s`, is added "
        "here. Sums over 2 and 4 GPUs are the fastest way of each size on our own [H100s](h100-x4.md), NCCL or torch's "
        "shared memory, beside the terms of vLLM: small ones take 9 microseconds, three in TensorRT-LLM.",
        "",
        "| operation | GPU | sizes | median | quarter to three quarters |",
        "|---|---|---|---|---|",
    ]
    for (what, gpu), values in sorted(ratios.items()):
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        lines.append(f"| {what} | {gpu} | {len(values)} | {middle - 1:+.0%} | {low - 1:+.0%} to {high - 1:+.0%} |")
    return [*lines, ""]


# Seconds in which a kernel starts and ends, in the same tables: a product of one token of 4096 x 4096 takes so much
# longer than reading its weights, attention of one short sequence so much in all.
PRODUCT_STARTS, ATTENTION_STARTS = 5e-6, 12e-6


# Sizes from which a sum is bound by the link.
LARGE = 1 << 22


def _sums() -> list[dict[str, Any]]:
    """All-reduces that we measured ourselves."""
    measured = json.loads((MEASURED / "h100-x4.json").read_text(encoding="utf-8"))["sums"]["result"]
    return [
        {"what": f"sum over {number} GPUs, {'4 MB and more' if int(size) >= LARGE else 'less than 4 MB'}",
         "gpu": "h100", "tp": int(number), "bytes": int(size),
         "ms": min(row[size] for row in of["by_bytes"].values() if isinstance(row, dict) and size in row) / 1e3}
        for number, of in measured.items()
        for size in of["by_bytes"]["nccl"]
    ]  # fmt: skip


_card = functools.lru_cache(maxsize=None)(facts.find_gpu)


def _operation(one: dict[str, Any], how: Efficiency) -> float:
    gpu = _card(one["gpu"])
    assert gpu.sm is not None
    if one["what"] == "BF16 product":
        compute = 2 * one["m"] * one["n"] * one["k"] / (how.flops(gpu, "bf16") * how.product(gpu.sm, "bf16"))
        reading = one["n"] * one["k"] * 2 / (how.bandwidth(gpu) * how.weights)
        return float((compute**how.sharpness + reading**how.sharpness) ** (1 / how.sharpness)) + PRODUCT_STARTS
    if "bytes" in one:
        return all_reduce(gpu, one["tp"], how).seconds(one["bytes"])
    values = one["batch"] * one["length"] * 2 * one["own"] * 128
    if one["what"] == "decode attention":
        seconds = values * (1 if one["eight"] else 2) / (how.bandwidth(gpu) * how.kv)
        if one["eight"] and one["own"] == one["heads"]:
            seconds = max(seconds, values / (how.flops(gpu, "bf16") * how.own_heads))
        return float(seconds + ATTENTION_STARTS)
    share = how.prompt(gpu.sm, "fp8" if one["eight"] else "bf16")
    products = 4 * one["heads"] * 128 * one["batch"] * one["length"] ** 2 / 2 / (how.flops(gpu, "bf16") * share)
    features = (one["heads"] + 2 * one["own"]) * 128
    elementwise = one["batch"] * one["length"] * features * 2 * how.elementwise / how.bandwidth(gpu)
    return float(products + elementwise + ATTENTION_STARTS)
