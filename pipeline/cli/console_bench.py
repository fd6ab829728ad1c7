"""Console output of `bench` and `compare`: progress, load points side by side, a comparison.

Progress is written without rich: its import would delay the first request, and its thread would take the interpreter
from the reader of answers a dozen times a second.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.metric import VALUE, rounded
from trtpipe.pipeline.cli import console
from trtpipe.pipeline.cli.console_text import bounded, one_line

if TYPE_CHECKING:
    from trtpipe.pipeline.bench.compare.comparison import Comparison
    from trtpipe.pipeline.bench.options import Progress
    from trtpipe.pipeline.bench.results.metric import Metric
    from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult

# Statistics of a distribution in the table.
POINTS = ("p50", "p90", "p99")
# Columns of output that goes into a pipe or a file.
PIPED_WIDTH = 100
# Seconds between lines of progress where stderr is not a terminal.
PERIOD_S = 15.0
# Most characters of a line in the head of a column.
HEAD_WIDTH = 9
STYLES = {"INVALID": "bold red", "missed": "red", "met": "green", "worse": "red", "better": "green", "FIRED": "red"}


@contextlib.contextmanager
def progress() -> Iterator[Callable[[Progress], None]]:
    """Show progress on stderr: a line that is replaced, or a line now and then where stderr is not a terminal.

    A load point that has ended keeps its line.
    """
    if console.FLAGS.quiet:
        yield lambda at: None
        return
    status = _Status() if sys.stderr.isatty() else _Log()
    try:
        yield status.tell
    finally:
        status.close()


class _Log:
    """Writes a line as a load point begins and ends, and every PERIOD_S seconds in between."""

    def __init__(self) -> None:
        self._next = 0.0

    def tell(self, at: Progress) -> None:
        now = time.monotonic()
        if at.state == "begun":
            _write(f"{at.name}: begins" + (f", {at.total:,} requests" if at.total else ""))
        elif at.state == "ended":
            _write(ended_line(at))
        elif self._next <= now:
            if self._next:
                _write(running_line(at))
        else:
            return
        self._next = now + PERIOD_S

    def close(self) -> None:
        pass


class _Status:
    """Keeps one line at the bottom of a terminal."""

    def __init__(self) -> None:
        _write("connecting", end="")

    def tell(self, at: Progress) -> None:
        if at.state == "ended":
            self.close()
            for part in textwrap.wrap(ended_line(at), shutil.get_terminal_size().columns, subsequent_indent="  "):
                _write(part)
        elif at.state == "running":
            self.close()
            _write(running_line(at, shutil.get_terminal_size().columns - 1), end="")

    def close(self) -> None:
        sys.stderr.write("\r\x1b[K")


def _write(line: str, end: str = "\n") -> None:
    sys.stderr.write(bounded(line) + end)
    sys.stderr.flush()


def running_line(at: Progress, width: int = 1000) -> str:
    """The state of a load point in one line: of its parts, the most important first, as many as fit."""
    live = at.live
    if live.to_make:
        return f"{at.name}: making prompts, {live.made:,} of {live.to_make:,}"[:width]
    parts = [f"{at.name}: {live.done:,}{f' of {at.total:,}' if at.total else ''} done"]
    left = live.left_s
    if at.total and live.done:
        left = live.elapsed_s * (at.total - live.done) / live.done
    if left is not None:
        parts.append(f"{left:.0f} s left")
    if live.failed:
        parts.append(f"{live.failed:,} failed")
    elapsed = max(live.elapsed_s, 1e-9)
    if live.first_ns:
        times = sorted(live.first_ns)
        half, most = times[len(times) // 2], times[len(times) * 99 // 100]
        parts.append(f"first byte p50/p99 {rounded(half / 1e6, 0)}/{rounded(most / 1e6, 0)} ms")
    ended = (live.warmed + live.done) / elapsed
    parts += [
        f"{live.in_flight} in flight",
        f"{rounded(ended)} requests/s",
        f"{rounded(live.responses / elapsed, 0)} responses/s",
    ]
    shown = itertools.takewhile(lambda line: len(line) <= width, itertools.accumulate(parts, "{}, {}".format))
    return max(shown, key=len, default=parts[0][:width])


def ended_line(at: Progress) -> str:
    """The main figures of a load point that has ended."""
    live, result = at.live, at.result
    parts = [f"{at.name}: {live.done:,} requests in {live.elapsed_s:.1f} s", f"{live.failed:,} failed"]
    if result is not None:
        first, rate = result.metrics["time_to_first_token"], result.metrics["output_token_throughput"]["value"]
        if first["p50"] is not None:
            parts.append(f"TTFT p50/p99 {rounded(first['p50'])}/{rounded(first['p99'])} ms")
        parts += [] if rate is None else [f"{rounded(rate)} tokens/s"]
        parts += [] if result.slo is None or result.slo["met"] else ["SLO missed"]
        parts += [] if result.verdict["valid"] else ["INVALID"]
    return ", ".join(parts)


def report(measured: BenchReport) -> None:
    """Print a column for each load point, and the means of repeated ones."""
    from trtpipe.pipeline.bench.results.metrics import tabled

    results = measured.results
    if not results:
        return
    metrics = [metric for metric in tabled() if any(metric.name in result.metrics for result in results)]
    # A search for goodput asks how many requests keep the objectives; of the load point as a whole, whether it keeps
    # those of metrics with one value.
    by_share = any(one.search.goal == "max-goodput" for one in measured.searches)

    def kept(slo: dict[str, Any] | None) -> str:
        if by_share and (slo is None or all(row["met"] for row in slo["objectives"] if row["statistic"] == VALUE)):
            return "-" if slo is None or slo["attainment"] is None else f"{100 * slo['attainment']:.1f}%"
        return "met" if slo is not None and slo["met"] else "missed"

    judged = any(result.slo is not None for result in results)
    rows: list[tuple[str, Callable[[LoadPointResult], str]]] = [
        ("requests", lambda result: f"{result.requests['succeeded']:,}"),
        ("failed", lambda result: f"{result.requests['failed']:,}"),
    ]
    if any(result.repeat for result in results):
        rows.insert(0, ("run", lambda result: str(result.repeat + 1)))
    for metric in metrics:
        for point in metric.figures(POINTS):

            def figure(result: LoadPointResult, metric: Metric = metric, point: str = point) -> str:
                value = result.metrics.get(metric.name, {}).get(point)
                return "-" if value is None else rounded(metric.shown(value))

            rows.append((metric.heading(point), figure))
    if judged:
        rows.append(("SLO", lambda result: kept(result.slo)))
    if not measured.valid:
        rows.append(("verdict", lambda result: "" if result.verdict["valid"] else "INVALID"))
    cells = [[cell(result) for _, cell in rows] for result in results]
    _side_by_side([name for name, _ in rows], [(result.protocol, result.label) for result in results], cells)
    _repeats(measured)


def _repeats(measured: BenchReport) -> None:
    """Print the means over the runs of each load measured more than once, with half of their 95% interval."""
    from trtpipe.pipeline.bench.results.metrics import tabled

    repeated = [one for one in measured.repeats() if one["valid"] > 1]
    if not repeated:
        return

    def cell(metric: Metric, entry: dict[str, Any] | None) -> str:
        if entry is None:
            return "-"
        mean, low = metric.shown(entry["mean"]), metric.shown(entry["interval"][0])
        return f"{rounded(mean)} \u00b1{rounded(mean - low)}"

    figures = [
        (metric, point)
        for metric in tabled()
        if any(metric.name in one["metrics"] for one in repeated)
        for point in metric.figures(("p50", "p99"))
    ]
    cells = [
        [
            str(one["valid"]),
            *(cell(metric, one["metrics"].get(metric.name, {}).get(point)) for metric, point in figures),
        ]
        for one in repeated
    ]
    console.result("", "means of repeated runs, with their 95% intervals")
    names = ["runs", *(metric.heading(point) for metric, point in figures)]
    _side_by_side(names, [(one["protocol"], one["label"]) for one in repeated], cells)


def _side_by_side(names: Sequence[str], heads: Sequence[tuple[str, str]], cells: Sequence[Sequence[str]]) -> None:
    """Print named rows with a column for each of `heads` (protocol, load); below one another what is too wide."""
    wrap = textwrap.TextWrapper(HEAD_WIDTH, break_long_words=False).wrap
    wrapped = [[protocol, *wrap(one_line(label))] for protocol, label in heads]
    depth = max(map(len, wrapped))
    columns = [[*head, *[""] * (depth - len(head)), *column] for head, column in zip(wrapped, cells, strict=True)]
    stub = [*[""] * depth, *names]
    first = max(map(len, stub))
    widths = [2 + max(map(len, column)) for column in columns]
    while columns:
        room = itertools.accumulate(widths, initial=first)
        count = max(1, sum(reached <= _width() for reached in room) - 1)
        for number, row in enumerate(zip(stub, *columns[:count], strict=True)):
            style = "bold" if number < depth else ""
            _line(
                [(row[0].ljust(first), ""), *((cell.rjust(w), style) for cell, w in zip(row[1:], widths, strict=False))]
            )
        columns, widths = columns[count:], widths[count:]
        if columns:
            console.result("")


def _width() -> int:
    out = console.out()
    return out.width if out.is_terminal else PIPED_WIDTH


def _line(cells: Sequence[tuple[str, str]]) -> None:
    """Print cells of (text, style) as one line without trailing blanks; what passes judgement has its own colour."""
    from rich.text import Text

    line = Text()
    for cell, style in cells:
        line.append(one_line(cell), STYLES.get(cell.strip(), style))
    line.rstrip()
    console.out().print(line)


def comparison(compared: Comparison, *, as_json: bool) -> None:
    """Print how the runs' conditions differ, then each report against the first, then the conclusion."""
    if as_json:
        console.result_json(compared.to_json())
        return
    for letter, path in compared.paths.items():
        console.result(f"{letter}: {path}")
    for warning in compared.warnings:
        console.result(f"unlike: {warning}")
    for note in compared.notes:
        console.result(f"note: {note}")
    for head, sections in compared.tables():
        rows = [row for _, rows in sections for row in rows]
        widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
        console.result("")
        _line([(cell, "bold") for cell in _aligned(head, widths)])
        for load, rows in sections:
            _line([(load, "bold")])
            for row in rows:
                _line([(cell, "") for cell in _aligned(row, widths)])
    console.result("")
    for line in compared.summary():
        console.result(line)
    for judgement in compared.judgements:
        verdict = "not fired" if judgement.fired is False else "FIRED"
        _line([(verdict, ""), (f": {judgement.condition}: {judgement.told}", "")])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """The first and the last cell of a row to the left, all others to the right."""
    inner = [cell.rjust(width + 2) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)]
    return [f"  {row[0].ljust(widths[0])}", *inner, "  ", row[-1]]
