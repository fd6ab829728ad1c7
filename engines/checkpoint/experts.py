"""Tensors of a layer's experts: in the Hugging Face folder three matrices each, in a rank file two for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.engines.base import Mapping as Ranks
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan, share
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.model_config import Experts

# Type of a router's weights in a checkpoint, whatever that of the others.
ROUTER_DTYPE = "F32"


def moe_block(experts: Experts | None) -> dict[str, Any]:
    """`moe` of a checkpoint's config; a loader raises TypeError for another key.

    Mode 1 takes the softmax over the chosen experts, mode 0 over all of them. The rest is not for the families here.
    """
    return {
        "num_experts": experts.count if experts else 0,
        "shared_expert_intermediate_size": 0,
        "top_k": experts.top_k if experts else 0,
        "normalization_mode": int(experts.normalize) if experts else 0,
        "sparse_mixer_epsilon": 0.01,
        "tp_mode": 0,
        "device_limited_n_group": 0,
        "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }


def expert_shapes(experts: Experts, hidden: int, names: SourceNames) -> dict[str, tuple[int, ...]]:
    """Tensors of the router and the experts in a layer of the Hugging Face folder, name within the layer -> shape."""
    wide, narrow = (experts.intermediate_size, hidden), (hidden, experts.intermediate_size)
    out: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (experts.count, hidden)}
    for gate, up, down in names.of_experts(experts.count).mlps:
        out |= {f"{gate}.weight": wide, f"{up}.weight": wide, f"{down}.weight": narrow}
    return out


def plan_experts(
    experts: Experts, hidden: int, names: SourceNames, mapping: Ranks, tp_rank: int, ours: str, theirs: str
) -> Iterator[TensorPlan]:
    """Plans of a layer's router and experts in a rank file; `ours` and `theirs` as `Family.plan_layer` takes them.

    A rank holds a block of experts, and of each of them the same share of its features: fc [experts, 2 x features,
    hidden] has the rows of up before those of gate, the activated one, and each of the two is divided by itself.
    """
    tp_place, ep_place = mapping.moe_ranks(tp_rank)
    first, last = share(experts.count, mapping.moe_ep_size, ep_place)
    begin, end = rows = share(experts.intermediate_size, mapping.moe_tp_size, tp_place)
    held = names.of_experts(experts.count).mlps[first:last]
    fc = tuple(Piece(f"{theirs}{name}.weight", rows) for gate, up, _ in held for name in (up, gate))
    proj = tuple(Piece(f"{theirs}{down}.weight", (0, hidden), rows) for _, _, down in held)
    yield TensorPlan(f"{ours}mlp.fc.weight", (last - first, 2 * (end - begin), hidden), fc)
    yield TensorPlan(f"{ours}mlp.proj.weight", (last - first, hidden, end - begin), proj)
    # Every rank scores all experts.
    router = (Piece(f"{theirs}{names.router}.weight", (0, experts.count)),)
    yield TensorPlan(f"{ours}mlp.router.weight", (experts.count, hidden), router, dtype=ROUTER_DTYPE)
