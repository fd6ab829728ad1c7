"""Collective operations of a tensor-parallel model: in one process that holds all ranks, or over NCCL.

Both give the same results: the ranks' partial results are summed in the compute type, and the sum is then added to
the hidden state, as with TensorRT-LLM's all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed


class Ranks(Protocol):
    """Collective operations over the tensor-parallel ranks, for a process that holds some of them.

    held  the ranks of this process, in order
    """

    @property
    def held(self) -> range: ...

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum over all ranks. `parts` are the tensors of the ranks held, of one shape, and may be overwritten."""

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Concatenation of all ranks' parts along the last dimension."""


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
