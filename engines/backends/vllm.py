"""Backend of vLLM: the engine is a Hugging Face folder and a file for `vllm serve --config`; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtpipe.engines.backends.base import (
    METHODS,
    ServedBy,
    Target,
    Workshop,
    checkpoint_form,
    refuse_others,
    require_form,
)
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.quantization import COMPRESSED_TENSORS, KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.toolchain import Toolchain

FORM = "hf"
COMPILED = False
ANYWHERE = False
SERVED_BY = ServedBy.ENGINE_PROCESS
PROCESS = "trtpipe.engines.engine_process.vllm_runtime"
# A stub forwards some 10,000 tokens per second: 64 sequences at 150 tokens per second.
SEQUENCES_PER_STUB = 64
ATTENTION_WINDOW = True
ONE_NODE = "on several, vLLM wants a Ray cluster, which is not written here"
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block")
FILE = "engine_args.yaml"
# Most tokens of a step that runs as a CUDA graph. vLLM's default is at most 512, so that a step of 500 requests and the
# prompts of four others takes 1.5 times as long as one of 512 requests: docs/measurements/h200.md.
GRAPH_TOKENS = 1024
# Where the GPU has no FP4, vLLM's Marlin kernel decodes the weights and takes inputs as they are.
WEIGHT_ONLY: tuple[QuantAlgo, ...] = (QuantAlgo.NVFP4,)
# As measured: docs/measurements/vllm.md.
READS: dict[str, tuple[QuantAlgo | None, ...]] = {
    "modelopt": (QuantAlgo.FP8, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, QuantAlgo.FP8_BLOCK_SCALES, QuantAlgo.NVFP4),
    COMPRESSED_TENSORS: tuple(algo for algo in QuantAlgo if COMPRESSED_TENSORS in algo.row.formats),
    "fp8": (QuantAlgo.FP8, QuantAlgo.FP8_BLOCK_SCALES),
}


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {}


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    refuse_others(build, SETTINGS, "vllm", "it is a choice of trtllm-build, and vLLM has its own")
    require_form("vllm", target)
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        raise UsageError(
            "vLLM has no INT8 KV cache with scales",
            why="a Hugging Face folder has no place for them",
            remedy="use --kv-cache fp8 or none",
        )
    # vLLM's attention always reads a paged cache.
    return replace(build, use_paged_context_fmha=True), {}


def rendered(build: BuildConfig, target: Target) -> dict[str, str]:
    """See EngineBackend.rendered."""
    algo, cache = target.quantization.quant_algo, target.quantization.kv_cache_quant_algo
    settings = {
        "tensor-parallel-size": target.mapping.tp_size,
        "pipeline-parallel-size": target.mapping.pp_size,
        "max-num-seqs": build.max_batch_size,
        "max-model-len": build.max_seq_len,
        "max-num-batched-tokens": build.max_num_tokens,
        "block-size": build.tokens_per_block,
        "max-cudagraph-capture-size": min(build.max_num_tokens, max(GRAPH_TOKENS, 2 * build.max_batch_size)),
        # Of a folder that came quantized vLLM finds the method itself.
        "quantization": _method(algo) if algo and not target.stored else None,
        "kv-cache-dtype": cache.value.lower() if cache else "auto",
    }
    return {FILE: hf_engine.settings_text(settings)}


def _method(algo: QuantAlgo) -> str:
    """vLLM's name of the method of a folder that is written for it."""
    method = METHODS[checkpoint_form("vllm", algo)]
    return "modelopt_fp4" if method == "modelopt" and algo is QuantAlgo.NVFP4 else method


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Link the folder and write engine_args.yaml."""
    return hf_engine.lay_out(checkpoint, out, rendered(build, target)), {}
