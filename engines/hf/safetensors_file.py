"""Reader of untrusted safetensors headers, and header of a new file whose layout is known in advance.

Format (Hugging Face, safetensors README): 8 bytes little-endian header length, that many bytes of JSON
mapping each tensor name to {dtype, shape, data_offsets: [begin, end)} relative to the end of the header,
optionally `__metadata__`; then the tensors' bytes, without gaps.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.json_input import TooLarge, open_regular, parse_json

# A tensor takes some 120 bytes of a header and counts as 16 values. Qwen3-30B-A3B in NVFP4 has 74,000 tensors, all in
# one file with the 50 GB of transformers 5: 9 MB and 1.1 million values, read in a second and 80 MB of memory. The
# reference implementation reads up to 100 MB, which would take a gigabyte here.
MAX_HEADER_BYTES = 16 << 20
MAX_HEADER_VALUES = 1_500_000

ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class SafetensorsError(InputDataError):
    """A safetensors file whose header is truncated, malformed or inconsistent with the file."""


@dataclass(frozen=True)
class TensorEntry:
    """Type, shape and position of a tensor: `offset` counts bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    path: Path
    tensors: dict[str, TensorEntry]


def read_header(path: Path) -> SafetensorsFile:
    """Parse and check the header of `path`: ranges lie in the file, without overlap or gap, and match the shapes.

    Raises SafetensorsError.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise SafetensorsError(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except ValueError as error:
        raise SafetensorsError(f"{path} cannot be read", why=str(error)) from None
    with file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise _damaged(path, f"{size} bytes is too short to hold a header")
        (header_len,) = struct.unpack("<Q", start)
        if start.startswith(b"version "):
            raise SafetensorsError(
                f"{path} is a Git LFS pointer, not weights", remedy="run `git lfs pull` or download the model again"
            )
        if header_len > size - 8:
            raise _damaged(path, f"the header claims {header_len} bytes in a file of {size}")
        if header_len > MAX_HEADER_BYTES:
            raise _too_large(path, f"has {header_len:,} bytes, and at most {MAX_HEADER_BYTES:,} are read")
        raw = file.read(header_len)
    try:
        header = parse_json(raw, max_values=MAX_HEADER_VALUES, pairs=_no_duplicates)
    except TooLarge:
        raise _too_large(path, f"holds more than {MAX_HEADER_VALUES:,} values, which are not read") from None
    except ValueError as error:
        raise _damaged(path, f"the header cannot be parsed: {error}") from None
    if not isinstance(header, dict):
        raise _damaged(path, "the header is not an object")
    header.pop("__metadata__", None)
    base = 8 + header_len
    entries = {name: _entry(path, name, spec, base) for name, spec in header.items()}
    _check_layout(path, entries.values(), base, size)
    return SafetensorsFile(path, entries)


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Header for (name, dtype, shape) tensors stored in the given order, and the offset of each in the file.

    The JSON is padded with spaces to a multiple of 8, as the reference implementation does, so that the data
    starts aligned. No `__metadata__` is written: TensorRT-LLM writes none.
    """
    header: dict[str, Any] = {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    offsets = {name: base + int(spec["data_offsets"][0]) for name, spec in header.items()}
    return struct.pack("<Q", len(text)) + text, offsets


def _damaged(path: Path, why: str) -> SafetensorsError:
    return SafetensorsError(f"{path} is damaged", why=why, remedy="download the file again")


def _too_large(path: Path, why: str) -> SafetensorsError:
    return SafetensorsError(
        f"{path} cannot be read",
        why=f"its header {why}",
        remedy="save the model again in smaller files (max_shard_size of save_pretrained)",
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice")
    return out


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _entry(path: Path, name: str, spec: Any, base: int) -> TensorEntry:
    if not isinstance(spec, dict) or not {"dtype", "shape", "data_offsets"} <= spec.keys():
        raise _damaged(path, f"tensor '{name}' lacks dtype, shape or data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise _damaged(path, f"tensor '{name}' has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 8 or not all(_is_count(n) for n in shape):
        raise _damaged(path, f"tensor '{name}' has no usable shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(n) for n in offsets):
        raise _damaged(path, f"tensor '{name}' has no usable data_offsets")
    begin, end = offsets
    nbytes = prod(shape) * ITEMSIZE[dtype]
    if end - begin != nbytes:
        raise _damaged(path, f"tensor '{name}' of shape {shape} and dtype {dtype} needs {nbytes} bytes, "
                             f"its range has {end - begin}")  # fmt: skip
    return TensorEntry(name, dtype, tuple(shape), base + begin, nbytes)


def _check_layout(path: Path, entries: Iterable[TensorEntry], base: int, size: int) -> None:
    position = base
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != position:
            kind = "overlaps another" if entry.offset < position else "leaves a gap before it"
            raise _damaged(path, f"tensor '{entry.name}' {kind}")
        position += entry.nbytes
    if position != size:
        raise _damaged(path, f"the header describes {position} bytes, the file has {size}")
