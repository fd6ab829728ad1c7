"""Fit of efficiencies to published runs, by robust least squares of the logarithm of predicted over measured, and the
file that it writes. Shares of single operations are bound by what was measured of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

from tests.benchmarks.planner.batch import Batch, spread
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
# Not fitted, since runs do not tell these apart from a layer's overhead or a product's share: read off the same tables,
# of decode attention and of all-reduces over NVLink. A ring's start and share are NCCL's on our H100s too, and eight
# Hopper GPUs, whose switch adds up, do better.
FIXED = {"kv": 0.85, "allreduce_s": 3e-6, "one_shot": 0.6, "ring_s": 3e-5, "nvlink": 0.75}
# Where every fit begins, and within which bounds it stays. A release begins as fast as the newest of its runtime.
OVERHEADS = {"step_s": (5e-4, 5e-5, 2e-3), "layer_s": (3e-5, 5e-6, 1e-4), "request_s": (4e-6, 1e-7, 5e-5)}
OTHERS = {"elementwise": (4.0, 2.0, 8.0), "allreduce_share": (0.8, 0.3, 1.0), "front_s": (2e-3, 1e-4, 2e-2)}
PCIE, RELEASE = (0.5, 0.1, 0.9), (1.0, 0.5, 2.0)
# The releases that the others are measured by.
NEWEST = {"tensorrt_llm": "0.17", "trtllm_pytorch": "1.2"}
# Errors of this size begin to count less than by their square: a published outlier counts, and does not rule.
ROBUST = 0.03
HEADER = """\
# How much of a data sheet's figures an engine reaches. Written by `python -m tests.benchmarks.planner --fit` from
# single operations and published runs; what each means is in pipeline/planner/efficiency.py.
"""

Key = tuple[str, ...]


class Timed:
    """Runs with few requests at once: their (TTFT, TPOT) in seconds without a simulation; nan where queues decide.

    In a second `rate` steps compute a prompt beside those that decode; a request that comes waits for half a step,
    and for the prompts before it as in a queue with one server and equal service times (M/D/1).
    """

    def __init__(self, figures: Sequence[MeasuredRun]) -> None:
        self.figures = [one for one in figures if one.tpot_ms is None or _light(one)]
        self._costs = [option(one).cost for one in self.figures]

        def column(value: Callable[[MeasuredRun], float | None]) -> Any:
            return np.array([math.nan if (of := value(one)) is None else of for one in self.figures], dtype=float)

        self.measured = np.array([column(lambda one: one.ttft_ms), column(lambda one: one.tpot_ms)]) / 1e3
        ttft, tpot = self.measured
        self._prompt, answer = column(lambda one: one.input_tokens), column(lambda one: one.output_tokens)
        clients, rate = column(lambda one: one.concurrency), column(lambda one: one.requests_per_s)
        self._static, closed = np.isnan(tpot), ~np.isnan(clients)
        spell = np.where(self._static, 0.0, tpot * answer)
        self._rate = np.where(self._static, 0.0, np.where(closed, clients / (spell + ttft), rate))
        self._beside = np.where(closed, clients - 1, np.nan_to_num(self._rate * spell))
        self._busy, self._middle = np.maximum(1.0, self._beside + closed), self._prompt + answer / 2

    def predicted(self, how: Efficiency) -> Any:
        under = {key: how.of(*key) for key in {(one.runtime, one.release) for one in self.figures}}
        each = [under[one.runtime, one.release] for one in self.figures]
        cost = spread([one.under(of) for one, of in zip(self._costs, each, strict=True)])
        front = np.where(self._static, 0.0, [one.front_s for one in each])
        busy, beside, rate = self._busy, self._beside, self._rate
        alone = cost.seconds(Step(0, busy, busy * self._middle, 0, busy))
        work = self._prompt**2 / 2
        mixed = cost.seconds(Step(self._prompt, beside, beside * self._middle, work, beside + 1))
        load = np.where(beside > 0, np.minimum(0.9, rate * mixed), 0.0)
        waits = np.where(beside > 0, alone / 2 + load * mixed / (2 * (1 - load)), 0.0)
        token = np.where(beside > 0, 1 / (rate + np.maximum(1 - rate * mixed, 0.02) / alone), alone)
        return np.array([mixed + waits + front, np.where(self._static, np.nan, token)])


def _light(figure: MeasuredRun) -> bool:
    return (figure.concurrency or 99) <= 25 or (figure.requests_per_s or 99) <= 8


def fit(how: Efficiency, known: Batch, few: Sequence[MeasuredRun]) -> Efficiency:
    """Least squares of the logarithms of predicted over measured. It begins at the same values whatever the runs are,
    so that a fit to some of them knows nothing of the others; of `how` it keeps what is not fitted."""
    keys, ranges = zip(*_fitted(how).items(), strict=True)
    low, high = (np.log([one[side] for one in ranges]) for side in (1, 2))
    how = replace(how, **FIXED)  # type: ignore[arg-type]
    measured: list[Any] = [one.output_tokens_per_s for one in known.figures]
    true, timed = np.log(measured), Timed(few)

    def off(values: Any) -> Any:
        tried = _with(how, keys, np.exp(values).tolist())
        times = np.log(timed.predicted(tried) / timed.measured)
        return np.concatenate([np.log(known.predicted(tried)) - true, times[~np.isnan(times)]])

    start = np.log([one[0] for one in ranges])
    found = least_squares(
        off, start, bounds=(low, high), x_scale="jac", loss="soft_l1", f_scale=ROBUST, ftol=1e-4, max_nfev=60
    )
    print(f"fit of {len(found.fun)} values: {np.mean(np.abs(found.fun)):.4f}, {found.nfev} steps", flush=True)
    return _with(how, keys, np.exp(found.x).tolist())


def _fitted(how: Efficiency) -> dict[Key, tuple[float, float, float]]:
    """Of each fitted parameter its start and bounds."""
    return {
        **{("products", kind): (one, one / FREEDOM, one * FREEDOM) for kind, one in PRODUCTS.items()},
        **{("pcie", str(number)): PCIE for number in how.pcie},
        **{(name,): of for name, of in (OTHERS | OVERHEADS).items()},
        **{("runtimes", "trtllm_pytorch", name): of for name, of in OVERHEADS.items()},
        **{("releases", runtime, one): RELEASE for runtime, rows in how.releases.items() for one in rows
           if one != NEWEST[runtime]},
    }  # fmt: skip


def _with(how: Efficiency, keys: Sequence[Key], values: Sequence[float]) -> Efficiency:
    changed: dict[str, Any] = {"products": {**how.products}, "pcie": {**how.pcie}}
    changed |= {name: {key: {**rows} for key, rows in getattr(how, name).items()} for name in ("runtimes", "releases")}
    for key, value in zip(keys, values, strict=True):
        if len(key) == 1:
            changed[key[0]] = value
        elif len(key) == 2:
            changed[key[0]][int(key[1]) if key[0] == "pcie" else key[1]] = value
        else:
            changed[key[0]][key[1]][key[2]] = value
    return replace(how, **changed)


def bounded(how: Efficiency) -> list[tuple[str, float]]:
    """Fitted parameters that are at a bound, by name."""
    values = asdict(how)
    out = []
    for key, (_, low, high) in _fitted(how).items():
        value: Any = values
        for name in key:
            value = value[int(name) if key[0] == "pcie" and name != "pcie" else name]
        if not low * 1.003 < value < high * 0.997:
            out.append((".".join(key), value))
    return out


def write_efficiency(how: Efficiency, errors: dict[str, dict[str, float]]) -> None:
    """Write configs/efficiency.yaml, with the errors of the judgement."""
    # No table tells these: INT8 as the other 8-bit type of its card, or as FP16 where it has none.
    products = dict(how.products)
    products |= {f"{sm}.int8": products.get(f"{sm}.fp8", products[f"{sm}.fp16"]) for sm in (80, 89, 90, 100)}
    plain: dict[str, Any] = {**asdict(how), "products": dict(sorted(products.items())), "probed": _probed()}
    plain["runtimes"] = {**how.runtimes, "vllm": fit_vllm(how)}
    plain["errors"] = errors
    for name in ("slower", "runtime", "ahead", "again"):
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
    return {**how.runtimes["vllm"], **best}


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
