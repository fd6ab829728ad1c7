"""Reader of a benchmark's JSON files, within limits; errors name the file and the line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError, kind_of
from trtpipe.engines.json_input import bounded_lines, parse_json, read_bounded

# Another tool's result may hold a number for each token of every request: 6 million take 250 MB of memory.
MAX_BYTES = 128 << 20
MAX_VALUES = 6_000_000


def read_objects(file: Path) -> list[dict[str, Any]]:
    """The object in a file, or several, one per line. Raises InputDataError.

    NaN and Infinity, which Python writes although JSON has neither, become None: unknown numbers.
    """
    try:
        data = read_bounded(file, MAX_BYTES)
        found = _values(data)
    except OSError as error:
        remedy = "give the path of a report, such as reports/latest/report.json"
        raise InputDataError(f"{file} cannot be read", why=error.strerror or str(error), remedy=remedy) from None
    except UnicodeDecodeError as error:
        raise InputDataError(f"{file} is not text", why=error.reason) from None
    except ValueError as error:
        raise InputDataError(f"{file} is not JSON", why=str(error), remedy="give a whole file") from None
    if not found:
        raise InputDataError(f"{file} is empty", remedy="measure again")
    for value in found:
        if not isinstance(value, dict):
            raise InputDataError(f"{file} is not a result", why=f"it holds {kind_of(value)}, not an object")
    return [_known(value) for value in found] if b"NaN" in data or b"Infinity" in data else found


def read_lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name in error messages, object) of each line of a file. Raises InputDataError."""
    remedy = "measure again, or remove the file to do without it"
    try:
        for number, line in bounded_lines(file):
            where = f"line {number} of {file}"
            try:
                value = parse_json(line)
            except ValueError as error:
                raise InputDataError(f"{where} is not a JSON object", why=str(error), remedy=remedy) from None
            if not isinstance(value, dict):
                why = f"it holds {kind_of(value)}"
                raise InputDataError(f"{where} is not a JSON object", why=why, remedy=remedy)
            yield where, value
    except OSError as error:
        raise InputDataError(f"{file} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{file} cannot be read", why=str(error), remedy=remedy) from None


def _values(data: bytes) -> list[Any]:
    """JSON values of a file's bytes. Raises ValueError."""
    if not data.strip():
        return []
    try:
        return [parse_json(data, max_bytes=MAX_BYTES, max_values=MAX_VALUES)]
    except ValueError as whole:
        lines = [line for line in data.split(b"\n") if line.strip()]
        if len(lines) < 2 or not lines[0].rstrip().endswith(b"}"):
            raise
        try:
            return [parse_json(line, max_bytes=MAX_BYTES, max_values=MAX_VALUES // len(lines)) for line in lines]
        except ValueError:
            raise whole from None


def _known(value: Any) -> Any:
    """The same value with None in place of non-finite numbers. Recursion is as deep as `parse_json` allows."""
    if isinstance(value, dict):
        return {key: _known(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
