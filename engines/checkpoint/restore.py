"""Comparison of an unquantized TensorRT-LLM checkpoint with its HF source, and conversion back to an HF folder.

Both use the converter's plan in reverse: each piece of each rank's tensors says which rows and columns of which
HF tensor it holds. Files are mapped into memory, and compared or copied in blocks. Any converter's checkpoint will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.checkpoint.cast import Bits, Caster, Overflow
from trtpipe.engines.checkpoint.config import CheckpointError, read_config
from trtpipe.engines.checkpoint.layout import ROTARY_TABLES, SAFETENSORS_DTYPE, plan_rank, rank_file, source_shapes
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.families import family_of
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.folder import SINGLE_NAME, LocatedTensor, locate_tensors, read_model_config
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, SafetensorsFile, header_bytes, read_header
from trtpipe.engines.model_config import CheckpointConfig

BLOCK_BYTES = 8 << 20
# Fields of config.json that must be equal in both folders.
COMPARED_FIELDS = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_size", "norm_epsilon", "max_position_embeddings", "rotary_base", "rotary_scaling",
    "attn_bias",
)  # fmt: skip


@dataclass(frozen=True)
class _Held:
    """A piece in a rank file: rows [row, row + rows of the piece) of `plan`'s tensor in `file`."""

    file: SafetensorsFile
    plan: TensorPlan
    piece: Piece
    row: int

    @property
    def nbytes(self) -> int:
        first, end = self.piece.rows
        return (end - first) * prod(self.plan.shape[1:]) * ITEMSIZE[self.file.tensors[self.plan.name].dtype]


def differences(
    checkpoint: Path, source: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Differences between a checkpoint and the conversion of its HF folder; empty when they are equal.

    `progress` is called with (bytes compared, bytes in all).
    Values are compared bit for bit after casting the source to the checkpoint's type. Raises InputDataError for a
    folder that cannot be read.
    """
    config, model = _read_plain(checkpoint), read_model_config(source)
    out = [
        f"config.json: {name} is {getattr(config, name)!r}, the source has {getattr(model, name)!r}"
        for name in COMPARED_FIELDS
        if getattr(config, name) != getattr(model, name)
    ]
    located = locate_tensors(source)
    # Casters allocate scratch arrays, so one caster per type is used for all tensors.
    casters: dict[str, Caster] = {}
    pieces = list(_pieces(checkpoint, config))
    total, done = sum(held.nbytes for held in pieces), 0
    for held in pieces:
        done += held.nbytes
        progress(done, total)
        where = f"tensor '{held.plan.name}' in {held.file.path.name}"
        tensor = located.get(held.piece.source)
        if tensor is None:
            out.append(f"{where}: the source has no '{held.piece.source}'")
        elif not _fits(held.piece, tensor):
            out.append(f"{where}: '{held.piece.source}' of the source has shape {list(tensor.entry.shape)}")
        else:
            target = SAFETENSORS_DTYPE[config.dtype]
            caster = casters.setdefault(tensor.entry.dtype, Caster(tensor.entry.dtype, target))
            if not _equal(held, tensor, caster):
                out.append(f"{where}: differs from '{held.piece.source}' of the source")
    for rank in range(config.mapping.world_size):
        out += _padding_faults(checkpoint, config, rank)
    return out


def _read_plain(checkpoint: Path) -> CheckpointConfig:
    config = read_config(checkpoint)
    algo = config.quantization.quant_algo or config.quantization.kv_cache_quant_algo
    if algo is not None:
        raise CheckpointError(
            f"{checkpoint} is quantized with {algo.value}",
            why="quantizing has changed its weights, so they equal no source and give none back",
            remedy="measure it with `trtpipe verify`",
        )
    return config


def restore(checkpoint: Path, out: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write config.json and model.safetensors of the HF folder that a checkpoint was made from into the folder `out`.

    `progress` is called with (bytes done, bytes in all), twice over: the values are written, then compared.
    Tensors keep the checkpoint's type; a checkpoint has no tokenizer. Raises CheckpointError when ranks that hold
    the same values disagree, or padding is not zero.
    """
    config = _read_plain(checkpoint)
    # All planned tensors are checked against the files before a file of the size that config.json states is created.
    pieces = list(_pieces(checkpoint, config))
    write_json(out / "config.json", family_of(config).hf_config(config))
    shapes = source_shapes(config)
    dtype = SAFETENSORS_DTYPE[config.dtype]
    header, offsets = header_bytes((name, dtype, shape) for name, shape in shapes.items())
    size = len(header) + sum(prod(shape) for shape in shapes.values()) * config.dtype.itemsize
    target = out / SINGLE_NAME
    with target.open("wb") as file:
        file.write(header)
        file.truncate(size)
    total, done = sum(held.nbytes for held in pieces), 0
    for held in pieces:
        done += held.nbytes
        progress(done, total)
        name = held.piece.source
        matrix = np.memmap(target, _kind(dtype), "r+", offsets[name], shape=_two_dimensional(shapes[name]))
        matrix[slice(*held.piece.rows), _columns(held.piece)] = _stored(held)
    # Several ranks store norms, biases and replicated heads, and a tied head is a copy of the embedding: where two
    # copies disagree, one of them now differs from what was written.
    faults = differences(checkpoint, out, progress)
    if faults:
        raise CheckpointError(f"the ranks of {checkpoint} disagree", why=faults[0])


def _pieces(checkpoint: Path, config: CheckpointConfig) -> Iterator[_Held]:
    """Pieces of all rank files. Raises CheckpointError for a tensor that is missing or of a wrong shape or type."""
    mapping = config.mapping
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        file = read_header(rank_file(checkpoint, rank))
        plans = list(plan_rank(config, mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=config.embedding))
        extra = sorted(file.tensors.keys() - {plan.name for plan in plans} - ROTARY_TABLES)
        if extra:
            raise CheckpointError(f"tensor '{extra[0]}' in {file.path} has no place in this model")
        for plan in plans:
            entry = file.tensors.get(plan.name)
            if entry is None:
                raise CheckpointError(f"tensor '{plan.name}' is missing from {file.path}")
            if entry.shape != plan.shape or entry.dtype != SAFETENSORS_DTYPE[config.dtype]:
                raise CheckpointError(
                    f"tensor '{plan.name}' in {file.path} is {entry.dtype} {list(entry.shape)}",
                    why=f"config.json implies {SAFETENSORS_DTYPE[config.dtype]} {list(plan.shape)}",
                )
            row = 0
            for piece in plan.pieces:
                yield _Held(file, plan, piece, row)
                row += piece.rows[1] - piece.rows[0]


def _equal(held: _Held, tensor: LocatedTensor, caster: Caster) -> bool:
    ours = _stored(held)
    entry = tensor.entry
    whole = np.memmap(tensor.path, _kind(entry.dtype), "r", entry.offset, shape=_two_dimensional(entry.shape))
    theirs = whole[slice(*held.piece.rows), _columns(held.piece)]
    rows = max(1, BLOCK_BYTES // max(1, theirs.shape[1] * theirs.itemsize))
    for start in range(0, len(theirs), rows):
        block = np.ascontiguousarray(theirs[start : start + rows])
        try:
            wanted = caster.cast(block.reshape(-1))
        except Overflow:
            return False
        if not np.array_equal(wanted, np.ascontiguousarray(ours[start : start + rows]).reshape(-1)):
            return False
    return True


def _padding_faults(checkpoint: Path, config: CheckpointConfig, rank: int) -> list[str]:
    """Messages for the rows beyond the vocabulary that are not zero."""
    pp_rank, tp_rank = divmod(rank, config.mapping.tp_size)
    file = read_header(rank_file(checkpoint, rank))
    out = []
    for plan in plan_rank(config, config.mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=config.embedding):
        if plan.pad_rows and _map(file, plan)[-plan.pad_rows :].any():
            out.append(f"tensor '{plan.name}' in {file.path.name}: its padding is not zero")
    return out


def _stored(held: _Held) -> Bits:
    rows = held.piece.rows[1] - held.piece.rows[0]
    return _map(held.file, held.plan)[held.row : held.row + rows]


def _map(file: SafetensorsFile, plan: TensorPlan) -> Bits:
    entry = file.tensors[plan.name]
    return np.memmap(file.path, _kind(entry.dtype), "r", entry.offset, shape=_two_dimensional(entry.shape))


def _fits(piece: Piece, tensor: LocatedTensor) -> bool:
    shape = _two_dimensional(tensor.entry.shape)
    columns = shape[1] if piece.cols is None else piece.cols[1]
    return len(tensor.entry.shape) in (1, 2) and piece.rows[1] <= shape[0] and columns <= shape[1]


def _columns(piece: Piece) -> slice:
    return slice(None) if piece.cols is None else slice(*piece.cols)


def _kind(dtype: str) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if ITEMSIZE[dtype] == 4 else np.uint16


def _two_dimensional(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], prod(shape[1:]))
