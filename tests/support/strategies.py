"""Random cases for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE
from trtpipe.engines.base import Mapping


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], Mapping]:
    """Config overrides of a model and a mapping that it can be cut by."""
    family = draw(st.sampled_from([{}, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, PHI3]))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % tp == 0 or tp % n == 0]))
    groups = [n for n in (1, 2, 3, 4) if kv_heads * n % tp == 0]
    if family in (QWEN3, QWEN3_MOE) and kv_heads > 1:
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
    if family is PHI3:
        overrides["hidden_size"] = kv_heads * group * overrides["head_dim"]
    if not family:
        overrides["attention_bias"] = draw(st.booleans())
    ep = 1
    if "num_experts_per_tok" in family:
        ep = draw(st.sampled_from([n for n in (1, 2, 3, 4) if tp % n == 0]))
        experts = ep * draw(st.integers(1, 3))
        features = tp // ep * draw(st.integers(1, 8))
        overrides["num_experts_per_tok"] = draw(st.integers(1, experts))
        if family is MIXTRAL:
            overrides |= {"num_local_experts": experts, "intermediate_size": features}
        else:
            overrides |= {"num_experts": experts, "moe_intermediate_size": features}
    return overrides, Mapping(tp_size=tp, pp_size=1 if family is PHI3 else draw(st.integers(1, layers)), moe_ep_size=ep)
