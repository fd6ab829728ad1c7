"""Collective operations of a tensor-parallel model: in one process that holds all ranks, or over NCCL.

Both give the same results: the ranks' partial results are summed in the compute type, and the sum is then added to
the hidden state, as with TensorRT-LLM's all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed

# Sums of up to so many bytes are made by the GPUs in each other's memory; NCCL is faster for larger ones.
_SHARED_BYTES = 8 << 20
# Two ranks make sums of at least so many bytes so, for NCCL is faster for smaller ones too.
_NCCL_BYTES_OF_TWO = 1 << 20
# Sums for which a rank reads at most so many bytes of the others are read whole by every rank. Of larger ones each rank
# adds up a part.
_ONE_SHOT_BYTES = 1 << 20
# Sums in shared memory are made of whole words of so many bytes.
_WORD = 16
# Types that torch's kernels for shared memory add up, and numbers of ranks that they are made for.
_SUMMED, _KERNEL_RANKS = (torch.bfloat16, torch.float32), (2, 4, 8)


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

    Where every rank has a GPU of its own that reads the memory of the others, they make sums there, where that
    takes less time than NCCL (docs/measurements/h100-x4.md), and in the order of the ranks, as in one process. NCCL has
    an order of its own, which makes no difference for two ranks.
    """

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.held = range(rank, rank + 1)
        self._size = size
        self._shared: torch.Tensor | None = None
        group = torch.distributed.group.WORLD
        if group is not None and dtype in _SUMMED and size in _KERNEL_RANKS and _peers(size):
            # Imported here: it imports torch's tracing, which takes a second.
            from torch.distributed import _symmetric_memory

            self._shared = _symmetric_memory.empty(
                _SHARED_BYTES // dtype.itemsize, dtype=dtype, device=torch.device("cuda")
            )
            _symmetric_memory.rendezvous(self._shared, group)
            self._group = group.group_name

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        part = part.contiguous()
        fits = least_shared(self._size) <= part.nbytes <= _SHARED_BYTES and part.nbytes % (_WORD * self._size) == 0
        if self._shared is None or not fits:
            torch.distributed.all_reduce(part)
            return part
        shared, flat = self._shared[: part.numel()], part.view(-1)
        if part.nbytes * (self._size - 1) <= _ONE_SHOT_BYTES:
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, flat, "sum", self._group, flat)
        else:
            shared.copy_(flat)
            torch.ops.symm_mem.two_shot_all_reduce_out(shared, "sum", self._group, flat)
        return part

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        (part,) = parts
        gathered = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        torch.distributed.all_gather(gathered, part.contiguous())
        return torch.cat(gathered, dim=-1)


def least_shared(size: int) -> int:
    """Least bytes of a sum of `size` ranks that is made in shared memory."""
    return _NCCL_BYTES_OF_TWO if size == 2 else 0


def _peers(size: int) -> bool:
    """Whether each rank of the process group has a GPU of its own with peer access to the others'."""
    if torch.distributed.get_backend() != "nccl" or torch.cuda.device_count() < size:
        return False
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    return all(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
