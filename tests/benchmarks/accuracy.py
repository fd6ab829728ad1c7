"""What every recipe costs a real model: `make bench-accuracy`. Quantizes in both formats from one calibration.

python -m tests.benchmarks.accuracy MODEL_DIR SCRATCH [--samples 32] [--seq-len 256] [--report FILE.md]
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import shutil
import time
from datetime import datetime, timezone
from pathlib import Path

from trtpipe.configs import facts
from trtpipe.engines.accuracy.job import Measured, measure
from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.precision import QuantRecipe
from trtpipe.engines.quantize import job
from trtpipe.pipeline.accuracy import gate
from trtpipe.pipeline.sources import calibration

GROUP_SIZES = (128, 64)
ROWS = 16


def fitting(recipe: QuantRecipe, hidden: int) -> QuantRecipe:
    """The recipe with a group size that divides the model's hidden size."""
    size = next(size for size in GROUP_SIZES if hidden % size == 0)
    return dataclasses.replace(recipe, group_size=size) if recipe.quantization.packed else recipe


def row(name: str, form: str, seconds: float | None, nbytes: int, found: Measured) -> str:
    took = "" if seconds is None else f"{seconds:.0f}"
    return (
        f"| {name} | {form} | {took} | {nbytes / 1e6:.0f} | {found.quantized_perplexity:.2f} "
        f"| {found.perplexity_ratio:.3f} | {found.mean_kl:.4f} | {found.p99_kl:.3f} "
        f"| {100 * found.top1_agreement:.1f} | {found.worst(1)[0].layer} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--report", type=Path)
    args = parser.parse_args()
    args.scratch.mkdir(parents=True, exist_ok=True)
    log = args.scratch / "log"
    samples = calibration.samples(
        args.model, CalibrationConfig(data="demo", samples=args.samples, seq_len=args.seq_len)
    )
    heldout = CalibrationConfig(data=calibration.HELDOUT, samples=ROWS, seq_len=gate.SEQ_LEN)
    rows = calibration.samples(args.model, heldout)
    plain = measure(args.model, args.model, rows, log=log)
    size = sum(path.stat().st_size for path in args.model.glob("*.safetensors"))
    lines = [row("none", "hf", None, size, plain)]
    hidden = read_model_config(args.model).hidden_size
    for recipe in facts.load_quant_recipes().values():
        if recipe.quant_algo is None:
            continue
        scales: Path | None = None
        chosen, start = fitting(recipe, hidden), time.perf_counter()
        if chosen.quantization.calibrated:
            scales = args.scratch / "scales.safetensors"
            job.quantize(args.model, None, chosen, samples=samples, save_scales=scales, log=log)
        seconds: float | None = time.perf_counter() - start
        for form in recipe.quant_algo.row.formats:
            out = args.scratch / form
            out.mkdir()
            job.quantize(args.model, out, chosen, layout=job.Layout(form=form), scales=scales, log=log)
            found = measure(args.model, out, rows, log=log)
            size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
            lines.append(row(chosen.name, form, seconds, size, found))
            print(lines[-1], flush=True)
            seconds = None
            shutil.rmtree(out)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    text = "\n".join(
        [
            "# What every recipe costs",
            "",
            f"{datetime.now(timezone.utc):%Y-%m-%d}, {args.model.name}, {versions}, ModelOpt "
            f"{importlib.metadata.version('nvidia-modelopt')}, on a CPU. Calibrated on {args.samples} rows of "
            f"{args.seq_len} tokens of the shipped text, measured on",
            f"{ROWS} rows of {gate.SEQ_LEN} tokens of the held-out one. Written by "
            "`python -m tests.benchmarks.accuracy`. Seconds are calibration's.",
            "",
            "| recipe | format | s | MB | perplexity | ratio | mean KL | p99 KL | top-1 % | worst layer |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *lines,
        ]
    )
    print(text)
    if args.report:
        args.report.write_text(text + "\n")


if __name__ == "__main__":
    main()
