"""Mooncake traces: read in order of time, and mistakes named with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.load.trace import TracedRequest, read_trace


def line(**changes: Any) -> str:
    entry = {"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [1, 2], **changes}
    return json.dumps({key: value for key, value in entry.items() if value is not None})


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_requests_come_in_order_of_time_and_keep_theirs_when_they_come_together(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        line(timestamp=27482, input_length=6955, output_length=52, hash_ids=[46, 47]),
        line(timestamp=5.5, input_length=7, hash_ids=None),
        "",
        line(timestamp=27482, input_length=3, priority="high", hash_ids=[]),
    )
    assert read_trace(path) == (
        TracedRequest(5.5, 7, 50),
        TracedRequest(27482, 6955, 52, (46, 47)),
        TracedRequest(27482, 3, 50),
    )


def test_requests_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, line(input_length=60, output_length=4), line(input_length=60, output_length=5))
    assert [request.output_tokens for request in read_trace(path, 64)] == [4]
    with pytest.raises(InputDataError, match="no request to replay: all 2 are longer than 63 tokens"):
        read_trace(path, 63)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request to replay: the file is empty; give a trace in Mooncake's format"),
        ("{", ":1 is not JSON"),
        ("[1]", ":1 holds a list, not an object"),
        (line(timestamp=None), ":1 has no timestamp; give a trace in Mooncake's format"),
        (line(input_length=None), ":1 has no input_length"),
        (line(output_length="9"), ":1: output_length is '9', which is not a number from 1 on"),
        (line(input_length=0), ":1: input_length is 0, which is not a number from 1 on"),
        (line(input_length=1.5), ":1: input_length is 1.5"),
        (line(timestamp=-1), ":1: timestamp is -1, which is not a number from 0 on"),
        (line(timestamp=True), ":1: timestamp is True"),
        (line().replace("0,", "NaN,", 1), ":1 is not JSON: it holds a number that is not finite"),
        (line(hash_ids=7), ":1: hash_ids is not a list"),
        (line(hash_ids=[1, "2"]), ":1: hash_ids is '2'"),
        (line() + "\n" + line(hash_ids=[-1]), ":2: hash_ids is -1"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputDataError) as caught:
        read_trace(write(tmp_path, text))
    assert message in str(caught.value)
    assert "trace.jsonl" in str(caught.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"trace .*none\.jsonl cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
