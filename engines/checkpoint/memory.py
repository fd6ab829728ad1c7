"""GPU memory of a rank's weights and of the KV cache, in bytes, computed from names and shapes."""

from __future__ import annotations

from math import prod

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE, plan_rank
from trtpipe.engines.checkpoint.quantized import LINEARS
from trtpipe.engines.checkpoint.split import check_mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.safetensors_file import ITEMSIZE
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization


def rank_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of the largest rank's weights in an engine, without activations and KV cache."""
    algo, ranks = quantization.quant_algo, []
    for pp_rank in range(mapping.pp_size):
        total = 0
        for plan in plan_rank(model, mapping, tp_rank=0, pp_rank=pp_rank, quantization=quantization):
            size = ITEMSIZE[plan.dtype or SAFETENSORS_DTYPE[dtype]]
            # The checkpoint stores float weights; the build encodes them.
            if algo is not None and algo.row.engine_encodes and plan.name.endswith(LINEARS):
                size = ITEMSIZE[algo.row.codes]
            total += prod(plan.shape) * size
        ranks.append(total)
    return max(ranks)


def check_fit(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization, gpu: GpuSpec) -> None:
    """Raises UsageError, naming a --tp that fits, when the weights alone exceed the GPU's memory."""
    if gpu.memory_gib is None:
        return
    need = rank_bytes(model, dtype, mapping, quantization) / 2**30
    if need < gpu.memory_gib:
        return
    for tp in range(mapping.tp_size + 1, model.num_attention_heads + 1):
        if model.num_attention_heads % tp:
            continue
        wider = Mapping(tp_size=tp, pp_size=mapping.pp_size)
        try:
            check_mapping(model, wider, quantization=quantization)
        except UsageError:
            continue
        if rank_bytes(model, dtype, wider, quantization) / 2**30 < gpu.memory_gib:
            remedy = f"use --tp {tp} or more, or a smaller --dtype"
            break
    else:
        remedy = "use a smaller --dtype, or a larger GPU"
    raise UsageError(
        f"the weights of a rank take {need:.1f} GiB, and {gpu.describe()} has {gpu.memory_gib:g}",
        why="nothing would be left for activations and the KV cache",
        remedy=remedy,
    )


def kv_token_bytes(model: ModelConfig, dtype: DataType, mapping: Mapping, quantization: Quantization) -> int:
    """Bytes of KV cache per token on the rank with most layers: 2 x layers x KV heads x head size x item size.

    With more ranks than KV heads, ranks hold copies of the heads, and more ranks save nothing.
    """
    layers = -(-model.num_hidden_layers // mapping.pp_size)
    heads = max(1, model.num_key_value_heads // mapping.tp_size)
    item = 1 if quantization.kv_cache_quant_algo is not None else ITEMSIZE[SAFETENSORS_DTYPE[dtype]]
    return 2 * layers * heads * model.head_size * item
