"""Backend of the reference runtime: the engine is the TensorRT-LLM checkpoint itself, executed by PyTorch anywhere.

It runs exactly the bytes that trtllm-build would compile, so that a wrong split or name shows on a laptop.
It is not TensorRT-LLM, and its speed says nothing about TensorRT-LLM's speed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import (
    NativeServer,
    ServedBy,
    Target,
    Workshop,
    refuse_others,
    require_form,
    require_speculation,
)
from trtpipe.engines.base import Checkpoint, Engine
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.layout import rank_file
from trtpipe.engines.errors import UsageError
from trtpipe.engines.files import place, write_json
from trtpipe.engines.json_input import read_json
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, NGRAM
from trtpipe.engines.toolchain import Toolchain

FORM = "trtllm"
COMPILED = False
ANYWHERE = True
ON_CPU = True
SERVED_BY = ServedBy.ENGINE_PROCESS
PROCESS = "trtpipe.engines.reference.runtime"
NEEDS = NEEDS_ON_CPU = None
SEQUENCES_PER_STUB = None
OLD_GPUS = "it has been tried on SM80 and newer alone"
WEIGHT_ONLY: tuple[QuantAlgo, ...] = ()
MORE_SMS: dict[QuantAlgo, tuple[int, ...]] = {}
READS: dict[str, tuple[QuantAlgo | None, ...]] = {}
ONE_NODE = ""
NOTICE = ""
FIXED: dict[str, tuple[Any, str]] = {
    "serving.kv_cache_host_memory_bytes": (None, "its KV cache is in the memory of one device"),
    "serving.max_attention_window_size": (None, "each layer has the window of the model's config.json"),
}
MEANS: dict[str, str] = {}
# EAGLE-3 heads read the hidden states of layers, which the model does not give.
SPECULATES = (NGRAM, DRAFT_MODEL)
ARRAYS = False
ALL_STAGES = False
ROTARY: tuple[str, ...] = ("linear", "llama3", "yarn", "dynamic", "longrope")
# Beyond it the angles would change, and cached keys keep theirs (engines/reference/rope.py).
LENGTH_AS_STATED: dict[str, str] = {
    "dynamic": "max_position_embeddings",
    "longrope": "original_max_position_embeddings",
}
SAME_ADAPTERS = ""
SETTINGS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block")
# `version` in the engine's config.json; increase it when the runtime reads engines differently.
VERSION = "reference-1"


def tool_versions(toolchain: Toolchain) -> dict[str, str]:
    return {"reference": VERSION}


def runs_on(target: Target, sms: tuple[int, ...]) -> tuple[int, ...] | None:
    """See EngineBackend.runs_on."""
    return None


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    require_speculation(build, "reference")
    refuse_others(build, SETTINGS, "reference", "it is a choice of trtllm-build, and nothing is compiled here")
    require_form("reference", target)
    # The reference runtime always reads a paged cache; this build setting says so.
    return replace(build, use_paged_context_fmha=True), {}


def rendered(build: BuildConfig, target: Target) -> dict[str, str]:
    """See EngineBackend.rendered: an engine of this runtime has no settings file."""
    return {}


def build(
    checkpoint: Checkpoint, out: Path, build: BuildConfig, target: Target, workshop: Workshop
) -> tuple[Engine, dict[str, str]]:
    """Lay out the checkpoint as an engine folder: link the rank files, compile nothing."""
    config = read_config(checkpoint.path)
    for rank in range(config.mapping.world_size):
        place(rank_file(checkpoint.path, rank), rank_file(out, rank))
    write_json(
        out / "config.json",
        {
            "version": VERSION,
            "pretrained_config": read_json(checkpoint.path / "config.json", "checkpoint config"),
            "build_config": {
                "max_batch_size": build.max_batch_size,
                "max_input_len": build.max_input_len,
                "max_seq_len": build.max_seq_len,
                "max_num_tokens": build.max_num_tokens,
                "max_beam_width": build.max_beam_width,
                "kv_cache_type": "paged",
                **_speculation(build),
                "plugin_config": {
                    "paged_kv_cache": True,
                    "remove_input_padding": True,
                    "use_paged_context_fmha": True,
                    "tokens_per_block": build.tokens_per_block,
                    **({"lora_plugin": build.lora_plugin} if build.takes_adapters else {}),
                },
            },
        },
    )
    return Engine(path=out), {}


def _speculation(build: BuildConfig) -> dict[str, Any]:
    if not build.speculates:
        return {}
    return {
        "speculative_decoding_mode": build.speculative_decoding_mode,
        "max_draft_len": build.max_draft_len,
        "speculative_model": DRAFT if build.speculative_model else None,
    }


def native_server(
    engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
) -> NativeServer:
    """Raises UsageError: there is none."""
    raise UsageError(
        "the reference runtime has no server of its own",
        why="it is a library, which Triton's Python backend runs",
        remedy="serve it with --front triton",
    )
