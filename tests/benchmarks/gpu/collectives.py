"""What several GPUs do together, in the engine's environment: sums by size and way, and engines of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import loop
from tests.benchmarks.gpu.in_process import Reference
from tests.benchmarks.gpu.steps import compare_steps, decoded
from tests.support.paths import ROOT
from trtpipe.engines.reference.ranks import least_shared

# Bytes of a sum, and of those that GPUs make in each other's memory.
SIZES = [1 << power for power in range(10, 29, 2)]
MOST_SHARED = 8 << 20
# Sums in a recording, recordings that are timed, and numbers of a rank that are compared.
CALLS, REPLAYS, COMPARED = 20, 15, 1 << 16
# Tokens in the cache of the engines that are compared with one process.
TOKENS = 65536


def sums(ranks: int) -> dict[str, Any]:
    """Microseconds of a sum of bfloat16 over so many ranks, by way and bytes, recorded as CUDA graphs; and whether each
    way adds up in the order of the ranks, bit by bit."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513", "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-c", "from tests.benchmarks.gpu.collectives import rank; rank()"]
    started = [
        subprocess.Popen(command, cwd=ROOT, env={**environment, "RANK": str(number)}, stdout=subprocess.PIPE, text=True)
        for number in range(ranks)
    ]
    said = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("a rank failed")
    found: dict[str, Any] = json.loads(said[0].strip().rpartition("\n")[2])
    return found


def rank() -> None:
    """A rank of `sums`; rank 0 prints what was found."""
    import torch
    import torch.distributed as group
    from torch.distributed import _symmetric_memory

    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", number) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    group.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    ways: dict[str, tuple[int, Callable[[Any], None]]] = {"nccl": (SIZES[-1], group.all_reduce)}
    if cuda:
        world = group.group.WORLD
        assert world is not None
        shared = _symmetric_memory.empty(MOST_SHARED // 2, dtype=torch.bfloat16, device=device)
        _symmetric_memory.rendezvous(shared, world)

        def one_shot(part: Any) -> None:
            own = shared[: part.numel()]
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(own, part, "sum", world.group_name, part)

        def two_shot(part: Any) -> None:
            own = shared[: part.numel()]
            own.copy_(part)
            torch.ops.symm_mem.two_shot_all_reduce_out(own, "sum", world.group_name, part)

        ways |= {"one_shot": (MOST_SHARED, one_shot), "two_shot": (MOST_SHARED, two_shot)}
    found: dict[str, Any] = {"ranks": ranks, "in_order": {}}
    for name, (most, add) in ways.items():
        found["in_order"][name] = _in_order(torch, group, add, number, ranks, device)
        found[name] = {}
        for nbytes in SIZES:
            if nbytes <= most:
                part = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=device)
                found[name][str(nbytes)] = _microseconds(torch, add, part)
    group.barrier()
    group.destroy_process_group()
    if number == 0:
        print(json.dumps(found), flush=True)


def _in_order(torch: Any, group: Any, add: Callable[[Any], None], number: int, ranks: int, device: Any) -> bool:
    torch.manual_seed(number)
    part = torch.randn(COMPARED, device=device).bfloat16()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    group.all_gather(parts, part)
    expected = parts[0]
    for other in parts[1:]:
        expected = expected + other
    add(part)
    return bool(torch.equal(part, expected))


def _microseconds(torch: Any, add: Callable[[Any], None], part: Any) -> float:
    """Of a call: the median of recordings; without a GPU of plain calls."""
    for _ in range(3):
        add(part)
    if not part.is_cuda:
        began = time.perf_counter()
        add(part)
        return (time.perf_counter() - began) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            add(part)
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return float(np.median(times))


# A rank other than 0 that sums over NCCL alone.
FOLLOWER = """
import sys
from multiprocessing.connection import Connection
from trtpipe.engines.reference import parallel, ranks
ranks._peers = lambda size: False
parallel.follow(Connection(int(sys.argv[1])))
"""


def tensor_parallel(
    engine: str, levels: list[int], prompts: list[list[int]], new: int, together: bool, nccl: list[int], waves: int
) -> dict[str, Any]:
    """An engine of the reference runtime with a process and a GPU for each rank: tokens a second, and how much of that
    time the model takes, by requests in flight.

    prompts   their greedy answers are decoded twice, and with `together` by the same shards in one process as well
    together  whether one device holds them all
    nccl      requests in flight of a measurement without sums in shared memory
    waves     of a measurement
    """
    folder = Path(engine)
    settings: dict[str, Any] = {"enable_kv_cache_reuse": False, "apart": True}
    if together:
        settings["kv_cache_tokens"] = TOKENS
    apart = Reference(folder, **settings)
    said = decoded(apart, prompts, new, logits=True)
    out: dict[str, Any] = {"again": compare_steps(said, decoded(apart, prompts, new, logits=True))}
    out["in_process"] = _measured(apart, levels, waves)
    out["nccl_below"] = least_shared(apart.runtime.config.mapping.tp_size)
    _close(apart)
    del apart
    if together:
        one = Reference(folder, **{**settings, "apart": False})
        out["one_process"] = compare_steps(said, decoded(one, prompts, new, logits=True))
        del one
    if nccl:
        from trtpipe.engines.reference import parallel, ranks

        ranks._peers = lambda size: False
        setattr(parallel, "python_command", lambda module: [sys.executable, "-c", FOLLOWER])  # noqa: B010
        apart = Reference(folder, **settings)
        out["nccl"] = _measured(apart, nccl, waves)
        _close(apart)
    return out


def _close(engine: Reference) -> None:
    import torch

    engine.runtime.close()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _measured(engine: Reference, levels: list[int], waves: int) -> dict[str, dict[str, float]]:
    """`loop.measure`, with the share of its time that passes until a step's logits are there."""
    import torch

    model, spent = engine.runtime._model, [0.0]
    forward = model.forward

    def timed(spans: Any) -> Any:
        began = time.perf_counter()
        logits = forward(spans)
        if logits.is_cuda:
            torch.cuda.synchronize()
        spent[0] += time.perf_counter() - began
        return logits

    found: dict[str, dict[str, float]] = {}
    for level in levels:
        found[str(level)] = loop.waves(engine, level, waves=waves)
        print(level, found[str(level)], file=sys.stderr, flush=True)
        model.forward = timed  # type: ignore[method-assign]
        began, spent[0] = time.perf_counter(), 0.0
        loop.waves(engine, level, waves=1)  # with one that goes ahead
        found[str(level)]["model_share"] = spent[0] / (time.perf_counter() - began)
        model.forward = forward  # type: ignore[method-assign]
    return found
