"""Memory-mapped tensors of safetensors files as torch tensors."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch

from trtpipe.engines.hf.folder import LocatedTensor

STORED_DTYPE = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class MappedTensors(Mapping[str, torch.Tensor]):
    """Tensors of safetensors files by name, in their stored type; on a CPU they share the page cache's memory."""

    def __init__(self, located: Mapping[str, LocatedTensor], device: torch.device) -> None:
        self._located = located
        self._device = device
        self._files = {path: _map(path) for path in {tensor.path for tensor in located.values()}}

    def __getitem__(self, name: str) -> torch.Tensor:
        entry, data = self._located[name].entry, self._files[self._located[name].path]
        flat = torch.frombuffer(data, dtype=STORED_DTYPE[entry.dtype], count=prod(entry.shape), offset=entry.offset)
        return flat.view(entry.shape).to(self._device)

    # Overridden, because the base class would create a tensor to test whether it exists.
    def __contains__(self, name: object) -> bool:
        return name in self._located

    def __iter__(self) -> Iterator[str]:
        return iter(self._located)

    def __len__(self) -> int:
        return len(self._located)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Copy on write, because torch warns of read-only memory; nothing writes to it.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
