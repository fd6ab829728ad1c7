"""`make gpu-e2e`: what the project claims of GPUs, measured on one, end to end; on a machine with an NVIDIA GPU.

Two environments: this one serves, quantizes and measures (nvidia-pytriton with its numpy, ModelOpt, torch); the
engines run in that of `--engine-python`, which has torch and vLLM of its own, not by PYTHONPATH. Each section is
measured in one run and its figures are kept with its date, machine, versions and commands in the JSON; the page is
written from that file alone.

    python -m tests.benchmarks.gpu SCRATCH --engine-python PYTHON --smollm2 FOLDER [--only accuracy,engine,..]
        [--resume] [--seconds N] [--json FILE.json] [--report FILE.md] [--beside SECTIONS]

SCRATCH needs 60 GB of disk. `parallel` needs two GPUs, and `shared_gpu` one and NCCL 2.30 (for an older torch a newer
libnccl.so.2 by LD_PRELOAD); those of `several` need four, and 450 GB of disk or of a file system in memory. Where they
cannot run they are left out with a word. `--resume` goes on with sections that
broke off today, on this machine and with these versions. `--seconds` ends them all after so long. On a host of several
GPUs some of these may run at once, each with its CUDA_VISIBLE_DEVICES, SCRATCH and JSON; `--beside` is what the others
do, for the page. `python -m tests.benchmarks.gpu.cards` starts them so and puts their figures together.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import comparison, features, long_load, page, sections, served_page, several, tuned
from tests.benchmarks.gpu.place import MODEL, Place
from trtpipe.configs import facts
from trtpipe.engines.backends import vllm
from trtpipe.engines.errors import TrtpipeError
from trtpipe.engines.nvidia import Gpu, read_gpus
from trtpipe.pipeline.serving import engine_python, http_streams

# What takes the model of Llama 3 8B's shapes.
SHAPED: dict[str, Callable[[Place, Path, dict[str, Any], sections.Keep], None]] = {
    "engine": sections.engine, "kv_cache": sections.kv_cache, "reference": sections.reference, "study": sections.study,
    "features": features.features, "reference_features": features.reference_features, "offload": features.offload,
    "tune": tuned.tune, "long": long_load.long, "quantize": sections.quantize, "shared_gpu": sections.shared_gpu,
    "parallel": sections.parallel,
}  # fmt: skip
SECTIONS = ("families", "accuracy", "folders", *SHAPED, *several.SECTIONS)
# From it on ranks may share a GPU.
SHARING_NCCL = [2, 30]


class TimeIsUp(SystemExit):
    """The sections' time is over. An event loop passes on a SystemExit alone."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("scratch", type=Path)
    options.add_argument("--engine-python", default=sys.executable, help="where torch and vLLM are installed")
    options.add_argument("--smollm2", type=Path, help="a folder of SmolLM2-135M-Instruct, for accuracy and folders")
    options.add_argument("--only", default=",".join(SECTIONS))
    options.add_argument("--resume", action="store_true")
    options.add_argument("--seconds", type=float, help="end after so long, with what has been kept by then")
    options.add_argument("--beside", default="")
    options.add_argument("--json", type=Path, default=Path("docs/measurements/h200.json"))
    options.add_argument("--report", type=Path, default=Path("docs/measurements/h200.md"))
    chosen = options.parse_args()
    wanted = chosen.only.split(",")
    for name in set(wanted) - set(SECTIONS):
        options.error(f"no section is called '{name}'; there are {', '.join(SECTIONS)}")
    # As `serve` asks, before time on a GPU is spent.
    engine_python.require(chosen.engine_python, vllm.NEEDS)
    scratch: Path = chosen.scratch.resolve()
    (scratch / "logs").mkdir(parents=True, exist_ok=True)
    (scratch / "reports").mkdir(exist_ok=True)
    gpus = read_gpus()
    product = gpus[0].name.replace(" ", "-")
    whole = (spec for spec in facts.load_gpus().values() if not spec.mig)
    gpu = next((spec.name for spec in whole if spec.product == product), None)
    if gpu is None:
        raise SystemExit(f"no GPU file is of {gpus[0].name}: run `trtpipe probe` first")
    kept: dict[str, Any] = json.loads(chosen.json.read_text(encoding="utf-8")) if chosen.json.exists() else {}
    if chosen.seconds:
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, chosen.seconds)
    failed = []
    try:
        for name in wanted:
            place = Place(scratch, chosen.engine_python, gpu)
            found = place.inside("machine")
            reason = left_out(name, len(gpus), found["nccl"])
            if reason:
                print(f"{name} is left out: {reason}", flush=True)
                continue
            keeper = Keeper(chosen.json, kept, name, place, about(gpus, found, chosen.beside), resume=chosen.resume)
            try:
                _measure(name, place, chosen.smollm2, keeper)
                keeper.keep(whole=True)
            except TimeIsUp:
                raise
            except (Exception, SystemExit):  # the sections after it are measured all the same
                traceback.print_exc()
                failed.append(name)
            write(kept, chosen.report)
    except TimeIsUp:
        print(f"{name} was cut off: the {chosen.seconds:g} seconds are over", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _time_is_up(number: int, frame: object) -> None:
    raise TimeIsUp


def _measure(name: str, place: Place, smollm2: Path | None, keeper: Keeper) -> None:
    if name == "families":
        sections.families(place, keeper.result)
    elif name in ("accuracy", "folders"):
        if smollm2 is None:
            raise SystemExit(f"{name} needs --smollm2")
        getattr(sections, name)(place, smollm2.resolve(), keeper.result, keeper.keep)
    elif name in several.SECTIONS:
        several.SECTIONS[name](place, keeper.result, keeper.keep)
    else:
        model = place.scratch / MODEL
        if not model.is_dir():
            place.inside("synthetic:write", folder=str(model))
        SHAPED[name](place, model, keeper.result, keeper.keep)


def write(kept: dict[str, Any], report: Path) -> None:
    """The page, and its figures beside it."""
    figure = report.with_suffix(".svg")
    if "engine" in kept:
        figure.write_text(comparison.figure(kept, kept["engine"]["machine"]["gpu"]), encoding="utf-8")
    tails = report.with_name(f"{report.stem}-long.svg")
    if kept.get("long", {}).get("result"):
        tails.write_text(served_page.long_figure(kept["long"]["result"]), encoding="utf-8")
    report.write_text(page.render(kept, figure.name, tails.name), encoding="utf-8")


def left_out(name: str, gpus: int, nccl: list[int]) -> str:
    """Why the section cannot be measured on so many GPUs and with that NCCL, or nothing."""
    if name == "parallel" and gpus < 2:
        return "this machine has one GPU"
    if name in several.SECTIONS and gpus < several.GPUS:
        return f"it needs {several.GPUS} GPUs, and this machine has {gpus}"
    if name == "shared_gpu" and gpus > 1:
        return "this machine has a GPU for each rank"
    if name == "shared_gpu" and nccl < SHARING_NCCL:
        return f"NCCL {'.'.join(map(str, nccl))} lets no ranks share a GPU, {'.'.join(map(str, SHARING_NCCL))} does"
    return ""


class Keeper:
    """A section in the JSON file: its `result`, with how long it took and by which commands.

    about   what has to be the same where it goes on with what is there
    """

    def __init__(
        self, file: Path, kept: dict[str, Any], name: str, place: Place, about: dict[str, Any], *, resume: bool
    ) -> None:
        before = kept.get(name, {})
        if not resume or _settled(before) != _settled(about):
            before = {}
        self.result: dict[str, Any] = before.get("result", {})
        self._file, self._kept, self._name, self._place, self._about = file, kept, name, place, about
        self._seconds, self._commands = before.get("seconds", 0.0), before.get("commands", [])
        self._runs = before.get("runs", 1) + 1 if before else 1
        self._began = time.perf_counter()

    def keep(self, *, whole: bool = False) -> None:
        """Write what there is; `whole` says that the section has run to its end."""
        self._kept[self._name] = {
            **self._about,
            "whole": whole,
            "runs": self._runs,
            "seconds": self._seconds + time.perf_counter() - self._began,
            "commands": self._commands + self._place.said,
            "result": self.result,
        }
        self._file.write_text(json.dumps(self._kept, indent=1) + "\n", encoding="utf-8")


def _settled(about: dict[str, Any]) -> list[Any]:
    """What is the same in every run of a day: the bandwidth is measured each time, and the network may be set anew."""
    changing = ("bandwidth_gbs", "http_streams")
    machine = {key: value for key, value in about.get("machine", {}).items() if key not in changing}
    return [about.get("date"), machine, about.get("versions")]


def about(gpus: tuple[Gpu, ...], found: dict[str, Any], beside: str) -> dict[str, Any]:
    """When a section is measured, where, with what, and beside what on the host's other GPUs."""
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "beside": beside,
        "machine": {
            "gpu": gpus[0].name, "gpus": len(gpus), "sm": gpus[0].sm, "memory_mib": gpus[0].total_mib,
            "driver": gpus[0].driver, "cores": os.cpu_count(), "python": platform.python_version(),
            "bandwidth_gbs": found["bandwidth_gbs"], "cuda": found["cuda"], "http_streams": http_streams.capacity(),
        },
        "versions": {**found["versions"], **versions(), "nccl": ".".join(map(str, found["nccl"]))},
    }  # fmt: skip


def versions() -> dict[str, str]:
    """Of this environment."""
    found = {one.metadata["Name"].lower(): one.version for one in importlib.metadata.distributions()}
    return {name: found[name] for name in ("nvidia-pytriton", "nvidia-modelopt") if name in found}


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TrtpipeError as error:
        sys.exit(f"error: {error}")
