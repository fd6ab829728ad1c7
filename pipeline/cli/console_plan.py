"""Output of `trtpipe plan` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trtpipe.pipeline.cli import console
from trtpipe.pipeline.planner import against, tables
from trtpipe.pipeline.planner.advice import Advice
from trtpipe.pipeline.planner.against import Comparison
from trtpipe.pipeline.planner.disaggregation import Split
from trtpipe.pipeline.planner.whatif import WhatIf

# Heads with units, in words that a narrow column can fold.
HEADS = {
    "TTFT alone": "TTFT alone ms", "TPOT alone": "TPOT alone ms", "clients/s": "clients a second",
    "TTFT p99": "TTFT p99 ms", "TPOT p99": "TPOT p99 ms", "tokens/s": "tokens a second", "a GPU": "of a GPU",
    "1M tokens": "cost of 1M tokens", "": "why",
}  # fmt: skip
# Columns that --explain has too.
EXPLAINED = ("KV GiB", "batch")


def advice(
    found: Advice, changes: Sequence[WhatIf], splits: Sequence[Split], *, explain: bool, as_json: bool
) -> None:  # fmt: skip
    if as_json:
        more = {"what_if": [one.to_json() for one in changes], "splits": [one.to_json() for one in splits]}
        console.result_json({**found.to_json(), **more})
        return
    console.result(f"{found.question.model}: {tables.load(found)}")
    options = tables.options(found)
    if options.rows:
        _options(options)
    if explain:
        memory = tables.memory(found)
        console.result(f"{memory.title}, in GiB where nothing else is said:")
        console.table(memory.columns, memory.rows, numeric=memory.columns[1:])
    for name, reason in tables.refusals(found).rows:
        console.result(f"{name}: {reason}")
    for remark in (*found.remarks, *found.getting_there):
        console.result(remark)
    if options.rows and not found.question.objectives:
        console.result("no objective is given, so each option is as full as it can be: --slo ttft:500ms sets a limit")
    if changes:
        made = tables.changes(found.candidates[0].name, changes)
        console.result(f"{made.title}:")
        console.table(_heads(made.columns), made.rows)
    if splits:
        made = tables.splits(found, splits)
        console.result(f"{made.title}:")
        console.table(_heads(made.columns), made.rows, numeric=_heads(made.columns)[1:])


def comparison(found: Comparison, kept: Path | None, *, as_json: bool) -> None:
    if as_json:
        console.result_json({**found.to_json(), "kept": None if kept is None else str(kept)})
        return
    table = against.table(found)
    console.table(table.columns, table.rows, numeric=table.columns[1:])
    for run, why in found.refused:
        console.result(f"{run}: {why}")
    if kept is not None:
        console.result(f"refitted overheads are in {kept}; remove it for the shipped ones")


def _options(found: tables.Table) -> None:
    """The options' figures, then the reason of each in a line."""
    kept = [at for at, name in enumerate(found.columns[:-1]) if name not in EXPLAINED]
    columns = _heads([found.columns[at] for at in kept])
    console.table(columns, [[row[at] for at in kept] for row in found.rows], numeric=columns[1:])
    console.result(*(f"{row[0]}: {row[-1]}" for row in found.rows))


def _heads(columns: Sequence[str]) -> list[str]:
    return [HEADS.get(name, name) for name in columns]
