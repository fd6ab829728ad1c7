"""Fit of efficiencies to published runs, by coordinate descent on the mean absolute logarithm of predicted over
measured, and the file that it writes. Shares of single operations are bound by what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import yaml

from tests.benchmarks.planner.batch import Batch
from tests.support.published import vllm, waves
from trtpipe.configs import facts
from trtpipe.pipeline.planner.cost import Step
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, option

PROBED = "h200"
# Medians over AIConfigurator 0.12's tables of TensorRT-LLM's single operations (see docs/measurements/planner.md), and
# how far a fit may move from them: a card that is busy for minutes clocks lower than one that is measured for a second.
PRODUCTS = {
    "80.fp16": 0.82, "89.fp16": 0.60, "89.fp8": 0.50, "90.fp16": 0.79, "90.fp8": 0.63, "100.fp16": 0.69,
    "100.fp8": 0.60, "100.fp4": 0.45,
}  # fmt: skip
FREEDOM = 1.15
OVERHEADS = ("step_s", "layer_s", "request_s")
BOUNDS = {"elementwise": (2.0, 8.0), "layer_s": (5e-6, 1e-4), "kv": (0.78, 0.92)}
# Not fitted, since runs do not tell these apart from a layer's overhead: read off the same tables of all-reduces over
# NVLink. `nvlink` is of large ones of eight H100; two reach 0.37. A ring's start is NCCL's on our H100, and where the
# tables pass from one shot to a ring.
MEASURED = {"allreduce_s": 3e-6, "one_shot": 0.3, "ring_s": 2.7e-5, "nvlink": 0.52}
# The releases that the others are measured by.
NEWEST = {"tensorrt_llm": "0.17", "trtllm_pytorch": "1.2"}
HEADER = """\
# How much of a data sheet's figures an engine reaches. Written by `python -m tests.benchmarks.planner --fit` from
# single operations and published runs; what each means is in pipeline/planner/efficiency.py.
"""

Key = tuple[str, ...]


def slow(figure: MeasuredRun, how: Efficiency) -> tuple[float, float] | None:
    """(TTFT, TPOT) in ms of a run with few requests at once, without a simulation; None where queues decide.

    In a second `rate` steps compute a prompt beside those that decode; a request that comes waits for half a step,
    and for the prompts before it as in a queue with one server and equal service times (M/D/1).
    """
    if figure.tpot_ms is None and figure.ttft_ms is not None:
        prompt = Step(figure.input_tokens, 0, 0, figure.input_tokens**2 / 2, 1)
        return float(option(figure).cost.under(how).seconds(prompt)) * 1e3, math.nan
    if figure.tpot_ms is None or not ((figure.concurrency or 99) <= 25 or (figure.requests_per_s or 99) <= 8):
        return None
    spell = figure.tpot_ms / 1e3 * figure.output_tokens
    rate = figure.requests_per_s or (figure.concurrency or 1) / (spell + (figure.ttft_ms or 0) / 1e3)
    beside = figure.concurrency - 1 if figure.concurrency else rate * spell
    cost, middle = option(figure).cost.under(how), figure.input_tokens + figure.output_tokens / 2
    busy = max(1.0, beside + (figure.concurrency is not None))
    alone = float(cost.seconds(Step(0, busy, busy * middle, 0, busy)))
    work = figure.input_tokens**2 / 2
    mixed = float(cost.seconds(Step(figure.input_tokens, beside, beside * middle, work, beside + 1)))
    each = 1 / (rate + max(1 - rate * mixed, 0.02) / alone)
    load = min(0.9, rate * mixed) if beside else 0.0
    waits = (alone if beside else 0.0) / 2 + load * mixed / (2 * (1 - load))
    return (mixed + waits + how.front_s) * 1e3, (alone if figure.concurrency == 1 else each) * 1e3


def loss(how: Efficiency, known: Batch, few: Sequence[MeasuredRun]) -> float:
    true = np.array([one.output_tokens_per_s for one in known.figures])
    # A published outlier counts, and does not rule.
    total = np.minimum(np.abs(np.log(known.predicted(how) / true)), 0.4).tolist()
    under = {key: how.of(*key) for key in {(one.runtime, one.release) for one in few}}
    for figure in few:
        found = slow(figure, under[figure.runtime, figure.release])
        for value, measured in zip(found or (), (figure.ttft_ms, figure.tpot_ms), strict=False):
            if measured is not None and not math.isnan(value):
                total.append(min(abs(math.log(value / measured)), 0.4))
    return float(np.mean(total))


def fit(how: Efficiency, known: Batch, few: Sequence[MeasuredRun], rounds: int) -> Efficiency:
    keys: list[Key] = [("products", one) for one in PRODUCTS]
    keys += [("pcie", str(one)) for one in how.pcie] + [
        ("elementwise",),
        ("kv",),
        ("front_s",),
    ]
    keys += [(name,) for name in OVERHEADS]
    keys += [("runtimes", "trtllm_pytorch", name) for name in OVERHEADS]
    keys += [
        ("releases", runtime, one) for runtime, rows in how.releases.items() for one in rows if one != NEWEST[runtime]
    ]
    how = replace(how, **MEASURED)  # type: ignore[arg-type]
    step = dict.fromkeys(keys, 0.15)
    best = loss(how, known, few)
    for number in range(rounds):
        before = best
        for key in keys:
            for sign in (1, -1):
                tried = _moved(how, key, math.exp(sign * step[key]))
                value = loss(tried, known, few)
                if value < best:
                    best, how = value, tried
                    step[key] *= 1.3
                    break
            else:
                step[key] *= 0.4
        print(f"round {number}: {best:.4f}", flush=True)
        if before - best < 2e-4:
            break
    return how


def _moved(how: Efficiency, key: Key, factor: float) -> Efficiency:
    def within(name: str, value: float) -> float:
        low, high = BOUNDS.get(name, (0.0, math.inf))
        return min(high, max(low, value))

    name = key[0]
    if name == "products":
        middle = PRODUCTS[key[1]]
        value = min(middle * FREEDOM, max(middle / FREEDOM, how.products[key[1]] * factor))
        return replace(how, products={**how.products, key[1]: value})
    if name == "pcie":
        return replace(how, pcie={**how.pcie, int(key[1]): min(0.9, how.pcie[int(key[1])] * factor)})
    if len(key) == 3:
        rows: dict[str, dict[str, float]] = getattr(how, name)
        value = within(key[2], rows[key[1]][key[2]] * factor)
        changed: Any = {name: {**rows, key[1]: {**rows[key[1]], key[2]: value}}}
    else:
        changed = {name: within(name, getattr(how, name) * factor)}
    return replace(how, **changed)


def bounded(how: Efficiency) -> list[tuple[str, float]]:
    """Fitted parameters that are at a bound, by name."""
    values = {name: (getattr(how, name), *BOUNDS[name]) for name in BOUNDS}
    values |= {
        f"{runtime}.{name}": (row[name], *BOUNDS[name])
        for runtime, row in how.runtimes.items()
        for name in row
        if name in BOUNDS and runtime != "vllm"
    }
    values |= {
        f"products.{kind}": (how.products[kind], middle / FREEDOM, middle * FREEDOM)
        for kind, middle in PRODUCTS.items()
    }
    return [
        (name, value) for name, (value, low, high) in values.items() if value <= low * 1.003 or value >= high * 0.997
    ]


def write_efficiency(how: Efficiency, errors: dict[str, dict[str, float]]) -> None:
    """Write configs/efficiency.yaml, with the errors of the judgement."""
    # No table tells these: INT8 as the other 8-bit type of its card, or as FP16 where it has none.
    products = dict(how.products)
    products |= {f"{sm}.int8": products.get(f"{sm}.fp8", products[f"{sm}.fp16"]) for sm in (80, 89, 90, 100)}
    plain: dict[str, Any] = {**asdict(how), "products": dict(sorted(products.items())), "probed": _probed()}
    plain["runtimes"] = {**how.runtimes, "vllm": fit_vllm(how)}
    plain["errors"] = errors
    for name in ("slower", "runtime", "ahead"):
        del plain[name]

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(one) for key, one in value.items()}
        return float(f"{value:.3g}")

    text = yaml.safe_dump({name: short(value) for name, value in plain.items()}, sort_keys=False, width=120)
    (facts.CONFIGS / "efficiency.yaml").write_text(HEADER + text)


def fit_vllm(how: Efficiency) -> dict[str, float]:
    """The overheads of another engine: the best of a grid over its runs in 16 bits on one card."""
    points = [point for point in vllm() if (point.gpu, point.dtype) == (PROBED, "bf16")]
    base = how.of("vllm")

    def off(changed: dict[str, float]) -> float:
        found = [waves(point, replace(base, **changed)).tokens_per_s / point.tokens_per_s for point in points]  # type: ignore[arg-type]
        return sum(abs(math.log(one)) for one in found)

    grid = [
        {"step_s": step, "layer_s": layer, "request_s": request}
        for step in (0.0, 2e-4, 5e-4, 8e-4)
        for layer in (5e-6, 1.5e-5, 2.5e-5, 3.5e-5)
        for request in (2e-6, 4e-6, 6e-6, 9e-6, 1.2e-5)
    ]
    best: dict[str, float] = min(grid, key=off)
    return {**best, "ahead": base.ahead}


def _probed() -> dict[str, float]:
    """What a healthy card of the fitted kinds gives torch: our own H200, as shares of its data sheet."""
    gpu = facts.find_gpu(PROBED)
    found = gpu.measured
    assert found is not None
    assert found.nvlink_gbs is not None
    shares = {kind: found.tflops[kind] / gpu.tflops[kind] for kind in ("bf16", "fp16", "fp8")}
    return {
        "bandwidth": found.bandwidth_gbs / gpu.require("bandwidth_gbs"),
        "nvlink": found.nvlink_gbs / gpu.require("nvlink_gbs"),
        **shares,
    }
