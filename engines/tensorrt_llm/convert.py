"""Hugging Face folder -> TensorRT-LLM checkpoint, as a streaming rewrite of safetensors bytes.

Every output tensor's place is known before the first byte moves, so the files are written in one pass over the
source, rank beside rank, in blocks of at most BLOCK_BYTES: no torch, no full load, memory independent of the
model's size. Whole rows that keep their type are moved by the kernel (copy_file_range); anything cut by column
or cast goes through numpy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engines.base import Checkpoint, DataType, Mapping
from engines.errors import InputDataError
from engines.files import write_json
from engines.hf_folder import LocatedTensor, ModelConfig, locate_tensors, read_model_config
from engines.safetensors_file import ITEMSIZE, header_bytes
from engines.tensorrt_llm.checkpoint import (
    SAFETENSORS_DTYPE,
    Piece,
    TensorPlan,
    check_mapping,
    config_json,
    plan_rank,
    rank_file,
    source_shapes,
)

BLOCK_BYTES = 16 << 20

# Older exports carry this buffer; it follows from the config and was never a parameter.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"

# Raw bit patterns: uint16 for BF16 and F16, uint32 for F32.
Bits = npt.NDArray[Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Output:
    """An open rank file, what it holds and where."""

    file: int
    plans: list[TensorPlan]
    offsets: dict[str, int]


def convert(
    source: Path,
    out: Path,
    *,
    dtype: DataType | None,
    mapping: Mapping,
    progress: Progress = lambda done, total: None,
) -> Checkpoint:
    """Write the checkpoint of the HF folder `source` into the existing folder `out`.

    dtype     element type of every tensor; None keeps the source's, float32 becoming float16 as upstream does
    progress  called with (bytes written, bytes in all)

    Raises InputDataError for a damaged or incomplete source, UsageError for an impossible mapping.
    """
    model = read_model_config(source)
    check_mapping(model, mapping)
    located = locate_tensors(source)
    check_source(source, model, located)
    target = dtype or _automatic(model)
    write_json(out / "config.json", config_json(model, target, mapping))
    with ExitStack() as stack:
        sources = _open_sources(located, stack)
        outputs = [_create(out, model, mapping, rank, target, stack) for rank in range(mapping.world_size)]
        total = sum(prod(plan.shape) for output in outputs for plan in output.plans) * target.itemsize
        done = 0
        for output, plan in _in_source_order(outputs):
            position = output.offsets[plan.name]
            for piece in plan.pieces:
                position += _write_piece(output.file, position, piece, located, sources, target)
            if plan.pad_rows:
                position += _write_zeros(output.file, position, plan.pad_rows * plan.shape[1] * target.itemsize)
            done += prod(plan.shape) * target.itemsize
            progress(done, total)
        for output in outputs:
            os.fsync(output.file)
    return Checkpoint(path=out)


def check_source(folder: Path, model: ModelConfig, located: dict[str, LocatedTensor]) -> None:
    """Account for every tensor of the folder: none missing, none unexpected, every shape and dtype usable."""
    if model.mlp_bias:
        raise InputDataError(
            f"{folder} has biases in its feed-forward layers (mlp_bias)",
            why="a TensorRT-LLM Llama has none, and upstream's converter drops them silently",
        )
    wanted = source_shapes(model)
    for name, shape in wanted.items():
        if name not in located:
            raise InputDataError(f"tensor '{name}' is missing from {folder}", remedy="download the model again")
        found = located[name]
        if found.entry.shape != shape:
            raise InputDataError(
                f"tensor '{name}' in {found.path} has shape {list(found.entry.shape)}",
                why=f"config.json implies {list(shape)}",
            )
        if found.entry.dtype not in SAFETENSORS_DTYPE.values():
            raise InputDataError(
                f"tensor '{name}' in {found.path} has dtype {found.entry.dtype}",
                why="weights must be BF16, F16 or F32",
            )
    tied_head = {"lm_head.weight"} if model.tie_word_embeddings else set()
    extra = sorted(n for n in located.keys() - wanted.keys() - tied_head if not n.endswith(DERIVED_SUFFIX))
    if extra:
        raise InputDataError(
            f"tensor '{extra[0]}' in {located[extra[0]].path} has no place in a dense Llama",
            why="converting without it would change the model",
        )


def _automatic(model: ModelConfig) -> DataType:
    return DataType.FLOAT16 if model.dtype in (None, DataType.FLOAT32) else model.dtype


def _open_sources(located: dict[str, LocatedTensor], stack: ExitStack) -> dict[Path, int]:
    out: dict[Path, int] = {}
    for path in sorted({tensor.path for tensor in located.values()}):
        out[path] = os.open(path, os.O_RDONLY)
        stack.callback(os.close, out[path])
    return out


def _create(out: Path, model: ModelConfig, mapping: Mapping, rank: int, dtype: DataType, stack: ExitStack) -> _Output:
    pp_rank, tp_rank = divmod(rank, mapping.tp_size)
    plans = list(plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank))
    header, offsets = header_bytes((plan.name, SAFETENSORS_DTYPE[dtype], plan.shape) for plan in plans)
    file = os.open(rank_file(out, rank), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    stack.callback(os.close, file)
    size = len(header) + sum(prod(plan.shape) for plan in plans) * dtype.itemsize
    # Reserving the space first turns a full disk into an error before the work, not after it.
    os.posix_fallocate(file, 0, size)
    os.pwrite(file, header, 0)
    return _Output(file, plans, offsets)


def _in_source_order(outputs: list[_Output]) -> Iterator[tuple[_Output, TensorPlan]]:
    """Tensor by tensor, each on all ranks that hold it, so that the source is read once."""
    longest = max(len(output.plans) for output in outputs)
    for index in range(longest):
        for output in outputs:
            if index < len(output.plans):
                yield output, output.plans[index]


def _write_piece(
    file: int, position: int, piece: Piece, located: dict[str, LocatedTensor], sources: dict[Path, int], dtype: DataType
) -> int:
    """Write one piece at `position`; return its size in bytes."""
    tensor = located[piece.source]
    entry, source = tensor.entry, sources[tensor.path]
    width = prod(entry.shape[1:])
    item = ITEMSIZE[entry.dtype]
    first, last = piece.rows
    whole_rows = piece.cols is None or piece.cols == (0, width)
    if whole_rows and entry.dtype == SAFETENSORS_DTYPE[dtype]:
        nbytes = (last - first) * width * item
        _copy_range(source, entry.offset + first * width * item, file, position, nbytes)
        return nbytes
    columns = slice(None) if piece.cols is None else slice(*piece.cols)
    rows_per_block = max(1, BLOCK_BYTES // (width * item))
    written = 0
    for start in range(first, last, rows_per_block):
        rows = min(rows_per_block, last - start)
        raw = _read(source, entry.offset + start * width * item, rows * width * item, tensor.path)
        block = np.frombuffer(raw, dtype=f"<u{item}").reshape(rows, width)[:, columns]
        data = cast(np.ascontiguousarray(block), entry.dtype, SAFETENSORS_DTYPE[dtype], piece.source)
        _write(file, data.tobytes(), position + written)
        written += data.nbytes
    return written


def cast(bits: Bits, source: str, target: str, name: str) -> Bits:
    """Convert raw bit patterns between BF16, F16 and F32, rounding to nearest even.

    Raises InputDataError when a finite value does not fit the target: F16 ends at 65504, BF16 a little before F32.
    """
    if source == target:
        return bits
    wide = _to_float32(bits, source)
    if target == "F32":
        return wide.view(np.uint32)
    if target == "BF16":
        out, infinity = _to_bfloat16(wide), 0x7F80
    else:
        with np.errstate(over="ignore"):
            out, infinity = wide.astype(np.float16).view(np.uint16), 0x7C00
    if ((out & 0x7FFF == infinity) & np.isfinite(wide)).any():
        raise InputDataError(
            f"tensor '{name}' holds {float(np.abs(wide[np.isfinite(wide)]).max()):g}",
            why="bfloat16 ends at 3.38953e+38" if target == "BF16" else "float16 ends at 65504",
            remedy="convert to float32" if target == "BF16" else "convert to bfloat16",
        )
    return out


def _to_float32(bits: Bits, source: str) -> npt.NDArray[np.float32]:
    if source == "F32":
        return bits.view(np.float32)
    if source == "F16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(wide: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = wide.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    out = rounded.astype(np.uint16)
    # Rounding could carry a NaN's payload into infinity or past the sign; keep it a quiet NaN instead.
    nan = np.isnan(wide)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return out


def _copy_range(source: int, offset: int, file: int, position: int, nbytes: int) -> None:
    while nbytes:
        try:
            moved = os.copy_file_range(source, file, nbytes, offset, position)
        except OSError as error:
            # Across file systems on old kernels, or on one that does not offer it.
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            moved = os.pwrite(file, os.pread(source, min(nbytes, BLOCK_BYTES), offset), position)
        if moved == 0:
            raise InputDataError("a weight file became shorter while it was read", remedy="convert again")
        nbytes -= moved
        offset += moved
        position += moved


def _read(source: int, offset: int, nbytes: int, path: Path) -> bytes:
    data = os.pread(source, nbytes, offset)
    if len(data) != nbytes:
        raise InputDataError(f"{path} became shorter while it was read", remedy="convert again")
    return data


def _write(file: int, data: bytes, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view = view[written:]
        position += written


def _write_zeros(file: int, position: int, nbytes: int) -> int:
    _write(file, bytes(nbytes), position)
    return nbytes
