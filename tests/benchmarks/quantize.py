"""How long quantizing takes on a GPU, beside ModelOpt's own flow; `make bench-quantize` on a machine that has one.

A Llama of random weights in a scratch folder, random token ids for samples. One run measures: ModelOpt's flow (whole
model on the GPU, `mtq.quantize` in batches of 8, `export_hf_checkpoint`); ours, a layer at a time from the folder, to
each format; ours with every weight on the GPU before the clock starts; and ours with the GPU memory of the process
capped below the model's size. Imports are outside all clocks, files are in the page cache. Memory is torch's peak of
allocated bytes.

    python -m tests.benchmarks.quantize SCRATCH [--size 8b] [--samples 512] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.metadata
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

import modelopt.torch.quantization as mtq
import numpy as np
import numpy.typing as npt
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.benchmarks.convert import COMMON, SIZES
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.quantize import worker
from trtpipe.engines.quantize.calibrate import Calibrator  # noqa: F401  # imported before the clock starts
from trtpipe.engines.quantize.source import Source

SEQ_LEN = 512
MODELOPT_BATCH = 8
OTHERS_SAMPLES = 64


def make_model(folder: Path, size: str) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(**{**COMMON, **SIZES[size], "pad_token_id": None})
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="5GB")
    nbytes = sum(int(parameter.nbytes) for parameter in model.parameters())
    del model
    forget()
    return nbytes


def forget() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """(seconds, peak GiB on the GPU)."""
    forget()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**30


def theirs(folder: Path, out: Path, samples: npt.NDArray[np.int32]) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda").eval()
    ids = torch.from_numpy(samples).long().cuda()

    def forward(one: Any) -> None:
        with torch.no_grad():
            for start in range(0, len(ids), MODELOPT_BATCH):
                one(ids[start : start + MODELOPT_BATCH])

    bare, _ = timed(lambda: forward(model))
    calibrate, peak = timed(lambda: mtq.quantize(model, copy.deepcopy(mtq.FP8_DEFAULT_CFG), forward))
    with torch.inference_mode():
        export, more = timed(lambda: export_hf_checkpoint(model, torch.bfloat16, export_dir=str(out)))
    total = calibrate + export
    return [
        f"| ModelOpt: bare forward passes, batch {MODELOPT_BATCH} | {bare:.1f} | | | |",
        f"| ModelOpt: `mtq.quantize` + `export_hf_checkpoint` | {calibrate:.1f} + {export:.1f} = {total:.1f} | 1.00 | "
        f"{max(peak, more):.1f} | hf |",
    ]


def others(folder: Path, out: Path, ids: npt.NDArray[np.int32]) -> list[str]:
    """A row for each of the other recipes, with a few samples: AWQ's search takes the time it takes."""
    samples = out.parent / "few.npy"
    np.save(samples, ids[:OTHERS_SAMPLES])
    rows = []
    for recipe in load_quant_recipes().values():
        if recipe.quant_algo in (None, QuantAlgo.FP8) and recipe.kv_cache_quant_algo is None:
            continue
        quantization = {
            "quant_algo": recipe.quant_algo, "kv_cache_quant_algo": recipe.kv_cache_quant_algo,
            "group_size": recipe.group_size,
        }  # fmt: skip
        seconds, peak = ours(folder, out, samples, "trtllm", quantization=quantization, modelopt=recipe.modelopt)
        rows.append(f"| {recipe.name} | {seconds:.1f} | {peak:.1f} |")
        print(rows[-1], flush=True)
    return rows


def ours(folder: Path, out: Path, samples: Path, form: str | None, **options: Any) -> tuple[float, float]:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    spec = {
        "source": str(folder), "out": str(out), "format": form, "dtype": "bfloat16", "device": "cuda",
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "group_size": 128},
        "modelopt": "FP8_DEFAULT_CFG", "samples": str(samples), "batch_tokens": None, "scratch": str(out.parent),
        "hidden_bytes": None, "mapping": {"tp_size": 1, "pp_size": 1}, "embedding": "none", "toolchain": None,
        "scales_in": None, "scales_out": str(out.parent / "scales.safetensors"), **options,
    }  # fmt: skip
    return timed(lambda: worker.work(spec, lambda done, total: None))


class _Resident(Source):
    """All layers on the GPU from the start, given out again and again."""

    kept: dict[int, dict[str, torch.Tensor]] = {}  # noqa: RUF012  # shared on purpose

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        if index not in self.kept:
            self.kept[index] = self._read(index)
        return self.kept[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--size", default="8b", choices=SIZES)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    folder, samples = args.scratch / args.size, args.scratch / "samples.npy"
    args.scratch.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        make_model(folder, args.size)
    nbytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    vocab = COMMON["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab, (args.samples, SEQ_LEN), dtype=np.int32)
    np.save(samples, ids)
    rows = []

    def row(what: str, seconds: float, base: float, peak: float, form: str) -> None:
        rows.append(f"| {what} | {seconds:.1f} | {base / seconds:.2f} | {peak:.1f} | {form} |")
        print(rows[-1], flush=True)

    rows += theirs(folder, args.scratch / "theirs", ids)
    print("\n".join(rows), flush=True)
    base = float(rows[-1].split("= ")[1].split(" ")[0])
    shutil.rmtree(args.scratch / "theirs", ignore_errors=True)
    forget()
    out = args.scratch / "ours"
    ours(folder, out, samples, "hf")  # warms up the allocator, the kernels and the page cache
    for form in ("hf", "trtllm"):
        seconds, peak = ours(folder, out, samples, form)
        row("ours, a layer at a time", seconds, base, peak, form)
        if form == "hf":
            streamed = seconds
    seconds, peak = ours(folder, out, samples, None)
    row("ours, scales only", seconds, base, peak, "none")
    with mock.patch.object(worker, "Source", _Resident):
        ours(folder, out, samples, "hf")
        whole, peak = ours(folder, out, samples, "hf")
    row("ours, every weight resident", whole, base, peak, "hf")
    _Resident.kept.clear()
    forget()
    cap = nbytes / 2
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.get_device_properties(0).total_memory)
    with suppress(torch.OutOfMemoryError):
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
        raise SystemExit("the whole model fits into the cap, which proves nothing")
    forget()
    seconds, peak = ours(folder, out, samples, "hf", batch_tokens=8192)
    row(f"ours, GPU memory capped at {cap / 2**30:.1f} GiB, batches of 8192 tokens", seconds, base, peak, "hf")
    torch.cuda.set_per_process_memory_fraction(1.0)
    rest = others(folder, out, ids)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    lines = [
        "# FP8 calibration on a GPU",
        "",
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {torch.cuda.get_device_name()}, {versions}, "
        f"ModelOpt {importlib.metadata.version('nvidia-modelopt')}. Llama {args.size} of random weights, bfloat16,",
        f"{nbytes / 1e9:.1f} GB, {args.samples} samples of {SEQ_LEN} tokens. Written by",
        f"`python -m tests.benchmarks.quantize SCRATCH --size {args.size} --samples {args.samples}`.",
        "",
        "| flow | seconds | times as fast as ModelOpt | peak GiB on the GPU | writes |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"A layer at a time takes {streamed / whole:.2f} times as long as with every weight resident.",
        "",
        f"The other recipes, {OTHERS_SAMPLES} samples of {SEQ_LEN} tokens, to a TensorRT-LLM checkpoint:",
        "",
        "| recipe | seconds | peak GiB on the GPU |",
        "|---|---|---|",
        *rest,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.report:
        args.report.write_text(text)


if __name__ == "__main__":
    main()
