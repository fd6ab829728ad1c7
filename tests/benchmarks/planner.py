"""How far the planner is from measured runs, and the fit that its efficiencies come from.

    python -m tests.benchmarks.planner [--fit] [--report FILE.md] [--peer FILE.csv]

Shares of single operations are bound by what was measured of them; overheads are fitted to whole runs, by coordinate
descent on the mean absolute logarithm of said over measured. Every run is also judged by a fit that did not see its
(GPU, model, tp): five folds. --fit writes configs/efficiency.yaml. --peer adds what AIConfigurator says, from the table
that `tests/benchmarks/aiconfigurator.py` writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.published import figures, together, vllm
from trtpipe.configs import facts
from trtpipe.pipeline.planner.cost import Step, StepCost
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency
from trtpipe.pipeline.planner.figures import QUANTITIES, Figure, Said, at_once, errors, option, say

FOLDS = 5
PROBED = "h200"
# Medians over AIConfigurator 0.12's tables of TensorRT-LLM's single operations (see docs/measurements/planner.md), and
# how far a fit may move from them: a card that is busy for minutes clocks lower than one that is measured for a second.
PRODUCTS = {
    "80.fp16": 0.82, "89.fp16": 0.60, "89.fp8": 0.50, "90.fp16": 0.79, "90.fp8": 0.63, "100.fp16": 0.69,
    "100.fp8": 0.60, "100.fp4": 0.45,
}  # fmt: skip
FREEDOM = 1.15
OVERHEADS = ("step_s", "layer_s", "request_s", "allreduce_s")
BOUNDS = {"elementwise": (2.0, 8.0), "nvlink": (0.33, 0.8), "layer_s": (5e-6, 1e-4), "allreduce_s": (3e-6, 1.2e-5), "kv": (0.75, 0.92)}
# The releases that the others are measured by.
NEWEST = {"tensorrt_llm": "0.17", "trtllm_pytorch": "1.2"}
HEADER = """\
# How much of a data sheet's figures an engine reaches. Written by `python -m tests.benchmarks.planner --fit` from
# single operations and published runs; what each means is in pipeline/planner/efficiency.py.
"""

Key = tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """Figures whose steps are known beforehand, for fast evaluation: steps of all of them, one after another."""

    figures: list[Figure]
    costs: list[StepCost]
    repeat: Any
    step: Step
    owner: Any
    tokens: Any

    def said(self, how: Efficiency) -> Any:
        """Tokens a second of each figure."""
        under = {key: how.of(*key) for key in {(one.runtime, one.release) for one in self.figures}}
        costs = [
            cost.under(under[figure.runtime, figure.release])
            for figure, cost in zip(self.figures, self.costs, strict=True)
        ]
        seconds = _spread(costs, self.owner).seconds(self.step)
        return self.tokens / np.bincount(self.owner, self.repeat * seconds)


def _spread(costs: Sequence[StepCost], owner: Any) -> Any:
    """The costs of several engines as one, whose coefficients are arrays."""
    names = [field.name for field in dataclasses.fields(StepCost) if field.name.endswith("_s")]
    values = {name: np.array([getattr(cost, name) for cost in costs])[owner] for name in names}
    counts = replace(costs[0].counts, picked=np.array([cost.counts.picked for cost in costs])[owner])
    return _Several(**{**vars(costs[0]), **values, "counts": counts})


class _Several(StepCost):
    def reading(self, tokens: Any) -> Any:
        return self.weights_s + self.experts_s * (1 - (1 - self.counts.picked) ** tokens)


def batch(of: Iterable[Figure]) -> Batch:
    kept, costs, rows, tokens = [], [], [], []
    for figure in of:
        found = at_once(figure)
        if found is None:
            continue
        repeat, step, made = found
        for line in _binned(repeat, np.array(step)):
            rows.append((len(kept), *line))
        kept.append(figure)
        costs.append(option(figure).cost)
        tokens.append(made)
    columns = np.array(rows).T
    return Batch(kept, costs, columns[1], Step(*columns[2:]), columns[0].astype(int), np.array(tokens, dtype=float))


def _binned(repeat: Any, step: Any) -> list[tuple[float, ...]]:
    """Steps of about as many tokens as one: a step's seconds are nearly linear in the rest."""
    place = np.round(np.log(step[0] + step[1]) * 16).astype(int) * 2 + (step[0] > 0)
    out = []
    for one in np.unique(place):
        here = place == one
        weight = repeat[here]
        out.append((float(weight.sum()), *(step[:, here] @ weight / weight.sum()).tolist()))
    return out


def slow(figure: Figure, how: Efficiency) -> tuple[float, float] | None:
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


def loss(how: Efficiency, known: Batch, few: Sequence[Figure]) -> float:
    true = np.array([one.output_tokens_per_s for one in known.figures])
    # A published outlier counts, and does not rule.
    total = np.minimum(np.abs(np.log(known.said(how) / true)), 0.4).tolist()
    for figure in few:
        found = slow(figure, how.of(figure.runtime, figure.release))
        for said, measured in zip(found or (), (figure.ttft_ms, figure.tpot_ms), strict=False):
            if measured is not None and not math.isnan(said):
                total.append(min(abs(math.log(said / measured)), 0.4))
    return float(np.mean(total))


def fit(how: Efficiency, known: Batch, few: Sequence[Figure], rounds: int) -> Efficiency:
    keys: list[Key] = [("products", one) for one in PRODUCTS]
    keys += [("pcie", str(one)) for one in how.pcie] + [("elementwise",), ("kv",), ("nvlink",), ("front_s",)]
    keys += [(name,) for name in OVERHEADS]
    keys += [("runtimes", "trtllm_pytorch", name) for name in OVERHEADS]
    keys += [("releases", runtime, one) for runtime, rows in how.releases.items() for one in rows if one != NEWEST[runtime]]
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
        if before - best < 1e-4:
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
        return replace(how, **{name: {**rows, key[1]: {**rows[key[1]], key[2]: value}}})  # type: ignore[arg-type]
    return replace(how, **{name: within(name, getattr(how, name) * factor)})


def fold(figure: Figure) -> int:
    return zlib.crc32(figure.group.encode()) % FOLDS
