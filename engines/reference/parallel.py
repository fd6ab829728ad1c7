"""Tensor-parallel model with one process and one device per rank; torch.distributed combines the ranks' results.

Rank 0 is in the process of the runtime. It plans, sends the spans of every step to the other ranks, and has the logits;
the other ranks hold their weights and part of the KV cache, and end with rank 0. They use NCCL on GPUs and gloo on a
CPU. This module is also the program of the other ranks; its argument is the file descriptor of the pipe from rank 0.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from trtpipe.engines.errors import HostError, TrtpipeError
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.process import python_command
from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.lora import AdapterChange
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.ranks import Apart
from trtpipe.engines.reference.weights import Weights, load_weights

LOCALHOST = "127.0.0.1"


class _Part(NamedTuple):
    """Message to a rank: weights that it loads, its rank, and the port of the process group's store."""

    folder: Path
    config: CheckpointConfig
    dtype: torch.dtype
    device: str
    rank: int
    port: int


class ParallelModel:
    """`Model` over the tp_ranks of the checkpoint in `folder`, on devices cuda:0 to cuda:tp_size-1 or the CPU.

    With fewer GPUs, ranks share them, which NCCL supports from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1; this is
    slow, since the ranks take turns.

    `num_blocks` is called after the weights are loaded. Raises as `load_weights` does, and HostError when a rank does
    not start.
    """

    def __init__(
        self, folder: Path, config: CheckpointConfig, dtype: torch.dtype, device: torch.device, *,
        max_positions: int, tokens_per_block: int, num_blocks: Callable[[], int],
    ) -> None:  # fmt: skip
        size = config.mapping.tp_size
        store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        for rank in range(1, size):
            ours, theirs = Pipe()
            command = [*python_command("trtpipe.engines.reference.parallel"), str(theirs.fileno())]
            self._processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]))
            theirs.close()
            ours.send(_Part(folder, config, dtype, _device(device.type, rank), rank, store.port))
            self._pipes.append(ours)
        try:
            weights = _join(folder, config, dtype, torch.device(_device(device.type, 0)), 0, store)
            self._hear()
            # When a rank has died, the others wait for its result in a call that never returns.
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
            self.num_blocks = num_blocks()
            sizes = {
                "max_positions": max_positions, "tokens_per_block": tokens_per_block, "num_blocks": self.num_blocks,
            }  # fmt: skip
            self._tell(sizes)
            self._model = Model(config, weights, ranks=Apart(0, size, dtype), **sizes)
            self._hear()
        except BaseException:
            self._end()
            raise

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """See Model.forward."""
        try:
            self._tell(spans)
            return self._model.forward(spans)
        except (OSError, RuntimeError):
            # A pipe or a collective fails a moment before the end of the other rank's process can be seen.
            self._watcher.join(5)
            raise

    def load_adapter(self, number: int, folder: Path) -> None:
        """See Model.load_adapter: in all ranks, or in none."""
        self._tell(AdapterChange(number, folder))
        failures: list[TrtpipeError] = []
        try:
            self._model.load_adapter(number, folder)
        except TrtpipeError as error:
            failures.append(error)
        failures += [answer for pipe in self._pipes if (answer := pipe.recv()) is not None]
        if failures:
            self.drop_adapter(number)
            raise failures[0]

    def drop_adapter(self, number: int) -> None:
        """See Model.drop_adapter."""
        self._tell(AdapterChange(number, None))
        self._model.drop_adapter(number)

    def close(self) -> None:
        """End the other ranks."""
        self._model.close()
        self._end()

    def _end(self) -> None:
        self._closing = True
        for pipe in self._pipes:
            pipe.close()
        # Before waiting for the ranks, since NCCL ends a communicator only in all ranks at once.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for process in self._processes:
            process.wait()

    def _tell(self, what: Any) -> None:
        for pipe in self._pipes:
            pipe.send(what)

    def _hear(self) -> None:
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                error = pipe.recv()
            except EOFError:
                error = HostError(f"rank {rank} ended while it was loading", remedy="see the log above")
            if error is not None:
                raise error

    def _watch(self) -> None:
        select.select([os.pidfd_open(process.pid) for process in self._processes], [], [])
        if not self._closing:
            # Not to sys.stderr, which torch replaces for as long as it prints the traceback of a failed collective.
            os.write(2, b"a tensor-parallel rank has ended, and with it the engine\n")
            os._exit(1)


def _device(kind: str, rank: int) -> str:
    return f"cuda:{rank % torch.cuda.device_count()}" if kind == "cuda" else kind


def _join(
    folder: Path, config: CheckpointConfig, dtype: torch.dtype, device: torch.device, rank: int,
    store: Store,
) -> Weights:  # fmt: skip
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=config.mapping.tp_size)
    return load_weights(folder, config, dtype, device, [rank])


def follow(pipe: Connection) -> None:
    """Main loop of a rank other than 0: load the weights, then run each step that rank 0 sends, until rank 0 ends."""
    part: _Part = pipe.recv()
    # Threads of two ranks on the same cores would slow each other down, and a rank on a GPU needs only one thread.
    torch.set_num_threads(max(1, torch.get_num_threads() // part.config.mapping.tp_size))
    try:
        store = TCPStore(LOCALHOST, part.port, is_master=False)
        device = torch.device(part.device)
        weights = _join(part.folder, part.config, part.dtype, device, part.rank, store)
        pipe.send(None)
        model = Model(
            part.config, weights, ranks=Apart(part.rank, part.config.mapping.tp_size, part.dtype), **pipe.recv()
        )
        pipe.send(None)
    except (TrtpipeError, RuntimeError) as error:
        pipe.send(error if isinstance(error, TrtpipeError) else HostError(f"rank {part.rank}: {error}"))
        return
    try:
        while True:
            message = pipe.recv()
            if not isinstance(message, AdapterChange):
                model.forward(message)
            elif message.folder is None:
                model.drop_adapter(message.number)
            else:
                pipe.send(_load(model, message.number, message.folder))
    except EOFError:
        model.close()
        torch.distributed.destroy_process_group()


def _load(model: Model, number: int, folder: Path) -> TrtpipeError | None:
    try:
        model.load_adapter(number, folder)
    except TrtpipeError as error:
        return error
    return None


if __name__ == "__main__":
    follow(Connection(int(sys.argv[1])))
