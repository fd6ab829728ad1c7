"""Backend of the TensorRT-LLM runtime: trtllm-build compiles a TensorRT-LLM checkpoint on an NVIDIA host."""

from __future__ import annotations

from trtpipe.engines import trtllm_options
from trtpipe.engines.backends.base import ServedBy, Target
from trtpipe.engines.build_config import BuildConfig
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
ATTENTION_WINDOW = True
ONE_NODE = ""


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    target.toolchain.require_runtime("tensorrt_llm")
    return trtllm_options.resolve(build, target)
