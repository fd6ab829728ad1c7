"""Random cases for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.factories import MIXTRAL
from trtpipe.engines.base import Mapping


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Mapping]:
    """Config overrides of a model, with experts or without, and a mapping that it can be cut by."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % tp == 0 or tp % n == 0]))
    group = draw(st.sampled_from([n for n in (1, 2, 3, 4) if kv_heads * n % tp == 0]))
    layers = draw(st.integers(1, 4))
    overrides = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "head_dim": draw(st.sampled_from([2, 4, 6])),
        "hidden_size": draw(st.integers(1, 20)),
        "intermediate_size": tp * draw(st.integers(1, 12)),
        "num_hidden_layers": layers,
        "vocab_size": draw(st.integers(1, 40)),
        "attention_bias": draw(st.booleans()),
    }
    ep = 1
    if draw(st.booleans()):
        ep = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp % n == 0]))
        experts = ep * draw(st.integers(1, 3))
        top_k = draw(st.integers(1, experts))
        overrides |= {**MIXTRAL, "num_local_experts": experts, "num_experts_per_tok": top_k}
        overrides["intermediate_size"] = tp // ep * draw(st.integers(1, 8))
    return overrides, Mapping(tp_size=tp, pp_size=draw(st.integers(1, layers)), moe_ep_size=ep)
