"""Weights in, engine out. The only package that may touch torch, and it does so in child processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from engines.backend import EngineBackend

# runtime name -> module that offers what `EngineBackend` asks for, imported on demand
BACKENDS = {
    "reference": "engines.reference",
    "tensorrt_llm": "engines.tensorrt_llm",
    "trtllm_pytorch": "engines.trtllm_pytorch",
    "vllm": "engines.vllm",
}


def load_backend(runtime: str) -> EngineBackend:
    return cast("EngineBackend", importlib.import_module(BACKENDS[runtime]))
