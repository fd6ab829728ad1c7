"""Plots as SVG text, coloured by the classes s0, s1, ... of the page that contains it, and their data for charts.js.

A drawing has the width of a phone. It is what is printed, and what shows without script; with script, charts.js draws
curves and timelines anew in the width that there is. Every mark has the class `mark`, and a title that shows when the
pointer rests on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from markupsafe import Markup, escape

from trtpipe.pipeline.pages.axes import Axis, fitting, tick

WIDTH = 340
LEFT, RIGHT, TOP, BOTTOM = 46, 18, 10, 36
# Space for names at the left of distributions.
NAMES = 126
HEIGHT = 150
# Heights of one row of distributions, one panel of a timeline, one bar.
ROW, PANEL, BAR = 26, 64, 22
PANEL_GAP = 26
# Colours of curves and lines.
STYLES = 8
# A long series is reduced to the smallest and largest value of this many columns; most bins of a distribution.
COLUMNS = 50
BINS = 100
_LETTER = 5.6  # the mean width of a letter of the labels
_DOT = 3.5
_STROKE = "m-1.5 0h3"
_MARKERS = (
    "M{x} {y}m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "M{x} {y}m-3.2 -3.2h6.4v6.4h-6.4z",
    "M{x} {y}m0 -4.4l4 7h-8z",
    "M{x} {y}m0 -4.4l4.4 4.4l-4.4 4.4l-4.4 -4.4z",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A drawing under a title.

    legend  names and the classes that they are drawn in
    note    how to read it, in a sentence
    charts  what charts.js draws in its place, one below the other: axes, and the points of each curve
    """

    title: str
    drawing: Markup
    legend: Sequence[tuple[str, int]] = ()
    note: str = ""
    charts: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point; `hollow` where its value needs caution."""

    x: float
    y: float
    label: str
    title: str
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Curve:
    name: str
    style: int
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution; `marks` are (name, value) of some percentiles."""

    label: str
    title: str
    style: int
    edges: Sequence[float]
    counts: Sequence[float]
    marks: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series; None leaves a gap."""

    name: str
    style: int
    values: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Panel:
    label: str
    lines: Sequence[Line]


@dataclass(frozen=True, kw_only=True)
class Bar:
    label: str
    title: str
    value: float
    style: int = 0


@dataclass
class _Drawing:
    """Parts of one plot. Numbers are pixels; `left` is where the axes cross."""

    left: float = LEFT
    parts: list[str] = field(default_factory=list)

    @property
    def inner(self) -> float:
        return WIDTH - self.left - RIGHT

    def across(self, axis: Axis, value: float) -> float:
        return self.left + axis.share(value) * self.inner

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> None:
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"{kind}>{escape(words)}</text>')

    def grid(self, path: str) -> None:
        self.parts.append(f'<path class="grid" d="{path}"/>')

    def mark(self, kind: str, path: str, title: str) -> None:
        self.parts.append(f'<path class="mark {kind}" d="{path}"><title>{escape(title)}</title></path>')

    def x_axis(self, axis: Axis, base: float, top: float) -> None:
        places = [(self.across(axis, value), value) for value in axis.ticks]
        self.grid("".join(f"M{_n(x)} {_n(top)}V{_n(base)}" for x, _ in places))
        for x, value in places:
            self.text(x, base + 14, tick(value), anchor="middle")
        self.text(self.left + self.inner / 2, base + 29, axis.label, anchor="middle", kind="label")

    def y_axis(self, axis: Axis, base: float, height: float) -> None:
        places = [(base - axis.share(value) * height, value) for value in axis.ticks]
        self.grid("".join(f"M{_n(self.left)} {_n(y)}h{_n(self.inner)}" for y, _ in places))
        for y, value in places:
            self.text(self.left - 5, y + 4, tick(value), anchor="end")

    def done(self, height: float, described: str) -> Markup:
        opened = f'<svg viewBox="0 0 {WIDTH} {_n(height)}" role="img" aria-label="{escape(described)}">'
        # All text in the parts has been escaped already.
        return Markup(f"{opened}{''.join(self.parts)}</svg>")


def _n(number: float) -> str:
    """A coordinate, rounded to a tenth of a pixel."""
    return f"{number:.1f}".removesuffix(".0")


def curves(
    title: str, found: Sequence[Curve], *, x: str, y: str, band: Sequence[Point] = (), note: str = "",
    linear: bool = False,
) -> Figure:  # fmt: skip
    """Points joined by lines in the given order, labelled where there is room; `band` lies behind the curves."""
    points = [point for curve in found for point in curve.points]
    across = fitting(x, (point.x for point in points), linear=linear)
    up = fitting(y, (point.y for point in points), linear=linear)
    drawing, base = _Drawing(), TOP + 14 + HEIGHT
    drawing.text(4, TOP + 2, y, kind="label")
    drawing.x_axis(across, base, base - HEIGHT)
    drawing.y_axis(up, base, HEIGHT)
    drawn = [
        (curve, [(drawing.across(across, p.x), base - up.share(p.y) * HEIGHT, p) for p in curve.points])
        for curve in found
    ]
    if len(band) > 1:
        line = [f"{_n(drawing.across(across, p.x))} {_n(base - up.share(p.y) * HEIGHT)}" for p in band]
        drawing.parts.append(f'<path class="band" d="M{"L".join(line)}"/>')
    # Labels must not hide points.
    taken = [(a - _DOT, 2 * _DOT, b + _DOT) for _, places in drawn for a, b, _ in places]
    for curve, places in drawn:
        if len(places) > 1:
            kind = f"line s{curve.style}" + (" dashed" if curve.dashed else "")
            drawing.mark(kind, "M" + "L".join(f"{_n(a)} {_n(b)}" for a, b, _ in places), curve.name)
        for a, b, point in places:
            shape = _MARKERS[curve.style % len(_MARKERS)].format(x=_n(a), y=_n(b))
            drawing.mark(f"dot s{curve.style}" + (" hollow" if point.hollow else ""), shape, point.title)
    for _, places in drawn:
        for a, b, point in places:
            _label(drawing, taken, a, b, point.label)
    told = [
        {
            "name": curve.name, "style": curve.style, "dashed": curve.dashed,
            "x": [_short(point.x) for point in curve.points], "y": [_short(point.y) for point in curve.points],
            "titles": [point.title for point in curve.points], "labels": [point.label for point in curve.points],
            "hollow": [at for at, point in enumerate(curve.points) if point.hollow],
        }
        for curve in found
    ]  # fmt: skip
    chart = {"x": _told(across), "y": _told(up), "curves": told, "band": [[_short(p.x), _short(p.y)] for p in band]}
    legend = [(curve.name, curve.style) for curve in found if curve.name]
    return Figure(title=title, drawing=drawing.done(base + BOTTOM, title), legend=legend, note=note, charts=[chart])


def _told(axis: Axis) -> dict[str, Any]:
    return {"label": axis.label, "low": axis.low, "high": axis.high, "log": axis.log}


def _short(value: float | None) -> float | None:
    """Four significant digits: more cannot be seen."""
    return None if value is None else float(f"{value:.4g}")


def _label(drawing: _Drawing, taken: list[tuple[float, float, float]], x: float, y: float, words: str) -> None:
    """Write beside a point, on the first side that is free; write nothing if none is."""
    width = _LETTER * len(words)
    for left, base in ((x + 6, y - 4), (x - 6 - width, y - 4), (x + 6, y + 11), (x - 6 - width, y + 11)):
        fits = left >= LEFT and left + width <= WIDTH and base - 9 >= TOP
        if fits and all(
            left + width < other or other + size < left or abs(base - at) > 10 for other, size, at in taken
        ):
            taken.append((left, width, base))
            drawing.text(left, base, words, kind="point")
            return


def spreads(title: str, rows: Sequence[Spread], *, x: str, legend: Sequence[tuple[str, int]] = ()) -> Figure:
    """Distributions one below the other on one axis. Areas are shares; the highest bar of each row fills its height."""
    rows = [row for row in rows if sum(row.counts)]
    values = [edge for row in rows for edge in (*_ends(row), *(value for _, value in row.marks))]
    axis = fitting(x, values, from_zero=False)
    drawing, base = _Drawing(left=NAMES), TOP + ROW * len(rows)
    drawing.x_axis(axis, base, TOP)
    for number, row in enumerate(rows):
        bottom = TOP + ROW * (number + 1) - 3
        drawing.mark(f"area s{row.style}", _steps(drawing, row, axis, bottom), row.title)
        places = (drawing.across(axis, value) for _, value in row.marks)
        lines = "".join(f"M{_n(x)} {_n(bottom - ROW + 8)}V{_n(bottom)}" for x in places)
        drawing.parts.append(f'<path class="percentiles" d="{lines}"/>')
        drawing.text(4, bottom - 3, _shortened(row.label, NAMES - 8), kind="point")
    return Figure(title=title, drawing=drawing.done(base + BOTTOM, title), legend=legend)


def _shortened(words: str, width: float) -> str:
    most = int(width / _LETTER)
    return words if len(words) <= most else words[: most - 1] + "…"


def _ends(row: Spread) -> tuple[float, float]:
    """Start and end of a distribution, without its empty bins."""
    filled = [number for number, count in enumerate(row.counts) if count]
    return row.edges[filled[0]], row.edges[filled[-1] + 1]


def _steps(drawing: _Drawing, row: Spread, axis: Axis, base: float) -> str:
    """Outline of a histogram: heights are counts divided by the width of the bin on the axis."""
    edges, counts = _merged(row.edges, row.counts)
    places = [drawing.across(axis, edge) for edge in edges]
    # Bins too narrow for the axis are drawn a pixel wide.
    widths = [max(1.0, right - left) for left, right in pairwise(places)]
    heights = [count / width for count, width in zip(counts, widths, strict=True)]
    scale = (ROW - 8) / max(heights)
    path = [f"M{_n(places[0])} {_n(base)}"]
    for left, width, height in zip(places, widths, heights, strict=False):
        path.append(f"H{_n(left)}V{_n(base - height * scale)}H{_n(left + width)}")
    return "".join(path) + f"V{_n(base)}z"


def _merged(edges: Sequence[float], counts: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """Join neighbouring bins until there are at most BINS."""
    every = math.ceil(len(counts) / BINS)
    if every == 1:
        return edges, counts
    return [*edges[:-1:every], edges[-1]], [sum(counts[at : at + every]) for at in range(0, len(counts), every)]


def timeline(title: str, seconds: Sequence[float], panels: Sequence[Panel]) -> Figure:
    """Panels one below the other over the same time, and the names of lines that share a panel in one legend."""
    across = fitting("Seconds", [0.0, *seconds])
    drawing, top = _Drawing(), float(TOP)
    charts = []
    for panel in panels:
        known = [value for line in panel.lines for value in line.values if value is not None]
        axis = fitting(panel.label, known, ticks=2)
        base = top + 16 + PANEL
        drawing.text(4, top + 8, panel.label, kind="label")
        drawing.y_axis(axis, base, PANEL)
        told = []
        for line in panel.lines:
            pairs = _thinned(seconds, line.values)
            path = _gapped(
                (drawing.across(across, at), None if value is None else base - axis.share(value) * PANEL)
                for at, value in pairs
            )
            if path:
                most = max(value for value in line.values if value is not None)
                drawing.mark(f"line s{line.style}", path, f"{line.name}: at most {most:,.4g}")
            xs, ys = ([_short(pair[part]) for pair in pairs] for part in (0, 1))
            told.append({"name": line.name, "style": line.style, "x": xs, "y": ys})
        charts.append({"x": _told(across), "y": _told(axis), "curves": told, "along": True})
        top = base + PANEL_GAP - 16
    drawing.x_axis(across, base, base - 3)
    several = [line for panel in panels if len(panel.lines) > 1 for line in panel.lines]
    legend = list(dict.fromkeys((line.name, line.style) for line in several))
    return Figure(title=title, drawing=drawing.done(base + BOTTOM, title), legend=legend, charts=charts)


def _thinned(seconds: Sequence[float], values: Sequence[float | None]) -> list[tuple[float, float | None]]:
    """The series; one too long to draw is reduced to the smallest and the largest value of each column, in order."""
    pairs = list(zip(seconds, values, strict=True))
    every = math.ceil(len(pairs) / COLUMNS)
    if every <= 2:
        return pairs
    out: list[tuple[float, float | None]] = []
    for at in range(0, len(pairs), every):
        column = [(second, value) for second, value in pairs[at : at + every] if value is not None]
        if not column:
            out.append((seconds[at], None))
            continue
        ends = min(column, key=lambda pair: pair[1]), max(column, key=lambda pair: pair[1])
        out += sorted(set(ends))
    return out


def _gapped(places: Iterable[tuple[float, float | None]]) -> str:
    """A path through the points, with a new start after each gap. A point between two gaps becomes a short stroke."""
    path: list[str] = []
    run = 0
    for x, y in places:
        if y is None:
            path += [_STROKE] if run == 1 else []
            run = 0
            continue
        path.append(f"{'L' if run else 'M'}{_n(x)} {_n(y)}")
        run += 1
    return "".join(path) + (_STROKE if run == 1 else "")


def bars(title: str, rows: Sequence[Bar], *, x: str) -> Figure:
    """Bars one below the other, each under its label."""
    axis = fitting(x, [0.0, *(row.value for row in rows)])
    drawing, pitch = _Drawing(), BAR + 12
    base = TOP + pitch * len(rows)
    drawing.x_axis(axis, base, TOP)
    for number, row in enumerate(rows):
        top = TOP + pitch * number
        drawing.text(LEFT + 2, top + 10, row.label, kind="point")
        width = max(1.0, axis.share(row.value) * drawing.inner)
        drawing.mark(f"bar s{row.style}", f"M{LEFT} {_n(top + 14)}h{_n(width)}v{BAR - 10}h-{_n(width)}z", row.title)
    return Figure(title=title, drawing=drawing.done(base + BOTTOM, title))
