"""Backend of the TensorRT-LLM runtime: trtllm-build compiles a TensorRT-LLM checkpoint on an NVIDIA host."""

from __future__ import annotations

from pathlib import Path

from trtpipe.engines import trtllm_options
from trtpipe.engines.backends.base import NativeServer, ServedBy, Target
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.trtllm_build import build, rendered, tool_versions
from trtpipe.engines.trtllm_options import SETTINGS

__all__ = ["SETTINGS", "build", "rendered", "tool_versions"]

FORM = "trtllm"
COMPILED = True
ANYWHERE = False
ON_CPU = False
SERVED_BY = ServedBy.TENSORRTLLM
PROCESS = ""
SEQUENCES_PER_STUB = None
ATTENTION_WINDOW = True
ONE_NODE = ""


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    target.toolchain.require_runtime("tensorrt_llm")
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
