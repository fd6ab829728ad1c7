"""Counters of the values that exceed the range of a static scale while a layer runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trtpipe.engines.reference.experts import Expert, ExpertMlp
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Fp8, Int8, Linear, Nvfp4, Smoothed, Stacked
from trtpipe.engines.reference.mlp import Branches, Each, GatedMlp, Mlp, OneInput, OneProduct
from trtpipe.engines.reference.number_formats import E2M1_MAX, E4M3_MAX
from trtpipe.engines.reference.weights import LayerShard

# Largest magnitude of a value in units of its static scale.
_LARGEST = {"INT8": 127, "FP8": E4M3_MAX, "NVFP4": E2M1_MAX * E4M3_MAX}
_CACHE = "attention.kv_cache"


@dataclass
class Count:
    """Count of values beyond the range of their scale, and of all values."""

    beyond: int = 0
    inputs: int = 0

    def add(self, scaled: torch.Tensor, kind: str) -> None:
        """Count values that are divided by their scale but not rounded yet, to a type of _LARGEST."""
        over = (scaled.round() if kind == "INT8" else scaled).abs() > _LARGEST[kind]
        self.beyond += int(over.count_nonzero())
        self.inputs += scaled.numel()


@dataclass(frozen=True)
class _Watched(Linear):
    """`linear` with a count of its inputs."""

    linear: Fp8 | Int8 | Nvfp4
    count: Count

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add(x / self.linear.input_scale, type(self.linear).__name__.upper())
        return self.linear.encode(x)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.linear.product(operand, dtype)


@dataclass(frozen=True)
class _WatchedCodec(KvCodec):
    """A codec with a count of the values that it encodes."""

    count: Count

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        self.count.add(kv / self.scale, self.algo.value)
        return super().encode(kv)


def watched(shards: Sequence[LayerShard]) -> tuple[tuple[LayerShard, ...], Mapping[str, Count]]:
    """Return the layer with counters, and the counters by linear name. Inputs without a static scale have no counter.

    Inputs that all ranks share are counted once, at the first rank, and inputs of separate q, k and v matrices are
    counted once, at q. Keys and values that several ranks hold are counted by each rank.
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
        mlp=_watch_mlp(shard.mlp, counts, first=first),
        kv_codec=codec,
    )


def _watch_mlp(mlp: Mlp, counts: dict[str, Count], *, first: bool) -> Mlp:
    if isinstance(mlp, GatedMlp):
        branches = _watch_branches(mlp.branches, counts) if first else mlp.branches
        return GatedMlp(branches, _watch(mlp.proj, "mlp.proj", counts))
    if isinstance(mlp, ExpertMlp):
        # Each expert has tokens of its own.
        held = [Expert(_watch(e.fc, "mlp.fc", counts), _watch(e.proj, "mlp.proj", counts)) for e in mlp.held]
        return replace(mlp, held=held)
    return mlp


def _watch_branches(branches: Branches, counts: dict[str, Count]) -> Branches:
    if isinstance(branches, (Each, OneInput)):
        return Each(_watch(branches.first, "mlp.fc", counts), _watch(branches.second, "mlp.gate", counts))
    if isinstance(branches, OneProduct):
        watched = replace(branches, both=_watch(branches.both, "mlp.fc", counts))
        if "mlp.fc" in counts:
            counts["mlp.gate"] = counts["mlp.fc"]  # the same input
        return watched
    return branches


def _watch(linear: Linear, name: str, counts: dict[str, Count]) -> Linear:
    if isinstance(linear, Smoothed):
        return replace(linear, linear=_watch(linear.linear, name, counts))
    if isinstance(linear, Stacked):
        # Exporters use one scale for all matrices of one input, so counting at the first one is enough.
        first, *rest = linear.parts
        return replace(linear, parts=(_watch(first, name, counts), *rest))
    if isinstance(linear, (Fp8, Int8, Nvfp4)):
        return _Watched(linear, counts.setdefault(name, Count()))
    return linear
