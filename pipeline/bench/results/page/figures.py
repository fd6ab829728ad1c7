"""Figures of a load point's requests: distributions, courses over time, errors by class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.metric import Distribution
from trtpipe.pipeline.bench.results.page.load_points import LoadPoint, named
from trtpipe.pipeline.pages import plots
from trtpipe.pipeline.pages.parts import capital, number
from trtpipe.pipeline.pages.plots import Figure

# Time series of a load point: panels by their titles, lines by their names.
PANELS = (
    ("Requests in flight", {"in_flight": "in flight"}),
    ("Output tokens/s", {"tokens_per_s": "tokens/s"}),
    ("TTFT p50, ms", {"ttft_p50_ms": "TTFT p50"}),
    ("Latency, ms", {"latency_p99_ms": "p99", "latency_p50_ms": "p50"}),
)


def distributions(points: list[LoadPoint]) -> Iterator[Figure]:
    protocols = list(dict.fromkeys(point["protocol"] for point in points))
    told = {metric for point in points for metric in point["histograms"]}
    for metric in metrics.distributions():
        if metric.instead_of in told:
            continue
        rows = [spread for point in points for spread in _spread(metric, point, protocols.index(point["protocol"]))]
        if rows:
            yield plots.spreads(
                f"{capital(metric.short)} of each load point",
                rows,
                x=f"{capital(metric.short)}, {metric.unit}",
                legend=[(protocol, style % plots.STYLES) for style, protocol in enumerate(protocols)],
            )


def _spread(metric: Distribution, point: LoadPoint, style: int) -> Iterator[plots.Spread]:
    found = point["histograms"].get(metric.name)
    entry = point["metrics"].get(metric.name, {})
    if found and sum(found["counts"]):
        marks = [(statistic, entry[statistic]) for statistic in ("p50", "p99") if entry.get(statistic) is not None]
        told = ", ".join(f"{statistic} {number(value)} {metric.unit}" for statistic, value in marks)
        yield plots.Spread(
            label=named(point),
            title=f"{named(point)}: {number(sum(found['counts']))} values; {told}",
            style=style % plots.STYLES,
            edges=found["edges"],
            counts=found["counts"],
            marks=marks,
        )


def timelines(points: list[LoadPoint]) -> Iterator[Figure]:
    for point in points:
        series = point["series"]
        if series and series["t_s"]:
            panels = [
                plots.Panel(label=title, lines=_lines(series, names))
                for title, names in PANELS
                if any(series.get(key) for key in names)
            ]
            yield plots.timeline(named(point), series["t_s"], panels)


def _lines(series: dict[str, Any], names: dict[str, str]) -> list[plots.Line]:
    return [
        plots.Line(name=name, style=style, values=series[key])
        for style, (key, name) in enumerate(names.items())
        if series.get(key)
    ]


def errors(points: list[LoadPoint]) -> Figure:
    counts: dict[str, int] = {}
    messages: dict[str, list[str]] = {}
    for point in points:
        for entry in point["errors"]:
            counts[entry["kind"]] = counts.get(entry["kind"], 0) + entry["count"]
            messages.setdefault(entry["kind"], []).extend(entry["messages"])
    rows = [
        plots.Bar(
            label=f"{kind}: {count}", title="; ".join(dict.fromkeys(messages[kind])) or kind, value=count, style=1
        )
        for kind, count in sorted(counts.items(), key=lambda pair: -pair[1])
    ]
    return plots.bars("Failed requests by class", rows, x="Requests")
