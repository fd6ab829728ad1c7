"""Predictions of the planner, and the Markdown and SVG that the studies' pages are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from functools import cache

import numpy as np

from trtpipe.pipeline.api.plan import plan
from trtpipe.pipeline.pages.axes import Axis, fitting, tick
from trtpipe.pipeline.planner.advice import Candidate

COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce")
# Margins and sides of a plot in pixels.
LEFT, TOP, WIDE, HIGH = 70, 40, 500, 320


@cache
def planned(
    gpu: str, model: str, dtype: str, tp: int = 1, *, tokens: tuple[int, int] = (128, 128),
    runtime: str = "tensorrt_llm", kv_cache: str | None = None, slo: tuple[str, ...] = (), reuse: bool = False,
) -> Candidate:  # fmt: skip
    """What the planner says of one option; `tokens` are those of a prompt and of an answer."""
    found = plan(
        model, gpu=gpu, dtype=dtype, tp=tp, runtime=runtime, kv_cache=kv_cache, input_tokens=tokens[0],
        output_tokens=tokens[1], slo=slo, reuse=reuse,
    )  # fmt: skip
    return found.candidates[0]


def stream(one: Candidate) -> float | None:
    """Output tokens/s of one client alone."""
    return None if one.single is None else one.single.tokens_per_s


def full(one: Candidate) -> float | None:
    """Output tokens/s of all GPUs of the option with as many clients as there is room for."""
    return None if one.best is None else one.best.tokens_per_s


def first_token(one: Candidate) -> float | None:
    """Milliseconds to the first token of one client alone."""
    return None if one.single is None or not len(one.single.ttft) else float(np.median(one.single.ttft))


def ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def text(value: float | None, unit: str = "") -> str:
    """A figure in three digits; a dash for none."""
    if value is None:
        return "–"
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return shown + unit


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def head(title: str, about: str, plot: str, described: str) -> list[str]:
    return [
        f"# {title}",
        "",
        f"{date.today().isoformat()}. Written by `make studies` from `trtpipe plan`. {about}",
        "",
        "Unless a line says that a figure was measured, it is predicted: for TensorRT-LLM, without a server in front. "
        "[measurements/planner.md](../measurements/planner.md) says how far such figures are from published ones.",
        "",
        f"![{described}]({plot})",
        "",
    ]


def curves(title: str, x: str, y: str, found: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    """An SVG of named curves; an axis is logarithmic where its values are far apart."""
    across = fitting(x, (a for _, points in found for a, _ in points))
    up = fitting(y, (b for _, points in found for _, b in points))

    def place(a: float, b: float) -> tuple[float, float]:
        return LEFT + across.share(a) * WIDE, TOP + (1 - up.share(b)) * HIGH

    width, height = LEFT + WIDE + 30, TOP + HIGH + 60 + 18 * len(found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
        *_grid(across, up),
    ]
    for number, (name, points) in enumerate(found):
        colour = COLOURS[number % len(COLOURS)]
        places = [place(*point) for point in points]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        below = TOP + HIGH + 60 + 18 * number
        parts.append(f'<path d="M{LEFT} {below}h24" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + 32}" y="{below + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for value in across.ticks:
        at = LEFT + across.share(value) * WIDE
        parts.append(f'<path d="M{at:.1f} {TOP}v{HIGH}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{at:.1f}" y="{TOP + HIGH + 18}" text-anchor="middle">{tick(value)}</text>')
    for value in up.ticks:
        at = TOP + (1 - up.share(value)) * HIGH
        parts.append(f'<path d="M{LEFT} {at:.1f}h{WIDE}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick(value)}</text>')
    middle, side = LEFT + WIDE / 2, TOP + HIGH / 2
    parts.append(f'<text x="{middle}" y="{TOP + HIGH + 38}" text-anchor="middle">{across.label}</text>')
    parts.append(f'<text x="16" y="{side}" text-anchor="middle" transform="rotate(-90 16 {side})">{up.label}</text>')
    return parts


def geometric(low: float, high: float, count: int) -> list[float]:
    """Numbers with equal ratios."""
    return [low * math.pow(high / low, number / (count - 1)) for number in range(count)]
