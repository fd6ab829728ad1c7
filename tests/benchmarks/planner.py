"""How far the planner is from measured runs, and the fit that its efficiencies come from.

    python -m tests.benchmarks.planner [--fit ROUNDS] [--report FILE.md] [--peer-python PYTHON]

Shares of single operations are bound by what was measured of them; overheads are fitted to whole runs, by coordinate
descent on the mean absolute logarithm of said over measured. Every run is also judged by a fit that did not see its
(GPU, model, tp): five folds. --fit writes configs/efficiency.yaml, after 0 rounds with the errors alone as new.
--peer-python adds what AIConfigurator says of the same runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import subprocess
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.published import figures, vllm, waves
from trtpipe.configs import facts
from trtpipe.pipeline.planner.cost import Step, StepCost, link_of
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency
from trtpipe.pipeline.planner.measured_runs import (
    QUANTITIES,
    MeasuredRun,
    PredictedRun,
    at_once,
    errors,
    option,
    predict_run,
)

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
BOUNDS = {
    "elementwise": (2.0, 8.0),
    "nvlink": (0.33, 0.8),
    "layer_s": (5e-6, 1e-4),
    "allreduce_s": (3e-6, 1.2e-5),
    "kv": (0.78, 0.92),
}
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

    figures: list[MeasuredRun]
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

    def only(self, kept: Sequence[bool]) -> Batch:
        """Of those figures alone."""
        keep = np.array(kept)
        steps, number = keep[self.owner], np.cumsum(keep) - 1
        return Batch(
            [one for one, here in zip(self.figures, kept, strict=True) if here],
            [one for one, here in zip(self.costs, kept, strict=True) if here],
            self.repeat[steps], Step(*(column[steps] for column in self.step)), number[self.owner[steps]],
            self.tokens[keep],
        )  # fmt: skip


def _spread(costs: Sequence[StepCost], owner: Any) -> Any:
    """The costs of several engines as one, whose coefficients are arrays."""
    names = [field.name for field in dataclasses.fields(StepCost) if field.name.endswith("_s")]
    values = {name: np.array([getattr(cost, name) for cost in costs])[owner] for name in names}
    counts = replace(costs[0].counts, picked=np.array([cost.counts.picked for cost in costs])[owner])
    return _Several(**{**vars(costs[0]), **values, "counts": counts})


class _Several(StepCost):
    def reading(self, tokens: Any) -> Any:
        return self.weights_s + self.experts_s * (1 - (1 - self.counts.picked) ** tokens)


def batch(of: Iterable[MeasuredRun]) -> Batch:
    kept: list[MeasuredRun] = []
    costs, rows, tokens = [], [], []
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
    place = np.round(np.log(step[0] + step[1]) * 8).astype(int) * 2 + (step[0] > 0)
    out = []
    for one in np.unique(place):
        here = place == one
        weight = repeat[here]
        out.append((float(weight.sum()), *(step[:, here] @ weight / weight.sum()).tolist()))
    return out


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
    total = np.minimum(np.abs(np.log(known.said(how) / true)), 0.4).tolist()
    for figure in few:
        found = slow(figure, how.of(figure.runtime, figure.release))
        for said, measured in zip(found or (), (figure.ttft_ms, figure.tpot_ms), strict=False):
            if measured is not None and not math.isnan(said):
                total.append(min(abs(math.log(said / measured)), 0.4))
    return float(np.mean(total))


def fit(how: Efficiency, known: Batch, few: Sequence[MeasuredRun], rounds: int) -> Efficiency:
    keys: list[Key] = [("products", one) for one in PRODUCTS]
    keys += [("pcie", str(one)) for one in how.pcie] + [
        ("elementwise",),
        ("kv",),
        ("nvlink",),
        ("front_s",),
    ]
    keys += [(name,) for name in OVERHEADS]
    keys += [("runtimes", "trtllm_pytorch", name) for name in OVERHEADS]
    keys += [
        ("releases", runtime, one) for runtime, rows in how.releases.items() for one in rows if one != NEWEST[runtime]
    ]
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


def fold(figure: MeasuredRun) -> int:
    return zlib.crc32(figure.group.encode()) % FOLDS


def folds(how: Efficiency, known: Batch, few: Sequence[MeasuredRun], rounds: int) -> list[Efficiency]:
    """For each fold a fit to the figures of the other folds, from the values that are there."""
    fits = []
    for number in range(FOLDS):
        rest = known.only([fold(one) != number for one in known.figures])
        fits.append(fit(how, rest, [one for one in few if fold(one) != number], rounds))
    return fits


Judged = list[tuple[MeasuredRun, PredictedRun]]


def judged(figures: Sequence[MeasuredRun], fits: Sequence[Efficiency], known: Batch) -> Judged:
    """What is said of every figure, with the fit that has not seen its group: by `plan`'s own simulation, or by the
    steps that are known."""
    at_once = [known.said(how) for how in fits]
    place = {one: number for number, one in enumerate(known.figures)}
    out: Judged = []
    for one in figures:
        number = fold(one) if len(fits) > 1 else 0
        if one in place:
            out.append((one, PredictedRun(float(at_once[number][place[one]]), None, None)))
        else:
            out.append((one, predict_run(one, fits[number])))
    return out


def kind_of(figure: MeasuredRun) -> str:
    """Runtime, SM and type of operands, as `Efficiency.confidence` asks for them."""
    made = option(figure)
    kind = {"bf16": "fp16"}.get(made.cost.counts.kind, made.cost.counts.kind)
    return f"{figure.runtime} {made.gpu.sm}.{kind}"


def spread(found: Judged) -> dict[str, dict[str, float]]:
    """What 8 of 10 errors are within, by quantity and kind, of kinds with ten figures or more."""
    out: dict[str, dict[str, float]] = {}
    for quantity in QUANTITIES:
        rows: dict[str, Judged] = {}
        for figure, said in found:
            rows.setdefault(kind_of(figure), []).append((figure, said))
        of = {kind: errors(members, quantity).values for kind, members in rows.items()}
        out[quantity] = {
            kind: round(float(np.quantile(np.abs(values), 0.8)), 3)
            for kind, values in sorted(of.items())
            if len(values) >= 10
        }
    return out


def write_efficiency(how: Efficiency, found: Judged) -> None:
    # No table tells these: INT8 as the other 8-bit type of its card, or as FP16 where it has none.
    products = dict(how.products)
    products |= {f"{sm}.int8": products.get(f"{sm}.fp8", products[f"{sm}.fp16"]) for sm in (80, 89, 90, 100)}
    plain: dict[str, Any] = {**asdict(how), "products": dict(sorted(products.items())), "probed": _probed()}
    plain["runtimes"] = {**how.runtimes, "vllm": fit_vllm(how)}
    plain["errors"] = spread(found)
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
        {"step_s": step, "layer_s": layer, "request_s": request, "allreduce_s": how.allreduce_s}
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


def report(
    fitted: Judged, held: Judged, peer: dict[MeasuredRun, dict[str, float]], terms: list[str]
) -> tuple[str, str]:
    """The page in Markdown, and its figure as SVG."""
    lines = [
        "# The planner against published figures",
        "",
        f"{date.today()}. Written by `python -m tests.benchmarks.planner`. {len(held)} published runs of TensorRT-LLM, "
        "whose sources are in tests/data/published/SOURCES.md.",
        "",
        f"*Fit*: with the shipped efficiencies, which were fitted to these runs. *Held out*: each run as said by a fit "
        f"that saw none of the same GPU, model and number of GPUs ({FOLDS} folds). Errors are mean absolute errors of "
        "said over measured; bias is the mean error. Queues (runs with a measured TTFT above one second) count in "
        "tokens/s and TPOT. Runs of NIM (0.17, with clients) are said with clients in step and 1,024 tokens a step, "
        "which NIM does not tell: of 512, 1,024, 1,536, 2,048 and 8,192 the times to the first token of either card "
        "alone fit that one best.",
        "",
        *_summary("all runs", [("all", fitted, held)]),
        *_grouped("release", fitted, held, lambda one: f"{one.runtime} {one.release}"),
        *_grouped("GPU", fitted, held, lambda one: f"{one.gpu} {one.dtype}"),
        *_grouped("model", fitted, held, lambda one: f"{one.model} tp{one.tp}"),
        *_grouped("lengths", fitted, held, lambda one: f"{one.input_tokens} / {one.output_tokens}"),
        "![predicted against published](planner.svg)",
        "",
        *_beside(held, peer),
        *terms,
        "vLLM 0.25 in its own process ([H200](h200.md), [H100](h100.md)), Llama 3 8B's shapes, 128 in and out, all "
        "clients in step: tokens a second, and the median time to the first token of the whole run. Only 16 bits on "
        "the H200 are fitted to, and only their tokens a second.",
        "",
        "| GPU | dtype | at once | tokens/s: measured | said | error | TTFT ms: measured | said | error |",
        "|" + "---|" * 9,
    ]
    how = load_efficiency().of("vllm")
    for run in vllm():
        found = waves(run, how)
        lines.append(
            f"| {run.gpu} | {run.dtype} | {run.concurrency} | {_beside_said(run.tokens_per_s, found.tokens_per_s)} | "
            f"{_beside_said(run.ttft_ms, float(np.median(found.ttft)))} |"
        )
    lines += ["", "Runs at a rate or of a number of clients, held out: said / measured.", ""]
    lines += ["| GPU | model | tp | in / out | load | tokens/s | TTFT ms | TPOT ms |", "|" + "---|" * 8]
    for one, said in held:
        if one.ttft_ms is not None:
            load = f"{one.requests_per_s:g}/s" if one.requests_per_s else f"{one.concurrency or 'all'} at once"
            cells = [
                f"{value:.4g} / {true:g}" if true is not None and (value := getattr(said, quantity)) is not None else ""
                for quantity in QUANTITIES
                for true in (getattr(one, quantity),)
            ]
            lines.append(
                f"| {one.gpu} | {one.model} | {one.tp} | {one.input_tokens} / {one.output_tokens} | {load} | "
                + " | ".join(cells) + " |"
            )  # fmt: skip
    points = [
        (one.output_tokens_per_s, said.output_tokens_per_s)
        for one, said in held
        if one.output_tokens_per_s is not None and said.output_tokens_per_s is not None
    ]
    return "\n".join(lines) + "\n", _svg(points)


def _beside_said(measured: float | None, said: float) -> str:
    return " |  | " if measured is None else f"{measured:.0f} | {said:.0f} | {said / measured - 1:+.0%}"


def queueing(figure: MeasuredRun) -> bool:
    return figure.ttft_ms is not None and figure.ttft_ms > 1000


def _cells(found: Judged, quantity: str) -> list[str]:
    kept = [one for one in found if quantity != "ttft_ms" or not queueing(one[0])]
    of = errors(kept, quantity)
    return [f"{of.mean:.1%}", f"{of.bias:+.1%}"] if of.values else ["", ""]


def _summary(title: str, groups: Iterable[tuple[str, Judged, Judged]]) -> list[str]:
    lines = [
        f"| {title} | runs | tokens/s: fit | bias | held out | bias | TTFT: fit | bias | held out | bias "
        "| TPOT: fit | bias | held out | bias |",
        "|" + "---|" * 14,
    ]
    for name, fitted, held in groups:
        cells = [cell for quantity in QUANTITIES for of in (fitted, held) for cell in _cells(of, quantity)]
        lines.append(f"| {name} | {len(held)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _grouped(title: str, fitted: Judged, held: Judged, key: Callable[[MeasuredRun], str]) -> list[str]:
    names = sorted({key(one) for one, _ in held})

    def of(judged: Judged, name: str) -> Judged:
        return [one for one in judged if key(one[0]) == name]

    return _summary(title, [(name, of(fitted, name), of(held, name)) for name in names])


def _beside(held: Judged, peer: dict[MeasuredRun, dict[str, float]]) -> list[str]:
    """The same runs as AIConfigurator says them."""
    if not peer:
        return []
    both = [(one, said) for one, said in held if one in peer]
    theirs: Judged = [
        (one, PredictedRun(peer[one]["tokens_per_s"], peer[one]["ttft_ms"], peer[one]["tpot_ms"])) for one, _ in both
    ]
    # Of a run whose requests all wait at once its TTFT is a queue's, which it does not say.
    lines = [
        "## Beside AIConfigurator 0.12",
        "",
        f"{len(both)} of the {sum(map(expressed, (one for one, _ in held)))} runs that it can express: its tables for "
        "H100, H200, A100, L40S and B200, no rates. It is given the number of sequences that our memory model says are "
        "in flight, or as many as it takes; ours are held out.",
        "",
        "| runs | number | tokens/s: ours | bias | AIConfigurator | bias | TTFT: ours | AIConfigurator | TPOT: ours | "
        "AIConfigurator |",
        "|" + "---|" * 10,
    ]
    names = sorted({f"{one.runtime} {one.release} {one.gpu} {one.dtype}" for one, _ in both})
    for name in [*names, "all"]:
        mine, other = (
            [one for one in of if name in ("all", f"{one[0].runtime} {one[0].release} {one[0].gpu} {one[0].dtype}")]
            for of in (both, theirs)
        )
        tokens = _cells(mine, "output_tokens_per_s") + _cells(other, "output_tokens_per_s")
        rest = [_cells(of, quantity)[0] for quantity in ("ttft_ms", "tpot_ms") for of in (mine, other)]
        lines.append(f"| {name} | {len(mine)} | " + " | ".join([*tokens, *rest]) + " |")
    return [*lines, ""]


def _svg(points: Sequence[tuple[float, float]]) -> str:
    """Predicted over published, both on logarithmic axes of 10 to 100,000 tokens/s."""

    def at(value: float) -> float:
        return 60 + (math.log10(value) - 1) / 4 * 500

    ticks = [10**power for power in (1, 2, 3, 4, 5)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 620" font-family="sans-serif" font-size="12">',
        '<rect width="620" height="620" fill="white"/>',
        *(f'<path d="M{at(one):.0f} 60V560M60 {620 - at(one):.0f}H560" stroke="#e2e8f0"/>' for one in ticks),
        '<path d="M60 560L560 60" stroke="#0f172a"/>',
        *(
            f'<path d="M{at(10 * max(1, 1 / share)):.1f} {620 - at(10 * max(1, share)):.1f}'
            f'L{at(100000 * min(1, 1 / share)):.1f} {620 - at(100000 * min(1, share)):.1f}" '
            'stroke="#0f172a" stroke-dasharray="4 4"/>'
            for share in (0.85, 1.15)
        ),
        *(
            f'<circle cx="{at(true):.1f}" cy="{620 - at(said):.1f}" r="2.5" fill="#c2410c" fill-opacity="0.5"/>'
            for true, said in points
        ),
        *(f'<text x="{at(one):.0f}" y="578" text-anchor="middle">{one:,}</text>' for one in ticks),
        *(f'<text x="54" y="{624 - at(one):.0f}" text-anchor="end">{one:,}</text>' for one in ticks),
        '<text x="310" y="600" text-anchor="middle">published, tokens/s</text>',
        '<text x="16" y="310" text-anchor="middle" transform="rotate(-90 16 310)">said (held out), tokens/s</text>',
        '<text x="70" y="80">dashed: 15% off</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def peers(figures: Sequence[MeasuredRun], python: Path, scratch: Path) -> dict[MeasuredRun, dict[str, float]]:
    """What AIConfigurator says, in an environment of its own whose Python is given."""
    scratch.mkdir(parents=True, exist_ok=True)
    kept = [one for one in figures if expressed(one)]
    rows = [_row(one, scratch) for one in kept]
    given, out = scratch / "rows.json", scratch / "said.json"
    given.write_text(json.dumps(rows))
    script = Path(__file__).with_name("planner_peer.py")
    subprocess.run([python, script, given, out, scratch / "operations.json"], check=True)
    said = json.loads(out.read_text())
    return {one: found for one, found in zip(kept, said, strict=True) if "tokens_per_s" in found}


def expressed(figure: MeasuredRun) -> bool:
    """Whether AIConfigurator can express a run."""
    return figure.gpu in SYSTEMS and figure.requests_per_s is None and figure.output_tokens > 1


def operations(scratch: Path) -> list[str]:
    """Our terms beside AIConfigurator's measured tables of single operations."""
    how = load_efficiency()
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in json.loads((scratch / "operations.json").read_text()):
        ratios.setdefault((one["what"], one["gpu"]), []).append(_operation(one, how) / (one["ms"] / 1e3))
    lines = [
        "## Single operations",
        "",
        "The terms of `pipeline/planner/cost.py` over what AIConfigurator's tables measured of TensorRT-LLM's kernels: "
        "median, and the middle half of all sizes. A kernel's start, which the model has in `layer_s`, is added here.",
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


_card = functools.lru_cache(maxsize=None)(facts.find_gpu)


def _operation(one: dict[str, Any], how: Efficiency) -> float:
    gpu = _card(one["gpu"])
    assert gpu.sm is not None
    if one["what"] == "BF16 product":
        compute = 2 * one["m"] * one["n"] * one["k"] / (how.flops(gpu, "bf16") * how.product(gpu.sm, "bf16"))
        reading = one["n"] * one["k"] * 2 / (how.bandwidth(gpu) * how.weights)
        return float((compute**how.sharpness + reading**how.sharpness) ** (1 / how.sharpness)) + PRODUCT_STARTS
    if one["what"] == "NVLink all-reduce":
        link, latency = link_of(gpu, one["tp"], how)
        return latency + float(2 * (one["tp"] - 1) / one["tp"] * one["bytes"] / link)
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


SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm", "a100": "a100_sxm", "l40s": "l40s", "b200": "b200_sxm"}


def _row(figure: MeasuredRun, scratch: Path) -> dict[str, Any]:
    shape, made, folder = facts.find_shape(figure.model)[1], option(figure), scratch / figure.model
    folder.mkdir(exist_ok=True)
    experts = shape.experts
    config = {
        "architectures": [shape.architecture], "model_type": "llama" if experts is None else "mixtral",
        "hidden_size": shape.hidden_size, "num_hidden_layers": shape.num_hidden_layers, "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size if experts is None else experts.intermediate_size,
        "num_attention_heads": shape.num_attention_heads, "num_key_value_heads": shape.num_key_value_heads,
        "vocab_size": shape.vocab_size, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if experts is not None:
        config |= {"num_local_experts": experts.count, "num_experts_per_tok": experts.top_k}
    (folder / "config.json").write_text(json.dumps(config))
    held = made.memory.batch(figure.input_tokens + figure.output_tokens)
    batch_size = figure.concurrency or min(made.limits.max_batch_size, held)
    return {
        "model": str(folder), "system": SYSTEMS[figure.gpu], "tp": figure.tp, "batch": batch_size,
        "isl": figure.input_tokens, "osl": figure.output_tokens, "dtype": figure.dtype, "experts": experts is not None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", type=int, metavar="ROUNDS", help="write configs/efficiency.yaml")
    parser.add_argument("--fold-rounds", type=int, default=4)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--peer-python", type=Path, help="Python of an environment that has aiconfigurator")
    options = parser.parse_args()
    all_of_them, how = figures(), load_efficiency()
    known, few = batch(all_of_them), [one for one in all_of_them if one.ttft_ms is not None]
    if options.fit is not None:
        how = fit(how, known, few, options.fit)
    held = judged(all_of_them, folds(how, known, few, options.fold_rounds), known)
    if options.fit is not None:
        write_efficiency(how, held)
    scratch = Path(".scratch/aiconfigurator/rows")
    peer = peers(all_of_them, options.peer_python.absolute(), scratch) if options.peer_python else {}
    page, figure = report(
        judged(all_of_them, [load_efficiency()], known), held, peer, operations(scratch) if peer else []
    )
    if options.report is None:
        print(page)
    else:
        options.report.write_text(page)
        options.report.with_suffix(".svg").write_text(figure)


if __name__ == "__main__":
    main()
