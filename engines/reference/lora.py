"""LoRA adapters in the reference runtime: loads their matrices, and adds their products to the outputs of a step.

A step may have requests of different adapters. Its rows are grouped by adapter. Adapters with a similar number of rows
are computed by one batched product, whose rows are padded to one length: padding at most doubles the work. B is stored
multiplied by the adapter's scale. A tensor-parallel rank holds the rows of B, or the columns of A, of its part of the
linear.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.plan import kv_head_rows, share
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.adapter import located_pairs, read_adapter
from trtpipe.engines.hf.adapter_check import check_range
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.reference.devices import named_memory_errors
from trtpipe.engines.reference.mapped_tensors import MappedTensors

# (layer, index of the shard in the layer, role) -> both transposed: A [adapters, in, rank], B [adapters, rank, out].
Matrices = dict[tuple[int, int, str], tuple[torch.Tensor, torch.Tensor]]
# Add(x [T, in], outputs): adds to each output (role, [T, out]), in place, the product of each row of x with the
# matrices that the row's adapter has for that role.
Add = Callable[[torch.Tensor, Sequence[tuple[str, torch.Tensor]]], None]
# Sets of adapters whose stacked matrices are kept, since steps that follow one another have mostly the same adapters.
_KEPT = 4


class _Group(NamedTuple):
    """Rows of a step that are computed together.

    adapters  numbers of n adapters
    padded    [n, most] rows of each adapter; padding repeats row 0
    rows      [k] the rows, of all the adapters
    places    [k] their places in `padded`, flattened
    """

    adapters: tuple[int, ...]
    padded: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor


class AdapterChange(NamedTuple):
    """Message to the process of another rank: load an adapter from `folder`, or drop it where that is None."""

    number: int
    folder: Path | None


class Adapters:
    """Adapters of a model, for the tensor-parallel ranks `held`, in `dtype` on `device`."""

    def __init__(self, config: CheckpointConfig, held: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._held, self._dtype, self._device = config, held, dtype, device
        self._loaded: dict[int, Matrices] = {}
        self._stacked: OrderedDict[tuple[int, ...], Matrices] = OrderedDict()
        tp, size = config.mapping.tp_size, config.head_size
        self._kv = len(range(*kv_head_rows(config, tp, 0)))
        self._q = config.num_attention_heads // tp * size

    def load(self, number: int, folder: Path) -> None:
        """Load the adapter in `folder`. Raises InputDataError for one that is damaged, gone, of another model or beyond
        the type's range, HostError where it does not fit into memory."""
        remedy = "remove adapters that are not used, or give the KV cache less"
        try:
            with named_memory_errors(self._device, [f"the adapter in {folder} was loaded"], remedy):
                self._loaded[number] = self._read(folder)
        except OSError as error:
            raise InputDataError(f"{folder} cannot be read", why=str(error)) from None

    def _read(self, folder: Path) -> Matrices:
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
                made[layer, place, role] = self._stored(ours[0].t()), self._stored(ours[1].t())
        return made

    def drop(self, number: int) -> None:
        """Drop an adapter that no request uses."""
        self._loaded.pop(number, None)
        for kept in [kept for kept in self._stacked if number in kept]:
            del self._stacked[kept]

    def _stored(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix.to(self._dtype).contiguous().unsqueeze(0)

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
        alike: dict[int, list[int]] = {}
        for number in sorted(rows):
            alike.setdefault(len(rows[number]).bit_length(), []).append(number)
        groups = [self._group(numbers, [rows[number] for number in numbers]) for numbers in alike.values()]
        return StepAdapters(groups, [self._matrices(group.adapters) for group in groups], self._q, self._kv)

    def _group(self, numbers: Sequence[int], rows: Sequence[Sequence[int]]) -> _Group:
        most = max(map(len, rows))
        padded = [[*own, *[0] * (most - len(own))] for own in rows]
        places = [index * most + place for index, own in enumerate(rows) for place in range(len(own))]
        together = [row for own in rows for row in own]
        tensors = (torch.tensor(one, device=self._device) for one in (padded, together, places))
        return _Group(tuple(numbers), *tensors)

    def _matrices(self, numbers: tuple[int, ...]) -> Matrices:
        if len(numbers) == 1:
            return self._loaded[numbers[0]]
        if numbers in self._stacked:
            self._stacked.move_to_end(numbers)
            return self._stacked[numbers]
        own = [self._loaded[number] for number in numbers]
        made = {key: self._stack([one.get(key) for one in own]) for key in sorted({key for one in own for key in one})}
        self._stacked[numbers] = made
        if len(self._stacked) > _KEPT:
            self._stacked.popitem(last=False)
        return made

    def _stack(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Matrices of several adapters, padded with zeros to the highest rank; all zeros for None."""
        there = [pair for pair in pairs if pair is not None]
        rank = max(b.shape[1] for _, b in there)
        a = there[0][0].new_zeros(len(pairs), there[0][0].shape[1], rank)
        b = there[0][1].new_zeros(len(pairs), rank, there[0][1].shape[2])
        for index, pair in enumerate(pairs):
            if pair is not None:
                own = pair[1].shape[1]
                a[index, :, :own], b[index, :own] = pair[0][0], pair[1][0]
        return a, b


class StepAdapters:
    """The adapters of one step. `q` is the number of features of a rank's queries, `kv` that of its keys or values."""

    def __init__(self, groups: Sequence[_Group], matrices: Sequence[Matrices], q: int, kv: int) -> None:
        self._groups, self._all, self._q, self._kv = groups, matrices, q, kv

    def of(self, layer: int, place: int) -> LayerAdapters:
        return LayerAdapters(self, layer, place)

    def add(self, layer: int, place: int, x: torch.Tensor, outputs: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See Add, for shard `place` of a layer."""
        for group, matrices in zip(self._groups, self._all, strict=True):
            wanted = [(matrices[layer, place, role], out) for role, out in outputs if (layer, place, role) in matrices]
            padded = x[group.padded] if wanted else x
            for (a, b), out in wanted:
                made = torch.bmm(torch.bmm(padded, a), b).flatten(0, 1)
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
