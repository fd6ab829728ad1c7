"""Backend of TensorRT-LLM's LLM API (PyTorch, 1.0 and newer): the engine is a Hugging Face folder and its arguments.

Nothing is compiled. Upstream develops this path further. `trtllm-serve --config` accepts llm_args.yaml unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import (
    MAX_CPU_LORAS,
    MAX_LORAS,
    NativeServer,
    ServedBy,
    Target,
    Workshop,
    refuse_others,
    require_form,
    require_speculation,
    require_weights,
)
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.precision import FP8_SMS
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, EAGLE3, LONGEST_NGRAM, NGRAM
from trtpipe.engines.toolchain import Toolchain, version_key

FORM = "hf"
COMPILED = False
ANYWHERE = False
ON_CPU = False
SERVED_BY = ServedBy.LLM_API
PROCESS = ""
NEEDS = NEEDS_ON_CPU = None
SEQUENCES_PER_STUB = None
ONE_NODE = ""
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")
FILE = "llm_args.yaml"
OLD_GPUS = ""
WEIGHT_ONLY: tuple[QuantAlgo, ...] = ()
MORE_SMS: dict[QuantAlgo, tuple[int, ...]] = {}
# Source: load_hf_quant_config of TensorRT-LLM 1.2 (tensorrt_llm/_torch/model_config.py).
READS: dict[str, tuple[QuantAlgo | None, ...]] = {
    "modelopt": (
        None, QuantAlgo.FP8, QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN, QuantAlgo.W8A16,
        QuantAlgo.W4A16_AWQ, QuantAlgo.W4A8_AWQ, QuantAlgo.NVFP4, QuantAlgo.FP8_BLOCK_SCALES,
    ),
    "fp8": (QuantAlgo.FP8_BLOCK_SCALES,),
}  # fmt: skip
NOTICE = ""
_AT_ONCE = "its model hands each request to the LLM API at once"
_OWN_TEXT = "the LLM API tokenises by itself, in one process"
FIXED: dict[str, tuple[Any, str]] = {
    "serving.multi_block_mode": (None, "its attention kernels choose by themselves"),
    "serving.normalize_log_probs": (False, "cumulative_logprob is the plain sum"),
    "serving.exclude_input_in_output": (True, "a request says otherwise: sampling_param_exclude_input_from_output"),
    "serving.triton_max_batch_size": (None, _AT_ONCE),
    "serving.max_queue_delay_microseconds": (0, _AT_ONCE),
    "serving.preprocessing_instance_count": (None, _OWN_TEXT),
    "serving.bls_instance_count": (None, _OWN_TEXT),
    "serving.ensemble": (None, "one model takes and returns text"),
    "serving.add_special_tokens": (True, "SamplingParams' default"),
    "serving.skip_special_tokens": (True, "SamplingParams' default"),
    "serving.accumulate_tokens": (False, "each streamed response carries the new text"),
}
MEANS: dict[str, str] = {}
SPECULATES = (NGRAM, DRAFT_MODEL, EAGLE3)
ARRAYS = False
ALL_STAGES = False
# Source: RotaryScalingType of TensorRT-LLM 1.0 to 1.3.
ROTARY: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic", "dynamic with alpha", "longrope")
LENGTH_AS_STATED: dict[str, str] = {}
SAME_ADAPTERS = "the model of the LLM API looks for them when it starts"


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"tensorrt_llm": toolchain.name}


def runs_on(target: Target, sms: tuple[int, ...]) -> tuple[int, ...] | None:
    """See EngineBackend.runs_on."""
    return tuple(sm for sm in sms if all(sm in table.get(algo.value, ()) for algo, table in _formats(target)))


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    target.toolchain.require_runtime("trtllm_pytorch")
    require_speculation(build, "trtllm_pytorch")
    if build.speculates and build.max_beam_width > 1:
        raise UsageError(
            "the LLM API does not speculate with several beams",
            why="a draft continues one text",
            remedy="leave build.max_beam_width out, or build.speculative_decoding_mode",
        )
    refuse_others(build, SETTINGS, "trtllm_pytorch", "it is a choice of trtllm-build, and nothing is compiled here")
    require_weights("trtllm_pytorch", target)
    _require_formats(target)
    require_form("trtllm_pytorch", target)
    # The attention of the PyTorch backend always reads a paged cache.
    return replace(build, use_paged_context_fmha=True), {}


def _formats(target: Target) -> list[tuple[QuantAlgo | KvCacheQuantAlgo, dict[str, tuple[int, ...]]]]:
    """The formats of weights and KV cache, if they have any, each with the release's table of SMs."""
    quantization, toolchain = target.quantization, target.toolchain
    both = (quantization.quant_algo, toolchain.formats), (quantization.kv_cache_quant_algo, toolchain.cache_formats)
    return [(algo, table) for algo, table in both if algo is not None]


def _require_formats(target: Target) -> None:
    """Raises UsageError for a format that the release's PyTorch backend does not run on the target's GPU."""
    toolchain, gpu = target.toolchain, target.gpu
    for algo, table in _formats(target):
        if gpu.sm in table.get(algo.value, ()):
            continue
        cache = isinstance(algo, KvCacheQuantAlgo)
        what, option, unquantized = (" as its KV cache", "--kv-cache", "none") if cache else ("", "--dtype", "bf16")
        where = ", ".join(f"SM{sm}" for sm in table.get(algo.value, ()))
        names = [one.value for one in type(algo)]
        there = [name for name, sms in table.items() if gpu.sm in sms and name in names]
        if cache and gpu.sm not in FP8_SMS:  # a precision has no such cache there, whatever the LLM API runs
            there = []
        runs = (
            f"it runs {', '.join([*there, unquantized])} there: choose {option} of these (`trtpipe quants` lists them)"
        )
        engines = ", or --runtime tensorrt_llm" if "tensorrt_llm" in toolchain.runtimes else ""
        raise UsageError(
            f"the LLM API of TensorRT-LLM {toolchain.name} does not run {algo.value}{what} on {gpu.describe()}",
            why=f"its PyTorch backend runs it on {where} alone"
            if where
            else "its PyTorch backend has no kernel for it that is known",
            remedy=f"{runs if there else f'use {option} {unquantized}'}{engines}",
        )


def rendered(build: BuildConfig, target: Target) -> dict[str, str]:
    """See EngineBackend.rendered."""
    cache = target.quantization.kv_cache_quant_algo
    settings = {
        "backend": "pytorch",
        "tensor_parallel_size": target.mapping.tp_size,
        "pipeline_parallel_size": target.mapping.pp_size,
        **_expert_sizes(target),
        **_adapters(build),
        "max_batch_size": build.max_batch_size,
        "max_input_len": build.max_input_len,
        "max_seq_len": build.max_seq_len,
        "max_num_tokens": build.max_num_tokens,
        "max_beam_width": build.max_beam_width,
        "kv_cache_config": {
            "dtype": cache.value.lower() if cache else "auto",
            "tokens_per_block": build.tokens_per_block,
        },
        **_speculation(build, target.toolchain),
    }
    return {FILE: hf_engine.settings_text(settings)}


def _adapters(build: BuildConfig) -> dict[str, Any]:
    if not build.takes_adapters:
        return {}
    sizes = {"max_lora_rank": build.max_lora_rank, "max_loras": MAX_LORAS, "max_cpu_loras": MAX_CPU_LORAS}
    return {"enable_lora": True, "lora_config": {"lora_target_modules": list(build.lora_target_modules), **sizes}}


def _speculation(build: BuildConfig, toolchain: Toolchain) -> dict[str, Any]:
    """Arguments of LLM; a model is named by its place in the engine's folder.

    Sources: DecodingBaseConfig of llm_args.py of TensorRT-LLM 1.0 to 1.3, which all know `speculative_model_dir`, and
    docs/source/features/speculative-decoding.md. Only EAGLE-3 works with the overlap scheduler in all of them.
    """
    if not build.speculates:
        return {}
    # Until 1.1 one type had heads of all kinds.
    eagle = "Eagle" if version_key(toolchain.name) < (1, 2) else "Eagle3"
    kind = {NGRAM: "NGram", DRAFT_MODEL: "DraftTarget", EAGLE3: eagle}[str(build.speculative_decoding_mode)]
    made: dict[str, Any] = {"decoding_type": kind, "max_draft_len": build.max_draft_len}
    if build.speculative_decoding_mode == NGRAM:
        # The pool of each request is its own, as its text is.
        made |= {"max_matching_ngram_size": LONGEST_NGRAM, "is_public_pool": False}
    else:
        made["speculative_model_dir"] = DRAFT
    alone = {} if kind == eagle else {"disable_overlap_scheduler": True}
    return {"speculative_config": made, **alone}


def _expert_sizes(target: Target) -> dict[str, int]:
    mapping = target.mapping
    if mapping.moe_ep_size == 1:
        return {}
    return {"moe_expert_parallel_size": mapping.moe_ep_size, "moe_tensor_parallel_size": mapping.moe_tp_size}


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Link the folder and write llm_args.yaml."""
    return hf_engine.lay_out(checkpoint, out, rendered(build, target)), {}


def native_server(
    engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
) -> NativeServer:
    """`trtllm-serve` with the engine's settings file; it calls the model by the name of its folder. Raises UsageError.

    Releases before 1.3 know the option of the file only by this name, which 1.3 still takes.
    """
    if len(names) > 1:
        raise UsageError("trtllm-serve calls a model by one name", remedy="give --served-model-name once")
    if (engine / DRAFT).is_dir():
        raise UsageError(
            "trtllm-serve does not find the engine's draft model",
            why="it takes the path in the settings file from its own folder on",
            remedy="serve it with --front triton",
        )
    program = "trtllm-serve"
    settings = ("--backend", "pytorch", "--extra_llm_api_options", str(engine / FILE), "--tokenizer", str(tokenizer))
    return NativeServer(
        program=program,
        command=(str(engine), *settings, "--host", host, "--port", str(port)),
        in_image=True,
        environment={},
    )
