"""The sizes an engine is built for, from what its GPU holds."""

from __future__ import annotations

from dataclasses import replace

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.folder import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.memory import Limits, memory

# Of a batch: what more gains less than its logits' memory costs.
MOST_BATCH = 2048
# TensorRT-LLM's own default: large enough for products to be compute-bound.
MAX_NUM_TOKENS = 8192


def sizes(
    model: ModelConfig,
    dtype: DataType,
    mapping: Mapping,
    quantization: Quantization,
    gpu: GpuSpec,
    mean: int,
    efficiency: Efficiency,
) -> Limits:
    """For sequences of `mean` tokens, prompt and answer: as many at once as the KV cache holds, and a little more, as
    trtllm-bench has it. Raises UsageError for a mapping that cannot be.
    """
    least = Limits(max_batch_size=64, max_num_tokens=MAX_NUM_TOKENS)
    held = memory(model, dtype, mapping, quantization, gpu, least, efficiency).batch(mean)
    batch = rounded(min(MOST_BATCH, held))
    return replace(least, max_batch_size=batch, max_num_tokens=max(MAX_NUM_TOKENS, batch))


def rounded(batch: int) -> int:
    """Up to a multiple of 8, 32 or 128 by size; what is below 8 stays, and is at least 1."""
    grain = 1 if batch < 8 else 8 if batch <= 128 else 32 if batch <= 512 else 128
    return max(1, -(-batch // grain) * grain)
