"""Result files of other load testers as reports of ours, so that `compare` takes them.

What a tool does not say is None, never 0. A metric has our name only where its definition is ours; otherwise its name
says what it is. Tools without a window take their rates over the whole run: such rates end in `_whole_run`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from engines.errors import InputDataError
from pipeline.bench.against import foreign_aiperf, foreign_genai_perf, foreign_vllm
from pipeline.bench.against.json_files import read_lines, read_objects


class _Tool(Protocol):
    """What a module of another tool offers."""

    NAME: str
    VERSIONS: str

    def recognises(self, value: dict[str, Any]) -> bool: ...

    def report(self, values: list[dict[str, Any]]) -> dict[str, Any]: ...

    def records(self, file: Path, values: list[dict[str, Any]]) -> list[dict[str, Any]] | None: ...


FAMILY = "trtpipe.bench/"
SCHEMA = f"{FAMILY}2"
REQUIRED = ("endpoints", "levels", "metrics", "options", "verdict")
# Of each of its levels.
LEVEL = (
    "protocol", "label", "load", "requests", "metrics", "verdict", "token_count_source", "wrong_length", "stopped",
    "interrupted",
)  # fmt: skip
# What a folder of results is looked through for.
USUAL_NAMES = ("report.json", "profile_export_aiperf.json", "profile_export_genai_perf.json")
TOOLS: tuple[_Tool, ...] = (foreign_aiperf, foreign_genai_perf, foreign_vllm)
KNOWN = "known are report.json of trtpipe bench, and the result files of AIPerf, GenAI-Perf and `vllm bench serve`"


def read_report(path: Path) -> dict[str, Any]:
    """A report of ours from any result file we know, or from a folder with one. Raises InputDataError."""
    file = _file(path)
    values = read_objects(file)
    schema = values[0].get("schema") if len(values) == 1 else None
    if isinstance(schema, str) and schema.startswith(FAMILY):
        if schema != SCHEMA:
            raise InputDataError(
                f"{file} has schema {schema}", why=f"this version reads {SCHEMA}", remedy="measure again"
            )
        missing = [key for key in REQUIRED if key not in values[0]]
        if missing:
            raise InputDataError(f"{file} lacks {', '.join(missing)}", remedy="measure again")
        damage = _damage(values[0]["levels"])
        if damage:
            raise InputDataError(f"{file} is damaged", why=damage, remedy="measure again")
        return values[0]
    for tool in TOOLS:
        if all(tool.recognises(entry) for entry in values):
            try:
                return tool.report(values)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise InputDataError(
                    f"{file} looks like a result of {tool.NAME} but cannot be read",
                    why=f"{type(error).__name__}: {error}",
                    remedy=f"read are the files of {tool.NAME} {tool.VERSIONS}",
                ) from None
    raise InputDataError(f"{file} is no benchmark result that we know", remedy=KNOWN)


def _damage(levels: Any) -> str:
    """What in the levels of a report of ours cannot be compared; empty if all can."""
    if not isinstance(levels, list):
        return "its levels are no list"
    for number, level in enumerate(levels):
        missing = [key for key in LEVEL if not isinstance(level, dict) or key not in level]
        if missing:
            return f"level {number} has no {missing[0]}"
        for name, entry in level["metrics"].items() if isinstance(level["metrics"], dict) else [("metrics", None)]:
            if not isinstance(entry, dict):
                return f"level {number}: {name} is no mapping"
            for statistic, value in entry.items():
                if statistic != "interval" and isinstance(value, str | list | dict | bool):
                    return f"level {number}: {statistic} of {name} is {value!r}"
    return ""


def read_records(path: Path, report: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The requests behind a report that `read_report` gave for the same path, in the form of report.requests.jsonl.

    None where they were not kept. Raises InputDataError.
    """
    file = _file(path)
    for tool in TOOLS:
        if report.get("tool", {}).get("name") == tool.NAME:
            return tool.records(file, read_objects(file))
    name = report.get("records")
    beside = file.parent / name if name else None
    return read_lines(beside) if beside is not None and beside.is_file() else None


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    for name in USUAL_NAMES:
        if (path / name).is_file():
            return path / name
    raise InputDataError(f"{path} has no result file", why=f"none of {', '.join(USUAL_NAMES)}", remedy="name the file")
