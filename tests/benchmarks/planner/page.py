"""The page of the planner's errors, docs/measurements/planner.md, and its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from datetime import date

import numpy as np

from tests.benchmarks.planner.fit import FIXED, bounded
from tests.benchmarks.planner.judge import FOLDS, Judged
from tests.benchmarks.planner.peer import expressed
from tests.support.published import predicted_before, vllm, waves
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.measured_runs import QUANTITIES, MeasuredRun, PredictedRun, errors

# The release whose times at a rate are published in whole ms.
WHOLE_MS = "0.14"


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
        "*Fit*: with the shipped efficiencies, which were fitted to these runs. *Held out*: each run as predicted by a "
        f"fit that saw none of the same GPU, model and number of GPUs ({FOLDS} folds; every fit begins at the same "
        "values, which are of single operations or guesses, and never at another fit). Errors are mean absolute errors "
        "of predicted over measured; bias is the mean error. Queues (runs with a measured TTFT above one second) count "
        "in tokens/s and TPOT. Runs of NIM (0.17, with clients) are predicted with clients in step and 1,024 tokens a "
        "step, which NIM does not tell: of 512, 1,024, 1,536, 2,048 and 8,192 the times to the first token of either "
        "card alone fit that one best.",
        "",
        *_summary("all runs", [("all", fitted, held)]),
        *_grouped("release", fitted, held, lambda one: f"{one.runtime} {one.release}"),
        *_grouped("GPU", fitted, held, lambda one: f"{one.gpu} {one.dtype}"),
        *_grouped("model", fitted, held, lambda one: f"{one.model} tp{one.tp}"),
        *_grouped("lengths", fitted, held, lambda one: f"{one.input_tokens} / {one.output_tokens}"),
        "![predicted against published](planner.svg)",
        "",
        *_whole(held),
        *_parameters(),
        *_beside(held, peer),
        *terms,
        "## Our own runs of vLLM",
        "",
        "vLLM 0.25 in its own process ([H200](h200.md), [H100](h100.md)), Llama 3 8B's shapes, 128 in and out, all "
        "clients in step: tokens a second, and the median time to the first token of the whole run. Only 16 bits on "
        "the H200 are fitted to, and only their tokens a second.",
        "",
        "| GPU | dtype | at once | tokens/s: measured | predicted | error | TTFT ms: measured | predicted | error |",
        "|" + "---|" * 9,
    ]
    how = load_efficiency().of("vllm")
    for run in vllm():
        found = waves(run, how)
        tokens = _beside_predicted(run.tokens_per_s, found.tokens_per_s)
        lines.append(
            f"| {run.gpu} | {run.dtype} | {run.concurrency} | {tokens} | "
            f"{_beside_predicted(run.ttft_ms, float(np.median(found.ttft)))} |"
        )
    lines += ["", *_before()]
    lines += ["Runs at a rate or of a number of clients, held out: predicted / measured.", ""]
    lines += ["| GPU | model | tp | in / out | load | tokens/s | TTFT ms | TPOT ms |", "|" + "---|" * 8]
    for one, predicted in held:
        if one.ttft_ms is not None:
            load = f"{one.requests_per_s:g}/s" if one.requests_per_s else f"{one.concurrency or 'all'} at once"
            cells = [
                f"{value:.4g} / {true:g}"
                if true is not None and (value := getattr(predicted, quantity)) is not None
                else ""
                for quantity in QUANTITIES
                for true in (getattr(one, quantity),)
            ]
            lines.append(
                f"| {one.gpu} | {one.model} | {one.tp} | {one.input_tokens} / {one.output_tokens} | {load} | "
                + " | ".join(cells) + " |"
            )  # fmt: skip
    points = [
        (one.output_tokens_per_s, predicted.output_tokens_per_s)
        for one, predicted in held
        if one.output_tokens_per_s is not None and predicted.output_tokens_per_s is not None
    ]
    return "\n".join(lines) + "\n", _svg(points)


def _before() -> list[str]:
    """Table of our own GPU runs: what was predicted before each run, what is predicted now, and what was measured."""
    lines = [
        "vLLM 0.25 in its own process on our [H100](h100.md) and [four H100s](h100-x4.md), 128 in and out, all "
        "requests starting together: what the planner said before the run, by the fit of that day, and what it says "
        "now. Of Mixtral with ep it said what it says of tp alone, since it knew no GPUs with whole experts. Its "
        "weights are random here, and their router prefers some experts more than a trained one: with ep a GPU that "
        "has those waits for nobody, and all wait for it.",
        "",
        "| engine | at once | tokens/s: measured | said before | error | now | error | TTFT ms: measured | said before "
        "| error | now | error |",
        "|" + "---|" * 12,
    ]
    how = load_efficiency().of("vllm")
    for run in predicted_before():
        now = waves(run, how)
        assert run.said is not None
        tokens = _beside_predicted(run.tokens_per_s, run.said[0], now.tokens_per_s)
        first = _beside_predicted(run.ttft_ms, run.said[1], float(np.median(now.ttft)))
        lines.append(f"| {run.engine} | {run.concurrency} | {tokens} | {first} |")
    return [*lines, ""]


def _whole(held: Judged) -> list[str]:
    """What of the TPOT's error comes from how some of the figures are published."""
    of = [
        (one, predicted)
        for one, predicted in held
        if one.tpot_ms is not None and predicted.tpot_ms is not None and one.release == WHOLE_MS
    ]
    # As those figures would be printed: time after the first token over all tokens of the answer, cut off to whole ms.
    alike = [
        math.floor(predicted.tpot_ms * (one.output_tokens - 1) / one.output_tokens) / one.tpot_ms - 1
        for one, predicted in of
        if one.tpot_ms is not None and predicted.tpot_ms is not None
    ]
    as_given = errors(of, "tpot_ms")
    return [
        f"TPOT: release {WHOLE_MS} publishes it in whole ms, 5 to 9 of them for an 8B model. Our figures for these "
        f"{len(of)} runs are off by {as_given.mean:.1%} (bias {as_given.bias:+.1%}); over all tokens of an answer "
        f"instead of those after the first, and cut off to whole ms, by {np.mean(np.abs(alike)):.1%} "
        f"({np.mean(alike):+.1%}). Which of the two was published is not told; the tables count the first.",
        "",
    ]


def _parameters() -> list[str]:
    """Parameters that are not fitted, and those that the fit left at a bound of what was measured."""
    how = load_efficiency()
    fixed = ", ".join(f"`{name}` {value:g}" for name, value in FIXED.items())
    at = ", ".join(f"`{name}` {value:g}" for name, value in bounded(how))
    return [
        "Not fitted, since runs do not tell them apart from a layer's overhead, but read off single operations: "
        f"{fixed}. " + (f"At a bound of what is plausible: {at}." if at else "No fitted parameter is at a bound."),
        "",
    ]


def _beside_predicted(measured: float | None, *predicted: float) -> str:
    if measured is None:
        return " |  | " + " |  | " * (len(predicted) - 1)
    return " | ".join([f"{measured:.0f}", *(f"{one:.0f} | {one / measured - 1:+.0%}" for one in predicted)])


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
    """The same runs as AIConfigurator predicts them."""
    if not peer:
        return []
    both = [(one, predicted) for one, predicted in held if one in peer]
    theirs: Judged = [
        (one, PredictedRun(peer[one]["tokens_per_s"], peer[one]["ttft_ms"], peer[one]["tpot_ms"])) for one, _ in both
    ]
    # Of a run whose requests all wait at once its TTFT is a queue's, which it does not predict.
    lines = [
        "## Beside AIConfigurator 0.12",
        "",
        f"{len(both)} of the {sum(map(expressed, (one for one, _ in held)))} runs that it can express (its tables for "
        "H100, H200, A100, L40S and B200, no rates): a sample, for the most part drawn by a seed with each GPU and "
        "model in turn, since it takes seconds for each. It is given the number of sequences that our memory model "
        "holds, or as many as it takes; ours are held out.",
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
            f'<circle cx="{at(true):.1f}" cy="{620 - at(predicted):.1f}" r="2.5" fill="#c2410c" fill-opacity="0.5"/>'
            for true, predicted in points
        ),
        *(f'<text x="{at(one):.0f}" y="578" text-anchor="middle">{one:,}</text>' for one in ticks),
        *(f'<text x="54" y="{624 - at(one):.0f}" text-anchor="end">{one:,}</text>' for one in ticks),
        '<text x="310" y="600" text-anchor="middle">published, tokens/s</text>',
        '<text x="16" y="310" text-anchor="middle" transform="rotate(-90 16 310)">'
        "predicted (held out), tokens/s</text>",
        '<text x="70" y="80">dashed: 15% off</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
