"""Page of a plan, self-contained HTML: each option's frontier of throughput against speed for one client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from trtpipe.pipeline.pages import plots, render
from trtpipe.pipeline.pages.plots import Figure
from trtpipe.pipeline.planner import tables
from trtpipe.pipeline.planner.advice import Advice, Candidate
from trtpipe.pipeline.planner.whatif import WhatIf

# Most curves that can be told apart in one drawing.
CURVES = 4


def write(found: Advice, changes: Sequence[WhatIf], file: Path) -> None:
    made = [tables.options(found), tables.memory(found), tables.refusals(found)]
    if changes:
        made.append(tables.changes(found.candidates[0].name, changes))
    page = render.render(
        "plan.html.j2", title=f"Plan for {found.question.model}", load=tables.load(found), remarks=found.remarks,
        figures=list(_figures(found)), tables=[one for one in made if one.rows],
    )  # fmt: skip
    file.write_text(page, encoding="utf-8")


def _figures(found: Advice) -> Iterator[Figure]:
    """Curves of the best option of each GPU and dtype, some per drawing."""
    best: dict[tuple[str, str], Candidate] = {}
    for one in found.candidates:
        if one.best is not None:
            best.setdefault((one.gpu.name, one.dtype), one)
    able = list(best.values())
    for start in range(0, len(able), CURVES):
        curves = [_curve(one, found, style) for style, one in enumerate(able[start : start + CURVES])]
        drawing = plots.curves(
            curves, x="tokens/s of one client", y="tokens/s of a GPU",
            described="throughput of a GPU against the speed that one client sees",
        )  # fmt: skip
        yield Figure(
            title="Throughput against speed", drawing=drawing, legend=[(curve.name, curve.style) for curve in curves]
        )


def _curve(one: Candidate, found: Advice, style: int) -> plots.Curve:
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
    return plots.Curve(name=one.name, style=style, points=points)
