"""Mapping rank files: what the config implies, what is tolerated, what is refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.factories import CHECKPOINT
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.checkpoint.layout import plan_rank, rank_file, rank_layout
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, ModelConfig
from trtpipe.engines.reference.weights import RankFiles, load_weights

CONFIG = replace(CHECKPOINT, vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3, head_size=2)
QKV = "transformer.layers.0.attention.qkv.weight"


def write(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F32", extra: bytes = b"") -> None:
    """A rank file whose tensors count upwards through the file; `extra` spaces shift the data."""
    head, _ = header_bytes((name, dtype, shape) for name, shape in shapes.items())
    text = head[8:] + extra
    count = sum(prod(shape) for shape in shapes.values())
    kind = np.float32 if dtype == "F32" else np.float16
    path.write_bytes(struct.pack("<Q", len(text)) + text + np.arange(count, dtype=kind).tobytes())


def rank_shapes(config: CheckpointConfig, pp_rank: int = 0) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, (_, shape) in rank_layout(config, pp_rank=pp_rank).items()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("embedding", EmbeddingSharding)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)])
def test_shapes_are_those_the_converter_plans(tp: int, pp: int, embedding: EmbeddingSharding, bias: bool) -> None:
    mapping = Mapping(tp_size=tp, pp_size=pp)
    config = replace(CONFIG, mapping=mapping, attn_bias=bias, embedding=embedding)
    model = ModelConfig(
        architecture="LlamaForCausalLM", dtype=None, vocab_size=7, hidden_size=8, intermediate_size=12,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_size=2, hidden_act="silu",
        norm_epsilon=1e-5, max_position_embeddings=64, rotary_base=10000.0, rotary_scaling=None,
        tie_word_embeddings=False, attn_bias=bias, mlp_bias=False,
    )  # fmt: skip
    for pp_rank in range(pp):
        for tp_rank in range(tp):
            plan = plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, embedding=embedding)
            assert {p.name: p.shape for p in plan} == rank_shapes(config, pp_rank=pp_rank)


@pytest.mark.parametrize("spaces", [b"", b" "], ids=["aligned", "unaligned"])
def test_values_are_those_of_the_file(tmp_path: Path, spaces: bytes) -> None:
    write(rank_file(tmp_path, 0), rank_shapes(CONFIG), extra=spaces)
    weights = load_weights(tmp_path, CONFIG, torch.float32)
    assert weights.embedding[0][1].tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert weights.layers[0][0].input_norm.tolist() == [56, 57, 58, 59, 60, 61, 62, 63]
    assert len(weights.layers) == 3
    assert load_weights(tmp_path, CONFIG, torch.bfloat16).head.final_norm.dtype == torch.bfloat16


def test_rotary_tables_are_tolerated(tmp_path: Path) -> None:
    shapes = rank_shapes(CONFIG)
    tables = {"embed_positions": (1, 64, 2), "rotary_inv_freq": (1,), "embed_positions_for_gpt_attention": (1, 128)}
    write(rank_file(tmp_path, 0), {**tables, **shapes})
    assert load_weights(tmp_path, CONFIG, torch.float32).head.final_norm.shape == (8,)


def test_a_missing_head_is_the_embedding(tmp_path: Path) -> None:
    shapes = rank_shapes(CONFIG)
    del shapes["lm_head.weight"]
    write(rank_file(tmp_path, 0), shapes)
    source = RankFiles(tmp_path, CONFIG, torch.float32)
    assert source.head().parts[0] is source.embedding()[0]


def test_a_head_missing_from_one_rank_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, mapping=Mapping(tp_size=2))
    shapes = rank_shapes(config)
    write(rank_file(tmp_path, 0), shapes)
    del shapes["lm_head.weight"]
    write(rank_file(tmp_path, 1), shapes)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is in some rank files"):
        load_weights(tmp_path, config, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({QKV: None}, f"tensor '{QKV}' is missing from "),
        ({QKV: (8, 16)}, f"tensor '{QKV}' in .* has shape \\[8, 16\\]: config.json implies \\[16, 8\\]"),
        ({"transformer.layers.3.mlp.fc.weight": (12, 8)}, "tensor 'transformer.layers.3.mlp.fc.weight' in .* no place"),
    ],
)
def test_what_does_not_belong_is_named(tmp_path: Path, change: dict[str, tuple[int, ...] | None], message: str) -> None:
    shapes = {**rank_shapes(CONFIG), **change}
    write(rank_file(tmp_path, 0), {name: shape for name, shape in shapes.items() if shape is not None})
    with pytest.raises(CheckpointError, match=message) as error:
        load_weights(tmp_path, CONFIG, torch.float32)
    assert "rank0.safetensors" in str(error.value)


def test_another_dtype_than_the_config_says_is_refused(tmp_path: Path) -> None:
    write(rank_file(tmp_path, 0), rank_shapes(CONFIG), dtype="F16")
    with pytest.raises(CheckpointError, match=r"has dtype F16: config\.json implies F32"):
        load_weights(tmp_path, CONFIG, torch.float32)
