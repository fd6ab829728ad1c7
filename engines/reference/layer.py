"""One decoder layer over any tokens, computed from the stored shards; the caller provides the attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.reference.fused import Encode, add_norm, encoded, rotated, unchanged
from trtpipe.engines.reference.lora import StepAdapters
from trtpipe.engines.reference.masks import prompt_mask
from trtpipe.engines.reference.ranks import Ranks, Together
from trtpipe.engines.reference.weights import LayerShard, rank_heads

# (index of the shard, [T, features of q, k and v]) -> [T, features of q], for the heads of that shard.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


def apply_layer(
    ranks: Ranks, shards: Sequence[LayerShard], hidden: torch.Tensor, update: torch.Tensor | None, epsilon: float,
    attend: Attend, adapters: StepAdapters | None = None, layer: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the residual stream [T, hidden_size] and the update to add to it, from the shards of the ranks held.

    update  update that the layer before has returned and that is not added yet
    layer   number of the layer, for `adapters`
    """
    first, dtype = shards[0], hidden.dtype
    # Adapters multiply the input of a linear before it is encoded.
    plain: list[Encode] = [] if adapters is None else [unchanged]
    encoders: list[Encode] = [shard.qkv.encode for shard in shards]
    hidden, operands = add_norm(hidden, update, first.input_norm, epsilon, encoders + plain)
    if first.dense_bias is not None:
        hidden = hidden + first.dense_bias
    parts = []
    for place, shard in enumerate(shards):
        qkv = shard.qkv.product(operands[place], dtype)
        if adapters is not None:
            adapters.of(layer, place).add_qkv(operands[-1], qkv)
        if shard.qkv_bias is not None:
            qkv = qkv + shard.qkv_bias
        attended = attend(place, qkv)
        parts.append(shard.dense.product(encoded(attended, shard.dense.encode), dtype))
        if adapters is not None:
            adapters.of(layer, place).add(attended, [("o", parts[-1])])
    encoders = [shard.mlp.encode for shard in shards]
    hidden, operands = add_norm(hidden, ranks.sum(parts), first.post_norm, epsilon, encoders + plain)
    if adapters is None:
        parts = [shard.mlp.product(operand, dtype) for shard, operand in zip(shards, operands, strict=True)]
    else:
        parts = [
            shard.mlp.adapted(operands[place], operands[-1], adapters.of(layer, place).add, dtype)
            for place, shard in enumerate(shards)
        ]
    return hidden, ranks.sum(parts)


@torch.inference_mode()
def run_layer(
    config: CheckpointConfig, shards: Sequence[LayerShard], hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Run one layer over whole sequences, causally and without a cache: [batch, length, hidden_size] -> same shape.

    hidden    in the shards' type, on their device
    cos, sin  [length, head_size] of positions 0 to length - 1, as `rotary_tables` returns them, on that device

    If the checkpoint quantizes the cache, each token reads all keys and values, its own included, with the cache's
    rounding: this is the largest error that quantizing the cache can cause.
    """
    batch, length, width = hidden.shape
    heads, kv = rank_heads(config)
    cos, sin = (table.to(hidden.dtype)[:, None] for table in (cos, sin))
    mask = prompt_mask(0, length, shards[0].window or length, hidden.dtype, hidden.device)

    def attend(place: int, qkv: torch.Tensor) -> torch.Tensor:
        x = qkv.reshape(batch, length, heads + 2 * kv, config.head_size)
        x = rotated(x, heads + kv, shards[place].head_norms, cos, sin)
        cached, codec = x[:, :, heads:], shards[place].kv_codec
        if codec is not None:
            cached = codec.decode(codec.encode(cached), hidden.dtype)
        out = functional.scaled_dot_product_attention(
            x[:, :, :heads].transpose(1, 2),
            cached[:, :, :kv].transpose(1, 2),
            cached[:, :, kv:].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(batch * length, -1)

    rows = hidden.reshape(-1, width)
    rows, update = apply_layer(Together(len(shards)), shards, rows, None, config.norm_epsilon, attend)
    return (rows + update).reshape(hidden.shape)
