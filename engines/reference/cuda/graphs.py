"""CUDA graphs of steps that only decode, because a GPU starts recorded kernels faster than a CPU can launch them.

A graph has one batch size and one width of block tables. A step is padded to the next size; padding rows and blocks
refer to a spare block that belongs to no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trtpipe.engines.reference.fused import recorded

# Least number of tokens of a block table: a graph for every length of a short sequence would cost more than it saves.
MIN_TOKENS = 256


class Decode(NamedTuple):
    """Inputs of a step with one token of each of n requests, on the device; int64.

    ids        [n] token ids
    positions  [n] positions of the tokens in their sequences
    slots      [n] slots of the tokens' keys and values in the pool
    tables     [n * width] blocks of each request, in the order of its tokens
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor


class _Recorded:
    """A CUDA graph with its input tensors and its output tensor."""

    def __init__(
        self, run: Callable[[Decode], torch.Tensor], rows: int, width: int, pool: Any, step: torch.Tensor
    ) -> None:
        self._inputs = step.cuda()
        inputs = Decode(*self._inputs.split([rows, rows, rows, rows * width]))
        # Warm-up: libraries select and set up kernels at the first use of a size, which cannot be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), recorded():
            for _ in range(2):
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may call the driver during the capture.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"), recorded():
            self._output = run(inputs)

    def replay(self, step: torch.Tensor) -> torch.Tensor:
        self._inputs.copy_(step, non_blocking=True)
        self._graph.replay()
        return self._output


class Graphs:
    """Records `run` at the first use of each size. Block `spare` belongs to no request."""

    def __init__(self, run: Callable[[Decode], torch.Tensor], tokens_per_block: int, spare: int) -> None:
        self._run = run
        self._block = tokens_per_block
        self._spare = spare
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        # Graphs share their memory: no two run at once, and each graph's output is used before the next replay.
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def replay(self, ids: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits [n, vocab_size] of tokens `ids` at `positions` of sequences in `blocks`; valid until the next call."""
        step = fill_up(ids, positions, blocks, self._block, self._spare)
        rows = len(step.ids)
        key = rows, len(step.tables) // rows
        together = torch.cat(step)
        if key not in self._recorded:
            self._recorded[key] = _Recorded(self._run, *key, self._pool, together)
        return self._recorded[key].replay(together.pin_memory())[: len(ids)]

    def forget(self) -> None:
        """Delete all recorded graphs."""
        self._recorded.clear()


def fill_up(
    ids: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], tokens_per_block: int, spare: int
) -> Decode:
    """Pad a step to a size of `size_for`: padding rows, and padding blocks of each row, refer to `spare`."""
    missing = size_for(len(ids)) - len(ids)
    needed = [position // tokens_per_block + 1 for position in positions]
    width = max(size_for(max(needed)), -(-MIN_TOKENS // tokens_per_block))
    tables: list[int] = []
    slots: list[int] = []
    for own, held, position in zip(blocks, needed, positions, strict=True):
        tables += own[:held]
        tables += [spare] * (width - held)
        slots.append(own[held - 1] * tokens_per_block + position % tokens_per_block)
    return Decode(
        torch.tensor([*ids, *[0] * missing]),
        torch.tensor([*positions, *[0] * missing]),
        torch.tensor([*slots, *[spare * tokens_per_block] * missing]),
        torch.tensor([*tables, *[spare] * (missing * width)]),
    )


def size_for(count: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, .. that is at least `count`."""
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if count <= size * 3 // 4 else size
