"""Engines from model weights. Only this package may import torch, and only in child processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from trtpipe.engines.errors import ArtefactRefused

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
    """Raises ArtefactRefused for a runtime that is not known: an engine from elsewhere may name any."""
    if runtime not in BACKENDS:
        raise ArtefactRefused(
            f"the runtime '{runtime}' is not known", why=f"this trtpipe has {', '.join(BACKENDS)}",
            remedy="use the version of trtpipe that built the engine",
        )  # fmt: skip
    return cast("EngineBackend", importlib.import_module(BACKENDS[runtime]))


def find_backend(runtime: str) -> EngineBackend | None:
    """The backend of the runtime that an engine from elsewhere names; None for one that is not known here."""
    return load_backend(runtime) if runtime in BACKENDS else None
