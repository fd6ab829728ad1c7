"""Layout of a table in a given width: cells are folded at blanks and slashes, or each row is listed as a record.

A line is a list of (text, style) pairs. Words are never broken, nor are URLs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len

Line = list[tuple[str, str]]
GAP = "  "
# A command; a URL; what ends in a slash that more than a unit follows, or before a version; a word.
PIECE = re.compile(r"`[^`]*`\S*\s*|\S*://\S+\s*|\S*?/+(?=[^\s/]{3})|\S+?(?=@\w)|\S+\s*|\s+")
# Words that are a verdict: a cell that is one of them has its colour.
VERDICTS = {
    **dict.fromkeys(("ok", "current", "done", "met", "whole"), "green"),
    **dict.fromkeys(("missing", "stale"), "yellow"),
    **dict.fromkeys(("fault", "failed", "refused", "missed", "INVALID", "damaged"), "red"),
}


def words(value: Any) -> str:
    """A value as people write it: yes, no, 80, `a, b`; - for None."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return words(value.value)
    if isinstance(value, float):
        return str(value).removesuffix(".0")
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {words(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(words(inner) for inner in value) or "none"
    return str(value)


def layout(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str], width: int | None
) -> list[Line]:
    """Lines of a table of at most `width`; None is any width.

    Of a table that does not fit, the shorter form is taken: with folded cells, or as records.
    """
    texts = list(zip(columns, *rows, strict=True))
    widths = [max(map(cell_len, column)) for column in texts]
    if width is None or _total(widths) <= width:
        return _table(columns, rows, numeric, widths)
    records = _records(columns, rows, width)
    natural = [max(map(cell_len, cells), default=0) for _, *cells in texts]  # a head may be folded first
    widths = _folded([max(map(_longest, column)) for column in texts], natural, width)
    if _total(widths) > width:
        return records
    return min(_table(columns, rows, numeric, widths), records, key=len)


def wrap(text: str, width: int) -> list[str]:
    """The text in lines of at most `width`, but for pieces that are longer."""
    lines = [""]
    for piece in PIECE.findall(text):
        if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _longest(text: str) -> int:
    return max((cell_len(piece.rstrip()) for piece in PIECE.findall(text)), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _folded(least: list[int], natural: list[int], width: int) -> list[int]:
    """Widths between the longest piece and the whole text, so that columns take about the same number of lines."""
    widths = list(least)
    for _ in range(width - _total(widths)):
        lines = [full / size if size else 0.0 for full, size in zip(natural, widths, strict=True)]
        widths[lines.index(max(lines))] += 1
    return widths


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str], widths: list[int]
) -> list[Line]:
    right = [column in numeric for column in columns]
    lines = list(_row(columns, widths, right, bold=True))
    for row in rows:
        lines += _row(row, widths, right, bold=False)
    return lines


def _row(cells: Sequence[str], widths: list[int], right: list[bool], *, bold: bool) -> Iterator[Line]:
    wrapped = [wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    if bold:  # a head stands on its column
        most = max(map(len, wrapped))
        wrapped = [[""] * (most - len(lines)) + lines for lines in wrapped]
    for parts in zip_longest(*wrapped, fillvalue=""):
        line: Line = []
        for cell, part, width, to_right in zip(cells, parts, widths, right, strict=True):
            blanks = " " * (width - cell_len(part))
            text = blanks + part if to_right else part + blanks
            line += [(text, "bold" if bold else VERDICTS.get(cell, "")), (GAP, "")]
        while line and not line[-1][0].strip():
            line.pop()
        yield line[:-1] + [(text.rstrip(), style) for text, style in line[-1:]]


def _records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[Line]:
    label = max(map(cell_len, columns))
    lines: list[Line] = []
    for row in rows:
        lines.append([])
        for column, cell in zip(columns, row, strict=True):
            if cell == words(None):
                continue
            for name, part in zip_longest([column], wrap(cell, width - label - len(GAP)), fillvalue=""):
                lines.append([(name + " " * (label - cell_len(name)) + GAP, ""), (part, VERDICTS.get(cell, ""))])
    return lines
