"""Comparison of an unquantized TensorRT-LLM checkpoint with its HF source, and conversion back to an HF folder.

Both use the converter's plan in reverse: each piece of each rank's tensors says which rows and columns of which
HF tensor it holds. Files are mapped into memory, and compared or copied in blocks. Any converter's checkpoint will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.checkpoint.cast import Bits, Caster, Overflow
from trtpipe.engines.checkpoint.config import CheckpointError, read_config
from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.checkpoint.layout import ROTARY_TABLES, SAFETENSORS_DTYPE, plan_rank, rank_file, source_shapes
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import family_of
from trtpipe.engines.files import reserve, write_json
from trtpipe.engines.hf.folder import SINGLE_NAME, LocatedTensor, locate_tensors, read_model_config
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, SafetensorsFile, header_bytes, read_header
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig

BLOCK_BYTES = 8 << 20
# Fields of config.json that must be equal in both folders.
COMPARED_FIELDS = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_size", "norm_epsilon", "max_position_embeddings", "rotary_base", "rotary_scaling",
    "attn_bias", "experts",
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
        return self.piece.elements(self.plan.shape) * ITEMSIZE[self.file.tensors[self.plan.name].dtype]


def differences(
    checkpoint: Path, source: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """Differences between a checkpoint and the conversion of its HF folder; empty when they are equal.

    `progress` is called with (bytes compared, bytes in all).
    Values are compared bit for bit after casting the source to the checkpoint's type. Raises InputDataError for a
    folder that cannot be read.
    """
    config, model = _read_plain(checkpoint), read_model_config(source)
    out, located = _config_differences(config, model), locate_tensors(source)
    try:
        check_source(source, model, located)
    except InputDataError as error:
        out.append(str(error))
    # The head of a tied model is the embedding, whether or not the checkpoint says that they are tied.
    config = replace(config, tie_word_embeddings=model.tie_word_embeddings)
    return out + _tensor_differences(checkpoint, config, located, progress)


def _config_differences(config: CheckpointConfig, model: ModelConfig) -> list[str]:
    out = [
        f"config.json: {name} is {getattr(config, name)!r}, the source has {getattr(model, name)!r}"
        for name in COMPARED_FIELDS
        if getattr(config, name) != getattr(model, name)
    ]
    if config.tie_word_embeddings and not model.tie_word_embeddings:
        out.append("config.json: tie_word_embeddings is True, the source has False")
    for layer in range(min(config.num_hidden_layers, model.num_hidden_layers)):
        ours, theirs = (_narrow(window, model) for window in (config.window(layer), model.window(layer)))
        if ours != theirs:
            # The other layers repeat it.
            return [*out, f"config.json: the attention window of layer {layer} is {ours}, the source has {theirs}"]
    return out


def _narrow(window: int | None, model: ModelConfig) -> int | None:
    """An attention window that some sequence exceeds; None for any other."""
    return None if window is None or window >= model.longest_sequence else window


def _tensor_differences(
    checkpoint: Path,
    config: CheckpointConfig,
    located: dict[str, LocatedTensor],
    progress: Callable[[int, int], None],
) -> list[str]:
    out = []
    # Casters allocate scratch arrays, so one caster per type is used for all tensors.
    casters: dict[tuple[str, str], Caster] = {}
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
            cast = tensor.entry.dtype, held.plan.dtype or SAFETENSORS_DTYPE[config.dtype]
            if cast not in casters:
                casters[cast] = Caster(*cast)
            if not _equal(held, tensor, casters[cast]):
                out.append(f"{where}: differs from '{held.piece.source}' of the source")
    for rank in range(config.mapping.world_size):
        out += _padding_faults(checkpoint, config, rank)
    return out


def casts(checkpoint: Path, source: Path) -> list[tuple[str, str]]:
    """Safetensors types of the HF folder's tensors that the checkpoint holds in another type, each with that type;
    without those that are wider in every checkpoint, such as a router's."""
    config, located = _read_plain(checkpoint), locate_tensors(source)
    stored = SAFETENSORS_DTYPE[config.dtype]
    pairs = {
        (located[held.piece.source].entry.dtype, held.plan.dtype or stored)
        for held in _pieces(checkpoint, config)
        if held.piece.source in located
    }
    return sorted(
        (one, other) for one, other in pairs if one != other and (other == stored or ITEMSIZE[other] <= ITEMSIZE[one])
    )


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
    Tensors have the checkpoint's type, those of a wider type (routers) only where that loses nothing; a checkpoint has
    no tokenizer. Raises CheckpointError when ranks that hold the same values disagree, padding is not zero, or
    config.json has a setting that the folder has no place for.
    """
    config = _read_plain(checkpoint)
    # All planned tensors are checked against the files before a file of the size that config.json states is created.
    pieces = list(_pieces(checkpoint, config))
    write_json(out / "config.json", family_of(config).hf_config(config))
    if lost := _config_differences(config, read_model_config(out)):
        raise CheckpointError(f"no Hugging Face folder equals {checkpoint}", why=lost[0])
    shapes, dtypes = source_shapes(config), _restored_types(pieces, SAFETENSORS_DTYPE[config.dtype])
    wider_first = sorted(shapes, key=lambda name: -ITEMSIZE[dtypes[name]])
    header, offsets = header_bytes((name, dtypes[name], shapes[name]) for name in wider_first)
    size = len(header) + sum(prod(shape) * ITEMSIZE[dtypes[name]] for name, shape in shapes.items())
    target = out / SINGLE_NAME
    with target.open("w+b") as file:
        file.write(header)
        file.flush()
        reserve(file.fileno(), size)
    total, done = sum(held.nbytes for held in pieces), 0
    for held in pieces:
        done += held.nbytes
        progress(done, total)
        name = held.piece.source
        matrix = np.memmap(target, _kind(dtypes[name]), "r+", offsets[name], shape=_matrix(shapes[name]))
        matrix[slice(*held.piece.rows), _columns(held.piece)] = _cast(held, dtypes[name])
    # Several ranks store norms, biases and replicated heads, and a tied head is a copy of the embedding: where two
    # copies disagree, one of them now differs from what was written.
    faults = _tensor_differences(checkpoint, config, locate_tensors(out), progress)
    if faults:
        raise CheckpointError(f"the ranks of {checkpoint} disagree", why=faults[0])


def _restored_types(pieces: Sequence[_Held], dtype: str) -> dict[str, str]:
    """The type of each restored tensor: `dtype`, or a wider one that is stored and needed."""
    out = {}
    for held in pieces:
        stored = held.file.tensors[held.plan.name].dtype
        exact = stored == dtype or np.array_equal(
            Caster(dtype, stored).cast(_cast(held, dtype).reshape(-1)), _flat(held)
        )
        out[held.piece.source] = dtype if exact else stored
    return out


def _cast(held: _Held, dtype: str) -> Bits:
    """A piece as `dtype`. Raises CheckpointError for a value beyond it."""
    stored = held.file.tensors[held.plan.name].dtype
    if stored == dtype:
        return _stored(held)
    try:
        return Caster(stored, dtype).cast(_flat(held)).reshape(_stored(held).shape)
    except Overflow as error:
        raise CheckpointError(f"tensor '{held.plan.name}' in {held.file.path} holds {error}") from None


def _flat(held: _Held) -> Bits:
    return np.ascontiguousarray(_stored(held)).reshape(-1)


def _pieces(checkpoint: Path, config: CheckpointConfig) -> Iterator[_Held]:
    """Pieces of all rank files. Raises CheckpointError for a tensor that is missing or of a wrong shape or type."""
    mapping = config.mapping
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        path = rank_file(checkpoint, rank)
        if not path.exists():
            raise CheckpointError(
                f"{path} is missing",
                why=f"the mapping of config.json has {mapping.world_size} ranks",
                remedy="copy the checkpoint's whole folder, or convert the model again",
            )
        file = read_header(path)
        plans = list(plan_rank(config, mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=config.embedding))
        extra = sorted(file.tensors.keys() - {plan.name for plan in plans} - ROTARY_TABLES)
        if extra:
            raise CheckpointError(f"tensor '{extra[0]}' in {file.path} has no place in this model")
        for plan in plans:
            entry = file.tensors.get(plan.name)
            if entry is None:
                raise CheckpointError(f"tensor '{plan.name}' is missing from {file.path}")
            stored = plan.dtype or SAFETENSORS_DTYPE[config.dtype]
            if entry.shape != plan.shape or entry.dtype != stored:
                raise CheckpointError(
                    f"tensor '{plan.name}' in {file.path} is {entry.dtype} {list(entry.shape)}",
                    why=f"config.json implies {stored} {list(plan.shape)}",
                )
            row = 0
            for piece in plan.pieces:
                yield _Held(file, plan, piece, row)
                row += piece.rows[1] - piece.rows[0]


def _equal(held: _Held, tensor: LocatedTensor, caster: Caster) -> bool:
    ours = _stored(held)
    entry = tensor.entry
    whole = np.memmap(tensor.path, _kind(entry.dtype), "r", entry.offset, shape=_matrix(entry.shape))
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
    return np.memmap(file.path, _kind(entry.dtype), "r", entry.offset, shape=_matrix(entry.shape))


def _fits(piece: Piece, tensor: LocatedTensor) -> bool:
    shape = _matrix(tensor.entry.shape)
    columns = shape[1] if piece.cols is None else piece.cols[1]
    return len(tensor.entry.shape) in (1, 2) and piece.rows[1] <= shape[0] and columns <= shape[1]


def _columns(piece: Piece) -> slice:
    return slice(None) if piece.cols is None else slice(*piece.cols)


def _kind(dtype: str) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if ITEMSIZE[dtype] == 4 else np.uint16


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns; a vector has rows of one number."""
    return (shape[0], 1) if len(shape) == 1 else (prod(shape[:-1]), shape[-1])
