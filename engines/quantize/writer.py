"""Writer of safetensors files whose layout is known in advance; tensors may be written in any order.

Each file is written under its final name, in a folder that is not read yet. Tensors may be on any device.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import pwrite_all, reserve
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, header_bytes
from trtpipe.engines.reference.mapped_tensors import STORED_DTYPE

_FLOATS = {torch.bfloat16, torch.float16, torch.float32}
# Staging buffer between a GPU and a file; small enough to stay in a core's cache between the two copies.
STAGING_BYTES = 16 << 20


@dataclass(frozen=True)
class _Slot:
    """Destination of a piece of a tensor: its rows and columns, its type, and a position in a file."""

    file: int
    position: int
    rows: tuple[int, int]
    cols: tuple[int, int] | None
    dtype: torch.dtype


class Writer:
    """Writes the pieces of tensors that the plans contain. Use as a context manager.

    dtype  safetensors type of tensors whose plan has none
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
        """Names of the tensors that have not been written yet."""
        return sorted(self._slots)

    def add_file(self, path: Path, plans: Iterable[TensorPlan]) -> None:
        """Create a file for the tensors of `plans`, wider types first so that each tensor is aligned."""
        typed = sorted(((plan, plan.dtype or self._dtype) for plan in plans), key=lambda pair: -ITEMSIZE[pair[1]])
        header, offsets = header_bytes((plan.name, dtype, plan.shape) for plan, dtype in typed)
        size = sum(prod(plan.shape) * ITEMSIZE[dtype] for plan, dtype in typed)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._stack.callback(os.close, file)
        # Reserving the space first makes a full disk fail before the work, not after it.
        reserve(file, len(header) + size)
        pwrite_all(file, header, 0)
        for plan, dtype in typed:
            position = offsets[plan.name]
            for piece in plan.pieces:
                self._slots.setdefault(piece.source, []).append(
                    _Slot(file, position, piece.rows, piece.cols, STORED_DTYPE[dtype])
                )
                position += piece.elements(plan.shape or (1,)) * ITEMSIZE[dtype]

    def write(self, name: str, tensor: torch.Tensor, *, calibrated: bool = False) -> None:
        """Write all planned pieces of the tensor `name`; of the scalars of fused linears only one is in a plan.

        A float tensor is cast to the type that is planned for it, codes are not. Raises InputDataError for a value that
        is then infinite or not a number.

        calibrated  whether calibration has made the tensor, and not the model's files alone
        """
        for slot in self._slots.pop(name, ()):
            part = tensor[slice(*slot.rows)] if tensor.dim() else tensor
            if slot.cols is not None:
                part = part[:, slice(*slot.cols)]
            if {part.dtype, slot.dtype} <= _FLOATS:
                part = part.to(slot.dtype)
            part = part.contiguous().view(-1)
            if not _all_finite(part):
                narrow = part.dtype is torch.float16
                if calibrated:
                    remedy = "calibrate with other samples, or download the model again"
                else:
                    remedy = "download the file again, or use another revision of the model"
                raise InputDataError(
                    f"tensor '{name}' holds a value that is infinite or not a number{' in float16' if narrow else ''}",
                    why="a model with it would answer nonsense",
                    remedy=f"use --dtype bfloat16, or {remedy}" if narrow else remedy,
                )
            self._write_bytes(slot.file, part.view(torch.uint8), slot.position)

    def _write_bytes(self, file: int, data: torch.Tensor, position: int) -> None:
        if data.device.type == "cpu":
            pwrite_all(file, data.numpy().data, position)
            return
        if self._staging is None:
            # Copies into pinned pages are some thirty times as fast as copies into fresh pages.
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        for start in range(0, len(data), STAGING_BYTES):
            part = self._staging[: min(STAGING_BYTES, len(data) - start)]
            part.copy_(data[start : start + STAGING_BYTES])
            pwrite_all(file, part.numpy().data, position + start)


def _all_finite(part: torch.Tensor) -> bool:
    """Whether every value of a vector is finite. The extremes take a tenth of the time of `torch.isfinite`."""
    if not part.numel():  # it has no extremes
        return True
    if part.dtype in _FLOATS:
        return all(math.isfinite(value) for value in torch.stack(torch.aminmax(part)).tolist())
    if part.dtype is torch.float8_e4m3fn:
        # It has no infinities, and two NaNs: 0x7f and 0xff.
        signed, unsigned = (torch.aminmax(part.view(kind)).max.item() for kind in (torch.int8, torch.uint8))
        return signed < 0x7F and unsigned < 0xFF
    return True
