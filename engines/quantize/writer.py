"""safetensors files whose layout is known before the first tensor comes, filled in any order.

Each file is written under its final name in a folder nobody reads yet. Tensors may come from any device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from trtpipe.engines.checkpoint.layout import TensorPlan
from trtpipe.engines.files import pwrite_all
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, header_bytes

# On the way from a GPU to a file; small enough to stay in the cores' caches between the two copies.
STAGING_BYTES = 16 << 20


@dataclass(frozen=True)
class _Slot:
    """Where a piece of a tensor goes: rows and columns of it, to a position in a file."""

    file: int
    position: int
    rows: tuple[int, int]
    cols: tuple[int, int] | None


class Writer:
    """Cuts tensors into the pieces that plans ask for. Use as a context manager.

    dtype  safetensors type of tensors whose plan names none
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._slots: dict[str, list[_Slot]] = {}
        self._stack = ExitStack()
        self._staging: torch.Tensor | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def missing(self) -> list[str]:
        """Tensors that have not come yet."""
        return sorted(self._slots)

    def add_file(self, path: Path, plans: Iterable[TensorPlan]) -> None:
        """Create a file for the tensors of `plans`, wider types first so that each lies aligned."""
        typed = sorted(((plan, plan.dtype or self._dtype) for plan in plans), key=lambda pair: -ITEMSIZE[pair[1]])
        header, offsets = header_bytes((plan.name, dtype, plan.shape) for plan, dtype in typed)
        size = sum(prod(plan.shape) * ITEMSIZE[dtype] for plan, dtype in typed)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._stack.callback(os.close, file)
        # Reserving the space first turns a full disk into an error before the work, not after it.
        os.posix_fallocate(file, 0, len(header) + size)
        pwrite_all(file, header, 0)
        for plan, dtype in typed:
            position = offsets[plan.name]
            for piece in plan.pieces:
                self._slots.setdefault(piece.source, []).append(_Slot(file, position, piece.rows, piece.cols))
                position += piece.elements(plan.shape or (1,)) * ITEMSIZE[dtype]

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write every piece of the tensor `name` that a plan asks for: of the scalars of fused linears only one is."""
        for slot in self._slots.pop(name, ()):
            part = tensor[slice(*slot.rows)] if tensor.dim() else tensor
            if slot.cols is not None:
                part = part[:, slice(*slot.cols)]
            self._write_bytes(slot.file, part.contiguous().view(-1).view(torch.uint8), slot.position)

    def _write_bytes(self, file: int, data: torch.Tensor, position: int) -> None:
        if data.device.type == "cpu":
            pwrite_all(file, data.numpy().data, position)
            return
        if self._staging is None:
            # Copies into pages the driver has pinned are some thirty times as fast as into fresh ones.
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(data), STAGING_BYTES):
            part = self._staging[: min(STAGING_BYTES, len(data) - start)]
            part.copy_(data[start : start + STAGING_BYTES])
            pwrite_all(file, part.numpy().data, position + start)
