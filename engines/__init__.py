"""Engines from model weights. Only this package may import torch, and only in child processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from trtpipe.engines.backends.base import EngineBackend

# runtime name -> module that implements `EngineBackend`, imported on demand
BACKENDS = {
    "reference": "trtpipe.engines.backends.reference",
    "tensorrt_llm": "trtpipe.engines.backends.tensorrt_llm",
    "trtllm_pytorch": "trtpipe.engines.backends.trtllm_pytorch",
    "vllm": "trtpipe.engines.backends.vllm",
}


def load_backend(runtime: str) -> EngineBackend:
    return cast("EngineBackend", importlib.import_module(BACKENDS[runtime]))
