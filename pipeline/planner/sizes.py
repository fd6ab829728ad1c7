"""Sizes that an engine is built for, from the memory of its GPU."""

from __future__ import annotations

from dataclasses import replace

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Limits, memory

# Largest batch: beyond it, throughput gains less than the memory of the logits costs.
MOST_BATCH = 2048
# TensorRT-LLM's own default: large enough for matrix products to be compute-bound.
MAX_NUM_TOKENS = 8192
# Sizes with which the memory for the KV cache is computed.
LEAST = Limits(max_batch_size=64, max_num_tokens=MAX_NUM_TOKENS)


def sizes(
    model: ModelConfig,
    dtype: DataType,
    mapping: Mapping,
    quantization: Quantization,
    gpu: GpuSpec,
    lengths: Lengths,
    efficiency: Efficiency,
    *,
    least: Limits = LEAST,
    max_batch_size: int | None = None,
    max_num_tokens: int | None = None,
    rows: int = 1,
) -> Limits:
    """Sizes for sequences of `lengths`: as many sequences of mean length as the KV cache holds, and a few more, as
    trtllm-bench does, at least 1 although `Memory.shortage` may say that none fits; a step of the tokens of `least`, or
    of a full batch. What `least` says of blocks, of the cache's share and of adapters holds.

    max_batch_size, max_num_tokens  those that are given, to which the other one is planned
    rows  tokens of a sequence in a step: its beams, each with its draft tokens

    Raises UsageError for an impossible mapping.
    """
    least = replace(least, max_num_tokens=max_num_tokens or least.max_num_tokens)
    held = memory(model, dtype, mapping, quantization, gpu, least, efficiency).batch(lengths.mean)
    most = MOST_BATCH if max_num_tokens is None else max(1, max_num_tokens // rows)
    if max_num_tokens is not None and not held:  # a batch that the given step suits: that none fits is told elsewhere
        held = -(-max_num_tokens // lengths.longest)
    batch = max_batch_size or min(most, rounded(min(MOST_BATCH, held)))
    tokens = max(batch * rows, min(least.max_num_tokens, batch * lengths.longest))
    return replace(least, max_batch_size=batch, max_num_tokens=tokens)


def rounded(batch: int) -> int:
    """Round up to a multiple of 8, 32 or 128 by size; a batch below 8 stays, and is at least 1."""
    grain = 1 if batch < 8 else 8 if batch <= 128 else 32 if batch <= 512 else 128
    return max(1, -(-batch // grain) * grain)
