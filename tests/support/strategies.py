"""Random cases for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.factories import QWEN2, QWEN3


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """(config overrides, tp, pp) of a model that can be cut so."""
    family = draw(st.sampled_from([{}, QWEN2, QWEN3]))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % tp == 0 or tp % n == 0]))
    groups = [n for n in (1, 2, 3, 4) if kv_heads * n % tp == 0]
    if family is QWEN3 and kv_heads > 1:
        groups = [n for n in groups if n > 1]
    group = draw(st.sampled_from(groups))
    layers = draw(st.integers(1, 4))
    overrides = {
        **family,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "hidden_size": draw(st.integers(1, 20)),
        "intermediate_size": tp * draw(st.integers(1, 12)),
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(1, 40)),
    }
    if not family:
        overrides["attention_bias"] = draw(st.booleans())
    return overrides, tp, draw(st.integers(1, layers))
