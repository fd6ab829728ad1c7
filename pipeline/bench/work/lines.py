"""Files of a record a line, read so that a mistake is named with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engines.errors import InputDataError


def read_text(file: Path, what: str) -> str:
    """Raises InputDataError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputDataError(f"{what} {file} cannot be read", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputDataError(f"{what} {file} is not UTF-8", why=str(error)) from None


def numbered(file: Path, text: str) -> list[tuple[str, str]]:
    """(file:number, line) of every line that is not blank."""
    # Not splitlines: JSON allows the other line separators of Unicode inside a string.
    lines = enumerate(text.split("\n"), 1)
    return [(f"{file}:{number}", line.rstrip("\r")) for number, line in lines if line.strip()]


def read_object(where: str, line: str) -> dict[str, Any]:
    """The JSON object of a line. Raises InputDataError."""
    try:
        item = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InputDataError(f"{where} is not JSON", why=str(error)) from None
    if not isinstance(item, dict):
        raise InputDataError(f"{where} holds a {type(item).__name__}, not an object")
    return item


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")
