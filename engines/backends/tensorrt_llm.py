"""Backend of the TensorRT-LLM runtime: trtllm-build compiles a TensorRT-LLM checkpoint on an NVIDIA host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines import trtllm_options
from trtpipe.engines.backends.base import NativeServer, ServedBy, Target, require_form, require_speculation
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.trtllm_build import build, rendered, tool_versions
from trtpipe.engines.trtllm_options import SETTINGS

__all__ = ["SETTINGS", "build", "rendered", "tool_versions"]

FORM = "trtllm"
COMPILED = True
ANYWHERE = False
ON_CPU = False
SERVED_BY = ServedBy.TENSORRTLLM
PROCESS = ""
NEEDS = NEEDS_ON_CPU = None
SEQUENCES_PER_STUB = None
OLD_GPUS = ""
WEIGHT_ONLY: tuple[QuantAlgo, ...] = ()
MORE_SMS: dict[QuantAlgo, tuple[int, ...]] = {}
READS: dict[str, tuple[QuantAlgo | None, ...]] = {}
ONE_NODE = ""
NOTICE = "engines end with TensorRT-LLM 1.2: `trtpipe migrate` makes the same service of the LLM API or vLLM"
FIXED: dict[str, tuple[Any, str]] = {}
MEANS: dict[str, str] = {}
SPECULATES = ("draft_tokens_external", "lookahead_decoding")
ARRAYS = True
ALL_STAGES = False
# Its builds fail for `dynamic` without alpha and for kinds that it does not know, and they scale nothing for `longrope`
# where the checkpoint has no tables of it (layers/attention.py).
ROTARY: tuple[str, ...] = ("linear", "llama3", "yarn")
LENGTH_AS_STATED: dict[str, str] = {}
SAME_ADAPTERS = "TensorRT-LLM's C++ backend loads a folder of adapters when it starts"


def runs_on(target: Target, sms: tuple[int, ...]) -> tuple[int, ...] | None:
    """See EngineBackend.runs_on: what is compiled for one runs on no other."""
    return None if target.gpu.sm is None else (target.gpu.sm,)


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    target.toolchain.require_runtime("tensorrt_llm")
    require_speculation(build, "tensorrt_llm")
    require_form("tensorrt_llm", target)
    return trtllm_options.resolve(build, target)


def native_server(
    engine: Path, tokenizer: Path, *, host: str, port: int, names: tuple[str, ...], on_cpu: bool
) -> NativeServer:
    """Raises UsageError: engines are served by Triton."""
    raise UsageError(
        "compiled engines are served by Triton alone",
        why="releases of trtllm-serve take engines by different options, and it ends with them",
        remedy="serve it with --front triton",
    )
