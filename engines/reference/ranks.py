"""How the parts of a tensor-parallel model come together: in one process that holds all of them, or over NCCL.

Both compute the same: what ranks hold in parts is added up in the type it was computed in, and only then joins the
hidden state, as TensorRT-LLM's all-reduce has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed


class Ranks(Protocol):
    """The tensor-parallel ranks, seen from a process that holds the parts of some of them.

    held  which ranks' parts this process has, in order
    """

    @property
    def held(self) -> range: ...

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over all ranks. `parts` are those of the ranks held, of one shape, and may be written to."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """All ranks' parts side by side in the last dimension."""


class Together:
    """All of `size` ranks in this process."""

    def __init__(self, size: int = 1) -> None:
        self.held = range(size)

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-1)


class Apart:
    """Rank `rank` of `size`, one in each process of torch's default process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.held = range(rank, rank + 1)
        self._size = size

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        part = part.contiguous()
        torch.distributed.all_reduce(part)
        return part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        torch.distributed.all_gather(gathered, part.contiguous())
        return torch.cat(gathered, dim=-1)
