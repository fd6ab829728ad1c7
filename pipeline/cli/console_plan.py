"""Output of `trtpipe plan` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trtpipe.pipeline.cli import console
from trtpipe.pipeline.planner import tables
from trtpipe.pipeline.planner.advice import Advice
from trtpipe.pipeline.planner.whatif import WhatIf


def advice(found: Advice, changes: Sequence[WhatIf], *, explain: bool, as_json: bool) -> None:
    if as_json:
        console.result_json({**found.to_json(), "what_if": [one.to_json() for one in changes]})
        return
    console.result(f"{found.question.model}: {tables.load(found)}")
    options = tables.options(found)
    if options.rows:
        console.table(options.columns, options.rows, numeric=options.columns[1:-1])
    if explain:
        memory = tables.memory(found)
        console.result(f"{memory.title}, in GiB where nothing else is said:")
        console.table(memory.columns, memory.rows, numeric=memory.columns[1:])
    for name, reason in tables.refusals(found).rows:
        console.result(f"{name}: {reason}")
    for remark in found.remarks:
        console.result(remark)
    if changes:
        made = tables.changes(found.candidates[0].name, changes)
        console.result(f"{made.title}:")
        console.table(made.columns, made.rows)
