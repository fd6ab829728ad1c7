"""Tiny random models with experts, by transformers, and their text, which the reference runtime must give too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.random_models import random_model

VOCAB = 101
EXPERTS, TOP_K = 8, 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "num_experts_per_tok": TOP_K,
    "initializer_range": 0.3,
}
# `model_type` -> its own settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "sliding_window": None},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True},
}
# Two groups that share a start, which a KV cache with reuse computes once.
PROMPTS = [tuple((7 * i * (1 + k % 2) + 3 + (k if i >= 40 else 0)) % VOCAB for i in range(64)) for k in range(20)]


def make(family: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Write the tiny model of a family into `folder`, and return it."""
    model = random_model(family, **{**SIZES, **FAMILIES[family], **changes}).to(dtype)
    model.save_pretrained(folder)
    return model


def answers(model: Any, new: int) -> list[list[int]]:
    """The `new` most probable next tokens of each of PROMPTS, by transformers."""
    with torch.no_grad():
        ids = model.generate(torch.tensor(PROMPTS), max_new_tokens=new, do_sample=False)
    return [row[-new:].tolist() for row in ids]
