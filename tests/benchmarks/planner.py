"""How far the planner is from NVIDIA's published figures, and the fit that its efficiencies come from.

    python -m tests.benchmarks.planner [--fit] [--report FILE.md]

Half of the throughput table is fitted to, with eight points of the serving table; the other half and the rest of the
serving table are only judged. --fit writes configs/efficiency.yaml: coordinate descent on the mean absolute logarithm
of predicted over published, from the values that are there.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from tests.support.published import Point, Serving, predicted, served, serving, throughput, together, vllm
from trtpipe.configs import facts
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency

# What is fitted, and within which bounds it has a meaning.
SHARES = ("attention", "weights", "kv", "nvlink", "pcie")
PRODUCTS = ("80.fp16", "89.fp8", "90.fp16", "90.fp8")
OTHERS = ("sharpness", "elementwise", "step_s", "layer_s", "request_s", "allreduce_s", "front_s")
BOUNDS = {**dict.fromkeys((*SHARES, *PRODUCTS), (0.2, 0.98)), "sharpness": (1.0, 8.0)}
PROBED = "h200"
RUNTIME_GIB = (1.0, 1.5, 2.0, 3.0)
HEADER = """\
# How much of a data sheet's figures TensorRT-LLM 0.17 reaches. Written by `python -m tests.benchmarks.planner --fit`
# from half of NVIDIA's published figures; what each means is in pipeline/planner/efficiency.py.
"""


def anchors(points: Sequence[Serving]) -> list[Serving]:
    """Those of the serving table that are fitted to: few sequences in flight, where throughput tables say nothing."""
    return [point for point in points if (point.input, point.output) == (467, 256) and point.requests_per_s in (2, 8)]


def fit(how: Efficiency) -> Efficiency:
    training = [point for point in throughput() if not point.held_out]
    slow = anchors(serving())
    best: tuple[float, Efficiency] | None = None
    for runtime in RUNTIME_GIB:
        loss, found = _descend(replace(how, runtime_gib=runtime), lambda one: _loss(one, training, slow))
        print(f"runtime {runtime} GiB: {loss:.4f}", flush=True)
        if best is None or loss < best[0]:
            best = loss, found
    assert best is not None
    return replace(best[1], runtimes={"vllm": fit_vllm(best[1])})


def fit_vllm(how: Efficiency) -> dict[str, float]:
    """The overheads of another engine, on the same card: the best of a grid over its runs in 16 bits."""
    points = [point for point in vllm() if point.quantization.quant_algo is None]

    def loss(changed: dict[str, float]) -> float:
        found = [together(point, replace(how, **changed)) / point.tokens_per_s for point in points]  # type: ignore[arg-type]
        return sum(abs(math.log(one)) for one in found)

    grid = itertools.product((2e-4, 5e-4, 8e-4, 1.2e-3), (0.0, 1e-6, 5e-6), (6e-6, 9e-6, 1.2e-5, 1.5e-5, 1.8e-5))
    tried = [{"step_s": step, "layer_s": layer, "request_s": request} for step, layer, request in grid]
    return min(tried, key=loss)


def _loss(how: Efficiency, points: Sequence[Point], slow: Sequence[Serving]) -> float:
    def off(said: float, true: float) -> float:
        # A published outlier counts, and does not rule.
        return min(abs(math.log(said / true)), 0.4)

    total = 0.0
    for point in points:
        value = predicted(point, how)
        total += 1.0 if value is None else off(value, point.tokens_per_s)
    for one in slow:
        ttft, itl, _ = served(one, how)
        total += off(ttft, one.ttft_ms) + off(itl, one.itl_ms)
    return total / (len(points) + 2 * len(slow))


def _descend(how: Efficiency, loss: Callable[[Efficiency], float]) -> tuple[float, Efficiency]:
    names = [*PRODUCTS, *SHARES, *OTHERS]
    step = dict.fromkeys(names, 0.2)
    best = loss(how)
    for _ in range(10):
        for name in names:
            for sign in (1, -1):
                tried = _moved(how, name, math.exp(sign * step[name]))
                value = loss(tried)
                if value < best:
                    best, how = value, tried
                    break
            else:
                step[name] *= 0.5
    return best, how


def _moved(how: Efficiency, name: str, factor: float) -> Efficiency:
    low, high = BOUNDS.get(name, (0.0, math.inf))
    if name in PRODUCTS:
        return replace(how, products={**how.products, name: min(high, max(low, how.products[name] * factor))})
    return replace(how, **{name: min(high, max(low, getattr(how, name) * factor))})


def write_efficiency(how: Efficiency) -> None:
    # No table tells these: FP16 on Ada as on Hopper, INT8 as FP16 of its card.
    products = {**how.products, "89.fp16": how.products["90.fp16"]}
    products |= {f"{sm}.int8": products[f"{sm}.fp16"] for sm in (80, 89, 90)}
    plain: dict[str, Any] = {**asdict(how), "products": dict(sorted(products.items())), "probed": _probed()}

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(one) for key, one in value.items()}
        return float(f"{value:.3g}")

    text = yaml.safe_dump({name: short(value) for name, value in plain.items()}, sort_keys=False, width=120)
    (facts.CONFIGS / "efficiency.yaml").write_text(HEADER + text)


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


def report(how: Efficiency) -> tuple[str, str]:
    """The page in Markdown, and its figure as SVG."""
    said = [(point, predicted(point, how)) for point in throughput()]
    fitted, judged = (
        [value / point.tokens_per_s - 1 for point, value in said if point.held_out == held and value is not None]
        for held in (False, True)
    )
    slow = anchors(serving())
    rates = [(point, served(point, how)) for point in serving()]
    lines = [
        "# The planner against published figures",
        "",
        f"{date.today()}. Written by `python -m tests.benchmarks.planner`; the figures' sources are in "
        "tests/data/published/SOURCES.md.",
        "",
        f"Output tokens/s at an infinite rate: mean absolute error **{_mean(judged):.1%}** over {len(judged)} points "
        f"that were held out, {_mean(fitted):.1%} over {len(fitted)} that were fitted to.",
        "",
        "![predicted against published](planner.svg)",
        "",
        "| model | tp | GPU | points | mean absolute error | mean error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, int, str, str], list[float]] = {}
    for point, value in said:
        kind = point.gpu + (" FP8" if point.quantization.quant_algo else " 16 bits")
        share = math.nan if value is None else value / point.tokens_per_s - 1
        groups.setdefault((point.model, point.tp, kind, point.release), []).append(share)
    for (model, tp, kind, release), errors in sorted(groups.items()):
        lines.append(
            f"| {model} | {tp} | {kind} ({release}) | {len(errors)} | {_mean(errors):.0%} | "
            f"{sum(errors) / len(errors):+.0%} | {max(errors, key=abs):+.0%} |"
        )
    lines += [
        "",
        f"At a rate (0.14, BF16, Triton; {len(slow)} of {len(rates)} rows fitted to, marked *): said / published. "
        f"Of the others, mean absolute error of TTFT {_off(rates, slow, 0):.0%}, of ITL {_off(rates, slow, 1):.0%}, "
        f"of tokens/s {_off(rates, slow, 2):.0%}, runs at an infinite rate left out.",
        "",
        "| model | tp | GPU | in / out | requests/s | TTFT ms | ITL ms | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one, (ttft, itl, tokens) in rates:
        mark = " *" if one in slow else ""
        lines.append(
            f"| {one.model}{mark} | {one.tp} | {one.gpu} | {one.input} / {one.output} | "
            f"{one.requests_per_s or 'infinite'} | {ttft:.0f} / {one.ttft_ms:g} | {itl:.1f} / {one.itl_ms:g} | "
            f"{tokens:.0f} / {one.tokens_per_s:g} |"
        )
    lines += [
        "",
        "vLLM 0.25 in its own process on an H200 ([measured](h200.md), in waves), Llama 3 8B's shapes, 128 in and out; "
        "only 16 bits are fitted to.",
        "",
        "| dtype | at once | measured | said | error |",
        "|---|---|---|---|---|",
    ]
    for run in vllm():
        value = together(run, how.of("vllm"))
        kind = "FP8" if run.quantization.quant_algo else "16 bits"
        error = f"{value / run.tokens_per_s - 1:+.0%}"
        lines.append(f"| {kind} | {run.concurrency} | {run.tokens_per_s:.0f} | {value:.0f} | {error} |")
    lines += ["", "| release | model | tp | in / out | GPU | published | said | error | |", "|" + "---|" * 9]
    for point, value in said:
        error = "does not fit" if value is None else f"{value / point.tokens_per_s - 1:+.0%}"
        lines.append(
            f"| {point.release} | {point.model} | {point.tp} | {point.input} / {point.output} | {point.gpu} | "
            f"{point.tokens_per_s:g} | {value or 0:.0f} | {error} | {'held out' if point.held_out else 'fitted'} |"
        )
    return "\n".join(lines) + "\n", _svg([(p.tokens_per_s, v, p.held_out) for p, v in said if v is not None])


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def _off(rates: list[tuple[Serving, tuple[float, float, float]]], slow: list[Serving], index: int) -> float:
    rest = [(point, said) for point, said in rates if point not in slow and point.requests_per_s is not None]
    true = [(point.ttft_ms, point.itl_ms, point.tokens_per_s)[index] for point, _ in rest]
    return _mean([said[index] / right - 1 for (_, said), right in zip(rest, true, strict=True)])


def _svg(points: list[tuple[float, float, bool]]) -> str:
    """Predicted over published, both on logarithmic axes of 100 to 100,000 tokens/s."""

    def at(value: float) -> float:
        return 60 + (math.log10(value) - 2) / 3 * 500

    def spot(true: float, said: float, held: bool) -> str:
        colour = "#c2410c" if held else "#94a3b8"
        return f'<circle cx="{at(true):.1f}" cy="{620 - at(said):.1f}" r="3" fill="{colour}"/>'

    ticks = [10**power for power in (2, 3, 4, 5)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 620" font-family="sans-serif" font-size="12">',
        '<rect width="620" height="620" fill="white"/>',
        *(f'<path d="M{at(one):.0f} 60V560M60 {620 - at(one):.0f}H560" stroke="#e2e8f0"/>' for one in ticks),
        '<path d="M60 560L560 60" stroke="#0f172a"/>',
        *(
            f'<path d="M{at(100 * max(1, 1 / share)):.1f} {620 - at(100 * max(1, share)):.1f}'
            f'L{at(100000 * min(1, 1 / share)):.1f} {620 - at(100000 * min(1, share)):.1f}" '
            'stroke="#0f172a" stroke-dasharray="4 4"/>'
            for share in (0.85, 1.15)
        ),
        *(spot(*point) for point in sorted(points, key=lambda point: point[2])),
        *(f'<text x="{at(one):.0f}" y="578" text-anchor="middle">{one:,}</text>' for one in ticks),
        *(f'<text x="54" y="{624 - at(one):.0f}" text-anchor="end">{one:,}</text>' for one in ticks),
        '<text x="310" y="600" text-anchor="middle">published, tokens/s</text>',
        '<text x="16" y="310" text-anchor="middle" transform="rotate(-90 16 310)">said, tokens/s</text>',
        '<text x="70" y="80" fill="#c2410c">held out</text><text x="70" y="96" fill="#64748b">fitted</text>',
        '<text x="70" y="112">dashed: 15% off</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="write configs/efficiency.yaml")
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.fit:
        write_efficiency(fit(load_efficiency()))
    page, figure = report(load_efficiency())
    if options.report is None:
        print(page)
    else:
        options.report.write_text(page)
        options.report.with_suffix(".svg").write_text(figure)


if __name__ == "__main__":
    main()
