"""One decoder layer over any tokens, from the shards as they are stored; who attends to whom is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional

from engines.reference.ranks import Ranks, Together
from engines.reference.weights import LayerShard, rank_heads
from engines.tensorrt_llm.checkpoint import CheckpointConfig

# (place of the shard, [T, features of q, k and v]) -> [T, features of q], for the heads of that shard.
Attend = Callable[[int, torch.Tensor], torch.Tensor]


def apply_layer(
    ranks: Ranks, shards: Sequence[LayerShard], hidden: torch.Tensor, epsilon: float, attend: Attend
) -> torch.Tensor:
    """[T, hidden_size] -> [T, hidden_size], from the shards of the ranks held.

    `attend` is given a contiguous tensor that it may write to.
    """
    first = shards[0]
    normed = rms_norm(hidden, first.input_norm, epsilon)
    if first.dense_bias is not None:
        hidden = hidden + first.dense_bias
    parts = []
    for place, shard in enumerate(shards):
        qkv = shard.qkv(normed)
        if shard.qkv_bias is not None:
            qkv = qkv + shard.qkv_bias
        parts.append(shard.dense(attend(place, qkv.contiguous())))
    hidden = hidden + ranks.sum(parts)
    normed = rms_norm(hidden, first.post_norm, epsilon)
    parts = []
    for shard in shards:
        act = functional.silu(shard.fc(normed), inplace=True)
        act *= shard.gate(normed)
        parts.append(shard.proj(act))
    return hidden + ranks.sum(parts)


@torch.inference_mode()
def run_layer(
    config: CheckpointConfig, shards: Sequence[LayerShard], hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """One layer over whole sequences, without a cache: [batch, length, hidden_size] -> the same, causally.

    hidden    in the shards' type, on their device
    cos, sin  [length, head_size] of positions 0 to length - 1, as `rotary_tables` gives them, on that device

    Where the checkpoint quantizes the cache, every token sees all keys and values as the cache would give them back,
    its own included: what quantization costs shows at its largest.
    """
    batch, length, width = hidden.shape
    heads, kv = rank_heads(config)
    cos, sin = (table.to(hidden.dtype)[:, None] for table in (cos, sin))

    def attend(place: int, qkv: torch.Tensor) -> torch.Tensor:
        x = qkv.view(batch, length, heads + 2 * kv, config.head_size)
        rotate(x[:, :, : heads + kv], cos, sin)
        cached, codec = x[:, :, heads:], shards[place].kv_codec
        if codec is not None:
            cached = codec.decode(codec.encode(cached), hidden.dtype)
        out = functional.scaled_dot_product_attention(
            x[:, :, :heads].transpose(1, 2),
            cached[:, :, :kv].transpose(1, 2),
            cached[:, :, kv:].transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(batch * length, -1)

    together = Together(len(shards))
    return apply_layer(together, shards, hidden.reshape(-1, width), config.norm_epsilon, attend).reshape(hidden.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Over the last dimension. The kernel computes in float32 whatever the type of x."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn queries and keys [..., heads, head_size] by their angles [..., 1, head_size], in place."""
    torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=x)
