"""Sections of `make gpu-e2e` that need four GPUs: sums, tensor parallelism, and models larger than one GPU.

Each fills what goes into the report's JSON, and goes on with what `out` holds. Models are those of `shaped`: their
weights come from a seed, so nothing here tells of a text.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from tests.benchmarks.gpu import predicted, shaped
from tests.benchmarks.gpu.loop import WAVES
from tests.benchmarks.gpu.place import SIZES, Place
from tests.benchmarks.gpu.sections import LEVELS, Keep

GPUS = 4
LOADS = tuple(LEVELS[:3])
# Of prompts whose answers are compared bit by bit.
PROMPTS, PROMPT, NEW = 8, 128, 32
# Seconds for an engine of a large model to be loaded and measured.
PATIENCE = 420.0
# Requests in flight behind a front.
SERVED = (64, 256)
SECONDS = 6.0
# NVLink's multicast is left alone: on a host that others share it can put the GPUs out of service. vLLM starts a rank's
# process anew, since a fork has no CUDA.
RANKS = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}  # fmt: skip
# Changes to a model's config where a script is tried without a GPU.
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


def changes() -> dict[str, Any]:
    return SMALL if os.environ.get("TRTPIPE_MEASURE_SMALL") else {}


@dataclass(frozen=True)
class Job:
    """A measurement of an engine on some of the GPUs, one for each rank."""

    model: str
    runtime: str
    devices: tuple[int, ...]
    fp8: bool = True
    ep: int = 1
    levels: tuple[int, ...] = LOADS
    # Of the reference runtime: how often every place is taken.
    waves: int = WAVES
    # Of the reference runtime: whether one GPU can hold all ranks, to compare, and what NCCL alone is measured at.
    together: bool = False
    nccl: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        return "fp8" if self.fp8 else "bf16"

    @property
    def key(self) -> str:
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"{RUNTIMES[self.runtime]} {self.dtype}, tp {len(self.devices)}{experts}"


RUNTIMES = {"vllm": "vLLM", "reference": "reference"}
LLAMA8, LLAMA70, MIXTRAL = "llama3-8b", "llama3-70b", "mixtral-8x7b"
FIRST, SECOND, ALL = (0, 1), (2, 3), (0, 1, 2, 3)
# Waves of the reference runtime with a large model.
FEW = 2
# Those that need one or two GPUs: the jobs of a list one after the other, both lists at the same time. Of the reference
# runtime with experts, a part of each expert is on each of two GPUs, or each has whole ones.
PAIRS = (
    (
        Job(LLAMA8, "reference", FIRST, fp8=False, together=True, nccl=LOADS[:2]),
        Job(LLAMA8, "reference", FIRST[:1]),
        Job(MIXTRAL, "vllm", FIRST[:1]),
        Job(LLAMA70, "vllm", FIRST),
        Job(MIXTRAL, "reference", FIRST, levels=LOADS[:2], waves=FEW, together=True),
    ),
    (
        Job(LLAMA8, "reference", SECOND, together=True, nccl=LOADS[:2]),
        Job(LLAMA8, "reference", SECOND[:1], fp8=False),
        Job(MIXTRAL, "vllm", SECOND, fp8=False),
        Job(LLAMA70, "reference", SECOND, waves=FEW),
        Job(MIXTRAL, "reference", SECOND, ep=2, levels=LOADS[:2], waves=FEW, together=True),
    ),
)
FOURS = (
    Job(MIXTRAL, "vllm", ALL, ep=4),
    Job(LLAMA70, "reference", ALL, waves=FEW),
    Job(LLAMA8, "reference", ALL, fp8=False, together=True, nccl=LOADS[:1]),
    Job(LLAMA8, "reference", ALL),
)
LARGE = (
    Job(LLAMA70, "vllm", ALL, fp8=False),
    Job(LLAMA70, "reference", ALL, fp8=False, waves=FEW),
)


def folder(place: Place, model: str, *, fp8: bool) -> Path:
    """The model's folder, written where it is not there."""
    path = place.scratch / "models" / f"{model}-{'fp8' if fp8 else 'bf16'}"
    return _made(path, lambda new: shaped.write(new, model, fp8=fp8, **changes()))


def _made(path: Path, make: Callable[[Path], Any]) -> Path:
    """`path`, made by whoever comes first; others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_dir():
            new = path.with_name(f"{path.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            make(new)
            new.rename(path)
    return path


def engine(place: Place, job: Job) -> Path:
    """The engine of a job, made where it is not there."""
    make = {"vllm": shaped.vllm_engine, "reference": shaped.reference_engine}[job.runtime]
    source = folder(place, job.model, fp8=job.fp8)
    path = place.scratch / "engines" / f"{job.model} {job.key}".replace(",", "").replace(" ", "-")
    return _made(path, lambda new: make(source, new, place.gpu, len(job.devices), job.ep))


def prepare(scratch: str, gpu: str, models: Sequence[str]) -> None:
    """Write folders and engines of some of the models ahead, while GPUs measure others."""
    for job in (*PAIRS[1], *PAIRS[0], *FOURS):
        if job.model in models:
            engine(Place(Path(scratch), "", gpu), job)


def measure(place: Place, out: dict[str, Any], keep: Keep, *lists: Sequence[Job]) -> None:
    """The jobs of each list one after the other, the lists at the same time, into `out` by model and engine; those that
    it holds are done. A prediction is made and kept before its job is started."""
    lock = Lock()

    def run(jobs: Sequence[Job]) -> None:
        for job in jobs:
            with lock:
                found = out.setdefault(job.model, {}).setdefault(job.key, {})
                if "in_process" in found:
                    continue
                found["beside"] = len(lists) > 1
                if job.runtime == "vllm":
                    found["predicted"] = predicted.together(
                        place.gpu, job.dtype, "vllm", job.levels, model=job.model, tp=len(job.devices), ep=job.ep
                    )
                    found["predicted_ep"] = job.ep
                keep()
            measured = _one(place, job)
            if job.runtime == "reference":
                shutil.rmtree(engine(place, job))  # those of all jobs do not fit side by side
            with lock:
                found |= measured
                keep()

    with ThreadPoolExecutor(len(lists)) as threads:
        list(threads.map(run, lists))


def _one(place: Place, job: Job) -> dict[str, Any]:
    there = RANKS | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.devices))}
    shared: dict[str, Any] = {"engine": str(engine(place, job)), "levels": list(job.levels)}
    if job.runtime == "vllm":
        found = place.inside("in_process:vllm_throughput", environment=there, limit=PATIENCE, **shared)
        return found if "reason" in found else {"in_process": found}
    top = SMALL["vocab_size"] if changes() else 30_000
    prompts = np.random.default_rng(1).integers(2, top, (PROMPTS, PROMPT)).tolist()
    made: dict[str, Any] = place.inside(
        "collectives:tensor_parallel", environment=there, limit=PATIENCE, prompts=prompts, new=NEW,
        together=job.together, nccl=list(job.nccl), waves=job.waves, **shared,
    )  # fmt: skip
    return made


def sums(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """All-reduces over two GPUs and over four, by bytes and way; and what `trtpipe probe` finds of them."""
    for ranks in (2, GPUS):
        if str(ranks) in out:
            continue
        there = RANKS | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(ranks)))}
        found = {"by_bytes": place.inside("collectives:sums", environment=there, ranks=ranks)}
        if not changes():
            written = place.scratch / f"probe-{ranks}.yaml"
            place.trtpipe("probe", "--out", str(written), **there)
            found["probe"] = written.read_text(encoding="utf-8")
        out[str(ranks)] = found
        keep()


def pairs(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Engines on one and on two GPUs: the reference runtime's from our checkpoints, vLLM's from the folders."""
    measure(place, out, keep, *PAIRS)


def fours(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """The same on all, with whole experts on each."""
    measure(place, out, keep, FOURS)


def large(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Llama 3 70B's shapes in BF16 on all: 141 GB of weights, and as many of a checkpoint."""
    measure(place, out, keep, LARGE)


def large_served(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Llama 3 70B's shapes in FP8 on four GPUs, built by `trtpipe build` from the folder: vLLM alone, behind our fronts
    and behind its own server."""
    model = folder(place, LLAMA70, fp8=True)
    out["predicted"] = predicted.together(place.gpu, "fp8", "vllm", LOADS, model=LLAMA70, tp=GPUS)
    keep()
    words = [word for setting in (*SIZES, f"tp={GPUS}") for word in ("--set", setting)]
    place.trtpipe("build", "--model", str(model), "--gpu", place.gpu, "--runtime", "vllm", "--accept-accuracy", *words)
    run = max((place.scratch / "runs").iterdir(), key=lambda run: run.stat().st_mtime)
    os.environ.update(RANKS)
    with place.served(run.name, LOADS, SECONDS) as inside:
        out |= {"in_process": inside, "served": []}
        keep()
        _bench(place, ("grpc", "completions"), out, keep)
    with place.native(run.name):
        _bench(place, ("native",), out, keep)


def _bench(place: Place, fronts: Sequence[str], out: dict[str, Any], keep: Keep) -> None:
    for front in fronts:
        for level in SERVED:
            row = place.bench(level, "completions" if front == "native" else front, SECONDS)
            out["served"].append({**row, "protocol": front})
            keep()


SECTIONS: dict[str, Callable[[Place, dict[str, Any], Keep], None]] = {
    "sums": sums, "pairs": pairs, "fours": fours, "large": large, "large_served": large_served,
}  # fmt: skip
