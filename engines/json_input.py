"""Reader of untrusted JSON, with limits on size, depth, number of values and digits.

Commands read all JSON files and lines through this module: without limits a file could make the parser exhaust
memory, exceed Python's recursion limit, or spend minutes on one number.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trtpipe.engines.errors import InputDataError, kind_of

# The largest known file is Gemma 3's tokenizer.json, with 33 MB and a million values.
MAX_BYTES = 64 << 20
# Arrays, objects and commas count once, colons twice: an entry of an object takes some 300 bytes of memory, a value of
# an array 100, so that a file takes at most some 400 MB. Gemma 3's tokenizer.json counts as some 2.5 million.
MAX_VALUES = 2_650_000
# Bound for texts with a character that needs four bytes, such as an emoji: Python then uses four bytes for each one.
MAX_WIDE_BYTES = 40 << 20
# Bound for a line of a JSONL file: a prompt of a million tokens has some 5 MB.
MAX_LINE_BYTES = 16 << 20
# Bound for the nesting of arrays and objects. Files of Hugging Face and of this project have less than 12 levels.
MAX_DEPTH = 64
# Bound for the digits of a number: 2^64 has 20 digits, and Python's parser takes quadratic time.
MAX_DIGITS = 64

# An escape that may be an unpaired surrogate; Python's parser accepts it, but writing the text fails later.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# Bytes and escapes that make Python use four bytes per character.
_WIDE = re.compile(rb"[\xf0-\xf7]|\\u[dD][89a-fA-F]")
_SURROGATE_BYTES = re.compile(_SURROGATE.pattern.encode())


class TooLarge(ValueError):
    """A text has more bytes or values than are read; it may be valid otherwise."""


Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(
    text: str | bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_wide_bytes: int = MAX_WIDE_BYTES,
    max_values: int = MAX_VALUES,
    pairs: Pairs | None = None,
) -> Any:
    """Parse a JSON text.

    max_values  bound on arrays + objects + commas + 2 * colons, counted before parsing, also inside strings
    pairs       makes an object of its (key, value) pairs, like `object_pairs_hook` of `json.loads`

    Raises ValueError for an invalid text; the message is about the text alone and names no file.
    """
    if len(text) > max_bytes:
        raise TooLarge(f"it has more than {max_bytes:,} bytes")
    try:
        if isinstance(text, bytes):
            if len(text) > max_wide_bytes and _WIDE.search(text):
                raise TooLarge(f"it has more than {max_wide_bytes:,} bytes, and characters of four bytes")
            text = text.decode("utf-8")
        if not text or text.isspace():
            raise ValueError("it is empty")
        escaped = _SURROGATE.search(text) is not None
        check_values(text, max_values)
        # Creating a decoder for each text would take a third of the time for a short text.
        value = (
            _DECODER.decode(text) if pairs is None else json.loads(text, parse_int=_integer, object_pairs_hook=pairs)
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if escaped or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_levels(value, texts=escaped)
    return value


def parse_rows(rows: Sequence[bytes], *, max_bytes: int, max_values: int = MAX_VALUES) -> Iterator[Any]:
    """Parse many short JSON texts, in half the time of `parse_json` where all of them are plain.

    max_bytes, max_values  bounds on each text

    Raises ValueError as `parse_json` does, when the iteration reaches the invalid text.
    """
    whole = b"[" + b",".join(rows) + b"]"
    opened = max((row.count(b"[") + row.count(b"{") for row in rows), default=0)
    within = len(whole) <= max_bytes and whole.count(b",") + opened * len(rows) <= max_values
    if within and opened <= MAX_DEPTH and not _SURROGATE_BYTES.search(whole):
        try:
            # No row here is deeply nested, and Python itself refuses a number of more than a few thousand digits.
            values: list[Any] = json.loads(whole.decode("utf-8"))
        except ValueError:  # parsing each text will find the invalid one
            values = []
        if len(values) == len(rows):
            yield from values
            return
    for row in rows:
        yield parse_json(row, max_bytes=max_bytes, max_values=max_values)


def check_values(text: str | bytes, max_values: int = MAX_VALUES) -> None:
    """Raises ValueError for a JSON text of more than `max_values` values, counted as in `parse_json`, unparsed."""
    if _count(text, "[") + _count(text, "{") + _count(text, ",") + 2 * _count(text, ":") > max_values:
        raise TooLarge(f"it holds more than {max_values:,} values")


def load_json(
    path: Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES, pairs: Pairs | None = None
) -> Any:
    """Parse a JSON file. Raises OSError, or ValueError as `parse_json` does."""
    return parse_json(read_bounded(path, max_bytes), max_bytes=max_bytes, max_values=max_values, pairs=pairs)


def read_json(path: Path, what: str, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises InputDataError naming the file for anything else."""
    try:
        value = load_json(path, max_bytes=max_bytes, max_values=max_values)
    except OSError as error:
        remedy = "name a folder that has one" if isinstance(error, FileNotFoundError) else ""
        raise InputDataError(f"{what} {path} cannot be read", why=error.strerror or str(error), remedy=remedy) from None
    except TooLarge as error:
        raise InputDataError(f"{what} {path} cannot be read", why=str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{what} {path} is not JSON", why=str(error), remedy="replace it") from None
    if not isinstance(value, dict):
        raise InputDataError(f"{what} {path} holds {kind_of(value)}, not an object", remedy="replace it")
    return value


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a regular file of at most `max_bytes`. Raises OSError, or ValueError for a larger file, pipe or device."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"it has more than {max_bytes:,} bytes")
    return data


def bounded_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes without the line end) of each non-blank line of a regular file.

    Raises OSError, or ValueError for a line of more than `max_bytes`.
    """
    with open_regular(path) as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes:
                raise ValueError(f"line {number} has more than {max_bytes:,} bytes")
            if line.strip():
                yield number, line.rstrip(b"\r\n")


def _count(text: str | bytes, mark: str) -> int:
    return text.count(mark) if isinstance(text, str) else text.count(mark.encode())


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it holds a number of more than {MAX_DIGITS} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


def _check_levels(value: Any, *, texts: bool) -> None:
    """Raises ValueError for nesting beyond MAX_DEPTH, and with `texts` for an unpaired surrogate.

    This is a loop over levels, since recursion could exceed Python's limit.
    """
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                inner += one.values()
                if texts:
                    inner += one
            elif isinstance(one, list):
                inner += one
            elif texts and isinstance(one, str):
                _check_text(one)
                continue
            else:
                continue
            if depth == MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        level, depth = inner, depth + 1


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("it holds half of a surrogate pair, which is not a character") from None


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError, or ValueError for a pipe or a device.

    A pipe without a writer does not block the call.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is not a regular file")
