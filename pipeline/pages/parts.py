"""Parts of a page, and numbers as text. An unknown value is a dash, never 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtpipe.pipeline.pages.plots import Figure

UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A figure, and the text that shows when the pointer rests on it. `words` is set as text, not as a number; `kind`
    is a class of page.css: good, bad or soft."""

    text: str
    title: str = ""
    words: bool = False
    kind: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """`bad` says why the row's figures need caution."""

    name: str
    cells: Sequence[Cell]
    bad: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table; `head` is the heading of the rows' names. `groups` span columns above their names: (name, number of
    columns)."""

    columns: Sequence[str]
    rows: Sequence[Row]
    groups: Sequence[tuple[str, int]] = ()
    head: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A figure of the summary at the top of a page."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence of the summary; `good` is None where nothing was judged."""

    text: str
    good: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Why the page's figures are not to be believed: a word, a sentence, and reasons with their remedies."""

    word: str
    text: str
    reasons: Sequence[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page; without a title it belongs to the one before. With `folded`, a line that says what it is, its
    content is folded up unless `unfolded`. `beside`: tables stand side by side where there is room."""

    title: str = ""
    lines: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    folded: str = ""
    unfolded: bool = False
    beside: bool = False


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: what it is about, its summary, and its sections. `kind` is the line above the title; `files` are names of
    files beside the page, which it links."""

    kind: str
    title: str
    about: str = ""
    files: Sequence[str] = ()
    alarm: Alarm | None = None
    cards: Sequence[Card] = ()
    findings: Sequence[Finding] = ()
    sections: Sequence[Section]


def number(value: float | None) -> str:
    """Four significant digits, or all digits before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def capital(words: str) -> str:
    """`words` with a capital; the name of a precision, a setting or a protocol that begins them stays as written."""
    first = words.partition(" ")[0]
    named = first.endswith(",") or any(letter.isdigit() or letter == "_" for letter in first)
    return words if named else words[:1].upper() + words[1:]


def sentence(words: str) -> str:
    """`words` with a capital and a full stop."""
    words = words.strip()
    return capital(words) + ("" if words.rstrip(")")[-1:] in (".", "!", "?", ":", "") else ".")
