"""LoRA adapters in the reference runtime: loads their matrices, and adds their products to the outputs of a step.

A step may have requests of different adapters. Its rows are grouped by adapter. Adapters of one rank with a similar
number of rows are computed by one batched product, whose rows are padded to one length: padding at most doubles the
work. For that the matrices of all adapters of one rank are stored as one tensor, so no adapter is in memory twice. B is
stored multiplied by the adapter's scale. A tensor-parallel rank holds the rows of B, or the columns of A, of its part
of the linear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.plan import kv_head_rows, share
from trtpipe.engines.errors import InputDataError, TrtpipeError
from trtpipe.engines.hf.adapter import located_pairs, read_adapter
from trtpipe.engines.hf.adapter_check import check_range
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.reference.devices import named_memory_errors
from trtpipe.engines.reference.mapped_tensors import MappedTensors

# (layer, index of the shard in the layer, role) -> A and B, both transposed: of one adapter [in, rank] and [rank, out],
# of several [places, in, rank] and [places, rank, out].
Matrices = dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]]
# Add(x [T, in], outputs): adds to each output (role, [T, out]), in place, the product of each row of x with the
# matrices that the row's adapter has for that role.
Add = Callable[[torch.Tensor, Sequence[tuple[str, torch.Tensor]]], None]


def device_bytes(folder: Path | None, dtype: torch.dtype) -> int:
    """Most bytes that the adapters in `folder` take on a device in `dtype`. One that cannot be read counts as none: its
    requests are refused."""
    total = 0
    for one in AdapterFolder(folder).all():
        with contextlib.suppress(TrtpipeError, OSError):
            pairs = read_adapter(one.path).linears.values()
            total += sum(prod(side.entry.shape) for pair in pairs for side in pair) * dtype.itemsize
    return total


class _Group(NamedTuple):
    """Rows of a step that are computed together.

    stacked   matrices of all adapters of their rank
    chosen    places of n adapters in them
    padded    [n, most] rows of each adapter; padding repeats row 0
    rows      [k] the rows, of all the adapters
    places    [k] their places in `padded`, flattened
    """

    stacked: Matrices
    chosen: slice | torch.Tensor
    padded: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


class _Stack:
    """Matrices of the adapters of one rank; `numbers` has the adapter at each place, 0 for a free place."""

    def __init__(self) -> None:
        self.matrices: Matrices = {}
        self.numbers: list[int] = []

    def put(self, number: int, own: Matrices) -> int:
        """Copy an adapter's matrices to a free place; the place. A linear that it does not adapt gets zeros."""
        place = self.numbers.index(0) if 0 in self.numbers else len(self.numbers)
        for key in self.matrices.keys() | own.keys():
            kept = self.matrices.get(key) or [one.new_empty(0, *one.shape) for one in own[key]]
            a, b = (_with_place(one, place) for one in kept)
            a[place], b[place] = own.get(key, (0, 0))
            self.matrices[key] = a, b
        self.numbers[place : place + 1] = [number]
        return place


def _with_place(matrices: torch.Tensor, place: int) -> torch.Tensor:
    """`matrices` [places, ...] with room for `place`, and for a quarter more where it must grow."""
    if place < len(matrices):
        return matrices
    grown = matrices.new_zeros(place + 1 + place // 4, *matrices.shape[1:])
    grown[: len(matrices)] = matrices
    return grown


class AdapterChange(NamedTuple):
    """Message to the process of another rank: load an adapter from `folder`, or drop it where that is None."""

    number: int
    folder: Path | None


class Adapters:
    """Adapters of a model, for the tensor-parallel ranks `held`, in `dtype` on `device`."""

    def __init__(self, config: CheckpointConfig, held: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._held, self._dtype, self._device = config, held, dtype, device
        self._stacks: dict[int, _Stack] = {}  # by rank
        self._where: dict[int, tuple[int, int]] = {}  # adapter number -> its rank and its place there
        tp, size = config.mapping.tp_size, config.head_size
        self._kv = len(range(*kv_head_rows(config, tp, 0)))
        self._q = config.num_attention_heads // tp * size

    def load(self, number: int, folder: Path) -> None:
        """Load the adapter in `folder`. Raises InputDataError for one that is damaged, gone, of another model or beyond
        the type's range, HostError where it does not fit into memory."""
        remedy = "remove adapters that are not used, or give the KV cache less"
        try:
            with named_memory_errors(self._device, [f"the adapter in {folder} was loaded"], remedy):
                rank, own = self._read(folder)
                self._where[number] = rank, self._stacks.setdefault(rank, _Stack()).put(number, own)
        except OSError as error:
            raise InputDataError(f"{folder} cannot be read", why=str(error)) from None

    def _read(self, folder: Path) -> tuple[int, Matrices]:
        """An adapter's rank and its matrices."""
        adapter = read_adapter(folder)
        pairs = located_pairs(adapter, self._config)
        check_range(adapter, DataType(str(self._dtype).removeprefix("torch.")))
        tensors = MappedTensors({side.entry.name: side for pair in pairs.values() for side in pair}, self._device)
        made: Matrices = {}
        for (layer, role), pair in pairs.items():
            a, b = tensors[pair.a.entry.name].float(), tensors[pair.b.entry.name].float() * adapter.scale
            for place, rank in enumerate(self._held):
                rows, columns = self._part(role, rank)
                ours = a if columns is None else a[:, slice(*columns)], b if rows is None else b[slice(*rows)]
                made[layer, place, role] = ours[0].t().to(self._dtype), ours[1].t().to(self._dtype)
        return adapter.rank, made

    def drop(self, number: int) -> None:
        """Drop an adapter that no request uses: the next one of its rank takes its place."""
        if number in self._where:
            rank, place = self._where.pop(number)
            numbers = self._stacks[rank].numbers
            numbers[place] = 0
            if not any(numbers):
                del self._stacks[rank]

    def _part(self, role: str, rank: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """(first, end) of a rank's rows of B, and of its columns of A; None for all of them."""
        config, tp = self._config, self._config.mapping.tp_size
        if role in ("k", "v"):
            return kv_head_rows(config, tp, rank), None
        attention = role in ("q", "o")
        whole = config.num_attention_heads * config.head_size if attention else config.intermediate_size
        part = share(whole, tp, rank)
        return (None, part) if role in ("o", "down") else (part, None)

    def plan(self, used: Sequence[tuple[int, int]]) -> StepAdapters | None:
        """Plan a step whose spans are (adapter number, tokens); 0 means no adapter. None where no span has one."""
        rows: dict[int, list[int]] = {}
        first = 0
        for number, count in used:
            if number:
                rows.setdefault(number, []).extend(range(first, first + count))
            first += count
        if not rows:
            return None
        alike: dict[tuple[int, int], list[int]] = {}
        for number in sorted(rows, key=self._where.__getitem__):
            alike.setdefault((self._where[number][0], len(rows[number]).bit_length()), []).append(number)
        groups = [
            self._group(rank, [self._where[number][1] for number in numbers], [rows[number] for number in numbers])
            for (rank, _), numbers in alike.items()
        ]
        return StepAdapters(groups, self._q, self._kv)

    def _group(self, rank: int, chosen: Sequence[int], rows: Sequence[Sequence[int]]) -> _Group:
        most = max(map(len, rows))
        padded = [[*own, *[0] * (most - len(own))] for own in rows]
        places = [index * most + place for index, own in enumerate(rows) for place in range(len(own))]
        together = [row for own in rows for row in own]
        indices, *tensors = (torch.tensor(one, device=self._device) for one in (chosen, padded, together, places))
        first, end = chosen[0], chosen[-1] + 1
        # A slice of the matrices is a view; an index makes a copy.
        own_places = slice(first, end) if end - first == len(chosen) else indices
        return _Group(self._stacks[rank].matrices, own_places, *tensors)


class StepAdapters:
    """The adapters of one step. `q` is the number of features of a rank's queries, `kv` that of its keys or values."""

    def __init__(self, groups: Sequence[_Group], q: int, kv: int) -> None:
        self._groups, self._q, self._kv = groups, q, kv

    def of(self, layer: int, place: int) -> LayerAdapters:
        return LayerAdapters(self, layer, place)

    def add(self, layer: int, place: int, x: torch.Tensor, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See Add, for shard `place` of a layer."""
        for group in self._groups:
            there = group.stacked
            wanted = [(there[layer, place, role], out) for role, out in outputs if (layer, place, role) in there]
            padded = x[group.padded] if wanted else x
            for (a, b), out in wanted:
                made = torch.bmm(torch.bmm(padded, a[group.chosen]), b[group.chosen]).flatten(0, 1)
                out.index_add_(0, group.rows, made[group.places])

    def split(self, qkv: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Views of the outputs of q, k and v in their joint output [T, features]."""
        return list(zip("qkv", qkv.split([self._q, self._kv, self._kv], dim=-1), strict=True))


class LayerAdapters(NamedTuple):
    """The adapters of one step for one shard of a layer."""

    step: StepAdapters
    layer: int
    place: int

    def add(self, x: torch.Tensor, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.step.add(self.layer, self.place, x, outputs)

    def add_qkv(self, x: torch.Tensor, qkv: torch.Tensor) -> None:
        self.add(x, self.step.split(qkv))
