"""JSON that others wrote: read within limits, and refused in words that say which limit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import MAX_DEPTH, bounded_lines, load_json, parse_json, parse_rows, read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_what_is_within_the_limits_reads_as_python_reads_it(value: object) -> None:
    try:
        text = json.dumps(value)
        text.encode()
    except UnicodeEncodeError:
        return
    assert parse_json(text) == json.loads(text) == parse_json(text.encode())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested more than 64 deep"),
        ('{"a":' * 200_000 + "1" + "}" * 200_000, "nested more than 64 deep"),
        ('"' + "[" * 1000 + '"', None),
        ("9" * 64, None),
        ("-" + "9" * 100_000, "more than 64 digits"),
        ("[" + "[]," * 2_000_000 + "1]", "more than 2,650,000 values"),
        ("[" + "1," * 2_649_998 + "1]", None),
        # One entry costs more memory than one value, and is counted so.
        ("{" + '"a":1,' * 1_000_000 + '"b":1}', "more than 2,650,000 values"),
        ('"' + "a" * (41 << 20) + '"', None),
        (b'"' + b"a" * (41 << 20) + "😀".encode() + b'"', "characters of four bytes"),
        (b'"' + b"a" * (41 << 20) + b'\\ud83d\\ude00"', "characters of four bytes"),
        ("[" * 65 + '"\\ud800"' + "]" * 65, "nested more than 64 deep"),
        ("[" * 64 + '"\\ud800"' + "]" * 64, "half of a surrogate pair"),
        ('"\\ud83d\\ude00"', None),
        ('{"\\ud800": 1}', "half of a surrogate pair"),
        ("[" + '"x"' * 2, "Expecting ',' delimiter"),
        (b"\xff\xfe", "utf-8"),
    ],
    ids=lambda value: str(value[:12]) if value else "within",
)
def test_a_limit_is_told_by_name(text: str | bytes, words: str | None) -> None:
    if words is None:
        assert parse_json(text) == json.loads(text)
    else:
        with pytest.raises(ValueError, match=words):
            parse_json(text)


def test_a_text_over_its_size_is_not_parsed() -> None:
    with pytest.raises(ValueError, match="more than 9 bytes"):
        parse_json(b"[1, 2, 3, 4]", max_bytes=9)


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match="not a regular file"):
        load_json(tmp_path / "config.json")
    with pytest.raises(InputDataError, match="config"):
        read_json(tmp_path / "config.json", "config")


def test_lines_are_numbered_as_an_editor_does_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\r\n\n  \n{"b": 2}')
    assert list(bounded_lines(path)) == [(1, b'{"a": 1}'), (4, b'{"b": 2}')]
    path.write_bytes(b"[1]\n" + b"x" * 101 + b"\n")
    with pytest.raises(ValueError, match="line 2 has more than 100 bytes"):
        list(bounded_lines(path, max_bytes=100))


@given(st.lists(VALUES, max_size=8))
def test_many_short_texts_read_as_each_of_them_alone(values: list[object]) -> None:
    rows = [json.dumps(value).encode() for value in values]
    try:
        alone = [parse_json(row) for row in rows]
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            list(parse_rows(rows, max_bytes=10_000))
    else:
        assert list(parse_rows(rows, max_bytes=10_000)) == alone


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (b"[" * 65 + b"]" * 65, "nested more than 64 deep"),
        (b"[" * 100_000, "nested more than 64 deep"),
        (b"9" * 5000, "more than 64 digits"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b"1,2", "Extra data"),
        (b"", "it is empty"),
        (b"\x00", "Expecting value"),
        (b'"\xed\xa0\x80"', "utf-8"),
        (b'"' + b"x" * 1_000_000 + b'"', "more than 1,000,000 bytes"),
    ],
    ids=range(9),
)
def test_of_many_short_texts_the_one_at_fault_is_told(row: bytes, words: str) -> None:
    read = parse_rows([b"1", row, b"2"], max_bytes=1_000_000)
    assert next(read) == 1
    with pytest.raises(ValueError, match=words):
        next(read)
