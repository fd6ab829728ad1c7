"""Page of a report: report.html, one file that needs neither network nor script.

It is designed for phones, for dark mode and for paper. An unknown value shows as a dash or a gap, never as 0.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.pages import plots
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.plots import Figure

UNKNOWN = "–"
# Figures of load points are folded up where there are more than this.
FOLDED = 8
# Statistics of a distribution in tables.
POINTS = ("p50", "p90", "p99")
# Time series of a load point: panels by their titles, lines by their names.
PANELS = (
    ("requests in flight", {"in_flight": "in flight"}),
    ("output tokens/s", {"tokens_per_s": "tokens/s"}),
    ("ms", {"latency_p99_ms": "latency p99", "latency_p50_ms": "latency p50", "ttft_p50_ms": "TTFT p50"}),
)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure, and the text that shows when the pointer rests on it. `words` is set as text, not as a number."""

    text: str
    title: str = ""
    words: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    cells: Sequence[Cell]
    bad: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. `groups` span columns above their names: (name, number of columns)."""

    columns: Sequence[str]
    rows: Sequence[Row]
    groups: Sequence[tuple[str, int]] = ()


def _figures() -> Iterator[tuple[metrics.Metric, str]]:
    """(metric, statistic) of each figure in a row of a table."""
    for metric in metrics.tabled():
        for statistic in metric.figures(POINTS):
            yield metric, statistic


def _short(name: str) -> str:
    metric = metrics.find(name)
    return name if metric is None else metric.short or name


def _headings() -> tuple[list[tuple[str, int]], list[str]]:
    """Groups and columns of the figures of a row."""
    groups, columns = list[tuple[str, int]](), list[str]()
    for metric in metrics.tabled():
        points = metric.figures(POINTS)
        groups.append((metric.heading(), len(points)) if len(points) > 1 else ("", 1))
        columns += points if len(points) > 1 else [metric.heading()]
    return groups, columns


def render(report: dict[str, Any]) -> str:
    """The page of a report."""
    return pages.render("bench.html.j2", report=report, view=_View(report))


def number(value: float | None) -> str:
    """Four significant digits, or all digits before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class _View:
    """Values that the template shows."""

    def __init__(self, report: dict[str, Any]) -> None:
        self._report = report
        self.levels: list[dict[str, Any]] = report["levels"]
        self.protocols = list(dict.fromkeys(level["protocol"] for level in self.levels))
        self._names = [_name(level) for level in self.levels]
        self.folded = len(self.levels) > FOLDED

    # Said at the top

    @property
    def invalid(self) -> bool:
        return self._report["verdict"]["valid"] is False

    @property
    def ended_early(self) -> list[str]:
        return [
            f"{name}: {level['stopped'] or 'interrupted'}"
            for name, level in self._each()
            if level["stopped"] or level["interrupted"]
        ]

    @property
    def title(self) -> str:
        models = dict.fromkeys(str(entry["model"]) for entry in self._report["endpoints"] if entry.get("model"))
        return f"Benchmark of {', '.join(models) or 'a server'}"

    @property
    def measured(self) -> list[tuple[str, str]]:
        """(name, value) of facts about what was measured, without the unknown ones."""
        report = self._report
        tool = report.get("tool") or {}
        command = report.get("command")
        rows = [
            ("endpoint", "; ".join(_joined(entry) for entry in report["endpoints"])),
            ("command", None if command is None else shlex.join(command)),
            ("measured by", _joined(tool)),
            ("started", report.get("started")),
            ("finished", report.get("finished")),
            ("seed", report.get("seed")),
            ("load from", _joined(report.get("host") or {})),
            ("versions", _joined(report.get("client") or {})),
            ("repository", report.get("repository_sha256")),
            ("tokenizer", report.get("tokenizer_sha256")),
        ]
        return [(name, str(value)) for name, value in rows if value not in (None, "")]

    @property
    def engine(self) -> list[tuple[str, str]]:
        return [(name, _plain(value)) for name, value in _flat(self._report.get("engine") or {})]

    @property
    def options(self) -> list[tuple[str, str]]:
        return [(name, _plain(value)) for name, value in _flat(self._report["options"])]

    # Figures of the load points

    @property
    def table(self) -> Table:
        groups, columns = _headings()
        groups, columns = [("", 1), *groups, ("", 1)], ["requests", *columns, "failed"]
        rows = [Row(name=name, cells=list(self._cells(level)), bad=_faults(level)) for name, level in self._each()]
        return Table(columns=columns, rows=rows, groups=groups)

    def _cells(self, level: dict[str, Any]) -> Iterator[Cell]:
        requests, found = level["requests"], level["metrics"]
        yield Cell(text=number(requests["measured"]))
        for metric, statistic in _figures():
            yield self._cell(found, metric.name, statistic)
        rate = found.get("error_rate", {}).get("value")
        told = "" if rate is None else f" ({100 * rate:.3g} %)"
        yield Cell(text=number(requests["failed"]) + (told if requests["failed"] else ""))

    def _cell(self, found: dict[str, Any], metric: str, statistic: str) -> Cell:
        entry = found.get(metric) or {}
        value = entry.get(statistic)
        if value is None:
            undefined = self._report["metrics"].get(metric, {}).get("undefined")
            return Cell(text=UNKNOWN, title=f"undefined: {undefined}" if undefined else "")
        interval = entry.get("interval")
        bounds = interval.get(statistic) if isinstance(interval, dict) else interval
        return Cell(text=number(value), title=f"95 %: {number(bounds[0])} to {number(bounds[1])}" if bounds else "")

    @property
    def repeats(self) -> Table | None:
        """Means over the runs of loads that were measured more than once."""
        rows = []
        for one in self._report.get("repeats") or []:
            cells = [Cell(text=str(one["valid"]))]
            for metric, statistic in _figures():
                cells.append(_over_runs(one["metrics"].get(metric.name, {}).get(statistic)))
            rows.append(Row(name=f"{one['protocol']}, {one['label']}", cells=cells))
        groups, columns = _headings()
        groups, columns = [("", 1), *groups], ["runs", *columns]
        return Table(columns=columns, rows=rows, groups=groups) if rows else None

    @property
    def searches(self) -> list[tuple[str, Table]]:
        """Each search and its result in a sentence, and the rates that were tried."""
        out = []
        for one in self._report.get("searches") or []:
            low, high = ("open" if side is None else number(side) for side in one["interval"])
            found = "nothing" if one["rate"] is None else f"{number(one['rate'])} requests/s ({low} to {high})"
            rest = f"; {one['ended']}" if one["ended"] else ""
            rows = []
            for step in one["steps"]:
                runs = [number(run["excess"]) for run in step["runs"]]
                cells = [Cell(text="passed" if step["passed"] else "failed"), Cell(text=", ".join(runs))]
                rows.append(Row(name=f"{number(step['rate'])} requests/s", cells=cells))
            columns = ["outcome", "worst value over its limit, each run"]
            out.append((f"{one['protocol']}, {one['goal']}: {found}{rest}", Table(columns=columns, rows=rows)))
        return out

    @property
    def client(self) -> Table | None:
        """Measurements of the client itself."""
        rows = []
        for name, level in self._each():
            own = level["client"]
            if own:
                lateness, delay, flight = own["loop_lateness_ms"], own["dispatch_delay_ms"], own["in_flight"]
                share = own["cpu_share"]
                figures = [
                    lateness["p99"],
                    lateness["max"],
                    delay["p99"],
                    delay["max"],
                    flight["asked"],
                    flight["reached"],
                ]
                cells = [*map(number, figures), UNKNOWN if share is None else f"{100 * share:.0f} %"]
                cells.append(number(own["cpu_s_per_1000_tokens"]))
                rows.append(Row(name=name, cells=[Cell(text=cell) for cell in cells], bad=_faults(level)))
        groups = [("loop lateness ms", 2), ("dispatch delay ms", 2), ("in flight", 2), ("CPU", 2)]
        columns = ["p99", "max", "p99", "max", "asked", "reached", "of a core", "s/1000 tokens"]
        return Table(columns=columns, rows=rows, groups=groups) if rows else None

    @property
    def trade_offs(self) -> list[Figure]:
        """Latency over throughput, a curve for each protocol and kind of load, and the Pareto front of them all."""
        out = []
        for metric in metrics.distributions():
            if not metric.drawn or metric.instead_of:
                continue
            found = [curve for curve in self._curves("output_token_throughput", metric, "p99") if curve.points]
            if found:
                title = f"{metric.short} p99 against throughput"
                front = _front([point for curve in found for point in curve.points if not point.hollow])
                if len(front) > 1:
                    title += "; the band is the Pareto front"
                drawing = plots.curves(
                    found, x="output tokens/s", y=f"{metric.short} p99, {metric.unit}", described=title, band=front
                )
                out.append(Figure(title=title, drawing=drawing, legend=_legend(found)))
        return out

    def _curves(self, across: str, up: metrics.Distribution, statistic: str) -> Iterator[plots.Curve]:
        for (protocol, kind), members in self._by_load().items():
            points = []
            for name, level in members:
                x = level["metrics"].get(across, {}).get("value")
                y = level["metrics"].get(up.name, {}).get(statistic)
                if x is not None and y is not None:
                    invalid = level["verdict"]["valid"] is False
                    title = f"{name}: {number(x)} tokens/s, {up.short} {statistic} {number(y)} {up.unit}"
                    points.append(
                        plots.Point(
                            x=x, y=y, label=_load(level), title=title + (", INVALID" if invalid else ""), hollow=invalid
                        )
                    )
            style = self.protocols.index(protocol)
            yield plots.Curve(name=f"{protocol}, {kind}", style=style, points=points, dashed=kind != "closed loop")

    @property
    def distributions(self) -> list[Figure]:
        out = []
        told = {metric for level in self.levels for metric in level["histograms"]}
        for metric in metrics.distributions():
            if metric.instead_of in told:
                continue
            rows = [spread for name, level in self._each() for spread in self._spread(metric, name, level)]
            if rows:
                title = f"{metric.short} of each load point"
                drawing = plots.spreads(rows, x=f"{metric.short}, {metric.unit}", described=title)
                out.append(Figure(title=title, drawing=drawing, legend=self._protocol_legend()))
        return out

    def _spread(self, metric: metrics.Distribution, name: str, level: dict[str, Any]) -> Iterator[plots.Spread]:
        found = level["histograms"].get(metric.name)
        entry = level["metrics"].get(metric.name, {})
        if found and sum(found["counts"]):
            marks = [(point, entry[point]) for point in ("p50", "p99") if entry.get(point) is not None]
            told = ", ".join(f"{point} {number(value)} {metric.unit}" for point, value in marks)
            yield plots.Spread(
                label=name,
                title=f"{name}: {number(sum(found['counts']))} values; {told}",
                style=self.protocols.index(level["protocol"]),
                edges=found["edges"],
                counts=found["counts"],
                marks=marks,
            )

    @property
    def timelines(self) -> list[Figure]:
        out = []
        for name, level in self._each():
            series = level["series"]
            if series and series["t_s"]:
                panels = [
                    plots.Panel(label=title, lines=_lines(series, names))
                    for title, names in PANELS
                    if any(series.get(key) for key in names)
                ]
                drawing = plots.timeline(series["t_s"], panels, described=f"{name} over time")
                out.append(Figure(title=name, drawing=drawing))
        return out

    # Objectives

    @property
    def objectives(self) -> Table | None:
        asked = next((level["slo"]["objectives"] for level in self.levels if level["slo"]), None)
        if asked is None:
            return None
        columns = [
            f"{_short(one['metric'])} {one['statistic']} < {number(one['limit'])} {one['unit']}" for one in asked
        ]
        rows = []
        for name, level in self._each():
            told = level["slo"]
            judged = told["objectives"] if told else []
            cells = [Cell(text=f"{'✓' if one['met'] else '✗'} {number(one['value'])}") for one in judged]
            goodput = self._cell(level["metrics"], "request_goodput", "value")
            verdict = Cell(text=UNKNOWN if told is None else "met" if told["met"] else "missed")
            blank = [Cell(text=UNKNOWN)] * (len(columns) - len(cells))
            rows.append(Row(name=name, cells=[verdict, *cells, *blank, goodput], bad=_faults(level)))
        return Table(columns=["all", *columns, "goodput requests/s"], rows=rows)

    @property
    def frontier(self) -> list[str]:
        """The highest load of each curve that meets all objectives."""
        out = []
        for (protocol, kind), members in self._by_load().items():
            judged = [(name, level) for name, level in members if level["slo"] and level["verdict"]["valid"]]
            met = [name for name, level in judged if level["slo"]["met"]]
            if judged:
                what = f"up to {met[-1].partition(', ')[2]}" if met else "at no load"
                out.append(f"{protocol}, {kind}: all objectives are met {what}.")
        return out

    @property
    def goodputs(self) -> list[Figure]:
        """Goodput over load; hollow where objectives are missed."""
        out: list[Figure] = []
        for kind in dict.fromkeys(kind for _, kind in self._by_load()):
            found = []
            for (protocol, its_kind), members in self._by_load().items():
                points = [
                    plots.Point(
                        x=_amount(level) or 0.0,
                        y=value,
                        label=_load(level),
                        title=f"{name}: {number(value)} good requests/s",
                        hollow=not (level["slo"] and level["slo"]["met"]),
                    )
                    for name, level in members
                    if (value := level["metrics"].get("request_goodput", {}).get("value")) is not None
                ]
                if its_kind == kind and points:
                    style = self.protocols.index(protocol)
                    found.append(plots.Curve(name=f"{protocol}, {kind}", style=style, points=points))
            if found:
                title = f"Goodput against load, {kind}"
                x = "requests in flight" if kind == "closed loop" else "requests/s asked for"
                drawing = plots.curves(found, x=x, y="good requests/s", described=title)
                out.append(Figure(title=title, drawing=drawing, legend=_legend(found)))
        return out

    # Errors and the server

    @property
    def errors(self) -> Table | None:
        rows = [
            Row(
                name=name,
                cells=[
                    Cell(text=entry["kind"]),
                    Cell(text=number(entry["count"])),
                    Cell(text="; ".join(entry["messages"]), words=True),
                ],
            )
            for name, level in self._each()
            for entry in level["errors"]
        ]
        return Table(columns=["class", "count", "messages"], rows=rows) if rows else None

    @property
    def error_figure(self) -> Figure:
        counts: dict[str, int] = {}
        messages: dict[str, list[str]] = {}
        for level in self.levels:
            for entry in level["errors"]:
                counts[entry["kind"]] = counts.get(entry["kind"], 0) + entry["count"]
                messages.setdefault(entry["kind"], []).extend(entry["messages"])
        rows = [
            plots.Bar(label=f"{kind}: {count}", title="; ".join(dict.fromkeys(messages[kind])), value=count, style=1)
            for kind, count in sorted(counts.items(), key=lambda pair: -pair[1])
        ]
        title = "Failed requests by class"
        return Figure(title=title, drawing=plots.bars(rows, x="requests", described=title))

    @property
    def server(self) -> Table | None:
        """All numbers that the server's metrics gave."""
        told = [dict(_flat(level["server"] or {})) for level in self.levels]
        columns = list(dict.fromkeys(key for values in told for key, value in values.items() if not _is_series(value)))
        if not columns:
            return None
        rows = [
            Row(name=name, cells=[Cell(text=_plain(values.get(column))) for column in columns])
            for name, values in zip(self._names, told, strict=True)
        ]
        return Table(columns=columns, rows=rows)

    @property
    def server_timelines(self) -> list[Figure]:
        out = []
        for name, level in self._each():
            for seconds, lines in _server_series(level["server"] or {}):
                panels = [
                    plots.Panel(label=key, lines=[plots.Line(name=key, style=at % 4, values=values)])
                    for at, (key, values) in enumerate(lines.items())
                ]
                drawing = plots.timeline(seconds, panels, described=f"the server over time, {name}")
                out.append(Figure(title=name, drawing=drawing))
        return out

    def _each(self) -> Iterator[tuple[str, dict[str, Any]]]:
        return zip(self._names, self.levels, strict=True)

    def _by_load(self) -> dict[tuple[str, str], list[tuple[str, dict[str, Any]]]]:
        """Load points of each protocol and kind of load, the lowest load first."""
        out: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
        for name, level in self._each():
            load = level["load"]
            kind = "closed loop" if load["kind"] == "closed" else f"{load.get('arrivals')} arrivals"
            out.setdefault((level["protocol"], kind), []).append((name, level))
        for members in out.values():
            members.sort(key=lambda member: _amount(member[1]) or 0.0)
        return out

    def _protocol_legend(self) -> list[tuple[str, int]]:
        return [(protocol, style) for style, protocol in enumerate(self.protocols)]


def _over_runs(entry: dict[str, Any] | None) -> Cell:
    if entry is None:
        return Cell(text=UNKNOWN)
    low, high = entry["interval"]
    return Cell(text=f"{number(entry['mean'])} ±{number((high - low) / 2)}", title=f"std {number(entry['std'])}")


def _name(level: dict[str, Any]) -> str:
    repeat = f", repeat {level['repeat'] + 1}" if level["repeat"] else ""
    return f"{level['protocol']}, {level['label']}{repeat}"


def _amount(level: dict[str, Any]) -> float | None:
    load = level["load"]
    amount: float | None = load.get("concurrency") if load["kind"] == "closed" else load.get("rate")
    return amount


def _load(level: dict[str, Any]) -> str:
    """Label of a load beside a point: 16, or 20/s."""
    amount = _amount(level)
    if amount is None:
        return str(level["label"])
    return f"{amount:g}" if level["load"]["kind"] == "closed" else f"{amount:g}/s"


def _faults(level: dict[str, Any]) -> str:
    """Why a load point's figures need caution."""
    told = [f"INVALID: {reason['what']}: {reason['why']}" for reason in level["verdict"]["reasons"]]
    told += [f"ended early: {level['stopped'] or 'interrupted'}"] if level["stopped"] or level["interrupted"] else []
    return "; ".join(told)


def _front(points: Sequence[plots.Point]) -> list[plots.Point]:
    """Points that no other one beats in one direction without being worse in the other; high x and low y are better."""
    out: list[plots.Point] = []
    for point in sorted(points, key=lambda point: (-point.x, point.y)):
        if not out or point.y < out[-1].y:
            out.append(point)
    return out


def _legend(found: Sequence[plots.Curve]) -> list[tuple[str, int]]:
    return [(curve.name, curve.style) for curve in found]


def _lines(series: dict[str, Any], names: dict[str, str]) -> list[plots.Line]:
    return [
        plots.Line(name=name, style=style, values=series[key])
        for style, (key, name) in enumerate(names.items())
        if series.get(key)
    ]


def _is_series(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) > 0 and all(isinstance(one, (int, float, type(None))) for one in value)
    )


def _server_series(value: dict[str, Any]) -> Iterator[tuple[list[float], dict[str, list[float | None]]]]:
    """All series in the value: lists as long as the `t_s` beside them."""
    seconds = value.get("t_s")
    if _is_series(seconds):
        assert seconds is not None
        lines = {
            key: one
            for key, one in value.items()
            if key != "t_s" and _is_series(one) and len(one) == len(seconds) and any(x is not None for x in one)
        }
        if lines:
            yield seconds, lines
    for inner in value.values():
        if isinstance(inner, dict):
            yield from _server_series(inner)


def _flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under dotted names; entries of a list under their own names, or their numbers."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flat(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
            for place, one in enumerate(inner):
                yield from _flat(one, f"{prefix}{key}.{one.get('name', place)}.")
        else:
            yield f"{prefix}{key}", inner


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    return UNKNOWN if value is None else str(value)


def _joined(value: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_plain(inner)}" for key, inner in _flat(value) if inner is not None)
