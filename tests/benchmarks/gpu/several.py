"""Sections of `make gpu-e2e` that need several GPUs: sums, tensor parallelism, and models larger than one GPU.

Each fills what goes into the report's JSON, and goes on with what `out` holds. Models are those of `shaped`: their
weights come from a seed, so nothing here tells of a text.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.gpu import predicted, shaped
from tests.benchmarks.gpu.place import SIZES, Place
from tests.benchmarks.gpu.sections import LEVELS, Keep
from trtpipe.engines.nvidia import NoDriver, read_gpus

LOADS = tuple(LEVELS[:3])
# Of prompts whose answers are compared bit by bit.
PROMPTS, PROMPT, NEW = 8, 128, 32
# Seconds for an engine of a large model to be loaded and measured.
PATIENCE = 300.0
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
    """A measurement on some of the GPUs."""

    runtime: str
    devices: tuple[int, ...]
    fp8: bool = True
    ep: int = 1
    levels: Sequence[int] = LOADS
    # Of the reference runtime: whether one GPU can hold all ranks, to compare, and whether NCCL alone is measured too.
    together: bool = False
    nccl: bool = False

    @property
    def dtype(self) -> str:
        return "fp8" if self.fp8 else "bf16"

    @property
    def ranks(self) -> int:
        return len(self.devices)

    @property
    def key(self) -> str:
        return f"{self.runtime} {self.dtype} tp={self.ranks}{f' ep={self.ep}' if self.ep > 1 else ''}"


def folder(place: Place, model: str, *, fp8: bool) -> Path:
    """The model's folder, written where it is not there."""
    path = place.scratch / "models" / f"{model}-{'fp8' if fp8 else 'bf16'}"
    return _made(path, lambda new: shaped.write(new, model, fp8=fp8, **changes()))


def _made(path: Path, make: Callable[[Path], Any]) -> Path:
    if not path.is_dir():
        new = path.with_name(f"{path.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        make(new)
        new.rename(path)
    return path


def engine(place: Place, model: str, job: Job) -> Path:
    """The folder as an engine of the job's runtime, made where it is not there."""
    make = {"vllm": shaped.vllm_engine, "reference": shaped.reference_engine}[job.runtime]
    source = folder(place, model, fp8=job.fp8)
    path = place.scratch / "engines" / f"{model} {job.key}".replace(" ", "-")
    return _made(path, lambda new: make(source, new, place.gpu, job.ranks, job.ep))


def measure(place: Place, model: str, out: dict[str, Any], keep: Keep, *lists: Sequence[Job]) -> None:
    """The jobs of each list one after the other, the lists at the same time; those that `out` holds are done.

    Predictions are made and engines are written before.
    """
    left = [[job for job in jobs if "in_process" not in out.get(job.key, {})] for jobs in lists]
    for job in (job for jobs in left for job in jobs):
        out[job.key] = {"beside": len(lists) > 1}
        if job.runtime == "vllm":
            out[job.key]["predicted"] = predicted.together(
                place.gpu, job.dtype, "vllm", job.levels, model=model, tp=job.ranks
            )
        engine(place, model, job)
    keep()

    def run(jobs: Sequence[Job]) -> None:
        for job in jobs:
            out[job.key] |= _one(place, model, job)
            keep()

    with ThreadPoolExecutor(len(lists)) as threads:
        list(threads.map(run, left))


def _one(place: Place, model: str, job: Job) -> dict[str, Any]:
    there = RANKS | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, job.devices))}
    shared = {"engine": str(engine(place, model, job)), "levels": list(job.levels)}
    if job.runtime == "vllm":
        found = place.inside("vllm_throughput", environment=there, limit=PATIENCE, **shared)
        return found if "reason" in found else {"in_process": found}
    top = SMALL["vocab_size"] if changes() else 30_000
    prompts = np.random.default_rng(1).integers(2, top, (PROMPTS, PROMPT)).tolist()
    return place.inside(
        "collectives:tensor_parallel", environment=there, limit=PATIENCE, prompts=prompts, new=NEW,
        together=job.together, nccl=list(job.levels) if job.nccl else [], **shared,
    )  # fmt: skip


def gpus() -> int:
    """How many there are; where the scripts are tried without one, as many ranks as are started then."""
    try:
        return len(read_gpus())
    except NoDriver:
        return 4


def sums(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """All-reduces over two GPUs and over all, by bytes and way; and what `trtpipe probe` finds of them."""
    for ranks in dict.fromkeys((2, gpus())):
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


def tensor_parallel(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """The reference runtime with Llama 3 8B's shapes: on one GPU beside two others, then on four."""
    for devices in [((0,), (2, 3)), ((0, 1, 2, 3),)][: 2 if gpus() >= 4 else 1]:
        lists = [
            [Job("reference", own, fp8=fp8, together=len(own) > 1, nccl=len(own) > 1) for fp8 in (False, True)]
            for own in devices
        ]
        measure(place, "llama3-8b", out, keep, *lists)


def llama70b(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Llama 3 70B's shapes in FP8: vLLM from the folder on two GPUs, the reference runtime from our checkpoint on the
    two others, then on four. vLLM on four is in `large_served`."""
    measure(
        place, "llama3-70b", out, keep, [Job("vllm", (0, 1))], [Job("reference", (2, 3), nccl=True)],
    )  # fmt: skip
    measure(place, "llama3-70b", out, keep, [Job("reference", (0, 1, 2, 3), nccl=True)])


def mixtral(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Mixtral 8x7B's shapes. vLLM: in FP8 on one GPU, in BF16 on two, and on four with whole experts on each. The
    reference runtime on two, with a part of each expert on each and with whole ones."""
    few = LOADS[:2]
    measure(place, "mixtral-8x7b", out, keep, [Job("vllm", (0,))], [Job("vllm", (2, 3), fp8=False)])
    measure(
        place, "mixtral-8x7b", out, keep, [Job("reference", (0, 1), levels=few, together=True)],
        [Job("reference", (2, 3), ep=2, levels=few, together=True)],
    )  # fmt: skip
    measure(place, "mixtral-8x7b", out, keep, [Job("vllm", (0, 1, 2, 3), ep=4)])


def large_served(place: Place, out: dict[str, Any], keep: Keep) -> None:
    """Llama 3 70B's shapes in FP8 on four GPUs, built by `trtpipe build` from the folder: vLLM alone, behind our fronts
    and behind its own server."""
    model = folder(place, "llama3-70b", fp8=True)
    out["predicted"] = predicted.together(place.gpu, "fp8", "vllm", LOADS, model="llama3-70b", tp=4)
    words = [word for setting in (*SIZES, "tp=4") for word in ("--set", setting)]
    place.trtpipe("build", "--model", str(model), "--gpu", place.gpu, "--runtime", "vllm", *words)
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
    "sums": sums, "tensor_parallel": tensor_parallel, "llama70b": llama70b, "mixtral": mixtral,
    "large_served": large_served,
}  # fmt: skip
