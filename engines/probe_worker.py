"""Worker of `trtpipe probe`: measures this machine's GPUs with torch.

    python -m trtpipe.engines.probe_worker           writes one JSON object to stdout

Every figure is the best of several rounds, timed by CUDA events after a warm-up; a figure that the GPU or this torch
cannot provide is absent.

    bandwidth_gbs  copy of 1 GiB within the GPU, counting both read and written bytes
    tflops         products of n x n matrices and of a Llama's shapes: torch.matmul for bf16 and fp16, torch._int_mm for
                   int8, torch._scaled_mm for fp8
    host_gbs       copy of 1 GiB from pinned host memory
    launch_us      repeated launches of an empty kernel: the cost of each kernel of a step without CUDA graphs
    cpu_score      millions of additions per second of one Python thread
    nvlink_gbs     NCCL's bus bandwidth of an all-reduce of 256 MiB over all GPUs: bytes x 2 (n - 1) / n / seconds
    allreduce_us   time of an all-reduce of 16 KiB
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from trtpipe.engines.process import python_command

GIB = 2**30
# (m, n, k): two large squares, and the MLP of Llama 3 8B and 70B for a step of 4096 tokens.
SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 28672, 4096), (4096, 57344, 8192))
ROUNDS = 5
SMALL, LARGE = 16 * 1024, 256 * 2**20


def main() -> None:
    if "RANK" in os.environ:
        _rank()
        return
    import torch

    if not torch.cuda.is_available():
        print(json.dumps({"absent": f"torch {torch.__version__} finds no GPU"}))
        return
    found: dict[str, Any] = {
        "name": torch.cuda.get_device_name(0),
        "count": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cpu_score": cpu_score(),
        "bandwidth_gbs": bandwidth(torch),
        "host_gbs": host(torch),
        "launch_us": launch(torch),
        "tflops": products(torch),
    }
    if found["count"] > 1:
        found |= together(found["count"])
    print(json.dumps(found))


def cpu_score() -> float:
    """Additions of a plain Python loop, in millions per second; the best of three runs."""
    best = 0.0
    for _ in range(3):
        start, total = time.perf_counter(), 0
        for number in range(5_000_000):
            total += number
        best = max(best, 5 / (time.perf_counter() - start))
    return round(best, 1)


def bandwidth(torch: Any) -> float:
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return round(2 * GIB / _seconds(torch, lambda: target.copy_(source), 20) / 1e9, 1)


def host(torch: Any) -> float:
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    return round(GIB / _seconds(torch, lambda: target.copy_(source, non_blocking=True), 4) / 1e9, 1)


def launch(torch: Any) -> float:
    """Microseconds between two launches of a kernel that itself takes less."""
    small = torch.zeros(1, device="cuda")

    def many() -> None:
        for _ in range(1000):
            small.add_(1)

    many()
    torch.cuda.synchronize()
    start = time.perf_counter()
    many()
    torch.cuda.synchronize()
    return round((time.perf_counter() - start) * 1e3, 2)


def products(torch: Any) -> dict[str, float]:
    kinds: dict[str, Callable[[int, int, int], Callable[[], Any]]] = {
        "bf16": lambda m, n, k: _plain(torch, torch.bfloat16, m, n, k),
        "fp16": lambda m, n, k: _plain(torch, torch.float16, m, n, k),
        "int8": lambda m, n, k: _int8(torch, m, n, k),
        "fp8": lambda m, n, k: _fp8(torch, m, n, k),
    }
    out = {}
    for name, make in kinds.items():
        best = 0.0
        for m, n, k in SHAPES:
            try:
                seconds = _seconds(torch, make(m, n, k), 20)
            except (RuntimeError, AttributeError, NotImplementedError) as error:
                print(f"{name} {m} x {n} x {k}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            best = max(best, 2 * m * n * k / seconds / 1e12)
            torch.cuda.empty_cache()
        if best:
            out[name] = round(best, 1)
    return out


def together(count: int) -> dict[str, Any]:
    """Measure all-reduces over `count` GPUs, with one process of this module per GPU."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            python_command("trtpipe.engines.probe_worker"), stdout=subprocess.PIPE, text=True,
            env={**os.environ, **environment, "RANK": str(rank)},
        )
        for rank in range(count)
    ]  # fmt: skip
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        print("NCCL failed", file=sys.stderr)
        return {}
    return {"ranks": count, **json.loads(said[0])}


def _rank() -> None:
    import torch
    import torch.distributed as group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    group.init_process_group("nccl", device_id=torch.device("cuda", rank))
    large = torch.zeros(LARGE, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    small = torch.zeros(SMALL, dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    seconds = _seconds(torch, lambda: group.all_reduce(large), 10)
    latency = _seconds(torch, lambda: group.all_reduce(small), 200)
    if rank == 0:
        bus = LARGE * 2 * (count - 1) / count / seconds / 1e9
        print(json.dumps({"nvlink_gbs": round(bus, 1), "allreduce_us": round(latency * 1e6, 2)}))
    group.destroy_process_group()


def _seconds(torch: Any, work: Callable[[], Any], times: int) -> float:
    """Seconds of one call of `work`: the best of ROUNDS means over `times` consecutive calls."""
    work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            work()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3 / times)
    return best


def _plain(torch: Any, kind: Any, m: int, n: int, k: int) -> Callable[[], Any]:
    left, right = (torch.randn(shape, device="cuda", dtype=kind) for shape in ((m, k), (n, k)))
    out = torch.empty((m, n), device="cuda", dtype=kind)
    return lambda: torch.matmul(left, right.t(), out=out)


def _int8(torch: Any, m: int, n: int, k: int) -> Callable[[], Any]:
    left, right = (torch.randint(-127, 127, shape, device="cuda", dtype=torch.int8) for shape in ((m, k), (n, k)))
    return lambda: torch._int_mm(left, right.t())


def _fp8(torch: Any, m: int, n: int, k: int) -> Callable[[], Any]:
    left, right = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(
        left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


if __name__ == "__main__":
    main()
