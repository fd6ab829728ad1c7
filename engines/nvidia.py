"""GPUs of this machine, as nvidia-smi reports them."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

from trtpipe.engines.errors import HostError

_FIELDS = "index,name,compute_cap,driver_version,memory.total,memory.used"
_SECONDS = 30


class NoDriver(HostError):
    """This machine has no NVIDIA driver."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its index, product name, compute capability as in GpuSpec, driver, and memory in MiB."""

    index: int
    name: str
    sm: int
    driver: str
    total_mib: int
    used_mib: int

    def describe(self) -> str:
        return f"{self.name} (SM{self.sm})"


def read_gpus() -> tuple[Gpu, ...]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible. Raises NoDriver, or HostError when the driver does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NoDriver(
            "this machine has no NVIDIA driver",
            remedy="use one with a GPU: here GPU targets can be planned, converted and quantized, not built or served",
        )
    query = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise HostError("nvidia-smi does not answer", remedy="the driver hangs: see the kernel's log") from None
    except OSError as error:
        raise HostError("nvidia-smi cannot be started", why=error.strerror or str(error)) from None
    if answer.returncode:
        raise HostError("nvidia-smi fails", why=(answer.stderr or answer.stdout).strip(), remedy="see the kernel's log")
    gpus = (_gpu(line) for line in answer.stdout.splitlines() if line.strip())
    return tuple(gpu for gpu in gpus if is_visible(gpu.index))


def is_visible(index: int) -> bool:
    """Whether CUDA_VISIBLE_DEVICES leaves a GPU visible. Of a list of UUIDs it leaves all: only indices are read."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not all(word.strip().isdigit() for word in visible.split(",") if word.strip()):
        return True
    return index in {int(word) for word in visible.split(",") if word.strip()}


def _gpu(line: str) -> Gpu:
    try:
        index, name, capability, driver, total, used = (word.strip() for word in line.split(","))
        major, _, minor = capability.partition(".")
        return Gpu(
            index=int(index), name=name, sm=10 * int(major) + int(minor), driver=driver, total_mib=int(float(total)),
            used_mib=int(float(used)),
        )  # fmt: skip
    except ValueError:
        raise HostError("nvidia-smi says something unexpected", why=line) from None
