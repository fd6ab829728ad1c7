"""GPU memory of a rank's weights and of the KV cache, in bytes, computed from names and shapes."""

from __future__ import annotations

from math import prod

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE, plan_rank
from trtpipe.engines.checkpoint.quantized import LINEARS
from trtpipe.engines.hf.safetensors_file import ITEMSIZE
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization


def rank_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of the largest rank's weights in an engine, without activations and KV cache."""
    return max(_stage_bytes(model, dtype, mapping, quantization, encoded=True))


def checkpoint_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of all rank files of a checkpoint."""
    return mapping.tp_size * sum(_stage_bytes(model, dtype, mapping, quantization, encoded=False))


def expert_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of the experts in `rank_bytes`; 0 for a dense model."""
    if model.experts is None:
        return 0
    return max(_stage_bytes(model, dtype, mapping, quantization, encoded=True, parts=(".mlp.fc.", ".mlp.proj.")))


def _stage_bytes(
    model: ModelConfig,
    dtype: DataType,
    mapping: Mapping,
    quantization: Quantization,
    *,
    encoded: bool,
    parts: tuple[str, ...] = ("",),
) -> list[int]:
    """Bytes of a rank of each pipeline stage; with `encoded` as the engine build encodes float weights.

    parts  of the names of the tensors that count
    """
    algo, ranks = quantization.quant_algo, []
    for pp_rank in range(mapping.pp_size):
        total = 0
        for plan in plan_rank(model, mapping, tp_rank=0, pp_rank=pp_rank, quantization=quantization):
            if not any(part in plan.name for part in parts):
                continue
            size = ITEMSIZE[plan.dtype or SAFETENSORS_DTYPE[dtype]]
            # The checkpoint stores float weights; the build encodes them.
            if encoded and algo is not None and algo.row.engine_encodes and plan.name.endswith(LINEARS):
                size = ITEMSIZE[algo.row.codes]
            total += prod(plan.shape) * size
        ranks.append(total)
    return ranks


def kv_token_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of KV cache per token on the rank with most layers: 2 x layers x KV heads x bytes of a head.

    With more ranks than KV heads, ranks hold copies of the heads, and more ranks save nothing.
    """
    layers = -(-model.num_hidden_layers // mapping.pp_size)
    heads = max(1, model.num_key_value_heads // mapping.tp_size)
    cache = quantization.kv_cache_quant_algo
    wide = model.head_size * ITEMSIZE[SAFETENSORS_DTYPE[dtype]]
    return 2 * layers * heads * (wide if cache is None else cache.row_bytes(model.head_size))
