"""Console output of all commands except `top` (console_top). Progress and complaints go to stderr, results to stdout.

Control characters are made visible in all output (console_text), except in text that `generate` and `logs` write to a
pipe or a file: as with `ls`, the reader of that gets it unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.cli.console_text import bounded, one_line, visible

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.segment import Segment

    from trtpipe.engines.hf.inspection import Inspection
    from trtpipe.pipeline.accuracy.gate import Report as AccuracyReport
    from trtpipe.pipeline.bench.compare.comparison import Comparison
    from trtpipe.pipeline.bench.options import Progress as BenchProgress
    from trtpipe.pipeline.bench.results.report import BenchReport
    from trtpipe.pipeline.runner import StageResult
    from trtpipe.triton_repo.check import Fault

    Progress = Callable[[int, int], None]


def prepare() -> None:
    """Let no output fail for a character that its encoding lacks (LANG=C): the character is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # a test's stream
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def out() -> RichConsole:
    """Standard output; rich is imported here because `--help` must not wait for it."""
    return console(soft_wrap=True)


def err() -> RichConsole:
    return console(stderr=True, soft_wrap=True)


def console(*, stderr: bool = False, soft_wrap: bool = False) -> RichConsole:
    # Paths and causes are shown unchanged: `[old]` in a path is not markup, and `:key:` is not an emoji.
    return _console_class()(stderr=stderr, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


@functools.cache
def _console_class() -> type[RichConsole]:
    from rich.console import Console
    from rich.segment import Segment

    class VisibleConsole(Console):
        """Passes everything it writes, tables and progress too, through `visible`, except rich's own sequences."""

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(visible(segment.text), segment.style)

    return VisibleConsole


def error(line: str) -> None:
    err().print(f"error: {bounded(line)}", style="red")


def traceback(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as Python does, with its message made visible: a `sys.excepthook`."""
    from traceback import format_exception

    sys.stderr.write(visible("".join(format_exception(kind, failure, trace))))


def note(line: str) -> None:
    err().print(bounded(line), style="dim")


def _say(line: str) -> None:
    err().print(bounded(line))


def result(*lines: str) -> None:
    for line in lines:
        out().print(one_line(line))


def result_json(value: Any) -> None:
    print(_json(value, indent=2))


def json_line(value: Any) -> None:
    """Print one value of a stream of JSON lines."""
    print(_json(value, allow_nan=False), flush=True)


def _json(value: Any, **options: Any) -> str:
    """JSON in ASCII; DEL, which is part of ASCII, is an escape too."""
    return json.dumps(value, **options).replace("\x7f", "\\u007f")


def text(piece: str) -> None:
    """Print streamed text as it arrives: unchanged into a pipe or a file, control characters visible on a terminal."""
    sys.stdout.write(visible(piece) if sys.stdout.isatty() else piece)
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: Sequence[str] = (), figures: bool = False
) -> None:
    """A plain table on stdout; `numeric` columns are aligned to the right. None is shown as a dash.

    figures  no cell may be folded: on a terminal that is too narrow each row is printed in lines of its own
    """
    from rich.table import Table

    columns = [one_line(column) for column in columns]
    numeric = [one_line(column) for column in numeric]
    rows = [["-" if cell is None else one_line(str(cell)) for cell in row] for row in rows]
    if figures and out().is_terminal and _width(columns, rows) > out().width:
        for row in rows:
            result("")
            for column, cell in zip(columns, row, strict=True):
                result(f"{column:{max(map(len, columns))}}  {cell}")
        return
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    where = out()
    if not where.is_terminal:
        where.width = 200  # a pipe has no width: do not fold what a program or a log will read
    where.print(grid)


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Width of a table with a space on either side of each column separator."""
    return sum(max(map(len, column)) for column in zip(columns, *rows, strict=True)) + 2 * (len(columns) - 1)


def size(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: 325.7 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def inspection(found: Inspection, problems: Sequence[str], *, as_json: bool) -> None:
    """Print a checkpoint's content: its tensors, the facts common to all of them, notes, and faults."""
    if as_json:
        value = dataclasses.asdict(found)
        result_json({**value, "bytes": found.nbytes, "parameters": found.parameters, "problems": list(problems)})
        return
    rows = [(t.file, t.name, t.dtype, "x".join(map(str, t.shape)), t.nbytes) for t in found.tensors]
    table(("file", "tensor", "dtype", "shape", "bytes"), rows, numeric=("bytes",))
    result(f"{found.kind} {found.architecture}, {found.dtype}, {found.parameters:,} values, {size(found.nbytes)}")
    for name, settings in (("mapping", found.mapping), ("quantization", found.quantization)):
        told = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
        result(f"{name}: {told or 'none'}")
    for remark in found.notes:
        result(f"note: {remark}")
    result(*[f"problem: {problem}" for problem in problems] or ["no problem found"])


def passport(facts: dict[str, Any]) -> None:
    """Print an engine's passport, nested facts under dotted names."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            rows += [(f"{name}.{inner}", inside) for inner, inside in value.items()]
        else:
            rows.append((name, size(value) if name == "rank_bytes" else value))
    table(("passport", "value"), rows)


def faults(found: Sequence[Fault]) -> None:
    """Print the faults of a checked repository, one a line."""
    for fault in found:
        place = f"{fault.path}: {fault.where}" if fault.where else str(fault.path)
        told = f"{fault.what}: {fault.why}" if fault.why else fault.what
        result(f"{fault.severity}  {place}  {told}{'; ' + fault.remedy if fault.remedy else ''}  [{fault.rule}]")
    if not found:
        result("no fault found")


def accuracy(report: AccuracyReport) -> None:
    """Print a comparison with the original: figures and limits, the worst layers, clipped inputs, the verdict."""
    from trtpipe.pipeline.accuracy.gate import WORST, percent

    table(("", "original", "quantized", "limit"), report.summary(), numeric=("original", "quantized", "limit"))
    layers = [(f"layer {layer.layer}", percent(layer.local), percent(layer.accumulated)) for layer in report.worst]
    table(("worst layers", "local error", "accumulated"), layers, numeric=("local error", "accumulated"))
    clipped = [
        (f"layer {entry.layer} {entry.linear}", entry.beyond, entry.inputs, percent(entry.share))
        for entry in report.saturated[:WORST]
    ]
    if clipped:
        table(("clipped inputs", "numbers", "of", "share"), clipped, numeric=("numbers", "of", "share"))
    failures = [f"failed: {failure}" for failure in report.failures]
    result(*failures or [f"{report.recipe} passes the accuracy gate"])


class BuildReporter:
    """Prints a line per stage: what is done or reused, and why; bytes and rate while a long one runs."""

    def __init__(self) -> None:
        self._console = err()

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Progress]:
        start = time.monotonic()
        if not self._console.is_terminal:
            _say(f"{name:<9} running  ({reason})")
            yield lambda done, total: None
            return
        with _status(self._console, f"{name:<9} running  ({reason})") as show:

            def progress(done: int, total: int) -> None:
                rate = done / max(time.monotonic() - start, 1e-9)
                left = f", {(total - done) / rate:.0f} s left" if rate else ""
                show(f"{name:<9} running  {size(done)} of {size(total)}, {size(rate)}/s{left}  ({reason})")

            yield progress

    def finished(self, result: StageResult) -> None:
        manifest = result.artefact.manifest
        made = "reused" if result.reused else f"{manifest.seconds:.1f} s"
        _say(f"{result.stage:<9} {made:<8} {size(manifest.size):>9}  ({result.reason})")
        for notice in manifest.notes.get("notices", ()):
            self.note(f"note: {notice}")

    def line(self, text: str) -> None:
        note(f"  {text}")

    def note(self, text: str) -> None:
        note(text)


class ClusterReporter:
    """Prints the stages of several targets that are built at once, with the target's name on each line."""

    def __init__(self, target: str) -> None:
        self._target = target

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Progress]:
        self.told(self._target, name, "begins", f"here  ({reason})")
        yield lambda done, total: None

    def finished(self, result: StageResult) -> None:
        manifest = result.artefact.manifest
        made = "reused" if result.reused else f"{manifest.seconds:.1f} s"
        _say(f"{self._target}: {result.stage:<9} {made:<8} {size(manifest.size):>9}  ({result.reason})")
        for notice in manifest.notes.get("notices", ()):
            self.note(f"note: {notice}")

    def line(self, text: str) -> None:
        note(f"{self._target}:   {text}")

    def note(self, text: str) -> None:
        note(f"{self._target}: {text}")

    @staticmethod
    def told(target: str, stage: str, kind: str, text: str) -> None:
        """Print what a machine of the cluster reports while it runs a stage."""
        if kind == "begins":
            _say(f"{target}: {stage:<9} running  {text}")
        elif kind == "ends":
            _say(f"{target}: {stage:<9} {text}, cleaning up")
        elif kind == "progress":
            done, total = map(int, text.split("/"))
            note(f"{target}: {stage:<9} running  {size(done)} of {size(total)}")
        else:
            note(f"{target}:   {text}")


# Statistics of a distribution in a benchmark's table.
POINTS = ("p50", "p90", "p99")


def bench_table(report: BenchReport) -> None:
    """Print one row for each load point; distributions as p50/p90/p99."""
    from trtpipe.pipeline.bench.results.metrics import tabled

    judged = any(result.slo is not None for result in report.results)
    metrics = [metric for metric in tabled() if any(metric.name in result.metrics for result in report.results)]
    # A search for goodput asks how many requests keep the objectives, not whether the load point as a whole does.
    by_share = any(one.search.goal == "max-goodput" for one in report.searches)

    def figures(found: dict[str, Any], points: tuple[str, ...]) -> str | None:
        values = [found[point] for point in points]
        return None if None in values else "/".join(f"{value:.1f}" for value in values)

    def kept(slo: dict[str, Any] | None) -> str | None:
        if by_share:
            return None if slo is None or slo["attainment"] is None else f"{100 * slo['attainment']:.1f}%"
        return "met" if slo is not None and slo["met"] else "missed"

    rows = [
        (
            result.protocol,
            result.label,
            result.requests["succeeded"],
            result.requests["failed"],
            *(figures(result.metrics[metric.name], metric.figures(POINTS)) for metric in metrics),
            *((kept(result.slo),) if judged else ()),
            *(() if report.valid else ("" if result.verdict["valid"] else "INVALID",)),
        )
        for result in report.results
    ]
    last = (*(("SLO",) if judged else ()), *(() if report.valid else ("verdict",)))
    columns = ("protocol", "load", "requests", "failed", *(metric.heading() for metric in metrics), *last)
    table(columns, rows, numeric=[name for name in columns[2:] if name not in last], figures=True)
    repeated = [one for one in report.repeats() if one["valid"] > 1]
    if repeated:
        _bench_repeats(repeated)


def _bench_repeats(repeated: list[dict[str, Any]]) -> None:
    """Print a row for each load measured more than once: means over its runs, with half of their 95% interval."""
    from trtpipe.pipeline.bench.results.metrics import tabled

    def cell(entry: dict[str, Any] | None) -> str | None:
        return None if entry is None else f"{entry['mean']:.1f} ±{entry['mean'] - entry['interval'][0]:.1f}"

    figures = [
        (metric, point)
        for metric in tabled()
        if any(metric.name in one["metrics"] for one in repeated)
        for point in metric.figures(("p50", "p99"))
    ]
    rows = [
        (
            one["protocol"],
            one["label"],
            one["valid"],
            *(cell(one["metrics"].get(metric.name, {}).get(point)) for metric, point in figures),
        )
        for one in repeated
    ]
    columns = ("protocol", "load", "runs", *(metric.heading(point) for metric, point in figures))
    table(columns, rows, numeric=columns[2:], figures=True)


def comparison(compared: Comparison, *, as_json: bool) -> None:
    """Print how the runs' conditions differ, then the figures, then the conclusion."""
    if as_json:
        result_json(compared.to_json())
        return
    for letter, path in compared.paths.items():
        result(f"{letter}: {path}")
    for warning in compared.warnings:
        result(f"unlike: {warning}")
    columns, rows = compared.table()
    table(columns, rows, numeric=[column for column in columns[2:] if not column.endswith(" is")], figures=True)
    for line in compared.summary():
        result(line)
    for judgement in compared.judgements:
        verdict = "not fired" if judgement.fired is False else "FIRED"
        result(f"{verdict}: {judgement.condition}: {judgement.told}")


@contextlib.contextmanager
def bench_progress() -> Iterator[Callable[[BenchProgress], None]]:
    """A status line of a benchmark; where stderr is not a terminal, a line as each load point begins and as it ends."""
    where = err()
    if not where.is_terminal:
        yield _bench_note
        return
    with _status(where, "connecting") as show:
        yield lambda at: show(_bench_line(at))


@contextlib.contextmanager
def _status(where: RichConsole, line: str) -> Iterator[Callable[[str], None]]:
    """A line at the bottom of the terminal, which each call replaces."""
    from rich.text import Text

    # As Text: rich takes a str as markup here, whatever the console's setting.
    with where.status(Text(bounded(line))) as status:
        yield lambda line: status.update(Text(bounded(line)))


def _bench_note(at: BenchProgress) -> None:
    if at.state == "begun":
        note(f"{at.protocol}, {at.label}: begins" + (f", {at.total} requests" if at.total else ""))
    elif at.state == "ended":
        note(
            f"{at.protocol}, {at.label}: {at.live.done} requests in {at.live.elapsed_s:.1f} s, {at.live.failed} failed"
        )


def _bench_line(at: BenchProgress) -> str:
    live = at.live
    said = [f"{at.protocol}, {at.label}: {live.done}{f' of {at.total}' if at.total else ''} done"]
    left = live.left_s
    if at.total and live.done:
        left = live.elapsed_s * (at.total - live.done) / live.done
    if left is not None:
        said.append(f"{left:.0f} s left")
    elapsed = max(live.elapsed_s, 1e-9)
    ended = (live.warmed + live.done) / elapsed
    # A terminal cuts what does not fit, so the more important part comes first.
    if live.first_ns:
        times = sorted(live.first_ns)
        half, most = times[len(times) // 2], times[len(times) * 99 // 100]
        said.append(f"TTFT p50/p99 {half / 1e6:.0f}/{most / 1e6:.0f} ms")
    said += [f"{live.in_flight} in flight", f"{ended:.1f} requests/s", f"{live.responses / elapsed:.0f} responses/s"]
    return ", ".join([*said, *([f"{live.failed} failed"] if live.failed else [])])
