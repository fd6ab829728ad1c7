"""The TensorRT-LLM backend: checkpoint format, its writer, and engines built by trtllm-build on an NVIDIA host."""

from __future__ import annotations

from trtpipe.engines.trtllm_build import build, rendered, tool_versions
from trtpipe.engines.trtllm_options import SETTINGS, resolve

FORM = "trtllm"
COMPILED = True
ANYWHERE = False

__all__ = ["ANYWHERE", "COMPILED", "FORM", "SETTINGS", "build", "rendered", "resolve", "tool_versions"]
