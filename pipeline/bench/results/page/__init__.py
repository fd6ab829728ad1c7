"""Page of a report: report.html, one file that asks the network for nothing and can be read without script."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from trtpipe.pipeline.bench.results.page import figures, head, samples, server, tables
from trtpipe.pipeline.bench.results.page.curves import Run, against_latency, against_load
from trtpipe.pipeline.bench.results.page.load_points import flat, plain
from trtpipe.pipeline.pages import render as pages
from trtpipe.pipeline.pages.parts import UNKNOWN, Page, Section, sentence

__all__ = ["UNKNOWN", "render"]

# Figures of load points are folded up where there are more than this.
FOLDED = 8


def render(report: dict[str, Any], files: Sequence[str] = ()) -> str:
    """The page of a report; `files` are names of files beside it."""
    title = head.title(report)
    return pages.render(
        Page(
            kind="Benchmark", title=title, about=head.about(report), files=files, alarm=head.alarm(report),
            cards=head.cards(report), findings=list(head.findings(report)),
            sections=[*_results(report), *_facts(report)],
        )
    )  # fmt: skip


def _results(report: dict[str, Any]) -> Iterator[Section]:
    points, runs = report["levels"], [Run(report=report)]
    if found := against_latency(runs):
        yield Section(title="Throughput and latency", figures=found)
    if found := against_load(runs):
        yield Section(title="Against load", figures=found)
    table = tables.load_points(report)
    yield Section(title="Load points", tables=[table] if points else [], lines=[] if points else ["None was measured."])
    repeated = tables.repeats(report)
    if repeated is not None:
        told = "The mean over the runs, and half of its 95 % interval."
        yield Section(title="Over repeated runs", lines=[told], tables=[repeated])
    for number, (told, tried) in enumerate(tables.searches(report)):
        yield Section(title="" if number else "Search", lines=[told], tables=[tried])
    judged = tables.objectives(report)
    if judged is not None:
        yield Section(title="Objectives", tables=[judged])
    if spreads := list(figures.distributions(points)):
        told = "An area is the share of values; the highest place of each fills its row. Lines are p50 and p99."
        yield Section(title="Distributions", lines=[told], figures=spreads)
    if courses := list(figures.timelines(points)):
        told = "Warm-up included. A gap is a time in which nothing ended."
        yield Section(title="Over time", lines=[told], figures=courses, **_folded(len(courses)))
    failed = tables.errors(report)
    if failed is not None:
        yield Section(title="Errors", figures=[figures.errors(points)], tables=[failed])
    said, courses = server.tables(points), list(server.timelines(points))
    if said or courses:
        told = "Of each load point alone; times are means over its requests."
        yield Section(title="What the server says", lines=[told], tables=said)
    if courses:
        yield Section(figures=courses, **_folded(len(courses)))
    own = tables.client(report)
    if own is not None:
        yield Section(title="What the client says of itself", tables=[own])
    yield from samples.sections(points)


def _folded(count: int) -> dict[str, Any]:
    return {"folded": f"{count} load points" if count > 1 else "1 load point", "unfolded": count <= FOLDED}


def _facts(report: dict[str, Any]) -> Iterator[Section]:
    yield Section(title="Facts", folded="The run: endpoints, command, machine, digests", facts=list(_run(report)))
    engine = [(name, plain(value)) for name, value in flat(report.get("engine") or {})]
    if engine:
        yield Section(folded=f"The engine: {len(engine)} facts of its passport", facts=engine)
    yield Section(folded="Options", facts=[(name, plain(value)) for name, value in flat(report["options"])])
    definitions = [
        (f"{name}, {metric['unit']}" if metric["unit"] else name, _definition(metric))
        for name, metric in report["metrics"].items()
    ]
    rest = [text for key in ("statistics", "window") if (text := report.get(key))]
    yield Section(folded="Definitions of the metrics", facts=definitions, lines=rest)


def _definition(metric: dict[str, Any]) -> str:
    told = sentence(metric["formula"])
    return f"{told} {sentence('undefined: ' + metric['undefined'])}" if metric.get("undefined") else told


def _run(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) of facts about what was measured, without the unknown ones."""
    command = report.get("command")
    rows = (
        ("Endpoint", "; ".join(_joined(entry) for entry in report["endpoints"])),
        ("Command", None if command is None else shlex.join(command)),
        ("Measured by", _joined(report.get("tool") or {})),
        ("Started", report.get("started")),
        ("Finished", report.get("finished")),
        ("Seed", report.get("seed")),
        ("Load from", _joined(report.get("host") or {})),
        ("Versions", _joined(report.get("client") or {})),
        ("Target", report.get("target")),
        ("Model repository, SHA-256", report.get("repository_sha256")),
        ("Tokenizer, SHA-256", report.get("tokenizer_sha256")),
    )
    for name, value in rows:
        if value not in (None, ""):
            yield name, str(value)


def _joined(value: dict[str, Any]) -> str:
    return ", ".join(f"{key} {plain(inner)}" for key, inner in flat(value) if inner is not None)
