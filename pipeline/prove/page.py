"""A proof as files: JSON, and one self-contained HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.parts import Card, Cell, Finding, Page, Row, Section, Table, number, sentence
from trtpipe.pipeline.prove.proof import HTML_NAME, JSON_NAME, Lane, Proof, Speed, Step
from trtpipe.pipeline.store.folders import write_whole

KINDS = {"held": "good", "failed": "bad", "left out": "soft"}


def write(proof: Proof, folder: Path) -> None:
    """Write proof.json and proof.html into `folder`, which is made if need be. Raises HostError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / JSON_NAME, json.dumps(proof.to_json(), indent=2, allow_nan=False) + "\n")
        write_whole(folder / HTML_NAME, render(proof))
    except OSError as error:
        why = error.strerror or str(error)
        raise HostError(f"the report cannot be written to {folder}", why=why, remedy="give another --output") from None


def render(proof: Proof) -> str:
    """The page for a report."""
    refused = [Row(name=name, cells=[Cell(text=why, words=True)]) for name, why in proof.refused.items()]
    page = Page(
        kind="Proof", title=f"{proof.model} on {proof.machine['gpu']}, {proof.runtime}",
        about=f"`trtpipe prove` of trtpipe {proof.version}, {proof.date}: built, served, asked and measured here.",
        files=[JSON_NAME],
        cards=[
            Card(label="Precisions that held", value=f"{sum(lane.held for lane in proof.lanes)} of {len(proof.lanes)}"),
            Card(label="GPU", value=proof.machine["gpu"]), Card(label="Driver", value=proof.machine["driver"]),
        ],
        findings=list(_findings(proof)),
        sections=[
            *(_lane(lane) for lane in proof.lanes),
            *([Section(
                title="Not run", lines=["This GPU or this runtime does not run them."],
                tables=[Table(head="Precision", columns=["why"], rows=refused)],
            )] if refused else []),
            Section(title="Machine", folded="versions", facts=list(proof.machine.items())),
        ],
    )  # fmt: skip
    return pages.render(page)


def _findings(proof: Proof) -> Iterator[Finding]:
    if proof.caution:
        yield Finding(text=sentence(proof.caution))
    if proof.named:
        for name, why in proof.refused.items():
            yield Finding(text=sentence(f"{name}: not run: {why}"), good=False)
    for lane in proof.lanes:
        failed = next((step for step in lane.steps if step.state == "failed"), None)
        out = next((step for step in lane.steps if step.state == "left out"), None)
        if failed is not None:
            yield Finding(text=sentence(f"{lane.dtype}: {failed.name} failed: {failed.told}"), good=False)
        elif out is not None:
            yield Finding(text=sentence(f"{lane.dtype}: what ran held; no {out.name}: {out.told}"), good=True)
        else:
            yield Finding(text=f"{lane.dtype}: every step held.", good=True)


def _lane(lane: Lane) -> Section:
    steps = [Row(name=step.name, cells=_cells(step)) for step in lane.steps]
    tables = [Table(head="Step", columns=["", "s", "found"], rows=steps)]
    if lane.speeds:
        columns = ["tokens/s", "planned tokens/s", "measured / planned", "TTFT p50, ms"]
        tables.append(Table(head="In flight", columns=columns, rows=[_speed(one) for one in lane.speeds]))
    logs = [f"{step.name}: {line}" for step in lane.steps for line in step.log.splitlines()]
    return Section(title=lane.dtype, lines=[lane.target, *logs], tables=tables)


def _cells(step: Step) -> list[Cell]:
    return [
        Cell(text=step.state, words=True, kind=KINDS[step.state]), Cell(text=f"{step.seconds:.1f}"),
        Cell(text=step.told, words=True),
    ]  # fmt: skip


def _speed(one: Speed) -> Row:
    planned = one.predicted_tokens_per_s
    share = None if not planned else one.tokens_per_s / planned
    values = (one.tokens_per_s, planned, share, one.ttft_ms)
    return Row(name=str(one.concurrency), cells=[Cell(text=number(value)) for value in values])
