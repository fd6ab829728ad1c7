"""Converter from a Hugging Face folder to a TensorRT-LLM checkpoint, as a streaming rewrite of safetensors bytes.

Every output tensor's offset is known before the first byte is copied. Each source tensor is read once, in blocks of at
most BLOCK_BYTES; a block is checked (no value may be infinite or NaN), cast once, and its rows and columns are
written to every rank that holds them. The converter needs no torch, and its memory does not depend on the model's size.
A few threads take blocks in their order on disk, so that reading stays sequential; reading, writing and numpy all
release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from trtpipe.engines.base import Checkpoint, DataType, Mapping
from trtpipe.engines.checkpoint.cast import Bits, Caster, Overflow
from trtpipe.engines.checkpoint.config import config_json
from trtpipe.engines.checkpoint.layout import DERIVED_SUFFIX, SAFETENSORS_DTYPE, plan_rank, rank_file, source_shapes
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.checkpoint.split import check_mapping, check_stages
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import family_of
from trtpipe.engines.files import pwrite_all, reserve, write_json
from trtpipe.engines.hf.folder import LocatedTensor, check_tied_head, locate_tensors, read_model_config
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, header_bytes
from trtpipe.engines.model_config import EmbeddingSharding, ModelConfig

BLOCK_BYTES = 8 << 20
# Two threads keep a disk busy while a third casts; more threads only take memory.
THREADS = min(3, os.cpu_count() or 1)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Share:
    """Piece of a source tensor that one rank file stores as `dtype`, and the file and offset where it begins."""

    file: int
    position: int
    piece: Piece
    dtype: str


def convert(
    source: Path,
    out: Path,
    *,
    dtype: DataType | None,
    mapping: Mapping,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    toolchain: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Checkpoint:
    """Write the checkpoint of the HF folder `source` into the existing folder `out`.

    dtype      element type of every tensor; None keeps the source's type, but float32 becomes float16 as upstream
    embedding  whether and along which dimension ranks share the embedding table
    toolchain  TensorRT-LLM release whose loader reads config.json; None for the default release
    progress   called with (bytes written, bytes in all)

    Raises InputDataError for a damaged or incomplete source, UsageError for an impossible mapping.
    """
    model = read_model_config(source)
    check_mapping(model, mapping, embedding)
    check_stages(model, mapping)
    located = locate_tensors(source)
    check_source(source, model, located)
    target = dtype or _automatic(model)
    config = config_json(model, target, mapping, embedding=embedding, toolchain=toolchain)
    write_json(out / "config.json", config)
    files = []
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        plans = list(plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=embedding))
        files.append((rank_file(out, rank), plans))
    rewrite(located, files, target, progress)
    return Checkpoint(path=out)


def rewrite(
    located: dict[str, LocatedTensor],
    files: Iterable[tuple[Path, list[TensorPlan]]],
    dtype: DataType,
    progress: Progress,
) -> None:
    """Write new safetensors files: for each path the planned tensors, copied from their source tensors.

    dtype  type of tensors whose plan has none

    Raises InputDataError for a value that is not finite or exceeds `dtype`.
    """
    with ExitStack() as stack:
        shares: dict[str, list[_Share]] = {}
        total = sum(_create(path, plans, SAFETENSORS_DTYPE[dtype], shares, stack) for path, plans in files)
        sources = _open_sources(located, stack)
        _run(_blocks(located, sources, shares), _Counter(total, progress))


def check_source(folder: Path, model: ModelConfig, located: dict[str, LocatedTensor]) -> None:
    """Raises InputDataError for a missing or unexpected tensor, one of a wrong shape or dtype, or a head that differs
    from the embedding to which config.json ties it."""
    family = family_of(model)
    family.check_source(folder, model)
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
    tied_head = {f"{family.names.head}.weight"} if model.tie_word_embeddings else set()
    extra = sorted(n for n in located.keys() - wanted.keys() - tied_head if not n.endswith(DERIVED_SUFFIX))
    if extra:
        raise InputDataError(
            f"tensor '{extra[0]}' in {located[extra[0]].path} has no place in a {model.architecture}",
            why="converting without it would change the model",
        )
    check_tied_head(model, located)


def _automatic(model: ModelConfig) -> DataType:
    return DataType.FLOAT16 if model.dtype in (None, DataType.FLOAT32) else model.dtype


def _open_sources(located: dict[str, LocatedTensor], stack: ExitStack) -> dict[Path, int]:
    out: dict[Path, int] = {}
    for path in sorted({tensor.path for tensor in located.values()}):
        out[path] = os.open(path, os.O_RDONLY)
        stack.callback(os.close, out[path])
    return out


def _create(path: Path, plans: list[TensorPlan], dtype: str, shares: dict[str, list[_Share]], stack: ExitStack) -> int:
    """Create a file with its header and add its pieces to `shares`; return the bytes of its tensors.

    Wider types come first, so that each tensor is aligned. Padding is not written: a new file reads as zeros where
    nothing was written.
    """
    typed = sorted(((plan, plan.dtype or dtype) for plan in plans), key=lambda pair: -ITEMSIZE[pair[1]])
    header, offsets = header_bytes((plan.name, stored, plan.shape) for plan, stored in typed)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    stack.callback(os.close, file)
    size = sum(prod(plan.shape) * ITEMSIZE[stored] for plan, stored in typed)
    # Reserving the space first makes a full disk fail before the work, not after it.
    reserve(file, len(header) + size)
    pwrite_all(file, header, 0)
    for plan, stored in typed:
        position = offsets[plan.name]
        for piece in plan.pieces:
            shares.setdefault(piece.source, []).append(_Share(file, position, piece, stored))
            position += piece.elements(plan.shape) * ITEMSIZE[stored]
    return size


def _disk_order(located: dict[str, LocatedTensor], shares: dict[str, list[_Share]]) -> list[str]:
    return sorted(shares, key=lambda name: (located[name].path, located[name].entry.offset))


class _Counter:
    """Count of bytes written; calls `progress` from one thread at a time."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            self._progress(self._done, self._total)


@dataclass(frozen=True)
class _Block:
    """Rows [first, last) of a source tensor, and the shares that need them."""

    tensor: LocatedTensor
    file: int
    first: int
    last: int
    shares: list[_Share]


def _blocks(
    located: dict[str, LocatedTensor], files: dict[Path, int], shares: dict[str, list[_Share]]
) -> Iterator[_Block]:
    for name in _disk_order(located, shares):
        tensor = located[name]
        count, width = tensor.entry.shape[0], prod(tensor.entry.shape[1:])
        rows = max(1, BLOCK_BYTES // max(1, width * ITEMSIZE[tensor.entry.dtype]))
        for first in range(0, count, rows):
            yield _Block(tensor, files[tensor.path], first, min(count, first + rows), shares[name])


def _run(blocks: Iterator[_Block], counter: _Counter) -> None:
    """Distribute the blocks over the threads; the first failure ends all threads."""
    lock = threading.Lock()
    failed = threading.Event()

    def take() -> Iterator[_Block]:
        while not failed.is_set():
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def loop() -> None:
        mover = _Mover(counter)
        try:
            for block in take():
                mover.move(block)
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for future in [pool.submit(loop) for _ in range(THREADS)]:
                future.result()
        finally:
            failed.set()  # also after Ctrl-C, so that the threads stop after their block


class _Mover:
    """Buffer and casters of one thread."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter
        self._buffer = bytearray(BLOCK_BYTES)
        self._casters: dict[tuple[str, str], Caster] = {}

    def move(self, block: _Block) -> None:
        """Read the rows of a block, check and cast them, and write each rank's share of them."""
        entry = block.tensor.entry
        # All shares of a tensor are stored as one type.
        cast = entry.dtype, block.shares[0].dtype
        if cast not in self._casters:
            self._casters[cast] = Caster(*cast)
        caster = self._casters[cast]
        width, item = prod(entry.shape[1:]), ITEMSIZE[entry.dtype]
        raw = self._read(block, entry.offset + block.first * width * item, (block.last - block.first) * width * item)
        bits = np.frombuffer(raw, np.uint32 if item == 4 else np.uint16)
        if not caster.all_finite(bits):
            raise InputDataError(
                f"tensor '{entry.name}' in {block.tensor.path} holds a value that is infinite or not a number",
                why="a model with it would answer nonsense",
                remedy="download the file again, or use another revision of the model",
            )
        rows = self._cast(caster, bits, block.tensor).reshape(block.last - block.first, width)
        for share in block.shares:
            self._write(share, rows, block.first)

    def _read(self, block: _Block, offset: int, nbytes: int) -> memoryview:
        if nbytes > len(self._buffer):  # a row longer than a block
            self._buffer = bytearray(nbytes)
        view = memoryview(self._buffer)[:nbytes]
        done = 0
        while done < nbytes:
            count = os.preadv(block.file, [view[done:]], offset + done)
            if count == 0:
                raise InputDataError(f"{block.tensor.path} became shorter while it was read", remedy="convert again")
            done += count
        return view

    def _cast(self, caster: Caster, bits: Bits, tensor: LocatedTensor) -> Bits:
        try:
            return caster.cast(bits)
        except Overflow as error:
            wide = caster.target == "BF16"
            raise InputDataError(
                f"tensor '{tensor.entry.name}' in {tensor.path} holds {error}",
                why="bfloat16 ends at 3.38953e+38" if wide else "float16 ends at 65504",
                remedy="convert to float32" if wide else "convert to bfloat16",
            ) from None

    def _write(self, share: _Share, block: Bits, first: int) -> None:
        """Write the part of a share within rows [first, first + len(block)) of its source tensor."""
        begin, end = share.piece.rows
        low, high = max(begin, first), min(end, first + len(block))
        if low >= high:
            return
        columns = slice(None) if share.piece.cols is None else slice(*share.piece.cols)
        part = np.ascontiguousarray(block[low - first : high - first, columns])
        position = share.position + (low - begin) * part.shape[1] * part.itemsize
        pwrite_all(share.file, part.reshape(-1).view(np.uint8).data, position)
        self._counter.add(part.nbytes)
