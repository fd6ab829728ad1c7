"""What runs in the engine's environment: `python -m tests.benchmarks.gpu.inside WHAT RESULT JSON`.

WHAT is one of the functions below, or MODULE:FUNCTION of this folder, JSON its arguments, RESULT the file that what it
returns is written to. Nothing here needs more than torch, transformers and vLLM.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np


def quantized(model: str, scratch: str, samples: int) -> dict[str, Any]:
    """Seconds of FP8 calibration and writing: ModelOpt's flow, and ours a layer at a time and all at once."""
    from tests.benchmarks import quantize

    folder, place = Path(model), Path(scratch)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocabulary, (samples, quantize.SEQ_LEN), dtype=np.int32)
    np.save(place / "samples.npy", ids)
    rows = quantize.theirs(folder, place / "theirs", ids)
    shutil.rmtree(place / "theirs", ignore_errors=True)
    quantize.ours(folder, place / "ours", place / "samples.npy", "hf")  # warms up
    seconds, peak = quantize.ours(folder, place / "ours", place / "samples.npy", "hf")
    shutil.rmtree(place / "ours", ignore_errors=True)
    return {"modelopt_s": float(rows[-1].split("= ")[1].split(" ")[0]), "ours_s": seconds, "ours_peak_gib": peak}


def machine() -> dict[str, Any]:
    """The GPU, its memory's rate as a copy shows it, and versions."""
    import importlib.metadata

    import torch

    from trtpipe.engines import probe_worker as probe

    names = ("vllm", "torch", "transformers", "triton", "numpy", "xgrammar")
    there = {one.name for one in importlib.metadata.distributions()}
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "bandwidth_gbs": probe.bandwidth(torch),
        "versions": {name: importlib.metadata.version(name) for name in names if name in there},
        "cuda": torch.version.cuda,
        "nccl": nccl_version(),
        "python": sys.version.split()[0],
    }


def nccl_version() -> list[int]:
    """Of the library that is loaded; torch tells the one that it was built with."""
    code = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(code))
    return [code.value // 10_000, code.value // 100 % 100, code.value % 100]


def main() -> None:
    what, result, arguments = sys.argv[1:]
    module, _, name = what.rpartition(":")
    there = importlib.import_module(f"tests.benchmarks.gpu.{module or 'inside'}")
    Path(result).write_text(json.dumps(getattr(there, name)(**json.loads(arguments))), encoding="utf-8")


if __name__ == "__main__":
    main()
