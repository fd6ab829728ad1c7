"""The rank files of a checkpoint or engine as tensors: mapped, not read, and checked against the config.

A tensor shares its memory with the page cache; only a cast to another compute type copies it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from engines.base import DataType
from engines.safetensors_file import read_header
from engines.tensorrt_llm.checkpoint import (
    ROTARY_TABLES,
    CheckpointConfig,
    CheckpointError,
    EmbeddingSharding,
    rank_file,
    rank_layout,
)

TORCH_DTYPE = {
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
    DataType.FLOAT32: torch.float32,
}
EMBEDDING = "transformer.vocab_embedding.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class LayerShard:
    """One rank's part of one layer; h hidden, q query and kv key/value features of the rank, f of its mlp."""

    input_norm: torch.Tensor  # [h]
    qkv: torch.Tensor  # [q + 2 kv, h]
    qkv_bias: torch.Tensor | None  # [q + 2 kv]
    dense: torch.Tensor  # [h, q]
    dense_bias: torch.Tensor | None  # [h], whole on every rank
    post_norm: torch.Tensor  # [h]
    fc: torch.Tensor  # [f, h], the activated branch
    gate: torch.Tensor  # [f, h]
    proj: torch.Tensor  # [h, f]


@dataclass(frozen=True)
class Weights:
    """A whole model: `layers[layer][tp_rank]`; embedding and head by tp_rank, or one part when not sharded."""

    embedding: tuple[torch.Tensor, ...]
    layers: tuple[tuple[LayerShard, ...], ...]
    final_norm: torch.Tensor
    head: tuple[torch.Tensor, ...]


def rank_heads(config: CheckpointConfig) -> tuple[int, int]:
    """Query heads and key/value heads of one tensor-parallel rank."""
    tp = config.mapping.tp_size
    return config.num_attention_heads // tp, -(-config.num_key_value_heads // tp)


def load_weights(folder: Path, config: CheckpointConfig, dtype: torch.dtype) -> Weights:
    """Map all rank files of `folder` and give every tensor the type `dtype`.

    Raises CheckpointError for a missing, unexpected or misshapen tensor, SafetensorsError for a damaged file.
    """
    mapping = config.mapping
    stages = [
        [
            _load_rank(rank_file(folder, mapping.rank(tp_rank=tp_rank, pp_rank=pp_rank)), config, pp_rank, dtype)
            for tp_rank in range(mapping.tp_size)
        ]
        for pp_rank in range(mapping.pp_size)
    ]
    layers = [
        tuple(_layer(tensors, f"transformer.layers.{layer}.", config.attn_bias) for tensors in stage)
        for stage, owned in zip(stages, mapping.layers(config.num_hidden_layers), strict=True)
        for layer in range(len(owned))
    ]
    first, last = stages[0], stages[-1]
    embedding = tuple(
        tensors[EMBEDDING] for tensors in (first[:1] if config.embedding is EmbeddingSharding.NONE else first)
    )
    if all(HEAD in tensors for tensors in last):
        head = tuple(tensors[HEAD] for tensors in last)
    elif any(HEAD in tensors for tensors in last):
        raise CheckpointError(f"tensor '{HEAD}' is in some rank files of {folder} and missing from others")
    elif config.embedding is EmbeddingSharding.HIDDEN:
        head = (torch.cat(embedding, dim=1),)
    else:
        head = embedding
    return Weights(embedding, tuple(layers), last[0]["transformer.ln_f.weight"], head)


def _load_rank(path: Path, config: CheckpointConfig, pp_rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    header = read_header(path)
    expected = rank_layout(config, pp_rank=pp_rank)
    for name, (stored_as, shape) in expected.items():
        entry = header.tensors.get(name)
        if entry is None:
            # A tied model may leave it out: the embedding serves.
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
    with path.open("rb") as file:
        # Copy on write: torch warns of read-only memory, and nothing ever writes.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    stored = TORCH_DTYPE[config.dtype]
    out: dict[str, torch.Tensor] = {}
    for name in expected.keys() & header.tensors.keys():
        entry = header.tensors[name]
        flat = torch.frombuffer(data, dtype=stored, count=prod(entry.shape), offset=entry.offset)
        out[name] = flat.view(entry.shape).to(dtype)
    return out


def _layer(tensors: dict[str, torch.Tensor], prefix: str, attn_bias: bool) -> LayerShard:
    return LayerShard(
        input_norm=tensors[prefix + "input_layernorm.weight"],
        qkv=tensors[prefix + "attention.qkv.weight"],
        qkv_bias=tensors[prefix + "attention.qkv.bias"] if attn_bias else None,
        dense=tensors[prefix + "attention.dense.weight"],
        dense_bias=tensors[prefix + "attention.dense.bias"] if attn_bias else None,
        post_norm=tensors[prefix + "post_layernorm.weight"],
        fc=tensors[prefix + "mlp.fc.weight"],
        gate=tensors[prefix + "mlp.gate.weight"],
        proj=tensors[prefix + "mlp.proj.weight"],
    )
