"""Sample prompts and answers of a report's page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.bench.results.page.load_points import LoadPoint, named
from trtpipe.pipeline.bench.results.samples import CHARACTERS
from trtpipe.pipeline.pages.parts import Section

# Most load points whose samples are shown: each may have 12,000 characters.
MOST = 8


def sections(points: list[LoadPoint]) -> Iterator[Section]:
    """One section, folded up; none where no load point has samples."""
    sampled = [point for point in points if point.get("samples")]
    facts = [fact for point in sampled[:MOST] for fact in _facts(point)]
    if facts:
        told = f"Load points: {len(sampled[:MOST])}; requests: {len(facts) // 2}"
        more = [f"report.json has those of {len(sampled) - MOST} more load points."] if len(sampled) > MOST else []
        yield Section(title="Sample prompts and answers", folded=told, facts=facts, lines=more)


def _facts(point: LoadPoint) -> Iterator[tuple[str, str]]:
    for sample in point["samples"]:
        yield _shown(f"{named(point)}: prompt", sample, "prompt")
        yield _shown("Answer", sample, "answer")


def _shown(name: str, sample: dict[str, Any], key: str) -> tuple[str, str]:
    text, count = sample[key][:CHARACTERS], sample[f"{key}_characters"]
    return (f"{name}, its first {len(text):,} of {count:,} characters" if count > len(text) else name), text
