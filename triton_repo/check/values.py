"""Parsers of parameter values that behave like their readers. Parameters are strings; the C++ backend parses them with
std::stoi and similar functions, which stop at the first invalid character, and uses the default for other texts."""

from __future__ import annotations

import re
from dataclasses import dataclass

INT32 = (-(2**31), 2**31 - 1)
SIZE = (0, 2**64 - 1)
# Booleans of the C++ backend; NVIDIA's Python models accept more spellings, and this project's scripts any case.
CPP_TRUE, CPP_FALSE = ("True", "true", "TRUE", "1"), ("False", "false", "FALSE", "0")
TEXT_WORDS = ("true", "false", "1", "0", "t", "f", "y", "n", "yes", "no")
BLS_WORDS = ("true", "yes", "1", "t", "false", "no", "0", "f", "n")

_INT = re.compile(r"\s*[+-]?\d+")
_FLOAT = re.compile(r"\s*[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_GROUP = re.compile(r"\s*\{\s*\d+(?:\s*,\s*\d+)*\s*,?\s*\}\s*")


@dataclass(frozen=True)
class Read:
    """Result of a reader: the value, or None for its default; and whether the value is what the text states."""

    value: float | None
    faithful: bool


def read_int(text: str, bounds: tuple[int, int] = INT32) -> Read:
    """Read a number like std::stoi or std::stoull, selected by `bounds`."""
    found = _INT.match(text)
    if not found:
        return Read(None, False)
    value = int(found.group())
    if not bounds[0] <= value <= bounds[1]:
        return Read(None, False)
    return Read(value, _said(text) == value)


def read_float(text: str) -> Read:
    """Read a number like std::stof."""
    found = _FLOAT.match(text)
    if not found:
        return Read(None, False)
    value = float(found.group())
    # `0.9f` is C's notation.
    return Read(value, _said(text.strip().removesuffix("f").removesuffix("F")) == value)


def read_python_int(text: str) -> Read:
    try:
        return Read(int(text), True)
    except ValueError:
        return Read(None, False)


def read_python_float(text: str) -> Read:
    try:
        return Read(float(text), True)
    except ValueError:
        return Read(None, False)


def read_ints(text: str) -> tuple[list[int], bool]:
    """Read a comma-separated list like csvStrToVecInt, which stops at an empty entry; and whether all was read."""
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) > 1 and not entries[-1]:
        entries.pop()
    out: list[int] = []
    for entry in entries:
        read = read_int(entry)
        if read.value is None or not read.faithful:
            return out, False
        out.append(int(read.value))
    return out, bool(out)


def read_groups(text: str) -> tuple[list[list[int]], bool]:
    """Read lists of numbers that semicolons separate; and whether all of them could be read."""
    parts = text.split(";")
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    groups = [read_ints(part) for part in parts]
    return [numbers for numbers, _ in groups], all(read for _, read in groups)


def is_tree(text: str) -> bool:
    """Whether `text` is a draft tree such as `{0}, {0, 0}, {1}`."""
    rest = text.strip()
    while rest:
        found = _GROUP.match(rest)
        if not found:
            return False
        rest = rest[found.end() :]
        if rest:
            if not rest.startswith(","):
                return False
            rest = rest[1:].strip()
    return bool(text.strip())


def _said(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
