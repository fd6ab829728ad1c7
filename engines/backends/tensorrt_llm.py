"""Backend of the TensorRT-LLM runtime: trtllm-build compiles a TensorRT-LLM checkpoint on an NVIDIA host."""

from __future__ import annotations

from trtpipe.engines.trtllm_build import build, rendered, tool_versions
from trtpipe.engines.trtllm_options import SETTINGS, resolve

FORM = "trtllm"
COMPILED = True
ANYWHERE = False

__all__ = ["ANYWHERE", "COMPILED", "FORM", "SETTINGS", "build", "rendered", "resolve", "tool_versions"]
