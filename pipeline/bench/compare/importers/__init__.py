"""Importers of other load testers' result files: they return reports in our schema for `compare`.

A value that a tool does not write is None, never 0. A metric has our name only where its definition is ours; otherwise
the name shows the difference. Tools without a window take their rates over the whole run: such rates end in
`_whole_run`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from trtpipe.engines.errors import InputDataError, malformed
from trtpipe.engines.files import file_in
from trtpipe.pipeline.bench.compare.importers import (
    aiperf,
    vllm,
)
from trtpipe.pipeline.bench.compare.json_files import read_lines, read_objects
from trtpipe.pipeline.bench.compare.request_files import MOST_LOAD_POINTS, checked
from trtpipe.pipeline.bench.results.digest import digest


class _Tool(Protocol):
    """Interface of an importer module."""

    NAME: str
    VERSIONS: str

    def recognises(self, value: dict[str, Any]) -> bool: ...

    def report(self, values: list[dict[str, Any]]) -> dict[str, Any]: ...

    def records(self, file: Path, values: list[dict[str, Any]]) -> Iterable[dict[str, Any]] | None: ...


FAMILY = "trtpipe.bench/"
SCHEMA = f"{FAMILY}2"
_NONE = type(None)
# Keys that a comparison needs of a report, of each of its load points, and of their loads.
REPORT: dict[str, tuple[type, ...]] = {
    "levels": (list,), "endpoints": (list,), "metrics": (dict,), "options": (dict,), "verdict": (dict,),
    "engine": (dict, _NONE), "host": (dict, _NONE), "client": (dict, _NONE), "records": (str, _NONE),
}  # fmt: skip
# Keys that a report may have besides these.
OPTIONAL: dict[str, tuple[type, ...]] = {
    "tool": (dict, _NONE), "notes": (list,), "broken": (str, _NONE), "records_sha256": (str, _NONE),
    "work_sha256": (dict, _NONE),
}  # fmt: skip
LOAD_POINT: dict[str, tuple[type, ...]] = {
    "protocol": (str,), "label": (str,), "load": (dict,), "requests": (dict,), "metrics": (dict,), "verdict": (dict,),
    "token_count_source": (str, _NONE), "wrong_length": (int, _NONE), "stopped": (str, _NONE), "interrupted": (bool,),
}  # fmt: skip
LOAD: dict[str, tuple[type, ...]] = {"kind": (str,)}
# What a load point may have besides these. A comparison does not use samples.
POINT_OPTIONAL: dict[str, tuple[type, ...]] = {"samples": (list,), "unknown_requests": (dict,)}
SAMPLE: dict[str, tuple[type, ...]] = {
    "id": (str,), "prompt": (str,), "prompt_characters": (int,), "answer": (str,), "answer_characters": (int,),
}  # fmt: skip
VERDICT: dict[str, tuple[type, ...]] = {"valid": (bool, _NONE), "reasons": (list,)}
REASON: dict[str, tuple[type, ...]] = {"what": (str,), "why": (str,)}
TOOL: dict[str, tuple[type, ...]] = {"name": (str,), "version": (str, _NONE)}
# Most metrics of a load point: each is a row of every table.
MOST_METRICS = 1000
# File names that are looked for in a folder of results.
USUAL_NAMES = ("report.json", "profile_export_aiperf.json")
TOOLS: tuple[_Tool, ...] = (aiperf, vllm)
KNOWN = "known are report.json of trtpipe bench and the results of " + ", ".join(
    f"{tool.NAME} ({tool.VERSIONS})" for tool in TOOLS
)


def read_report(path: Path) -> dict[str, Any]:
    """A report in our schema from any known result file, or from a folder with one. Raises InputDataError."""
    file = file_in(path, *USUAL_NAMES)
    values = read_objects(file)
    schema = values[0].get("schema") if len(values) == 1 else None
    if isinstance(schema, str) and schema.startswith(FAMILY):
        if schema != SCHEMA:
            raise InputDataError(
                f"{file} has schema {schema}", why=f"this version reads {SCHEMA}", remedy="measure again"
            )
        damage = next(_faults(values[0]), None)
        if damage is not None:
            raise InputDataError(f"{file} is damaged", why=damage, remedy="measure again")
        return values[0]
    for tool in TOOLS:
        if all(tool.recognises(entry) for entry in values):
            with _readable(file, tool):
                report = tool.report(values)
                damage = next(_faults(report), None)
                if damage is not None:
                    raise ValueError(damage)
                return report
    raise InputDataError(f"{file} is not a benchmark result that we know", remedy=KNOWN)


def _faults(report: Mapping[str, Any]) -> Iterator[str]:
    """Defects that prevent a comparison. Take the first one only: later checks rely on earlier ones."""
    yield from _unlike(report, REPORT, "the report")
    yield from _unlike(report, {name: OPTIONAL[name] for name in OPTIONAL if name in report}, "the report")
    yield from _unlike_verdict(report["verdict"], "its verdict")
    if report.get("tool") is not None:
        yield from _unlike(report["tool"], TOOL, "its tool")
    for name, entries, kind in (("endpoints", report["endpoints"], dict), ("notes", report.get("notes", []), str)):
        if not all(isinstance(entry, kind) for entry in entries):
            yield f"{name} of the report is {json.dumps(entries)[:40]}"
    for name, entry in report["metrics"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("unit", ""), str):
            yield f"{name} of its metrics has no unit"
    if len(report["levels"]) > MOST_LOAD_POINTS:
        yield f"it has {len(report['levels']):,} load points; at most {MOST_LOAD_POINTS:,} are read"
    for number, point in enumerate(report["levels"]):
        yield from _load_point_faults(point, f"load point {number}")


def _load_point_faults(point: Any, where: str) -> Iterator[str]:
    yield from _unlike(point, LOAD_POINT, where)
    yield from _unlike(point, {name: kinds for name, kinds in POINT_OPTIONAL.items() if name in point}, where)
    samples, unknown = point.get("samples", []), point.get("unknown_requests", {})
    yield from _unlike(unknown, dict.fromkeys(unknown, (int,)), f"unknown_requests of {where}")
    yield from _unlike(point["requests"], dict.fromkeys(point["requests"], (int, _NONE)), f"requests of {where}")
    yield from _unlike(point["load"], LOAD, f"the load of {where}")
    yield from _unlike_verdict(point["verdict"], f"the verdict of {where}")
    for sample in samples:
        yield from _unlike(sample, SAMPLE, f"a sample of {where}")
    if len(point["metrics"]) > MOST_METRICS:
        yield f"{where} has {len(point['metrics']):,} metrics; at most {MOST_METRICS:,} are read"
    for name, entry in point["metrics"].items():
        if not isinstance(entry, dict):
            yield f"{where}: {name} is not a mapping"
        for statistic, value in entry.items():
            is_number = type(value) in (int, float) and 0 <= value < math.inf
            if statistic != "interval" and value is not None and not is_number:
                yield f"{where}: {statistic} of {name} is {value!r}"


def _unlike_verdict(value: Any, what: str) -> Iterator[str]:
    yield from _unlike(value, VERDICT, what)
    for reason in value["reasons"]:
        yield from _unlike(reason, REASON, f"a reason of {what}")


def _unlike(value: Any, form: Mapping[str, tuple[type, ...]], what: str) -> Iterator[str]:
    """How `value` differs from an object of that schema."""
    if not isinstance(value, dict):
        yield f"{what} is not a mapping"
    for key, kinds in form.items():
        if key not in value:
            yield f"{what} has no {key}"
        if not isinstance(value[key], kinds):
            yield f"{key} of {what} is {json.dumps(value[key])[:40]}"


def read_records(path: Path, report: dict[str, Any]) -> Iterator[dict[str, Any]] | None:
    """The requests behind a report that `read_report` gave for the same path, in the form of report.requests.jsonl.

    None where the requests were not kept. Raises InputDataError, also while they are being read.
    """
    file = file_in(path, *USUAL_NAMES)
    for tool in TOOLS:
        if (report.get("tool") or {}).get("name") == tool.NAME:
            with _readable(file, tool):
                found = tool.records(file, read_objects(file))
            return None if found is None else _foreign(file, tool, found)
    name = report.get("records")
    if not name:
        return None
    beside = file.parent / name
    if beside.name != name or "\0" in name:
        raise InputDataError(f"{file} is damaged", why=f"its requests are not beside it: {name!r}"[:200])
    try:
        if not beside.is_file():
            return None
    except OSError as error:
        raise InputDataError(f"{beside} cannot be read", why=error.strerror or str(error)) from None
    if digest(beside) != report.get("records_sha256"):
        raise InputDataError(
            f"{beside} is not what was written with {file}",
            why="its digest is another",
            remedy="bring back the one that was, or remove it to do without",
        )
    return (checked(line, where) for where, line in read_lines(beside))


def _foreign(file: Path, tool: _Tool, found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    with _readable(file, tool):
        for number, line in enumerate(found):
            yield checked(line, f"request {number} of {file}")


@contextlib.contextmanager
def _readable(file: Path, tool: _Tool) -> Iterator[None]:
    """Turn errors from reading a file that is neither ours nor a known tool's into InputDataError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise InputDataError(
            f"{file} looks like a result of {tool.NAME} but cannot be read",
            why=malformed(error)[:400],
            remedy=f"read are the files of {tool.NAME} {tool.VERSIONS}",
        ) from None
