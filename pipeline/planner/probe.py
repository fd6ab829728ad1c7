"""Probe of this machine's GPUs (`trtpipe probe`): measures in a child process, writes a file that the planner uses."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml

from trtpipe.configs import facts as config
from trtpipe.configs import read
from trtpipe.configs.home import default_home
from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.engines.extras import install_command
from trtpipe.engines.gpu import GpuSpec, Measured
from trtpipe.engines.nvidia import Gpu, read_gpus
from trtpipe.engines.process import python_command

SECONDS = 600
HEADER = "# Written by `trtpipe probe` on this card; goes before the data sheet's figures.\n"


def probe(out: Path | None = None) -> tuple[GpuSpec, Path]:
    """Measure, write gpus/NAME.yaml of TRTPIPE_HOME (or `out`), and return the GPU and that path.

    It measures nvidia-smi's first visible GPU, and those of the same name. Other facts in an existing file, such as the
    price, are kept. Raises HostError without a GPU, without torch, and where torch measures another device (a MIG
    slice); StageFailed when the measurement fails.
    """
    gpus = read_gpus()
    if not gpus:
        raise HostError("no GPU is visible", remedy="see CUDA_VISIBLE_DEVICES")
    gpu = gpus[0]
    found = _measure([one for one in gpus if one.name == gpu.name])
    if found["name"] != gpu.name:
        raise HostError(
            f"{gpu.name} cannot be measured", why=f"torch measured {found['name']}", remedy="measure a whole GPU"
        )
    name, facts = _facts(gpu)
    measured = Measured(
        date=datetime.now(timezone.utc).date().isoformat(), host=f"{found['count']} x {gpu.name}, {_cpu()}",
        driver=gpu.driver, **{key: found[key] for key in FIGURES if key in found},
    )  # fmt: skip
    path = out or default_home() / "gpus" / f"{name}.yaml"
    old = read.read_yaml(path) if path.is_file() else {}
    plain = {key: value for key, value in dataclasses.asdict(measured).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + yaml.safe_dump({**facts, **old, "measured": plain}, sort_keys=False), encoding="utf-8")
    known = config.load_gpus().get(name)
    spec = known or read.build(GpuSpec, facts, path.name)
    return dataclasses.replace(spec, measured=measured), path


FIGURES = (
    "bandwidth_gbs", "tflops", "host_gbs", "nvlink_gbs", "allreduce_us", "ranks", "launch_us", "cpu_score",
)  # fmt: skip


def _measure(gpus: Sequence[Gpu]) -> dict[str, Any]:
    only = {"CUDA_VISIBLE_DEVICES": ",".join(gpu.device for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(
            python_command("trtpipe.engines.probe_worker"), capture_output=True, text=True, timeout=SECONDS,
            check=False, env={**os.environ, **only},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise StageFailed(
            f"measuring has not ended after {SECONDS} s", remedy="see nvidia-smi for who else works"
        ) from None
    if "No module named 'torch'" in done.stderr:
        raise HostError(
            "measuring needs torch", remedy=f"run `{install_command('serve')}`, or run in an image that has it"
        )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise StageFailed("measuring failed", why=last) from None
    if "absent" in found:
        raise HostError(found["absent"], remedy="install a torch that is built for this machine's driver")
    return found


def _facts(gpu: Gpu) -> tuple[str, dict[str, Any]]:
    """Name of the card and its facts, from the known cards or else from the driver."""
    known = config.gpu_of(gpu.name)
    if known is not None:
        return known.name, {"name": known.name}
    if gpu.total_mib is None:
        raise HostError(f"nvidia-smi does not tell the memory of {gpu.name}", remedy="measure it outside a container")
    product = gpu.name.replace(" ", "-")
    name = product.lower()
    return name, {
        "name": name, "sm": gpu.sm, "memory_gib": round(gpu.total_mib / 1024), "memory_mib": gpu.total_mib,
        "product": product,
    }  # fmt: skip


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
