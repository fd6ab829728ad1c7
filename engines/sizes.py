"""Upper bounds of the sizes in a model's config.

Names and shapes of tensors are computed from a config's sizes and compared with the stored tensors: a config
with two million layers must be refused before twenty million names are made for the comparison.
"""

from __future__ import annotations

# Some eight times the sizes of Llama 3.1 405B, and the positions of Llama 4 Scout.
LARGEST = {
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 10,
    "num_key_value_heads": 1 << 10,
    "head_dim": 1 << 12,
    "head_size": 1 << 12,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "vocab_size": 1 << 23,
    "max_position_embeddings": 1 << 27,
    "num_experts": 1 << 10,
    "num_local_experts": 1 << 10,
    "world_size": 1 << 12,
}
# Bounds of a config.json: one of a quantized model lists its modules and has some thousand values.
MOST_CONFIG_BYTES, MOST_CONFIG_VALUES = 4 << 20, 100_000


def excess(name: str, value: int) -> str:
    """Message for a size beyond the bounds of `LARGEST`; "" within them."""
    most = LARGEST.get(name)
    return "" if most is None or value <= most else f"{name} is {value:,}, and at most {most:,} are read"
