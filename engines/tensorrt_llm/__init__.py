"""The TensorRT-LLM backend: checkpoint format, its writer, and engines built by trtllm-build on an NVIDIA host."""

from __future__ import annotations

from engines.tensorrt_llm.build import build, check, tool_versions

__all__ = ["build", "check", "tool_versions"]
