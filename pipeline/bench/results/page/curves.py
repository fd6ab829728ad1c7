"""Curves over the load points of one report or of several: throughput against latency, and figures against load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.page.load_points import (
    LoadPoint,
    amount,
    by_load,
    gpus,
    invalid,
    kind,
    label,
    missed,
    named,
    shared,
    value,
)  # fmt: skip
from trtpipe.pipeline.pages import plots
from trtpipe.pipeline.pages.parts import capital, number
from trtpipe.pipeline.pages.plots import Figure, Point

HOLLOW = "A hollow mark is INVALID or misses an objective."


@dataclass(frozen=True, kw_only=True)
class Run:
    """A report in a figure; `name` begins the names of its curves, and is empty for the only one."""

    report: dict[str, Any]
    name: str = ""

    @property
    def points(self) -> list[LoadPoint]:
        found: list[LoadPoint] = self.report["levels"]
        return found

    @property
    def gpus(self) -> int | None:
        """None on a CPU too."""
        return None if (self.report.get("engine") or {}).get("gpu") == "cpu" else gpus(self.report)

    def named(self, words: str) -> str:
        return f"{self.name}, {words}" if self.name else words


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A value of a load point; `label` has its unit."""

    label: str
    of: Callable[[Run, LoadPoint], float | None]


def _metric(runs: Sequence[Run], metric: str, statistic: str = "value", told: str = "") -> Quantity | None:
    """`told` is its label; its own if left out. None where a run has no such metric."""
    found = shared([run.points for run in runs], metric, statistic)
    if found is None:
        return None
    name, short = found
    return Quantity(
        label=told or f"{capital(short)} {statistic}, ms", of=lambda _, point: value(point, name, statistic)
    )


def against_latency(runs: Sequence[Run]) -> list[Figure]:
    """p99 of each latency over throughput, with the Pareto front, and a client's speed over a GPU's throughput."""
    throughput = _metric(runs, "output_token_throughput", told="Output tokens/s")
    out = []
    for metric in metrics.distributions():
        if metric.drawn and not metric.instead_of:
            y = _metric(runs, metric.name, "p99")
            title = f"{y.label.partition(',')[0] if y else ''} against throughput"
            note = "Right and low is good; the band is the Pareto front."
            out.append(_figure(title, runs, throughput, y, note, front=True))
    known = all(run.gpus for run in runs)
    what = "a GPU" if known else "the server"

    def of_each(run: Run, point: LoadPoint) -> float | None:
        rate = None if throughput is None else throughput.of(run, point)
        return None if rate is None else rate / (run.gpus if known and run.gpus else 1)

    share = Quantity(label=f"Output tokens/s of {what}", of=of_each)
    speed = _metric(runs, "output_token_throughput_per_user", "p50", "Output tokens/s of one client, p50")
    title = f"Throughput of {what} against speed of one client"
    out.append(_figure(title, runs, speed, share, "Right and high is good."))
    return [figure for figure in out if figure is not None]


def against_load(runs: Sequence[Run]) -> list[Figure]:
    """Throughput, TTFT, and goodput where objectives were given, over the load; one figure for each kind of load."""
    quantities = (
        ("Throughput", _metric(runs, "output_token_throughput", told="Output tokens/s")),
        ("TTFT p99", _metric(runs, "time_to_first_token", "p99")),
        ("Goodput", _metric(runs, "request_goodput", told="Good requests/s")),
    )
    out = []
    for one in dict.fromkeys(kind(point) for run in runs for point in run.points):
        told = {str(point["label"]).rpartition(" ")[2] for run in runs for point in run.points if kind(point) == one}
        unit = "Conversations/s" if told == {"conversations/s"} else "Requests/s"
        x = Quantity(
            label="Requests in flight" if one == "closed loop" else f"{unit} asked for",
            of=lambda _, point, one=one: amount(point) if kind(point) == one else None,  # type: ignore[misc]
        )
        out += [_figure(f"{name} against load, {one}", runs, x, y) for name, y in quantities]
    return [figure for figure in out if figure is not None]


def _figure(
    title: str, runs: Sequence[Run], x: Quantity | None, y: Quantity | None, note: str = "", *, front: bool = False
) -> Figure | None:
    """None where no load point has both values."""
    if x is None or y is None:
        return None
    found, good = list[plots.Curve](), list[Point]()
    for number_, (run, protocol, loop, members) in enumerate(_groups(runs)):
        dots = []
        for point in members:
            a, b = x.of(run, point), y.of(run, point)
            if a is None or b is None:
                continue
            told = f"{run.named(named(point))}: {x.label}: {number(a)}; {y.label}: {number(b)}"
            told += ", INVALID" if invalid(point) else ", misses an objective" if missed(point) else ""
            hollow = invalid(point) or missed(point)
            dots.append(Point(x=a, y=b, label=label(point), title=told, hollow=hollow))
            good += [] if invalid(point) else [dots[-1]]
        if dots:
            name, style = run.named(f"{protocol}, {loop}"), number_ % plots.STYLES
            found.append(plots.Curve(name=name, style=style, points=dots, dashed=loop != "closed loop"))
    if not found:
        return None
    if len(found) == 1 and len(runs) > 1:
        # A legend names two curves or more.
        note = f"The only curve is {found[0].name}. {note}".strip()
    if any(point.hollow for curve in found for point in curve.points):
        note = f"{note} {HOLLOW}".strip()
    return plots.curves(title, found, x=x.label, y=y.label, band=_front(good) if front else (), note=note)


def _groups(runs: Sequence[Run]) -> Iterator[tuple[Run, str, str, list[LoadPoint]]]:
    for run in runs:
        for (protocol, loop), members in by_load(run.points).items():
            yield run, protocol, loop, members


def _front(points: Sequence[Point]) -> list[Point]:
    """Points that no other one beats in one direction without being worse in the other; high x and low y are better."""
    out: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.x, point.y)):
        if not out or point.y < out[-1].y:
            out.append(point)
    return out
