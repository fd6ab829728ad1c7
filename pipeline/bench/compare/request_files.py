"""Requests of one load point as Records, read back from report.requests.jsonl or another tool's file. Stamps and counts
that the tool does not write are unknown; the formulas of `metrics` compute the values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.compare.rows import SAME_FORMULA, WHOLE_RUN
from trtpipe.pipeline.bench.protocols.transport import MOST_TOKENS
from trtpipe.pipeline.bench.results.metric import Distribution, Values
from trtpipe.pipeline.bench.results.metrics import find, rates
from trtpipe.pipeline.bench.results.records import NONE, Columns, Records, TooManyToCompare

# Most load points of a report.
MOST_LOAD_POINTS = 1000
# Bounds of a stamp in nanoseconds: the difference of two stamps fits in 64 bits as well.
_MOMENT = (-(1 << 61), 1 << 61)
_COUNT = (0, MOST_TOKENS)
_NUMBERS = {
    **dict.fromkeys(("due_ns", "sent_ns", "end_ns"), _MOMENT),
    **dict.fromkeys(
        ("slot", "session", "turn", "input_tokens", "output_tokens", "max_tokens", "unstreamed_tokens"), _COUNT
    ),
}


def by_load_point(lines: Iterable[dict[str, Any]]) -> tuple[dict[int, Records], dict[int, str]]:
    """(measured requests of each load point, without those cut off when it ended; why a load point has too many of them
    to be compared). Raises InputDataError."""
    found: dict[int, Columns] = {}
    too_many: dict[int, str] = {}
    for line in lines:
        point = line["level"]
        if point in too_many:
            continue
        columns = found.setdefault(point, Columns())
        if not line["warmup"] and (line["failure"] or line["stamps_ns"]):
            try:
                columns.add(line)
            except TooManyToCompare as error:
                del found[point]
                too_many[point] = str(error)
    return {point: columns.records() for point, columns in found.items()}, too_many


def checked(line: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the line if it is a valid one of report.requests.jsonl. Raises InputDataError naming `where`."""
    fault = next(_faults(line), None)
    if fault is not None:
        remedy = "measure again, or remove the file to do without it"
        raise InputDataError(f"{where} is not a request of a report", why=fault, remedy=remedy)
    return line


def _faults(line: dict[str, Any]) -> Iterator[str]:
    """Values of a line that cannot be computed with."""
    for name, kind in (("id", str), ("warmup", bool)):
        if type(line.get(name)) is not kind:
            yield f"{name} is {_told(line.get(name))}"
    if not _are_numbers([line.get("level")], (0, MOST_LOAD_POINTS - 1)):
        yield f"level is {_told(line.get('level'))}"
    for name, bounds in _NUMBERS.items():
        if line.get(name) is not None and not _are_numbers([line[name]], bounds):
            yield f"{name} is {_told(line[name])}"
    failure = line.get("failure")
    told = isinstance(failure, dict) and all(isinstance(failure.get(name), str) for name in ("kind", "message"))
    if failure is not None and not told:
        yield f"failure is {_told(failure)}"
    stamps, tokens = line.get("stamps_ns"), line.get("tokens")
    if not _are_numbers(stamps, _MOMENT):
        yield "stamps_ns is not a list of moments"
    if tokens is not None and not (_are_numbers(tokens, _COUNT) and len(tokens) >= len(line["stamps_ns"])):
        yield "tokens is not a list of a number for each of stamps_ns"


def _are_numbers(values: Any, bounds: tuple[int, int]) -> bool:
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return False
    return not values or (min(values) >= bounds[0] and max(values) <= bounds[1])


def _told(value: Any) -> str:
    return json.dumps(value)[:40]


def values(found: Records, metric: str) -> Values | None:
    """Values of `metric`; None for one that cannot be computed from requests."""
    ours = find(SAME_FORMULA.get(metric, metric))
    return ours.values(found) if isinstance(ours, Distribution) else None


def whole_run_names() -> set[str]:
    """Rates that `whole_run_rates` can compute."""
    return {rate.name + WHOLE_RUN for rate in rates() if rate.windowed and rate.counted}


def whole_run_rates(found: Records) -> dict[str, float]:
    """Rates over the whole run, as tools without a window take them: from first request sent to last response."""
    good = found.good()
    sent = found.sent[found.sent != NONE]
    if not good.any() or not len(sent):
        return {}
    seconds = float(found.stamps[found.offsets[1:][good] - 1].max() - sent.min()) / 1e9
    if seconds <= 0:
        return {}
    return {
        rate.name + WHOLE_RUN: float(rate.counted(found)[good].sum()) / seconds
        for rate in rates()
        if rate.windowed and rate.counted
    }
