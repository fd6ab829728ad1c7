"""Diagnosis of a failed build or server: the first entry of configs/failures that matches its log, and the remedy.

An entry has a pattern for one line. Entries are tried in the order of their file, so a more specific one comes first.
"""

from __future__ import annotations

import functools
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtpipe.configs import facts
from trtpipe.configs.read import ConfigError, build, check_keys, read_yaml
from trtpipe.engines.errors import StageFailed

Where = Literal["build", "serve"]

# A verbose server writes gigabytes; the cause of its failure is at the end.
TAIL_BYTES = 4 << 20
# A line that names every tensor of a model is some 100 kB long; `.*` must not be tried on megabytes.
MATCHED_CHARS = 1 << 16
LINE_CHARS = 300

NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
# Colours and other terminal control sequences.
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
# Prefix of a logged line: time, source and level, as TensorRT-LLM, Triton and Python write them.
PREFIX = re.compile(
    r"(?:\[?\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\]?"
    r"|[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ [\w.]+:\d+\]"
    r"|\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?(?: -)?"
    r"|\[(?:TRT|TRT-LLM)\] \[\w\]"
    r"|\[TensorRT-LLM\]\[[A-Z]+\])\s*"
)
DISABLED = re.compile(
    r"is disabled because|\bare disabled\.|will be disabled|is not supported.*\bdisabling\b|Fall back to unfused MHA"
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An entry of configs/failures: the pattern of a line, the cause, and the remedy.

    pattern  a regular expression, searched in each line of a log
    cause    a phrase; {name} stands for a named group of the pattern
    remedy   a phrase, likewise
    source   where the failure is known from
    """

    name: str
    pattern: str
    cause: str
    remedy: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A failure found in a log; `line` is the matching line, without its time and at most LINE_CHARS long."""

    failure: str
    cause: str
    remedy: str
    line: str


def load_failures(where: Where) -> tuple[Failure, ...]:
    """The entries for failed builds or failed servers, in the order they are tried. Raises ConfigError."""
    return _load(facts.CONFIGS / "failures" / f"{where}.yaml")


def diagnose(text: str, where: Where) -> Diagnosis | None:
    """The cause of the failure, from the log of a failed build or server; None when no entry matches."""
    lines = [line[:MATCHED_CHARS] for line in _lines(text)]
    for failure in load_failures(where):
        pattern = re.compile(failure.pattern)
        for line in lines:
            found = pattern.search(line)
            if found:
                # A group in an alternative that did not match has no value.
                groups = {name: value or "?" for name, value in found.groupdict().items()}
                return Diagnosis(
                    failure=failure.name,
                    cause=failure.cause.format_map(groups),
                    remedy=failure.remedy.format_map(groups),
                    line=_shorten(line, found.start()),
                )
    return None


def explain(error: StageFailed, log: Path, where: Where, begin: int = 0) -> StageFailed:
    """The error with cause and remedy in place of the log's last lines; the error itself when no entry matches.

    `begin` is the byte at which the failed process started to write.
    """
    found = diagnose(_end(log, begin), where)
    if found:
        why = f"{found.cause} ({found.line})"
    else:
        # A killed process logs nothing at its end: only the error says how it ended.
        found = diagnose(error.what, where)
        if found is None:
            return error
        why = found.cause
    return StageFailed(error.what, why=why, remedy=f"{found.remedy}; the log is {log}")


def disabled_features(text: str) -> tuple[str, ...]:
    """The lines in a successful build's log that report a feature as turned off, each once."""
    return tuple(dict.fromkeys(_shorten(line, 0) for line in _lines(text) if DISABLED.search(line)))


@functools.cache
def _load(path: Path) -> tuple[Failure, ...]:
    raw = read_yaml(path)
    check_keys(raw, ["failures"], path.name)
    entries = raw.get("failures")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path.name}: failures must be a list of mappings")
    failures: dict[str, Failure] = {}
    for number, entry in enumerate(entries, start=1):
        failure = _failure(entry, f"{path.name}: {entry.get('name', f'entry {number}')}")
        if failure.name in failures:
            raise ConfigError(f"{path.name}: {failure.name} is there twice")
        failures[failure.name] = failure
    return tuple(failures.values())


def _failure(entry: dict[str, Any], where: str) -> Failure:
    failure = build(Failure, entry, where)
    if not NAME.fullmatch(failure.name):
        raise ConfigError(f"{where}: the name is not in kebab case")
    try:
        groups = re.compile(failure.pattern).groupindex
    except re.error as error:
        raise ConfigError(f"{where}: pattern is not a regular expression", why=str(error)) from None
    for key, phrase in (("cause", failure.cause), ("remedy", failure.remedy)):
        try:
            fields = list(string.Formatter().parse(phrase))
        except ValueError as error:
            raise ConfigError(f"{where}: {key}", why=str(error), remedy="write {{ for a brace") from None
        for _, field, form, conversion in fields:
            if field is not None and (field not in groups or form or conversion):
                raise ConfigError(f"{where}: {key}", why=f"'{field}' is not the bare name of a group of the pattern")
    return failure


def _lines(text: str) -> list[str]:
    # Triton writes the line ends within a message as two characters, and a progress bar ends its lines with \r.
    return ANSI.sub("", text).replace("\\n", "\n").replace("\r", "\n").splitlines()


def _shorten(line: str, start: int) -> str:
    """The line without its logger's prefix; of a long line, the part around `start`."""
    begin = 0
    while prefix := PREFIX.match(line, begin):
        begin = prefix.end()
    words = line[begin:].strip().strip('"').strip()
    if len(words) <= LINE_CHARS:
        return words
    room = LINE_CHARS - 8
    first = max(0, min(start - begin - room // 4, len(words) - room))
    head, rest = "... " if first else "", " ..." if first + room < len(words) else ""
    return f"{head}{words[first : first + room]}{rest}"


def _end(log: Path, begin: int) -> str:
    """The end of a log, without what was written before `begin`; "" for a log that cannot be read."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - TAIL_BYTES, 0))
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
