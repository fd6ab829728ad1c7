"""Collective operations of a tensor-parallel model: in one process that holds all ranks, or over NCCL.

Both give the same results: the ranks' partial results are summed in the compute type, and the sum is then added to
the hidden state, as with TensorRT-LLM's all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed
from torch.distributed import _symmetric_memory

# Sums of so many bytes are made by the GPUs in each other's memory; NCCL is faster for smaller and for larger ones.
_SHARED_BYTES = range(1 << 20, (8 << 20) + 1)


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
    """Rank `rank` of `size`, one in each process of torch's default process group; its tensors are of `dtype`.

    Where every rank has a GPU of its own that reads the memory of the others, sums of 2 MB take half of NCCL's time.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.held = range(rank, rank + 1)
        self._size = size
        self._shared: torch.Tensor | None = None
        group = torch.distributed.group.WORLD
        if group is not None and _peers(size):
            self._shared = _symmetric_memory.empty(
                _SHARED_BYTES.stop // dtype.itemsize, dtype=dtype, device=torch.device("cuda")
            )
            _symmetric_memory.rendezvous(self._shared, group)
            self._group = group.group_name

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        part = part.contiguous()
        # Each rank adds up a part of the sum, whose length must be a multiple of 16 bytes.
        if self._shared is not None and part.nbytes in _SHARED_BYTES and part.nbytes % (16 * self._size) == 0:
            shared = self._shared[: part.numel()]
            shared.copy_(part.view(-1))
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._group, part.view(-1))
            return part
        torch.distributed.all_reduce(part)
        return part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        torch.distributed.all_gather(gathered, part.contiguous())
        return torch.cat(gathered, dim=-1)


def _peers(size: int) -> bool:
    """Whether each rank of the process group has a GPU of its own with peer access to the others'."""
    if torch.distributed.get_backend() != "nccl" or torch.cuda.device_count() < size:
        return False
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
