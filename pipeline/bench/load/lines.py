"""Reader of files with one record per line, within limits; an error names the line."""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, kind_of
from trtpipe.engines.json_input import bounded_lines, parse_json

# Most records of a file: as prompts of one word each they take some 300 MB of memory. The largest collections of
# conversations have some 100,000.
MOST_LINES = 1_000_000


def numbered(file: Path, what: str) -> Generator[tuple[str, str], None, None]:
    """(file:number, line) of every line that is not blank. Raises InputDataError.

    The file stays open until the generator ends or is closed.
    """
    try:
        for count, (number, line) in enumerate(bounded_lines(file), 1):
            if count > MOST_LINES:
                raise InputDataError(f"{what} {file} has more than {MOST_LINES:,} lines", remedy="give a part of it")
            # JSON allows the other line separators of Unicode inside a string, so they do not end a line here.
            text = line.decode("utf-8")
            if text.strip():
                yield f"{file}:{number}", text
    except OSError as error:
        raise InputDataError(f"{what} {file} cannot be read", why=error.strerror or str(error)) from None
    except UnicodeDecodeError as error:
        raise InputDataError(f"{what} {file} is not UTF-8", why=str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{what} {file} cannot be read", why=str(error)) from None


def read_object(where: str, line: str) -> dict[str, Any]:
    """The JSON object of a line. Raises InputDataError."""
    try:
        item = parse_json(line)
    except ValueError as error:
        raise InputDataError(f"{where} is not JSON", why=str(error)) from None
    if not isinstance(item, dict):
        raise InputDataError(f"{where} holds {kind_of(item)}, not an object")
    if not _is_finite(item):
        raise InputDataError(f"{where} is not JSON", why="it holds a number that is not finite")
    return item


def shown(value: Any) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_finite(value: Any) -> bool:
    """Whether all numbers in a value are finite. Recursion is as deep as `parse_json` allows."""
    if isinstance(value, float):
        return math.isfinite(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(_is_finite(one) for one in inner)
