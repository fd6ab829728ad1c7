"""Counting, as a layer runs, the numbers that a static scale cannot hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Fp8, Int8, Linear, Smoothed, Stacked
from trtpipe.engines.reference.mlp import Branches, Each, OneInput, OneProduct
from trtpipe.engines.reference.number_formats import E4M3_MAX
from trtpipe.engines.reference.weights import LayerShard

INT8_MAX = 127
_CACHE = "attention.kv_cache"


@dataclass
class Count:
    """Numbers beyond what their scale holds, and all that were seen."""

    beyond: int = 0
    inputs: int = 0

    def add(self, scaled: torch.Tensor, *, int8: bool) -> None:
        """Numbers divided by their scale, before they are rounded."""
        over = scaled.round().abs() > INT8_MAX if int8 else scaled.abs() > E4M3_MAX
        self.beyond += int(over.count_nonzero())
        self.inputs += scaled.numel()


@dataclass(frozen=True)
class _Watched(Linear):
    """`linear`, and a count of what enters it."""

    linear: Fp8 | Int8
    count: Count

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add(x / self.linear.input_scale, int8=isinstance(self.linear, Int8))
        return self.linear.encode(x)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.linear.product(operand, dtype)


@dataclass(frozen=True)
class _WatchedCodec(KvCodec):
    """A codec, and a count of what it encodes."""

    count: Count

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        self.count.add(kv / self.scale, int8=self.algo is KvCacheQuantAlgo.INT8)
        return super().encode(kv)


def watched(shards: Sequence[LayerShard]) -> tuple[tuple[LayerShard, ...], Mapping[str, Count]]:
    """The same layer with counts, by what they count, that grow as it runs. What has no static scale has no count.

    Inputs that all ranks share are counted once, at the first, and so are those of q, k and v where each has a matrix
    of its own. Keys and values that several ranks hold are counted by each.
    """
    counts: dict[str, Count] = {}
    return tuple(_watch_shard(shard, counts, first=shard is shards[0]) for shard in shards), counts


def _watch_shard(shard: LayerShard, counts: dict[str, Count], *, first: bool) -> LayerShard:
    def shared(linear: Linear, name: str) -> Linear:
        return _watch(linear, name, counts) if first else linear

    codec = shard.kv_codec
    if codec is not None:
        codec = _WatchedCodec(codec.algo, codec.scale, counts.setdefault(_CACHE, Count()))
    return replace(
        shard,
        qkv=shared(shard.qkv, "attention.qkv"),
        dense=_watch(shard.dense, "attention.dense", counts),
        branches=_watch_branches(shard.branches, counts) if first else shard.branches,
        proj=_watch(shard.proj, "mlp.proj", counts),
        kv_codec=codec,
    )


def _watch_branches(branches: Branches, counts: dict[str, Count]) -> Branches:
    if isinstance(branches, (Each, OneInput)):
        return Each(_watch(branches.first, "mlp.fc", counts), _watch(branches.second, "mlp.gate", counts))
    if isinstance(branches, OneProduct) and isinstance(branches.both, (Fp8, Int8)):
        both = _watch(branches.both, "mlp.fc", counts)
        counts["mlp.gate"] = counts["mlp.fc"]  # the same input
        return OneProduct(both)
    return branches


def _watch(linear: Linear, name: str, counts: dict[str, Count]) -> Linear:
    if isinstance(linear, Smoothed):
        return replace(linear, linear=_watch(linear.linear, name, counts))
    if isinstance(linear, Stacked):
        # Exporters give matrices of one input one scale: the first stands for all.
        first, *rest = linear.parts
        return replace(linear, parts=(_watch(first, name, counts), *rest))
    if isinstance(linear, (Fp8, Int8)):
        return _Watched(linear, counts.setdefault(name, Count()))
    return linear
