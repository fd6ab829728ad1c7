"""Device of a worker's tensors, and the error message for a lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trtpipe.engines.errors import HostError


def find_device(name: str) -> torch.device:
    """Find the device for `auto`, `cpu` or `cuda`. Raises HostError for a CUDA device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise HostError("torch finds no CUDA device", remedy="use --device cpu, or install torch for this GPU's driver")
    return torch.device(name)


@contextmanager
def named_memory_errors(device: torch.device, where: list[str], remedy: str) -> Iterator[None]:
    """Turn a lack of memory into a HostError that names `where[0]`, which the `with` block keeps up to date."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        # torch raises a bare RuntimeError when the host's memory is full.
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise HostError(
            f"{'GPU' if device.type == 'cuda' else 'host'} memory ran out while {where[0]}",
            why=(str(error).splitlines() or [""])[0],
            remedy=remedy,
        ) from None
