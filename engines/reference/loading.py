"""Loading of an engine's model and drafter, with a KV cache of the size that memory allows."""

from __future__ import annotations

from pathlib import Path

import torch

from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig
from trtpipe.engines.reference.devices import named_memory_errors
from trtpipe.engines.reference.lora import device_bytes
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.parallel import ParallelModel
from trtpipe.engines.reference.speculation import Drafter, DraftModel, PromptLookup
from trtpipe.engines.reference.weights import load_weights, rank_heads
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, NGRAM

# Default size of the KV cache on a CPU, unless one sequence of max_seq_len alone needs more.
DEFAULT_KV_CACHE_BYTES = 1 << 30


def load_models(
    engine_dir: Path, config: CheckpointConfig, build: BuildConfig, dtype: torch.dtype, where: torch.device, *,
    kv_cache_tokens: int | None, free_fraction: float, apart: bool | None,
    adapters: Path | None,
) -> tuple[Model | ParallelModel, Drafter | None]:  # fmt: skip
    """The model, and its drafter where it speculates. See Runtime for the options; raises as it does."""
    ranks, block = config.mapping.tp_size, build.tokens_per_block
    if apart is None:
        apart = where.type == "cuda" and torch.cuda.device_count() >= ranks

    def num_blocks() -> int:
        """Number of blocks of the pool; called after the weights are on the device."""
        tokens = kv_cache_tokens
        if tokens is None:
            share = _bytes_for_cache(where, free_fraction, device_bytes(adapters, dtype)) * (ranks if apart else 1)
            tokens = _default_tokens(config, build, dtype, share, drafts)
        return -(-tokens // block)

    longest, mode = build.max_seq_len, build.speculative_decoding_mode
    drafts = read_model_config(engine_dir / DRAFT) if mode == DRAFT_MODEL else None
    remedy = "lower kv_cache_free_gpu_mem_fraction, build with smaller limits, or free the GPU"
    with named_memory_errors(where, ["the engine is loaded"], remedy):
        model: Model | ParallelModel
        if ranks > 1 and apart:
            model = ParallelModel(
                engine_dir, config, dtype, where, max_positions=longest, num_blocks=num_blocks, tokens_per_block=block
            )
        else:
            weights = load_weights(engine_dir, config, dtype, where)
            model = Model(config, weights, max_positions=longest, num_blocks=num_blocks(), tokens_per_block=block)
        drafter: Drafter | None = PromptLookup() if mode == NGRAM else None
        if drafts is not None:
            drafter = DraftModel(
                engine_dir / DRAFT, dtype, where, max_positions=longest, num_blocks=model.num_blocks,
                tokens_per_block=block,
            )  # fmt: skip
    return model, drafter


def _bytes_for_cache(device: torch.device, fraction: float, adapters: int) -> int:
    """Most bytes of a rank's KV cache on its device, beside adapters of so many bytes."""
    if device.type != "cuda":
        return DEFAULT_KV_CACHE_BYTES
    return int(max(0, torch.cuda.mem_get_info(device)[0] - adapters) * fraction)


def _default_tokens(
    config: CheckpointConfig, build: BuildConfig, dtype: torch.dtype, affordable: int, drafts: ModelConfig | None
) -> int:
    """Default number of tokens in the cache; all ranks together, and the model of drafts, have at most `affordable`
    bytes."""
    _, kv_heads = rank_heads(config)
    cache = config.quantization.kv_cache_quant_algo
    row = config.head_size * dtype.itemsize if cache is None else cache.row_bytes(config.head_size)
    per_layer = 2 * kv_heads * config.mapping.tp_size * row
    per_token = per_layer * config.num_hidden_layers
    if drafts is not None:
        per_token += 2 * drafts.num_key_value_heads * drafts.head_size * dtype.itemsize * drafts.num_hidden_layers
    tokens = affordable // per_token
    return max(build.max_seq_len, min(build.max_batch_size * build.max_seq_len, tokens))
