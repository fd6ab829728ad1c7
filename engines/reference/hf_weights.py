"""Weights from Hugging Face folders: an unquantized model, or ModelOpt's unified quantized export.

Both are WeightSources of a single rank, so that one runtime computes both models of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.checkpoint.config import config_json, parse_config
from trtpipe.engines.checkpoint.convert import DERIVED_SUFFIX, check_source
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE, plan_rank
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import LocatedTensor, locate_tensors, read_model_config
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, Quantization
from trtpipe.engines.quantize import unified
from trtpipe.engines.quantize.algorithms import make_linear
from trtpipe.engines.quantize.formats import HUGGING_FACE
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Linear, Stacked
from trtpipe.engines.reference.mapped_tensors import MappedTensors
from trtpipe.engines.reference.mlp import make_branches
from trtpipe.engines.reference.weights import (
    CPU,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TORCH_DTYPE,
    Head,
    LayerShard,
    by_role,
    rank_heads,
    read_layer,
)

_FLOATS = frozenset(SAFETENSORS_DTYPE.values())


class HfFolder:
    """Weights of the unquantized folder `folder`, to compute in `dtype` on `device`.

    Raises InputDataError for a folder that is incomplete, damaged or of another kind.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
        model, located = read_model_config(folder), locate_tensors(folder)
        check_source(folder, model, located)
        self.config = _checkpoint_config(folder, model, dtype, UNQUANTIZED)
        self._dtype = dtype
        self._rank = _Planned(plan_rank(model, Ranks(), tp_rank=0, pp_rank=0), MappedTensors(located, device), dtype)

    def embedding(self) -> tuple[torch.Tensor, ...]:
        return (self._rank[EMBEDDING],)

    def layer(self, index: int) -> tuple[LayerShard, ...]:
        return (read_layer(self._rank, index, self.config, self._dtype),)

    def head(self) -> Head:
        return Head(self._rank[FINAL_NORM], (self._rank[HEAD],), sharded=False)


class UnifiedFolder:
    """Weights of ModelOpt's quantized folder `folder`, to compute in `dtype` on `device`.

    Each matrix has its own scales, including q, k and v, and so do keys and values. Raises InputDataError for a folder
    that is incomplete, damaged, not quantized, or quantized in an unsupported way.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
        model = read_model_config(folder, quantized=True)
        self.config = _checkpoint_config(folder, model, dtype, unified.read_settings(folder, model))
        self._names = family_of(model).names
        located = locate_tensors(folder)
        self._check(folder, model, located)
        self._dtype = dtype
        self._tensors = MappedTensors(located, device)

    def embedding(self) -> tuple[torch.Tensor, ...]:
        return (self._float(f"{self._names.embedding}.weight"),)

    def layer(self, index: int) -> tuple[LayerShard, ...]:
        names, prefix = self._names, self._names.layer(index)
        qkv = [prefix + name for name in names.attention_inputs]
        biased, codec = self.config.attn_bias, None
        if self.config.quantization.kv_cache_quant_algo is not None:
            keys, values = self._tensors[qkv[1] + ".k_scale"], self._tensors[qkv[2] + ".v_scale"]
            codec = KvCodec.make(KvCacheQuantAlgo.FP8, keys, values, rank_heads(self.config)[1])
        shard = LayerShard(
            input_norm=self._float(f"{prefix}{names.input_norm}.weight"),
            qkv=Stacked(tuple(self._linear(name) for name in qkv)),
            qkv_bias=torch.cat([self._float(name + ".bias") for name in qkv]) if biased else None,
            dense=self._linear(prefix + names.o),
            dense_bias=self._float(f"{prefix}{names.o}.bias") if biased else None,
            post_norm=self._float(f"{prefix}{names.post_norm}.weight"),
            branches=make_branches(self._linear(prefix + names.gate), self._linear(prefix + names.up)),
            proj=self._linear(prefix + names.down),
            kv_codec=codec,
        )
        return (shard,)

    def head(self) -> Head:
        parts = self.embedding() if self.config.tie_word_embeddings else (self._float(f"{self._names.head}.weight"),)
        return Head(self._float(f"{self._names.final_norm}.weight"), parts, sharded=False)

    def _float(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._dtype)

    def _linear(self, name: str) -> Linear:
        algo = self.config.quantization.quant_algo
        return make_linear(algo, by_role(self._tensors, name + ".", algo, HUGGING_FACE), self._dtype)

    def _check(self, folder: Path, model: ModelConfig, located: Mapping[str, LocatedTensor]) -> None:
        plans = {plan.name: plan for plan in unified.plan(model, self.config.quantization)}
        for name, plan in plans.items():
            if name not in located:
                raise InputDataError(
                    f"tensor '{name}' is missing from {folder}",
                    why=f"config.json says {_described(self.config)}",
                    remedy="export the model again",
                )
            entry = located[name].entry
            if entry.shape != plan.shape:
                raise InputDataError(
                    f"tensor '{name}' in {located[name].path} has shape {list(entry.shape)}",
                    why=f"config.json implies {list(plan.shape)}",
                )
            if entry.dtype not in ({plan.dtype} if plan.dtype else _FLOATS):
                raise InputDataError(
                    f"tensor '{name}' in {located[name].path} has dtype {entry.dtype}",
                    why=f"config.json says {_described(self.config)}",
                )
        tied = {f"{self._names.head}.weight"} if model.tie_word_embeddings else set()
        extra = sorted(name for name in located.keys() - plans.keys() - tied if not name.endswith(DERIVED_SUFFIX))
        if extra:
            raise InputDataError(
                f"tensor '{extra[0]}' in {located[extra[0]].path} has no place in this model",
                why=f"config.json says {_described(self.config)}",
            )


class _Planned(Mapping[str, torch.Tensor]):
    """Tensors of a rank file, assembled from the tensors of an HF folder, in `dtype`."""

    def __init__(self, plans: Iterator[TensorPlan], source: MappedTensors, dtype: torch.dtype) -> None:
        self._plans = {plan.name: plan for plan in plans}
        self._source = source
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        # A single rank takes every piece whole.
        pieces = [self._source[piece.source].to(self._dtype) for piece in self._plans[name].pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._plans

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)


def _checkpoint_config(
    folder: Path, model: ModelConfig, dtype: torch.dtype, quantization: Quantization
) -> CheckpointConfig:
    stored = next(kind for kind, same in TORCH_DTYPE.items() if same == dtype)
    return replace(parse_config(config_json(model, stored, Ranks()), str(folder)), quantization=quantization)


def _described(config: CheckpointConfig) -> str:
    weights, cache = config.quantization.quant_algo, config.quantization.kv_cache_quant_algo
    return f"{weights.value if weights else 'unquantized'} weights, {cache.value if cache else 'unquantized'} KV cache"
