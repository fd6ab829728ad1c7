"""Page of a comparison: several reports in one chart, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.bench.compare.comparison import Cell as Compared
from trtpipe.pipeline.bench.compare.comparison import Comparison, Judgement, figure, verdict
from trtpipe.pipeline.bench.compare.importers import read_report
from trtpipe.pipeline.bench.results.page import head
from trtpipe.pipeline.bench.results.page.curves import Run, against_latency, against_load
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.parts import UNKNOWN, Card, Cell, Finding, Page, Row, Section, Table, sentence
from trtpipe.pipeline.store.folders import write_whole

# Differences of the runs that are named at the top; the others are folded up.
FEW = 4
# Figures of a report by their labels on its own page -> their headings here.
CARDS = {
    "Output tokens/s": "most tokens/s", "TTFT p99": "TTFT p99 ms", "ITL p99": "ITL p99 ms",
    "Latency p99": "latency p99 ms",
}  # fmt: skip


def write(found: Comparison, file: Path) -> None:
    """Write the page. Raises HostError, and InputDataError where a report cannot be read again."""
    reports = {letter: read_report(Path(path)) for letter, path in found.paths.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, render(found, reports))
    except OSError as error:
        why = error.strerror or str(error)
        raise HostError(f"page {file} cannot be written", why=why, remedy="give another place for it") from None


def render(found: Comparison, reports: dict[str, dict[str, Any]]) -> str:
    """The page of a comparison of `reports`, which are by their letters."""
    titles = {letter: head.title(report) for letter, report in reports.items()}
    runs = [Run(name=letter, report=report) for letter, report in reports.items()]
    page = Page(
        kind=f"Comparison of {len(reports)} reports", title=" against ".join(dict.fromkeys(titles.values())),
        about="A is the base.",
        findings=list(_findings(found)),
        sections=[
            Section(title="Reports", tables=[_reports(found, reports, titles)]),
            *_rest(found.warnings[FEW:]),
            *_charts(runs),
            *([Section(title="Conditions", tables=[_conditions(found.judgements)])] if found.judgements else []),
            *_figures(found),
        ],
    )  # fmt: skip
    return pages.render(page)


def _findings(found: Comparison) -> Iterator[Finding]:
    refusal = found.refusal()
    if found.judgements:
        yield Finding(
            text="A condition fired or cannot be judged." if refusal else "No condition fired.", good=not refusal
        )
    for line in found.summary():
        yield Finding(text=sentence(line))
    for line in found.warnings[:FEW]:
        yield Finding(text=sentence(f"the runs differ: {line}"))
    for line in found.notes:
        yield Finding(text=sentence(line))


def _rest(warnings: Sequence[str]) -> Iterator[Section]:
    if warnings:
        yield Section(folded=f"The runs differ in {len(warnings)} more ways", lines=list(map(sentence, warnings)))


def _reports(found: Comparison, reports: dict[str, dict[str, Any]], titles: dict[str, str]) -> Table:
    rows = []
    for letter, report in reports.items():
        verdict = {True: "valid", False: "INVALID", None: UNKNOWN}[report["verdict"]["valid"]]
        cards = [_card(card) for card in head.cards(report)] or [Cell(text=UNKNOWN)] * 4
        what = Cell(text=titles[letter], words=True)
        said = Cell(text=verdict, kind="bad" if verdict == "INVALID" else "")
        rows.append(Row(name=letter, cells=[what, said, *cards, Cell(text=found.paths[letter], words=True)]))
    columns = ["what", "verdict", *CARDS.values(), "file"]
    return Table(head="Report", columns=columns, rows=rows)


def _card(card: Card) -> Cell:
    """A figure of the heading; it has its own name where another tool measured another one in its place."""
    return Cell(text=card.value if card.label in CARDS else f"{card.value} ({card.label})", title=card.note)


def _charts(runs: list[Run]) -> Iterator[Section]:
    if figures := against_latency(runs):
        yield Section(title="Throughput and latency", figures=figures)
    if figures := against_load(runs):
        yield Section(title="Against load", figures=figures)


def _conditions(judgements: Iterable[Judgement]) -> Table:
    rows = []
    for one in judgements:
        outcome = {True: "fired", False: "not fired", None: "cannot be judged"}[one.fired]
        kind = "good" if one.fired is False else "bad"
        rows.append(Row(name=one.condition, cells=[Cell(text=outcome, kind=kind), Cell(text=one.told, words=True)]))
    return Table(head="Condition", columns=["outcome", "why"], rows=rows)


def _figures(found: Comparison) -> Iterator[Section]:
    """A table for each load point: the base's figure, and of each other report its own, the ratio, and a verdict."""
    others = list(found.paths)[1:]
    columns = [next(iter(found.paths))]
    for letter in others:
        columns += [letter, f"{letter}/A", "95 %", f"{letter} is"]
    tables: dict[str, list[Row]] = {}
    for name, row in found.shown():
        cells = [Cell(text=figure(row.cells[columns[0]].value, row.unit) or UNKNOWN)]
        for letter in others:
            cells += _side(row.cells[letter], row.unit)
        tables.setdefault(row.place, []).append(Row(name=name, cells=cells))
    shown = [Table(head=place, columns=columns, rows=rows) for place, rows in tables.items()]
    told = [] if shown else ["No load point is in both."]
    yield Section(title="Figures of each load point", lines=told, tables=shown, beside=True)


def _side(cell: Compared, unit: str) -> Iterator[Cell]:
    yield Cell(text=figure(cell.value, unit) or UNKNOWN)
    yield Cell(text=UNKNOWN if cell.ratio is None else f"{cell.ratio:.3f}")
    yield Cell(text="{:.3f} to {:.3f}".format(*cell.interval) if cell.interval else UNKNOWN)
    kind = "soft" if cell.better is None else "good" if cell.better else "bad"
    yield Cell(text=verdict(cell) or UNKNOWN, kind=kind)
