"""JSON files of a benchmark, with errors that name the file and the line."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from engines.errors import InputDataError

# NaN and Infinity, which Python writes though JSON has none, are numbers that nobody knows.
_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The object in a file, or several one after the other. Raises InputDataError."""
    text = _text(file)
    out: list[dict[str, Any]] = []
    at = len(text) - len(text.lstrip())
    while at < len(text):
        try:
            value, at = _DECODER.raw_decode(text, at)
        except ValueError as error:
            raise InputDataError(f"{file} is no JSON", why=str(error), remedy="give a whole file") from None
        if not isinstance(value, dict):
            raise InputDataError(f"{file} is no result", why=f"it holds a {type(value).__name__}, not an object")
        out.append(value)
        while at < len(text) and text[at].isspace():
            at += 1
    if not out:
        raise InputDataError(f"{file} is empty", remedy="measure again")
    return out


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file with one a line. Raises InputDataError."""
    out = []
    for number, line in enumerate(_text(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            remedy = "measure again, or remove the file to do without it"
            raise InputDataError(f"line {number} of {file} is no JSON object", remedy=remedy)
        out.append(value)
    return out


def sha256(file: Path) -> str:
    """Of a file of text. Raises InputDataError."""
    return hashlib.sha256(_text(file).encode()).hexdigest()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputDataError(f"{file} cannot be read", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputDataError(f"{file} is no text", why=error.reason) from None
