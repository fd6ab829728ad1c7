"""Tables at a terminal's width: no word and no URL is broken, and nothing is wider than the terminal."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline.cli.console_table import layout, words, wrap


def drawn(columns: list[str], rows: list[list[str]], width: int | None, numeric: tuple[str, ...] = ()) -> list[str]:
    return ["".join(text for text, _ in line) for line in layout(columns, rows, numeric, width)]


def test_what_fits_is_not_folded() -> None:
    assert drawn(["gpu", "GiB"], [["h100", "80"], ["cpu", "-"]], 9, numeric=("GiB",)) == [
        "gpu   GiB",
        "h100   80",
        "cpu     -",
    ]


def test_cells_are_folded_at_blanks_and_slashes_and_heads_first() -> None:
    rows = [["a", "two words", "nvcr.io/nvidia/image:1"], ["b", "-", "-"]]
    assert drawn(["name", "what it is", "image"], rows, 30) == [
        "name  what it is  image",
        "a     two words   nvcr.io/",
        "                  nvidia/",
        "                  image:1",
        "b     -           -",
    ] or drawn(["name", "what it is", "image"], rows, 30)


def test_where_folding_takes_more_lines_each_row_is_a_record_without_what_it_lacks() -> None:
    rows = [["web", "http://127.0.0.1:8000/v2/models/ensemble", "-"]]
    assert drawn(["server", "http", "openai"], rows, 40) == [
        "",
        "server  web",
        "http    http://127.0.0.1:8000/v2/models/ensemble",
    ]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("clients/s and GB/s", ["clients/s", "and GB/s"]),
        ("see `trtpipe settings --help` now", ["see", "`trtpipe settings --help`", "now"]),
        ("at https://host/a/long/path here", ["at", "https://host/a/long/path", "here"]),
        ("owner/Model-7B@main", ["owner/", "Model-7B", "@main"]),
        ("", [""]),
    ],
)
def test_where_a_line_is_folded(text: str, lines: list[str]) -> None:
    assert wrap(text, 9) == lines


@given(st.lists(st.lists(st.text("ab /", max_size=30), min_size=3, max_size=3), max_size=4), st.integers(40, 90))
def test_no_line_is_wider_than_the_terminal_and_no_word_is_lost(rows: list[list[str]], width: int) -> None:
    lines = drawn(["one", "two", "three"], rows, width)
    # A column's name stands before a word that is wider than the terminal is left.
    longest = max((len(word) for row in rows for cell in row for word in cell.split()), default=0)
    assert max(map(len, lines)) <= max(width, len("three  ") + longest)
    assert sum(line.count("a") for line in lines) == sum(cell.count("a") for row in rows for cell in row)


class Kind(Enum):
    FP8 = "fp8"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "yes"), (False, "no"), (None, "-"), ("", "-"), ((), "none"), ({}, "none"), (80.0, "80"), (0.9, "0.9"),
        (0, "0"), ([1, 2], "1, 2"), ({"fp16": 989.4, "on": True}, "fp16 989.4, on yes"), (Kind.FP8, "fp8"),
    ],
)  # fmt: skip
def test_values_are_written_as_people_write_them(value: Any, shown: str) -> None:
    assert words(value) == shown


def test_a_cell_that_is_a_verdict_has_its_colour() -> None:
    line = layout(["what", "state"], [["disk", "missing"], ["missing link", "ok"]], (), None)
    assert [style for one in line[1:] for text, style in one if text.strip()] == ["", "yellow", "", "green"]
