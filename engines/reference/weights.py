"""Weights of a model for the runtime: interface of weight sources, and the source that reads rank files.

Tensors are memory-mapped and checked against the config. They share the page cache's memory; only a cast to
another type, a decoding, another device, or packing for the products of a CPU copies them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.checkpoint.layout import ROTARY_TABLES, rank_file, rank_layout
from trtpipe.engines.checkpoint.plan import share
from trtpipe.engines.hf.folder import LocatedTensor
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Experts
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.quantize.algorithms import make_linear
from trtpipe.engines.quantize.formats import TENSORRT_LLM, Format
from trtpipe.engines.reference.experts import Expert, ExpertMlp
from trtpipe.engines.reference.fused import HeadNorms
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Linear, Plain
from trtpipe.engines.reference.mapped_tensors import MappedTensors
from trtpipe.engines.reference.matmul import packed
from trtpipe.engines.reference.mlp import Branches, GatedMlp, Mlp, OneProduct, make_branches

TORCH_DTYPE = {
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
    DataType.FLOAT32: torch.float32,
}
CPU = torch.device("cpu")
EMBEDDING = "transformer.vocab_embedding.weight"
HEAD = "lm_head.weight"
FINAL_NORM = "transformer.ln_f.weight"


@dataclass(frozen=True)
class LayerShard:
    """One rank's part of one layer. Sizes: h hidden; q query and kv key/value features of the rank."""

    input_norm: torch.Tensor  # [h]
    qkv: Linear  # h -> q + 2 kv
    qkv_bias: torch.Tensor | None  # [q + 2 kv]
    dense: Linear  # q -> h
    dense_bias: torch.Tensor | None  # [h], whole on every rank
    post_norm: torch.Tensor  # [h]
    mlp: Mlp  # h -> h
    kv_codec: KvCodec | None  # None for a cache in the compute type
    head_norms: HeadNorms | None  # of q and k, in families that have them
    window: int | None  # most tokens that a token attends to, itself included; None for all


class Head(NamedTuple):
    """Weights after the last layer: the norm [h] and the head's rows [.., h], by tp_rank or whole."""

    final_norm: torch.Tensor
    parts: tuple[torch.Tensor, ...]
    sharded: bool


@dataclass(frozen=True)
class Weights:
    """Weights of all tp_ranks or one: `layers[layer][rank]`; the embedding by rank, or one part when not sharded."""

    embedding: tuple[torch.Tensor, ...]
    layers: tuple[tuple[LayerShard, ...], ...]
    head: Head


class WeightSource(Protocol):
    """Reads a model part by part, in one type and on one device; it keeps no reference to returned layers."""

    @property
    def config(self) -> CheckpointConfig: ...

    def embedding(self) -> tuple[torch.Tensor, ...]:
        """The embedding table by tp_rank, or one part when it is not sharded."""

    def layer(self, index: int) -> tuple[LayerShard, ...]:
        """The shards by tp_rank of layer `index`, which is counted over all pipeline stages."""

    def head(self) -> Head:
        """The final norm and the head. A tied head is the embedding."""


def rank_heads(config: CheckpointConfig) -> tuple[int, int]:
    """Numbers of query heads and key/value heads of one tensor-parallel rank."""
    tp = config.mapping.tp_size
    return config.num_attention_heads // tp, -(-config.num_key_value_heads // tp)


def load_weights(
    folder: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    device: torch.device = CPU,
    tp_ranks: Sequence[int] | None = None,
) -> Weights:
    """Load the weights of a checkpoint or engine, for all ranks or `tp_ranks`, in `dtype`. Raises as `RankFiles`."""
    return load_all(RankFiles(folder, config, dtype, device, tp_ranks))


def load_all(source: WeightSource) -> Weights:
    """Read all parts of `source`, and pack its matrices for many products."""
    layers = tuple(_with_packed(source.layer(index)) for index in range(source.config.num_hidden_layers))
    head = source.head()
    return Weights(source.embedding(), layers, head._replace(parts=tuple(map(packed, head.parts))))


def _with_packed(part: Any) -> Any:
    """A shard of a layer, or a part of one, with the weights of its `Plain` linears packed."""
    if isinstance(part, Plain):
        return Plain(packed(part.weight))
    if type(part) is tuple:
        return tuple(map(_with_packed, part))
    if is_dataclass(part) and not isinstance(part, type):
        known: Any = part  # the protocol among them is kept by dataclasses
        return replace(known, **{one.name: _with_packed(getattr(part, one.name)) for one in fields(known)})
    return part


class RankFiles:
    """WeightSource of the rank files of a checkpoint or engine, in `dtype` on `device`.

    tp_ranks  ranks whose parts are returned; all by default

    Raises CheckpointError for a missing, unexpected or misshapen tensor, SafetensorsError for a damaged file.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        dtype: torch.dtype,
        device: torch.device = CPU,
        tp_ranks: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self._dtype = dtype
        mapping = config.mapping
        self._held = range(mapping.tp_size) if tp_ranks is None else tp_ranks
        self._stages = [
            [
                _map_rank(rank_file(folder, mapping.rank(tp_rank=tp_rank, pp_rank=pp_rank)), config, pp_rank, device)
                for tp_rank in range(mapping.tp_size)
            ]
            for pp_rank in range(mapping.pp_size)
        ]
        self._places = [
            (stage, local)
            for stage, owned in zip(self._stages, mapping.layers(config.num_hidden_layers), strict=True)
            for local in range(len(owned))
        ]
        self._has_head = [HEAD in rank for rank in self._stages[-1]]
        if any(self._has_head) and not all(self._has_head):
            raise CheckpointError(f"tensor '{HEAD}' is in some rank files of {folder} and missing from others")
        self._embedding: tuple[torch.Tensor, ...] | None = None

    def embedding(self) -> tuple[torch.Tensor, ...]:
        # Kept, so that a tied head is not a second copy.
        if self._embedding is None:
            held = (0,) if self.config.embedding is EmbeddingSharding.NONE else self._held
            self._embedding = tuple(self._stages[0][rank][EMBEDDING].to(self._dtype) for rank in held)
        return self._embedding

    def layer(self, index: int) -> tuple[LayerShard, ...]:
        stage, local = self._places[index]
        window = self.config.window(index)
        return tuple(read_layer(stage[rank], local, self.config, self._dtype, window, rank) for rank in self._held)

    def head(self) -> Head:
        last, sharding = self._stages[-1], self.config.embedding
        norm = last[0][FINAL_NORM].to(self._dtype)
        if all(self._has_head):
            return Head(norm, tuple(last[rank][HEAD].to(self._dtype) for rank in self._held), sharded=True)
        if sharding is EmbeddingSharding.HIDDEN:
            columns = [rank[EMBEDDING].to(self._dtype) for rank in self._stages[0]]
            return Head(norm, (torch.cat(columns, dim=1),), sharded=False)
        return Head(norm, self.embedding(), sharded=sharding is EmbeddingSharding.VOCABULARY)


def _map_rank(path: Path, config: CheckpointConfig, pp_rank: int, device: torch.device) -> MappedTensors:
    header = read_header(path)
    expected = rank_layout(config, pp_rank=pp_rank)
    for name, (stored_as, shape) in expected.items():
        entry = header.tensors.get(name)
        if entry is None:
            # A tied model may omit the head; the embedding is used.
            if name == HEAD:
                continue
            raise CheckpointError(f"tensor '{name}' is missing from {path}", remedy="convert the model again")
        if entry.shape != shape:
            raise CheckpointError(
                f"tensor '{name}' in {path} has shape {list(entry.shape)}", why=f"config.json implies {list(shape)}"
            )
        if entry.dtype != stored_as:
            raise CheckpointError(
                f"tensor '{name}' in {path} has dtype {entry.dtype}", why=f"config.json implies {stored_as}"
            )
    extra = sorted(header.tensors.keys() - expected.keys() - ROTARY_TABLES)
    if extra:
        raise CheckpointError(f"tensor '{extra[0]}' in {path} has no place in this model")
    wanted = {name: LocatedTensor(path=path, entry=header.tensors[name]) for name in expected if name in header.tensors}
    return MappedTensors(wanted, device)


def read_layer(
    tensors: Mapping[str, torch.Tensor], layer: int, config: CheckpointConfig, dtype: torch.dtype, window: int | None,
    tp_rank: int = 0,
) -> LayerShard:  # fmt: skip
    """Read a rank's shard of a layer from the tensors of its file; `layer` counts within the file."""
    prefix = f"transformer.layers.{layer}."
    attention, mlp = prefix + "attention.", prefix + "mlp."
    algo, cache = config.quantization.quant_algo, config.quantization.kv_cache_quant_algo

    def linear(name: str) -> Linear:
        return make_linear(algo, by_role(tensors, name, algo, TENSORRT_LLM), dtype)

    def vector(name: str) -> torch.Tensor | None:
        return tensors[name].to(dtype) if name in tensors else None

    def branches() -> Branches:
        if f"{mlp}gate.weight" in tensors:
            return make_branches(linear(mlp + "fc."), linear(mlp + "gate."))
        return OneProduct(linear(mlp + "fc."), activated=1)

    codec = None
    if cache is not None:
        scale = tensors[attention + "kv_cache_scaling_factor"]
        codec = KvCodec.make(cache, scale, scale, rank_heads(config)[1])
    return LayerShard(
        input_norm=tensors[prefix + "input_layernorm.weight"].to(dtype),
        qkv=linear(attention + "qkv."),
        qkv_bias=vector(attention + "qkv.bias"),
        dense=linear(attention + "dense."),
        dense_bias=vector(attention + "dense.bias"),
        post_norm=tensors[prefix + "post_layernorm.weight"].to(dtype),
        mlp=GatedMlp(branches(), linear(mlp + "proj."))
        if config.experts is None
        else _experts(tensors, mlp, config, config.experts, dtype, tp_rank),
        kv_codec=codec,
        head_norms=make_head_norms(
            config, vector(attention + "q_layernorm.weight"), vector(attention + "k_layernorm.weight")
        ),
        window=window,
    )


def _experts(
    tensors: Mapping[str, torch.Tensor], prefix: str, config: CheckpointConfig, facts: Experts, dtype: torch.dtype,
    tp_rank: int,
) -> ExpertMlp:  # fmt: skip
    """The experts of a rank, from stacks of their tensors; the scale of the inputs is one for all."""
    algo = config.quantization.quant_algo
    stacks = [by_role(tensors, prefix + name, algo, TENSORRT_LLM) for name in ("fc.", "proj.")]
    first, last = share(facts.count, config.mapping.moe_ep_size, config.mapping.moe_ranks(tp_rank)[1])

    def linear(stack: Mapping[str, torch.Tensor], place: int) -> Linear:
        own = {role: tensor if role == "input_scale" else tensor[place] for role, tensor in stack.items()}
        return make_linear(algo, own, dtype)

    held = [Expert(*(linear(stack, place) for stack in stacks)) for place in range(last - first)]
    return ExpertMlp(facts, tensors[prefix + "router.weight"], first, held)


def make_head_norms(
    config: CheckpointConfig, queries: torch.Tensor | None, keys: torch.Tensor | None
) -> HeadNorms | None:
    """The norms of a rank's heads, from the vectors [head_size] of queries and keys; None without them."""
    if queries is None or keys is None:
        return None
    heads, kv_heads = rank_heads(config)
    weight = torch.cat([queries.expand(heads, -1), keys.expand(kv_heads, -1)])
    return HeadNorms(weight.unsqueeze(0), config.norm_epsilon)


def by_role(
    tensors: Mapping[str, torch.Tensor], prefix: str, algo: QuantAlgo | None, form: Format
) -> dict[str, torch.Tensor]:
    """A linear's tensors by their roles; `prefix` precedes their names in the format."""
    names = {"weight": "weight"} if algo is None else form.names(algo)
    return {role: tensors[prefix + name] for role, name in names.items() if prefix + name in tensors}
