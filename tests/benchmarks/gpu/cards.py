"""Lists of sections of `make gpu-e2e` side by side, each on a GPU of its own of one host; then one JSON and one page.

    python -m tests.benchmarks.gpu.cards SCRATCH --engine-python PYTHON --smollm2 FOLDER --json FILE.json
        --report FILE.md --seconds 560 features,offload long accuracy,folders,quantize tune

The first list runs on GPU 0, the second on GPU 1. After `--seconds` a list is ended, its servers are stopped, and what
its sections kept counts. Each GPU has SCRATCH/gpuN to work in, with links to the model in SCRATCH, which is made first
where it is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.__main__ import write
from tests.benchmarks.gpu.place import MODEL, Place
from tests.support.paths import ROOT

# For stopping servers and writing, after a list's time.
GRACE_S = 30.0


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("scratch", type=Path)
    options.add_argument("lists", nargs="+", help="sections of each GPU, with commas between them")
    options.add_argument("--engine-python", default=sys.executable)
    options.add_argument("--smollm2", type=Path, help="for accuracy and folders")
    options.add_argument("--json", type=Path, required=True)
    options.add_argument("--report", type=Path, required=True)
    options.add_argument("--seconds", type=float, required=True)
    chosen = options.parse_args()
    scratch: Path = chosen.scratch.resolve()
    (scratch / "logs").mkdir(parents=True, exist_ok=True)
    model = scratch / MODEL
    if not model.is_dir():
        Place(scratch, chosen.engine_python, "").inside("synthetic:write", folder=str(model))
    started = []
    for gpu, names in enumerate(chosen.lists):
        own = scratch / f"gpu{gpu}"
        own.mkdir(exist_ok=True)
        if not (own / MODEL).is_symlink():
            (own / MODEL).symlink_to(model)
        beside = "; ".join(other for number, other in enumerate(chosen.lists) if number != gpu)
        words = [
            sys.executable, "-m", "tests.benchmarks.gpu", str(own), "--only", names, "--resume", "--beside", beside,
            "--engine-python", chosen.engine_python,
            "--json", str(own / "found.json"), "--report", str(own / "found.md"), "--seconds", str(chosen.seconds),
        ]  # fmt: skip
        words += ["--smollm2", str(chosen.smollm2.resolve())] if chosen.smollm2 else []
        with (scratch / f"gpu{gpu}.log").open("ab") as log:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
            started.append(subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log))
    for gpu, process in enumerate(started):
        try:
            code = process.wait(chosen.seconds + GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        print(f"GPU {gpu}, {chosen.lists[gpu]}: exit code {code}", flush=True)
    found = [_read(scratch / f"gpu{gpu}" / "found.json") for gpu in range(len(started))]
    whole = merged(_read(chosen.json), found, chosen.lists)
    chosen.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    write(whole, chosen.report)
    return 0


def merged(kept: Mapping[str, Any], found: Sequence[Mapping[str, Any]], lists: Sequence[str]) -> dict[str, Any]:
    """`kept` with the sections of the lists that were measured in `found`, a list and a file for each GPU. A section
    that was cut off replaces none that is whole."""
    whole = dict(kept)
    for one, names in zip(found, lists, strict=True):
        for name in names.split(","):
            section = one.get(name)
            if section and (section["whole"] or not kept.get(name, {}).get("whole")):
                whole[name] = section
    return whole


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


if __name__ == "__main__":
    sys.exit(main())
