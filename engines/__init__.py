"""Weights in, engine out. The only package that may touch torch, and it does so in child processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from trtpipe.engines.backends.base import EngineBackend

# runtime name -> module that offers what `EngineBackend` asks for, imported on demand
BACKENDS = {
    "reference": "trtpipe.engines.backends.reference",
    "tensorrt_llm": "trtpipe.engines.backends.tensorrt_llm",
    "trtllm_pytorch": "trtpipe.engines.backends.trtllm_pytorch",
    "vllm": "trtpipe.engines.backends.vllm",
}


def load_backend(runtime: str) -> EngineBackend:
    return cast("EngineBackend", importlib.import_module(BACKENDS[runtime]))
