"""Reading a safetensors header: what is true is read exactly, whatever is not is refused, naming the file."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trtpipe.engines.hf.safetensors_file import (
    MAX_HEADER_BYTES,
    SafetensorsError,
    TensorEntry,
    header_bytes,
    read_header,
)


def entry(dtype: object, shape: object, *offsets: object) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def write(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with that header: an object written as JSON, or bytes as they are."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(path: Path) -> str:
    """The one line `path` is refused with."""
    with pytest.raises(SafetensorsError) as caught:
        read_header(path)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_two_tensors_are_located_from_the_start_of_the_file(path: Path) -> None:
    raw = json.dumps({"b": entry("F32", [], 6, 10), "a": entry("BF16", [3, 1], 0, 6)}).encode()
    write(path, raw, bytes(10))
    assert read_header(path).tensors == {
        "a": TensorEntry("a", "BF16", (3, 1), 8 + len(raw), 6),
        "b": TensorEntry("b", "F32", (), 8 + len(raw) + 6, 4),
    }


def test_metadata_is_no_tensor(path: Path) -> None:
    write(path, {"__metadata__": {"format": "pt"}, "a": entry("U8", [2], 0, 2)}, b"xy")
    assert list(read_header(path).tensors) == ["a"]


def test_empty_tensors_take_no_room(path: Path) -> None:
    write(path, {"a": entry("F32", [0, 5], 0, 0), "b": entry("U8", [1], 0, 1), "c": entry("F32", [0], 1, 1)}, b"x")
    assert {name: tensor.nbytes for name, tensor in read_header(path).tensors.items()} == {"a": 0, "b": 1, "c": 0}


def test_a_file_without_tensors(path: Path) -> None:
    assert read_header(write(path, {})).tensors == {}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes is too short to hold a header"),
        (b"1234567", "7 bytes is too short to hold a header"),
        (struct.pack("<Q", 50) + b"{}", "the header claims 50 bytes in a file of 10"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "the header claims 18446744073709551615 bytes in a file of 10"),
        (struct.pack("<Q", 2) + b"{]", "the header cannot be parsed"),
        (struct.pack("<Q", 1) + b"{}", "the header cannot be parsed"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "the header cannot be parsed"),
        (struct.pack("<Q", 2) + b"[]", "the header is not an object"),
        (struct.pack("<Q", 4) + b"null", "the header is not an object"),
        (struct.pack("<Q", 0), "the header cannot be parsed"),
    ],
)
def test_damaged_beginnings(path: Path, content: bytes, why: str) -> None:
    path.write_bytes(content)
    assert why in refused(path)


@pytest.mark.parametrize(
    ("tensors", "data", "why"),
    [
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 3, 7)}, 7, "tensor 'b' overlaps another"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 0, 4)}, 4, "tensor 'b' overlaps another"),
        ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 5, 9)}, 9, "tensor 'b' leaves a gap before it"),
        ({"a": entry("U8", [4], 1, 5)}, 5, "tensor 'a' leaves a gap before it"),
        ({"a": entry("U8", [4], 0, 4)}, 3, "the file has"),
        ({"a": entry("U8", [4], 0, 4)}, 5, "the file has"),
        ({"a": entry("U8", [0], 9, 9)}, 0, "tensor 'a' leaves a gap before it"),
        ({"a": entry("F32", [2, 3], 0, 23)}, 23, "of shape [2, 3] and dtype F32 needs 24 bytes, its range has 23"),
        ({"a": entry("F32", [1], 4, 0)}, 4, "needs 4 bytes, its range has -4"),
        ({"a": entry("F33", [1], 0, 4)}, 4, "tensor 'a' has the unknown dtype 'F33'"),
        ({"a": entry(["F32"], [1], 0, 4)}, 4, "tensor 'a' has the unknown dtype ['F32']"),
        ({"a": entry("F32", [-1, -1], 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", [True], 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", [1.0], 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", 1, 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", [1] * 9, 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", [2**63], 0, 4)}, 4, "tensor 'a' has no usable shape"),
        ({"a": entry("F32", [2**62, 2**62], 0, 4)}, 4, "its range has 4"),
        ({"a": entry("F32", [2**32, 2**32, 0], 0, 4)}, 4, "needs 0 bytes, its range has 4"),
        ({"a": entry("F32", [1], False, 4)}, 4, "tensor 'a' has no usable data_offsets"),
        ({"a": entry("F32", [1], -4, 0)}, 4, "tensor 'a' has no usable data_offsets"),
        ({"a": entry("F32", [1], 0, 4, 8)}, 4, "tensor 'a' has no usable data_offsets"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "tensor 'a' lacks dtype, shape or data_offsets"),
        ({"a": "F32"}, 4, "tensor 'a' lacks dtype, shape or data_offsets"),
        ({"a": None}, 4, "tensor 'a' lacks dtype, shape or data_offsets"),
    ],
)
def test_untrue_headers(path: Path, tensors: dict[str, Any], data: int, why: str) -> None:
    assert why in refused(write(path, tensors, bytes(data)))


def test_a_name_that_occurs_twice(path: Path) -> None:
    one = json.dumps(entry("U8", [1], 0, 1))
    assert "a name occurs twice" in refused(write(path, f'{{"a":{one},"a":{one}}}'.encode(), b"x"))


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"a":' * 100_000, b'{"a":{"shape":[' + b"9" * 10_000])
def test_json_made_to_exhaust_the_parser(path: Path, raw: bytes) -> None:
    assert "the header cannot be parsed" in refused(write(path, raw))


def test_a_header_above_the_limit_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)  # sparse: takes no room
    assert refused(path) == (
        f"{path} cannot be read: its header has 16,777,217 bytes, and at most 16,777,216 are read; "
        "save the model again in smaller files (max_shard_size of save_pretrained)"
    )


def test_a_header_of_a_shard_of_experts_is_read(path: Path) -> None:
    # A shard of 5 GB of Qwen3-30B-A3B in FP8 has 9,000 tensors, one of 50 GB 55,000.
    tensors = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": entry("U8", [0, 0], 0, 0) for n in range(60_000)}
    assert len(read_header(write(path, tensors)).tensors) == 60_000


def test_a_header_of_too_many_tensors_is_not_called_damaged(path: Path) -> None:
    write(path, {str(number): entry("U8", [0, 0], 0, 0) for number in range(94_000)})
    assert "cannot be read: its header holds more than 1,500,000 values, which are not read; save" in refused(path)


def test_a_git_lfs_pointer_is_called_by_its_name(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 269060552\n")
    assert refused(path).endswith("is a Git LFS pointer, not weights; run `git lfs pull` or download the model again")


def test_what_is_no_file(path: Path, tmp_path: Path) -> None:
    assert refused(path).endswith("cannot be read: No such file or directory")
    assert refused(tmp_path).endswith("cannot be read: Is a directory")
    os.mkfifo(path)  # nobody writes to it: reading it would never end
    assert refused(path).endswith("cannot be read: it is not a regular file")


GOOD = json.dumps(
    {"__metadata__": {"format": "pt"}, "a": entry("BF16", [2, 3], 0, 12), "b": entry("F32", [1], 12, 16)}
).encode()
# What JSON can hold in the place of a number, a name or a structure.
VALUES = ["0", "-1", "1", "12", "16", "2", "1e9", "1.5", "true", "null", "[]", "{}", '""', '"F16"', "[2,3]", "[0,12]",
          "9223372036854775808", "NaN", '"\\ud800"', '"a"']  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """The good file with a few bytes or JSON values replaced, or cut short."""
    raw = GOOD
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(raw)))
        stop = min(len(raw), start + draw(st.integers(0, 12)))
        middle = draw(st.one_of(st.binary(max_size=4), st.sampled_from(VALUES).map(str.encode)))
        raw = raw[:start] + middle + raw[stop:]
    length = draw(st.one_of(st.just(len(raw)), st.integers(0, 2**64 - 1), st.integers(0, len(raw) + 20)))
    content = struct.pack("<Q", length) + raw + bytes(draw(st.sampled_from([16, 16, 16, 0, 15, 17])))
    return content[: draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))]


@given(content=mutated())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_read_truly_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    tensors: list[TensorEntry] = []
    line = str(path)
    try:
        tensors += read_header(path).tensors.values()
    except SafetensorsError as error:
        line = str(error)
    assert str(path) in line
    for tensor in tensors:
        assert 8 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(content)


def test_headers_written_are_headers_read(path: Path) -> None:
    raw, offsets = header_bytes([("x", "F16", (2, 2)), ("y", "U8", (3,)), ("empty", "F32", (0, 7))])
    path.write_bytes(raw + bytes(11))
    assert len(raw) % 8 == 0
    tensors = read_header(path).tensors
    assert {name: tensor.offset for name, tensor in tensors.items()} == offsets
    assert offsets == {"x": len(raw), "y": len(raw) + 8, "empty": len(raw) + 11}
    assert b"__metadata__" not in raw


def test_the_official_library_reads_what_we_write_and_we_read_what_it_writes(path: Path) -> None:
    values = np.arange(6, dtype=np.float16).reshape(2, 3)
    path.write_bytes(header_bytes([("x", "F16", (2, 3))])[0] + values.tobytes())
    with safetensors.safe_open(path, "numpy") as file:
        assert np.array_equal(file.get_tensor("x"), values)
    safetensors.numpy.save_file({"x": values, "y": np.ones(5, dtype=np.int64)}, path, metadata={"by": "them"})
    tensors = read_header(path).tensors
    assert {name: (t.dtype, t.shape, t.nbytes) for name, t in tensors.items()} == {
        "x": ("F16", (2, 3), 12),
        "y": ("I64", (5,), 40),
    }
