"""Steps that only decode, recorded as CUDA graphs: a GPU starts their kernels faster than a CPU can name them.

A graph is of one batch size and one width of block tables. Steps are filled up to the next size: the rows and blocks
that nobody asked for are those of a block that no request has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from trtpipe.engines.reference.cuda.fused import recorded

# Tokens that a table holds at least: a graph for every length of a short sequence would cost more than it saves.
MIN_TOKENS = 256


class Decode(NamedTuple):
    """n requests' next token each, on the device; int64.

    ids        [n] the tokens
    positions  [n] their places in their sequences
    slots      [n] where their keys and values go
    tables     [n * width] blocks of each request, in the order of its tokens
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor


class _Recorded:
    """A graph, the tensors it reads, and the one it writes."""

    def __init__(
        self, run: Callable[[Decode], torch.Tensor], rows: int, width: int, pool: Any, step: torch.Tensor
    ) -> None:
        self._inputs = step.cuda()
        inputs = Decode(*self._inputs.split([rows, rows, rows, rows * width]))
        # Libraries choose and set up what they run when they first meet a size, which cannot be recorded.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), recorded():
            for _ in range(2):
                run(inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: other threads, such as NCCL's watchdog, may go on asking the driver.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"), recorded():
            self._output = run(inputs)

    def replay(self, step: torch.Tensor) -> torch.Tensor:
        self._inputs.copy_(step, non_blocking=True)
        self._graph.replay()
        return self._output


class Graphs:
    """Records `run` for each size that comes up. Block `spare` is one that no request ever has."""

    def __init__(self, run: Callable[[Decode], torch.Tensor], tokens_per_block: int, spare: int) -> None:
        self._run = run
        self._block = tokens_per_block
        self._spare = spare
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        # Graphs share their memory: no two run at once, and what one gives is used before the next.
        self._pool = torch.cuda.graph_pool_handle()

    @torch.inference_mode()
    def replay(self, ids: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """[n, vocab_size], valid until the next call, for tokens `ids` at `positions` of sequences in `blocks`."""
        step = fill_up(ids, positions, blocks, self._block, self._spare)
        rows = len(step.ids)
        key = rows, len(step.tables) // rows
        together = torch.cat(step)
        if key not in self._recorded:
            self._recorded[key] = _Recorded(self._run, *key, self._pool, together)
        return self._recorded[key].replay(together.pin_memory())[: len(ids)]

    def forget(self) -> None:
        """Let all that is recorded go."""
        self._recorded.clear()


def fill_up(
    ids: Sequence[int], positions: Sequence[int], blocks: Sequence[Sequence[int]], tokens_per_block: int, spare: int
) -> Decode:
    """A step of a size that graphs are made for: further rows, and further blocks of each row, are `spare`."""
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
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, 24, .. that holds so many."""
    size = 1 << (count - 1).bit_length()
    return size * 3 // 4 if count <= size * 3 // 4 else size
