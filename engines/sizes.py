"""The largest sizes of a model that are read.

Names and shapes of tensors are derived from the sizes that a config states, and compared with what is stored: a config
that states two million layers must be refused before twenty million names are made for the comparison.
"""

from __future__ import annotations

# Some eight times those of Llama 3.1 405B, and positions of Llama 4 Scout.
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
    "world_size": 1 << 12,
}
# Of a config.json: those of quantized models list their modules, and have some thousand values.
MOST_CONFIG_BYTES, MOST_CONFIG_VALUES = 4 << 20, 100_000


def excess(name: str, value: int) -> str:
    """What is wrong with a size that is larger than any model's, or nothing."""
    most = LARGEST.get(name)
    return "" if most is None or value <= most else f"{name} is {value:,}, and at most {most:,} are read"
