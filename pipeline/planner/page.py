"""Page of a plan, self-contained HTML: each option's frontier of throughput against speed for one client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.pages import plots, render
from trtpipe.pipeline.pages.parts import UNKNOWN, Card, Cell, Finding, Page, Row, Section, Table, capital, sentence
from trtpipe.pipeline.pages.plots import Figure
from trtpipe.pipeline.planner import tables
from trtpipe.pipeline.planner.advice import Advice, Candidate
from trtpipe.pipeline.planner.disaggregation import Split
from trtpipe.pipeline.planner.preparation import amount
from trtpipe.pipeline.planner.whatif import WhatIf
from trtpipe.pipeline.store.folders import write_whole

# Most curves that can be told apart in one drawing.
CURVES = plots.STYLES
# Headings that say more here than the terminal has room for.
HEADINGS = {
    "KV GiB": "KV cache GiB", "batch": "most at once", "TTFT alone": "TTFT alone ms", "TPOT alone": "TPOT alone ms",
    "TTFT p99": "TTFT p99 ms", "TPOT p99": "TPOT p99 ms", "a GPU": "tokens/s of a GPU",
    "1M tokens": "cost of 1M tokens", "weights": "weights GiB", "activations": "activations GiB",
    "buffers": "buffers GiB", "runtime": "runtime GiB", "KV pool": "KV pool GiB", "GiB": "whole GPU GiB",
    "KV bytes a token": "KV bytes of a token", "of": "requests of the batch", "": "what it does",
}  # fmt: skip
PREDICTED = (
    "Predicted, not measured: weights and KV cache are exact, times come from a simulation of in-flight batching whose "
    "{fit}."
)
FIT = "efficiencies were fitted to published runs of TensorRT-LLM"
# Runtimes that have a fit of their own.
FITS = {
    "vllm": "overheads were fitted to runs of vLLM 0.25 in BF16 on an H200, its other efficiencies to published runs "
    "of TensorRT-LLM",
}
READING = (
    "Right and high is good. Numbers are requests in flight. A filled mark meets all objectives, a hollow one not."
)


def write(found: Advice, changes: Sequence[WhatIf], splits: Sequence[Split], file: Path) -> None:
    """Write the page. Raises HostError."""
    made = [tables.options(found), tables.memory(found), tables.refusals(found)]
    if changes:
        made.append(tables.changes(found.candidates[0].name, changes))
    if splits:
        made.append(tables.splits(found, splits))
    figures = list(_figures(found))
    page = Page(
        kind="Plan", title=f"Plan for {found.question.model}",
        about=sentence(f"{tables.load(found)}; runtime {found.question.runtime}"),
        cards=list(_cards(found)), findings=list(_findings(found)),
        sections=[
            *([Section(title="Throughput against speed", figures=figures)] if figures else []),
            *(Section(title=capital(one.title), lines=_lines(one), tables=[_table(one)]) for one in made if one.rows),
        ],
    )  # fmt: skip
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, render.render(page))
    except OSError as error:
        why = error.strerror or str(error)
        raise HostError(f"page {file} cannot be written", why=why, remedy="give another place for it") from None


def _cards(found: Advice) -> Iterator[Card]:
    """Figures of the best option."""
    best = found.candidates[0]
    if best.best is None:
        return
    assert best.rate is not None
    yield Card(label="Best option", value=best.name, note="by cost" if found.priced else "by tokens/s of a GPU")
    yield Card(label="Output tokens/s", value=f"{best.best.tokens_per_s:,.0f}", note=f"{best.per_gpu:,.0f} of a GPU")
    if len(best.best.ttft):
        yield Card(
            label="TTFT p99",
            value=f"{np.percentile(best.best.ttft, 99):.0f}",
            unit="ms",
            note=f"at {tables.figure(best.rate)} clients/s",
        )
    if found.priced:
        yield Card(label="1M output tokens", value=amount(best.cost), note="in the currency of the prices")
    elif len(best.best.tpot):
        yield Card(label="TPOT p99", value=f"{np.percentile(best.best.tpot, 99):.1f}", unit="ms")


def _findings(found: Advice) -> Iterator[Finding]:
    able = sum(one.best is not None for one in found.candidates)
    asked = " within the objectives" if found.question.objectives else ""
    yield Finding(text=f"{able} of {len(found.candidates)} options can serve this load{asked}.", good=able > 0)
    for remark in (*found.remarks, *found.getting_there):
        yield Finding(text=sentence(remark))
    yield Finding(text=PREDICTED.format(fit=FITS.get(found.question.runtime, FIT)))


def _lines(found: tables.Table) -> list[str]:
    return ["Costs are in the currency in which the prices were given (--price, or the GPU's file)."] * (
        "1M tokens" in found.columns
    )


def _table(found: tables.Table) -> Table:
    """Sentences get a capital and a full stop."""
    last = len(found.columns) - 2
    rows = [
        Row(
            name=row[0] or UNKNOWN,
            cells=[
                Cell(text=UNKNOWN if text is None else sentence(text) if found.worded and at == last else text,
                     words=found.worded and at == last)
                for at, text in enumerate(row[1:])
            ],
        )
        for row in found.rows
    ]  # fmt: skip
    head, *columns = found.columns
    return Table(head=capital(head), columns=[HEADINGS.get(column, column) for column in columns], rows=rows)


def _figures(found: Advice) -> Iterator[Figure]:
    """Curves of the best option of each GPU and dtype, some per drawing."""
    best: dict[tuple[str, str], Candidate] = {}
    for one in found.candidates:
        if one.best is not None:
            best.setdefault((one.gpu.name, one.dtype), one)
    drawn = [(one.name, points) for one in best.values() if (points := _points(one, found))]
    for start in range(0, len(drawn), CURVES):
        curves = [
            plots.Curve(name=name, style=style, points=points)
            for style, (name, points) in enumerate(drawn[start : start + CURVES])
        ]
        yield plots.curves(
            "Throughput of a GPU against speed of one client", curves, x="Output tokens/s of one client",
            y="Output tokens/s of a GPU", note=READING,
        )  # fmt: skip


def _points(one: Candidate, found: Advice) -> list[plots.Point]:
    """Load points of an option; none where answers are of one token, since they have no speed."""
    assert one.option is not None
    points = []
    concurrency = 1
    while concurrency <= one.option.limits.max_batch_size:
        at = one.option.together(found.question.demand, concurrency)
        if len(at.tpot):
            speed, throughput = 1e3 / float(np.median(at.tpot)), at.tokens_per_s / one.tp
            points.append(
                plots.Point(
                    x=speed, y=throughput, label=str(concurrency), hollow=not at.meets(found.question.objectives),
                    title=f"{one.name}, {concurrency} in flight: {speed:.1f} tokens/s of one client, "
                    f"{throughput:.0f} of a GPU, TTFT {np.median(at.ttft):.0f} ms",
                )
            )  # fmt: skip
        concurrency *= 4
    return points
