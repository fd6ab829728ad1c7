"""Tiny random models with experts, by transformers, and their text, which the reference runtime must give too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

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
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Architecture -> its own settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": EXPERTS, "sliding_window": None},
}
# Two groups that share a start, which a KV cache with reuse computes once.
PROMPTS = [tuple((7 * i * (1 + k % 2) + 3 + (k if i >= 40 else 0)) % VOCAB for i in range(64)) for k in range(20)]


def make(architecture: str, folder: Path, **changes: Any) -> Any:
    """Write the tiny model of an architecture into `folder`, and return it."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    config = kind.config_class(**{**SIZES, **FAMILIES[architecture], **changes})
    model = kind(config).to(getattr(torch, str(changes.get("dtype", "float32")))).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:  # transformers starts them at 1, which would hide a lost one
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def answers(model: Any, new: int) -> list[list[int]]:
    """The `new` most probable next tokens of each of PROMPTS, by transformers."""
    with torch.no_grad():
        ids = model.generate(torch.tensor(PROMPTS), max_new_tokens=new, do_sample=False)
    return [row[-new:].tolist() for row in ids]
