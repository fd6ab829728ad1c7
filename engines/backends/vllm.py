"""Backend of vLLM: the engine is a Hugging Face folder and a file for `vllm serve --config`; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import ServedBy, Target, Workshop, refuse_others
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.quantization import FP8_SMS, KvCacheQuantAlgo, QuantAlgo
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
NOTICE = ""
FIXED: dict[str, tuple[Any, str]] = {
    "build.max_beam_width": (1, "the vllm runtime has no beam search"),
    "serving.batch_scheduler_policy": ("max_utilization", "vLLM admits what fits, and pauses and recomputes"),
    "serving.enable_chunked_context": (True, "vLLM always splits long prompts"),
    "serving.max_tokens_in_paged_kv_cache": (None, "the KV cache is what the memory share leaves"),
    "serving.max_attention_window_size": (None, "vLLM takes the window of the model's config.json"),
    "serving.multi_block_mode": (None, "its attention kernels choose by themselves"),
    "request.bad_words": (None, "the vllm runtime refuses it"),
    "request.beam_width": (None, "the vllm runtime has no beam search"),
    "request.return_context_logits": (None, "the vllm runtime returns no logits"),
    "request.return_generation_logits": (None, "the vllm runtime returns no logits"),
}
MEANS: dict[str, str] = {
    "build.max_input_len": "the longest prompt is max_seq_len less the tokens that a request asks for",
    "serving.kv_cache_free_gpu_mem_fraction": "a share of the GPU's whole memory, for weights and activations too",
}
# Most tokens of a step that runs as a CUDA graph. vLLM's default is at most 512, so that a step of 500 requests and the
# prompts of four others takes 1.5 times as long as one of 512 requests: docs/measurements/h200.md.
GRAPH_TOKENS = 1024
# Algorithms of ModelOpt's folders that vLLM reads, as measured: docs/measurements/vllm.md.
READ = (QuantAlgo.FP8, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {}


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    refuse_others(build, SETTINGS, "vllm", "it is a choice of trtllm-build, and vLLM has its own")
    algo = target.quantization.quant_algo
    if algo is not None and algo not in READ:
        raise UsageError(
            f"vLLM does not read {algo.value} from ModelOpt's folders",
            why="of its quantized weights it takes FP8",
            remedy=f"use --runtime tensorrt_llm, or --dtype {'fp8' if target.gpu.sm in FP8_SMS else 'bf16'}",
        )
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
        "quantization": "modelopt" if algo else None,
        "kv-cache-dtype": "fp8" if cache is KvCacheQuantAlgo.FP8 else "auto",
    }
    return {FILE: hf_engine.settings_text(settings)}


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Link the folder and write engine_args.yaml."""
    return hf_engine.lay_out(checkpoint, out, rendered(build, target)), {}
