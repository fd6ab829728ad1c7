"""Parameter values as their readers understand them. Parameters are strings; the C++ backend parses them with
std::stoi and its like, which stop at the first character they cannot use, and takes the default for the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

INT32 = (-(2**31), 2**31 - 1)
SIZE = (0, 2**64 - 1)
# Exactly these; NVIDIA's own Python models take more, and this project's scripts any case.
CPP_TRUE, CPP_FALSE = ("True", "true", "TRUE", "1"), ("False", "false", "FALSE", "0")
TEXT_WORDS = ("true", "false", "1", "0", "t", "f", "y", "n", "yes", "no")
BLS_WORDS = ("true", "yes", "1", "t", "false", "no", "0", "f", "n")

_INT = re.compile(r"\s*[+-]?\d+")
_FLOAT = re.compile(r"\s*[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_GROUP = re.compile(r"\s*\{\s*\d+(?:\s*,\s*\d+)*\s*,?\s*\}\s*")


@dataclass(frozen=True)
class Read:
    """What a reader makes of a text: the value, or None for its default; and whether that is what the text says."""

    value: float | None
    faithful: bool


def read_int(text: str, bounds: tuple[int, int] = INT32) -> Read:
    """By std::stoi or std::stoull, told apart by `bounds`."""
    found = _INT.match(text)
    if not found:
        return Read(None, False)
    value = int(found.group())
    if not bounds[0] <= value <= bounds[1]:
        return Read(None, False)
    return Read(value, _said(text) == value)


def read_float(text: str) -> Read:
    """By std::stof."""
    found = _FLOAT.match(text)
    if not found:
        return Read(None, False)
    value = float(found.group())
    # `0.9f` is how C writes it.
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
    """A list with commas as csvStrToVecInt reads it, which ends at an empty entry; and whether it read all."""
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
    """Lists of numbers between semicolons, and whether all of them could be read."""
    parts = text.split(";")
    if len(parts) > 1 and not parts[-1].strip():
        parts.pop()
    groups = [read_ints(part) for part in parts]
    return [numbers for numbers, _ in groups], all(read for _, read in groups)


def is_tree(text: str) -> bool:
    """Is this a draft tree such as `{0}, {0, 0}, {1}`?"""
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
