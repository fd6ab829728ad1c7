"""Backend of TensorRT-LLM's LLM API (PyTorch, 1.0 and newer): the engine is a Hugging Face folder and its arguments.

Nothing is compiled. Upstream develops this path further. `trtllm-serve --config` accepts llm_args.yaml unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtpipe.engines.backends.base import NativeServer, ServedBy, Target, Workshop, refuse_others
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo
from trtpipe.engines.toolchain import Toolchain

FORM = "hf"
COMPILED = False
ANYWHERE = False
ON_CPU = False
SERVED_BY = ServedBy.LLM_API
PROCESS = ""
SEQUENCES_PER_STUB = None
ATTENTION_WINDOW = True
ONE_NODE = "on several, the LLM API wants trtllm-llmapi-launch under mpirun, which is not written here"
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")
FILE = "llm_args.yaml"


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"tensorrt_llm": toolchain.name}


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    target.toolchain.require_runtime("trtllm_pytorch")
    refuse_others(build, SETTINGS, "trtllm_pytorch", "it is a choice of trtllm-build, and nothing is compiled here")
    if target.quantization.quant_algo is QuantAlgo.W8A8_SQ_PER_CHANNEL:
        raise UsageError(
            "the LLM API runs no INT8 SmoothQuant",
            why="its PyTorch backend has no kernel for W8A8_SQ_PER_CHANNEL",
            remedy="use --runtime tensorrt_llm, or another --dtype",
        )
    if target.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        raise UsageError(
            "the LLM API has no INT8 KV cache",
            why="a Hugging Face folder has no place for its scales",
            remedy="use --runtime tensorrt_llm, or --kv-cache fp8 or none",
        )
    # The attention of the PyTorch backend always reads a paged cache.
    return replace(build, use_paged_context_fmha=True), {}


def rendered(build: BuildConfig, target: Target) -> dict[str, str]:
    """See EngineBackend.rendered."""
    cache = target.quantization.kv_cache_quant_algo
    settings = {
        "backend": "pytorch",
        "tensor_parallel_size": target.mapping.tp_size,
        "pipeline_parallel_size": target.mapping.pp_size,
        "max_batch_size": build.max_batch_size,
        "max_input_len": build.max_input_len,
        "max_seq_len": build.max_seq_len,
        "max_num_tokens": build.max_num_tokens,
        "max_beam_width": build.max_beam_width,
        "kv_cache_config": {
            "dtype": "fp8" if cache is KvCacheQuantAlgo.FP8 else "auto",
            "tokens_per_block": build.tokens_per_block,
        },
    }
    return {FILE: hf_engine.settings_text(settings)}


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
    program = "trtllm-serve"
    settings = ("--backend", "pytorch", "--extra_llm_api_options", str(engine / FILE), "--tokenizer", str(tokenizer))
    return NativeServer(
        program=program,
        command=(str(engine), *settings, "--host", host, "--port", str(port)),
        in_image=True,
        environment={},
    )
