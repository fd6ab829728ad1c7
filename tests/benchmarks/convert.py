"""How fast `convert` is beside `cp` of the same bytes, and how much memory it takes; `make bench-convert`.

Synthetic models with Llama's real names and shapes in a scratch folder. Each round runs `cp -r` of the source,
`convert`, then `cp -r` of what it wrote (with tp > 1 that is more than the source has: every rank holds the
embedding). The two copies differ by what the disk's own caches still hold; the ratio is taken against the output's,
which has as many bytes as convert writes and is the faster. Before each run, what it reads is brought to the disk
and dropped from the page cache; a first round warms the machine's memory up and is not counted. All end when their
last write returns; none waits for the disk to have it. Memory is the peak of the process's anonymous pages
(RssAnon), sampled every 20 ms: mapped and cached file pages are the kernel's to take back. A 70B is planned and
moved from sparse files, which cost no disk to read.

    python -m tests.benchmarks.convert SCRATCH [--sizes 1b,8b,moe] [--rounds 3] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.checkpoint.cast import Caster
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import ITEMSIZE, header_bytes

COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "tie_word_embeddings": False},
    "moe": {"architectures": ["MixtralForCausalLM"], "hidden_size": 2048, "intermediate_size": 2816,
            "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
            "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "tie_word_embeddings": False},
}  # fmt: skip
SHARDS = 4


def make_model(folder: Path, size: str, *, sparse: bool = False, dtype: str = "BF16") -> int:
    """Write a model folder; return the bytes of its weights. Sparse: headers only, all weights read as zero."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**COMMON, **SIZES[size]}))
    shapes = list(source_shapes(read_model_config(folder)).items())
    # As transformers shards: in the order of the model, cut where a shard is full.
    shapes.sort(key=lambda item: (item[0] != "model.embed_tokens.weight", not item[0].startswith("model.layers.")))
    noise = (np.random.default_rng(0).integers(0x3C00, 0x3E00, 4 << 20, dtype=np.uint16)).tobytes()
    weight_map, total = {}, 0
    for index in range(SHARDS):
        file = f"model-{index + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = [(name, dtype, shape) for name, shape in shapes[_cut(shapes, index) : _cut(shapes, index + 1)]]
        header, _ = header_bytes(part)
        nbytes = sum(prod(shape) for _, _, shape in part) * ITEMSIZE[dtype]
        with (folder / file).open("wb") as out:
            out.write(header)
            if sparse:
                out.truncate(len(header) + nbytes)
            for start in () if sparse else range(0, nbytes, len(noise)):
                out.write(noise[: min(len(noise), nbytes - start)])
        weight_map.update({name: file for name, _, _ in part})
        total += nbytes
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


def _cut(shapes: list[tuple[str, tuple[int, ...]]], index: int) -> int:
    """Where shard `index` begins in the list, so that all have about the same size."""
    sizes = [prod(shape) for _, shape in shapes]
    return next((i for i in range(len(sizes)) if sum(sizes[:i]) * SHARDS >= sum(sizes) * index), len(sizes))


def measure(command: list[str]) -> tuple[float, float]:
    """(seconds, peak of anonymous memory in MB) of a command."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while child.poll() is None:
        try:
            status = Path(f"/proc/{child.pid}/status").read_text()
            peak = max(peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon")))
        except (OSError, TypeError):
            pass  # it has just ended
        time.sleep(0.02)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {child.returncode}")
    return time.perf_counter() - start, peak / 1000


def convert_command(source: Path, out: Path, tp: int, dtype: str = "bfloat16") -> list[str]:
    return [sys.executable, "-m", "trtpipe", "convert", str(source), str(out), "--tp", str(tp), "--dtype", dtype]


def pairs(scratch: Path, size: str, rounds: int) -> Iterator[str]:
    """Rows of the table for one size: cp and convert in turn."""
    source = scratch / size
    nbytes = make_model(source, size)
    copy_of(source, scratch)
    for tp in (1, 4):
        ratios, memory, seconds, written = [], 0.0, [], 0
        for _ in range(rounds):
            before = copy_of(source, scratch)
            forget(source)
            mine, peak = measure(convert_command(source, scratch / "out", tp))
            written = sum(path.stat().st_size for path in (scratch / "out").iterdir())
            after = copy_of(scratch / "out", scratch)
            shutil.rmtree(scratch / "out")
            ratios.append(mine / after)
            seconds.append((before, mine, after))
            memory = max(memory, peak)
        ratio, spread = sorted(ratios)[rounds // 2], "/".join(f"{r:.2f}" for r in ratios)
        before, mine, after = (min(column) for column in zip(*seconds, strict=True))
        yield (f"| {size} bf16, tp={tp} | {nbytes / 1e9:.1f} | {written / 1e9:.1f} | {before:.1f} | {mine:.1f} "
               f"| {after:.1f} | **{ratio:.2f}** ({spread}) | {memory:.0f} |")  # fmt: skip
    shutil.rmtree(source)


def copy_of(folder: Path, scratch: Path) -> float:
    """Seconds that `cp -r` of the folder takes; the copy is removed."""
    forget(folder)
    seconds, _ = measure(["cp", "-r", str(folder), str(scratch / "copy")])
    shutil.rmtree(scratch / "copy")
    return seconds


def forget(folder: Path) -> None:
    """Bring a folder's files to the disk and out of the page cache."""
    os.sync()
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def sparse_70b(scratch: Path) -> str:
    """Memory only: the source is sparse, and the output too, since zeros of a sparse block are still written."""
    source = scratch / "70b"
    nbytes = make_model(source, "70b", sparse=True)
    command = [sys.executable, "-m", "tests.benchmarks.convert", str(scratch), "--read-only", str(source)]
    seconds, peak = measure(command)
    shutil.rmtree(source)
    return f"| 70b bf16, tp=8, output discarded | {nbytes / 1e9:.1f} | | | {seconds:.1f} | | | {peak:.0f} |"


def read_only(source: Path) -> None:
    """Everything convert does but keep its output: each file is a hole that takes what is written and forgets it."""
    from trtpipe.engines.base import DataType, Mapping
    from trtpipe.engines.checkpoint import convert as module

    module.os = _Discarding()  # type: ignore[attr-defined, assignment]
    module.pwrite_all = lambda file, data, position: None  # type: ignore[attr-defined]
    out = source.parent / "discarded"
    out.mkdir()
    try:
        module.convert(source, out, dtype=DataType.BFLOAT16, mapping=Mapping(tp_size=8))
    finally:
        shutil.rmtree(out)


class _Discarding:
    """The os module, reserving no space."""

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def posix_fallocate(self, file: int, start: int, size: int) -> None:
        os.ftruncate(file, size)


def casts() -> Iterator[str]:
    """Casting alone, one core: GB of input a second."""
    bits = np.random.default_rng(0).integers(0x3C000000, 0x3E000000, 64 << 20, dtype=np.uint32)
    for source, target in (("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("BF16", "F16")):
        values = bits if source == "F32" else (bits >> 16).astype(np.uint16)
        caster = Caster(source, target)
        best = min(_timed(caster, values) for _ in range(3))
        yield f"| {source} to {target} | {values.nbytes / best / 1e9:.2f} |"


def _timed(caster: Caster, values: np.ndarray[tuple[int], np.dtype[np.unsignedinteger[Any]]]) -> float:
    start = time.perf_counter()
    assert caster.all_finite(values)
    caster.cast(values)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--sizes", default="1b,8b,moe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--read-only", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read_only:
        read_only(args.read_only)
        return
    args.scratch.mkdir(parents=True, exist_ok=True)
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name"))
    lines = [
        "# convert beside cp",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {os.cpu_count()} cores of {cpu}, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, numpy {np.__version__}. Written by",
        f"`python -m tests.benchmarks.convert SCRATCH --sizes {args.sizes} --rounds {args.rounds}`.",
        "Seconds are the best of the rounds.",
        "",
        "| case | GB read | GB written | cp of source s | convert s | cp of output s "
        "| convert / cp of output: median (all) | anonymous MB |",
        "|---|---|---|---|---|---|---|---|",
        *(row for size in args.sizes.split(",") for row in pairs(args.scratch, size, args.rounds)),
        sparse_70b(args.scratch),
        "",
        "| cast, with the check for infinite values, one core | GB/s of input |",
        "|---|---|",
        *casts(),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
