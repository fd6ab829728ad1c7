"""Reading of JSON that others wrote, within limits of size, depth, number of values and digits.

Every JSON file and line that a command reads comes through here: a parser without limits can be made to take all
memory, to recurse past Python's limit, or to spend minutes on one number.
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

from trtpipe.engines.errors import InputDataError

# The largest files with a use: tokenizer.json of Gemma 3 has 33 MB and a million values.
MAX_BYTES = 64 << 20
# Arrays, objects and commas count once, colons twice: an entry of an object takes some 300 bytes of memory, a value of
# an array 100, so that no file takes much more than 400 MB. Gemma 3's tokenizer.json counts some 2.5 million.
MAX_VALUES = 2_650_000
# Python keeps every character of a text in four bytes when one of them needs that, as an emoji does.
MAX_WIDE_BYTES = 40 << 20
# One line of a JSONL file: a prompt of a million tokens has some 5 MB.
MAX_LINE_BYTES = 16 << 20
# Nesting of arrays and objects. Hugging Face's and our own files have less than 12.
MAX_DEPTH = 64
# 2^64 has 20 digits. Python takes quadratic time to read more.
MAX_DIGITS = 64

# An escape that may be half of a pair; Python's parser takes it, and whatever writes it later fails.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# What makes a text of four bytes for each character.
_WIDE = re.compile(rb"[\xf0-\xf7]|\\u[dD][89a-fA-F]")
_SURROGATE_BYTES = re.compile(_SURROGATE.pattern.encode())


class TooLarge(ValueError):
    """More bytes or values than are read: nothing is known to be wrong with them."""


Pairs = Callable[[list[tuple[str, Any]]], Any]


def parse_json(
    text: str | bytes,
    *,
    max_bytes: int = MAX_BYTES,
    max_wide_bytes: int = MAX_WIDE_BYTES,
    max_values: int = MAX_VALUES,
    pairs: Pairs | None = None,
) -> Any:
    """The value of a JSON text.

    max_values  bound on arrays, objects, commas and twice the colons, counted before anything is parsed; those in
                strings count as well
    pairs       makes an object of its (key, value) pairs, as `json.loads` takes it

    Raises ValueError, whose words are about the text alone, for whatever is wrong with it.
    """
    if len(text) > max_bytes:
        raise TooLarge(f"it has more than {max_bytes:,} bytes")
    try:
        if isinstance(text, bytes):
            if len(text) > max_wide_bytes and _WIDE.search(text):
                raise TooLarge(f"it has more than {max_wide_bytes:,} bytes, and characters of four bytes")
            text = text.decode("utf-8")
        escaped = _SURROGATE.search(text) is not None
        check_values(text, max_values)
        # A decoder made for each text costs a short one a third of its time.
        value = (
            _DECODER.decode(text) if pairs is None else json.loads(text, parse_int=_integer, object_pairs_hook=pairs)
        )
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if escaped or text.count("[") + text.count("{") > MAX_DEPTH:
        _check_levels(value, texts=escaped)
    return value


def parse_rows(rows: Sequence[bytes], *, max_bytes: int, max_values: int = MAX_VALUES) -> Iterator[Any]:
    """The value of each of many short JSON texts, in half the time that `parse_json` takes where all are plain.

    max_bytes, max_values  bounds on each text

    Raises ValueError as `parse_json` does, at the text that it is about.
    """
    whole = b"[" + b",".join(rows) + b"]"
    opened = max((row.count(b"[") + row.count(b"{") for row in rows), default=0)
    within = len(whole) <= max_bytes and whole.count(b",") + opened * len(rows) <= max_values
    if within and opened <= MAX_DEPTH and not _SURROGATE_BYTES.search(whole):
        try:
            # No row is deep, and of digits Python itself takes no more than a few thousand.
            values: list[Any] = json.loads(whole.decode("utf-8"))
        except ValueError:  # reading each will tell which
            values = []
        if len(values) == len(rows):
            yield from values
            return
    for row in rows:
        yield parse_json(row, max_bytes=max_bytes, max_values=max_values)


def check_values(text: str | bytes, max_values: int = MAX_VALUES) -> None:
    """Raises ValueError for a JSON text of more values, counted as `parse_json` does, without parsing it."""
    if _count(text, "[") + _count(text, "{") + _count(text, ",") + 2 * _count(text, ":") > max_values:
        raise TooLarge(f"it holds more than {max_values:,} values")


def load_json(
    path: Path, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES, pairs: Pairs | None = None
) -> Any:
    """The value of a JSON file. Raises OSError, or ValueError as `parse_json` does."""
    return parse_json(read_bounded(path, max_bytes), max_bytes=max_bytes, max_values=max_values, pairs=pairs)


def read_json(path: Path, what: str, *, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The JSON object in `path`. Raises InputDataError naming the file for anything else."""
    try:
        value = load_json(path, max_bytes=max_bytes, max_values=max_values)
    except OSError as error:
        raise InputDataError(f"{what} {path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise InputDataError(f"{what} {path} is not JSON", why=str(error), remedy="replace it") from None
    if not isinstance(value, dict):
        raise InputDataError(f"{what} {path} holds a {type(value).__name__}, not an object", remedy="replace it")
    return value


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file. Raises OSError, or ValueError for a larger file, a pipe or a device."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"it has more than {max_bytes:,} bytes")
    return data


def bounded_lines(path: Path, max_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """(number from 1, bytes without the line end) of each line of a regular file that is not blank.

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
    """Raises ValueError for nesting of more than MAX_DEPTH, and with `texts` for half of a surrogate pair.

    A loop over levels: recursion is what this guards.
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
            raise ValueError("it holds half of a surrogate pair, which is no character") from None


def open_regular(path: Path) -> BinaryIO:
    """A regular file, open for reading. Raises OSError, or ValueError for a pipe or a device.

    A pipe that nobody writes to is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise ValueError("it is not a regular file")
