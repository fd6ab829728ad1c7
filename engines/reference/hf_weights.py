"""Weights from Hugging Face folders: an unquantized model, or one that is quantized by a method of `engines.hf.stored`.

Both are WeightSources of a single rank, so that one runtime computes both models of a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.checkpoint.config import config_json, parse_config
from trtpipe.engines.checkpoint.convert import check_source
from trtpipe.engines.checkpoint.layout import plan_rank
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import names_of
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.stored import read_stored, under_published_names
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, Quantization
from trtpipe.engines.quantize.algorithms import make_linear
from trtpipe.engines.reference.experts import Expert, ExpertMlp
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Linear, Stacked
from trtpipe.engines.reference.mapped_tensors import STORED_DTYPE, MappedTensors
from trtpipe.engines.reference.mlp import GatedMlp, Mlp, OneProduct, make_branches
from trtpipe.engines.reference.stored_linear import cache_scale, read_linear
from trtpipe.engines.reference.weights import (
    CPU,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    TORCH_DTYPE,
    Head,
    LayerShard,
    make_head_norms,
    rank_heads,
    read_layer,
)


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
        return (read_layer(self._rank, index, self.config, self._dtype, self.config.window(index)),)

    def head(self) -> Head:
        return Head(self._rank[FINAL_NORM], (self._rank[HEAD],), sharded=False)


class QuantizedFolder:
    """Weights of the quantized folder `folder`, to compute in `dtype` on `device`.

    Each matrix has its own scales, including q, k and v, and so do keys and values. Raises InputDataError for a folder
    that is incomplete, damaged, not quantized, or quantized in a way that is not read here.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device = CPU) -> None:
        model, stored = read_model_config(folder, quantized=True), read_stored(folder)
        if stored is None:
            raise InputDataError(
                f"{folder} is not quantized",
                why="it has no hf_quant_config.json, and config.json no quantization_config",
            )
        self.config = _checkpoint_config(folder, model, dtype, stored.quantization)
        self._stored, self._names = stored, names_of(model)
        located = locate_tensors(folder)
        stored.check(str(folder), model, located)
        self._dtype = dtype
        self._tensors = MappedTensors(under_published_names(located, self._names), device)

    def embedding(self) -> tuple[torch.Tensor, ...]:
        return (self._float(f"{self._names.embedding}.weight"),)

    def layer(self, index: int) -> tuple[LayerShard, ...]:
        names, prefix = self._names, self._names.layer(index)
        qkv = [prefix + name for name in names.attention_inputs]
        biases = [bias for name in qkv if (bias := self._vector(f"{name}.bias")) is not None]
        shard = LayerShard(
            input_norm=self._float(f"{prefix}{names.input_norm}.weight"),
            qkv=Stacked(tuple(self._linear(name) for name in qkv)),
            qkv_bias=torch.cat(biases) if biases else None,
            dense=self._linear(prefix + names.o),
            dense_bias=self._vector(f"{prefix}{names.o}.bias"),
            post_norm=self._float(f"{prefix}{names.post_norm}.weight"),
            mlp=self._mlp(prefix),
            kv_codec=self._codec(prefix),
            head_norms=make_head_norms(
                self.config,
                self._vector(f"{prefix}{names.q_norm}.weight"),
                self._vector(f"{prefix}{names.k_norm}.weight"),
            ),
            window=self.config.window(index),
        )
        return (shard,)

    def _mlp(self, prefix: str) -> Mlp:
        facts, mlps = self.config.experts, self._names.mlps
        linears = [[self._linear(prefix + name) for name in mlp] for mlp in mlps]
        if facts is None:
            *inputs, down = linears[0]
            return GatedMlp(make_branches(*inputs) if len(inputs) > 1 else OneProduct(inputs[0]), down)
        router = self._tensors[f"{prefix}{self._names.router}.weight"].float()
        return ExpertMlp(facts, router, 0, [Expert(Stacked((up, gate)), down) for gate, up, down in linears])

    def head(self) -> Head:
        parts = self.embedding() if self.config.tie_word_embeddings else (self._float(f"{self._names.head}.weight"),)
        return Head(self._float(f"{self._names.final_norm}.weight"), parts, sharded=False)

    def _float(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._dtype)

    def _vector(self, name: str) -> torch.Tensor | None:
        return self._float(name) if name in self._tensors else None

    def _linear(self, name: str) -> Linear:
        algo = self.config.quantization.quant_algo
        return make_linear(algo, read_linear(self._tensors, name, self.config.quantization), self._dtype)

    def _codec(self, prefix: str) -> KvCodec | None:
        cache = self.config.quantization.kv_cache_quant_algo
        if cache is None:
            return None
        keys, values = (cache_scale(self._tensors, prefix + name) for name in self._stored.cache_scales(self._names))
        return KvCodec.make(cache, keys, values, rank_heads(self.config)[1])


class _Planned(Mapping[str, torch.Tensor]):
    """Tensors of a rank file, assembled from the tensors of an HF folder, in `dtype`."""

    def __init__(self, plans: Iterator[TensorPlan], source: MappedTensors, dtype: torch.dtype) -> None:
        self._plans = {plan.name: plan for plan in plans}
        self._source = source
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        # A single rank takes all columns.
        plan = self._plans[name]
        dtype = self._dtype if plan.dtype is None else STORED_DTYPE[plan.dtype]
        pieces = [self._source[piece.source][slice(*piece.rows)].to(dtype) for piece in plan.pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces).view(plan.shape)

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
