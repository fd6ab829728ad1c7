"""Tables of a report's page: load points, repeats, searches, objectives, errors, and the client itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.metric import VALUE, Distribution, Metric
from trtpipe.pipeline.bench.results.page.load_points import LoadPoint, faults, named
from trtpipe.pipeline.pages.parts import UNKNOWN, Cell, Row, Table, number

HEAD = "Load point"
# Statistics of a distribution in tables.
POINTS = ("p50", "p90", "p99")


def load_points(report: dict[str, Any]) -> Table:
    groups, columns = _headings(report)
    groups, columns = [("", 1), *groups, ("", 1)], ["requests", *columns, "failed"]
    rows = [Row(name=named(point), cells=list(_cells(report, point)), bad=faults(point)) for point in report["levels"]]
    return Table(head=HEAD, columns=columns, rows=rows, groups=groups)


def _tabled(report: dict[str, Any]) -> list[Metric]:
    """Metrics of the tables: without those of speculation where no load point has any."""
    there = {name for point in report["levels"] for name in point["metrics"]}
    return [metric for metric in metrics.tabled() if metric not in metrics.SPECULATION or metric.name in there]


def _figures(report: dict[str, Any]) -> Iterator[tuple[Metric, str]]:
    """(metric, statistic) of each figure in a row of a table."""
    for metric in _tabled(report):
        for statistic in metric.figures(POINTS):
            yield metric, statistic


def _headings(report: dict[str, Any]) -> tuple[list[tuple[str, int]], list[str]]:
    """Groups and columns of the figures of a row."""
    groups, columns = list[tuple[str, int]](), list[str]()
    for metric in _tabled(report):
        points = metric.figures(POINTS)
        groups.append((metric.heading(), len(points)) if len(points) > 1 else ("", 1))
        columns += points if len(points) > 1 else [metric.heading()]
    return groups, columns


def _cells(report: dict[str, Any], point: LoadPoint) -> Iterator[Cell]:
    requests, found = point["requests"], point["metrics"]
    yield Cell(text=number(requests["measured"]))
    for metric, statistic in _figures(report):
        yield _cell(report, found, metric, statistic)
    rate = found.get("error_rate", {}).get("value")
    told = "" if rate is None else f" ({100 * rate:.3g} %)"
    failed = requests["failed"]
    yield Cell(text=number(failed) + (told if failed else ""), kind="bad" if failed else "")


def _cell(report: dict[str, Any], found: dict[str, Any], metric: Metric, statistic: str) -> Cell:
    entry = found.get(metric.name) or {}
    value = entry.get(statistic)
    if value is None:
        undefined = report["metrics"].get(metric.name, {}).get("undefined")
        return Cell(text=UNKNOWN, title=f"undefined: {undefined}" if undefined else "")
    interval = entry.get("interval")
    bounds = interval.get(statistic) if isinstance(interval, dict) else interval
    return Cell(
        text=number(metric.shown(value)), title=f"95 %: {number(bounds[0])} to {number(bounds[1])}" if bounds else ""
    )


def repeats(report: dict[str, Any]) -> Table | None:
    """Means over the runs of loads that were measured more than once."""
    rows = []
    for one in report.get("repeats") or []:
        cells = [Cell(text=str(one["valid"]))]
        for metric, statistic in _figures(report):
            cells.append(_over_runs(metric, one["metrics"].get(metric.name, {}).get(statistic)))
        rows.append(Row(name=f"{one['protocol']}, {one['label']}", cells=cells))
    groups, columns = _headings(report)
    return Table(head=HEAD, columns=["runs", *columns], rows=rows, groups=[("", 1), *groups]) if rows else None


def _over_runs(metric: Metric, entry: dict[str, Any] | None) -> Cell:
    if entry is None:
        return Cell(text=UNKNOWN)
    low, high = entry["interval"]
    mean, half, std = (number(metric.shown(value)) for value in (entry["mean"], (high - low) / 2, entry["std"]))
    return Cell(text=f"{mean} ±{half}", title=f"std {std}")


def searches(report: dict[str, Any]) -> Iterator[tuple[str, Table]]:
    """Each search and its result in a sentence, and the rates that were tried."""
    for one in report.get("searches") or []:
        low, high = ("open" if side is None else number(side) for side in one["interval"])
        unit = one.get("unit", "requests/s")  # an older report has none
        found = "nothing" if one["rate"] is None else f"{number(one['rate'])} {unit} ({low} to {high})"
        rest = f"; {one['ended']}" if one["ended"] else ""
        rows = []
        for step in one["steps"]:
            runs = [number(run["excess"]) for run in step["runs"]]
            outcome = Cell(text="passed", kind="good") if step["passed"] else Cell(text="failed", kind="bad")
            rows.append(Row(name=f"{number(step['rate'])} {unit}", cells=[outcome, Cell(text=", ".join(runs))]))
        columns = ["outcome", "worst value over its limit, each run"]
        yield f"{one['protocol']}, {one['goal']}: {found}{rest}.", Table(head="Rate", columns=columns, rows=rows)


def objectives(report: dict[str, Any]) -> Table | None:
    asked = next((point["slo"]["objectives"] for point in report["levels"] if point["slo"]), None)
    if asked is None:
        return None
    columns = [_objective(one) for one in asked]
    rows = []
    for point in report["levels"]:
        told = point["slo"]
        judged = told["objectives"] if told else []
        cells = [
            Cell(text=f"{'✓' if one['met'] else '✗'} {_shown(one, 'value')}", kind="good" if one["met"] else "bad")
            for one in judged
        ]
        goodput = _cell(report, point["metrics"], metrics.REQUEST_GOODPUT, "value")
        verdict = Cell(text=UNKNOWN if told is None else "met" if told["met"] else "missed")
        blank = [Cell(text=UNKNOWN)] * (len(columns) - len(cells))
        rows.append(Row(name=named(point), cells=[verdict, *cells, *blank, goodput], bad=faults(point)))
    return Table(head=HEAD, columns=["all", *columns, "goodput requests/s"], rows=rows)


def _objective(row: dict[str, Any]) -> str:
    metric = metrics.find(row["metric"])
    sign = ">" if metric is not None and metric.better == "higher" else "<"
    statistic = "" if row["statistic"] == VALUE else row["statistic"]
    words = (_short(row["metric"]), statistic, sign, _shown(row, "limit"), row["unit"])
    return " ".join(word for word in words if word)


def _shown(row: dict[str, Any], key: str) -> str:
    """A value of an objective, or its limit, as tables show the metric."""
    metric, value = metrics.find(row["metric"]), row[key]
    return number(value if value is None or metric is None else metric.shown(value))


def _short(name: str) -> str:
    for metric in metrics.METRICS:
        if name == metric.name and metric.short:
            return metric.short
        if isinstance(metric, Distribution) and name == metric.judged:
            return f"{metric.short} from due"
    return name


def errors(report: dict[str, Any]) -> Table | None:
    rows = [
        Row(
            name=named(point),
            cells=[
                Cell(text=entry["kind"]),
                Cell(text=number(entry["count"])),
                Cell(text="; ".join(entry["messages"]), words=True),
            ],
        )
        for point in report["levels"]
        for entry in point["errors"]
    ]
    return Table(head=HEAD, columns=["class", "count", "messages"], rows=rows) if rows else None


def client(report: dict[str, Any]) -> Table | None:
    """Measurements of the client itself."""
    rows = []
    for point in report["levels"]:
        own = point["client"]
        if own:
            lateness, delay, flight = own["loop_lateness_ms"], own["dispatch_delay_ms"], own["in_flight"]
            share = own["cpu_share"]
            figures = [
                lateness["p99"], lateness["max"], delay["p99"], delay["max"], flight["asked"], flight["reached"],
            ]  # fmt: skip
            cells = [*map(number, figures), UNKNOWN if share is None else f"{100 * share:.0f} %"]
            cells.append(number(own["cpu_s_per_1000_tokens"]))
            rows.append(Row(name=named(point), cells=[Cell(text=cell) for cell in cells], bad=faults(point)))
    groups = [("loop lateness ms", 2), ("dispatch delay ms", 2), ("in flight", 2), ("CPU", 2)]
    columns = ["p99", "max", "p99", "max", "asked", "reached", "of a core", "s/1000 tokens"]
    return Table(head=HEAD, columns=columns, rows=rows, groups=groups) if rows else None
