"""GPUs of this machine, as nvidia-smi reports them."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from trtpipe.engines.errors import HostError

_FIELDS = "index,name,compute_cap,driver_version,memory.total,memory.used,uuid"
_SECONDS = 30


class NoDriver(HostError):
    """This machine has no NVIDIA driver."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU: its index, product name, compute capability as in GpuSpec, driver, memory in MiB, and UUID: its own, or
    that of the MIG slice of it that CUDA_VISIBLE_DEVICES names.

    The memory is None in a container that has only a slice of it, where nvidia-smi does not tell it.
    """

    index: int
    name: str
    sm: int
    driver: str
    total_mib: int | None
    used_mib: int | None
    uuid: str = ""

    @property
    def device(self) -> str:
        """Its name for Docker, and for CUDA_VISIBLE_DEVICES with CUDA_DEVICE_ORDER=PCI_BUS_ID, nvidia-smi's order."""
        return self.uuid if self.uuid.startswith("MIG-") else str(self.index)

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
    answer = _ask(program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits")
    gpus = [_gpu(line) for line in answer.splitlines() if line.strip()]
    uuids = [(gpu.index, gpu.uuid) for gpu in gpus]
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        uuids += _slices(_ask(program, "-L"))
    found = visible(uuids)
    return tuple(dataclasses.replace(gpu, uuid=found[gpu.index]) for gpu in gpus if gpu.index in found)


def visible(uuids: Iterable[tuple[int, str]]) -> dict[int, str]:
    """GPUs that CUDA_VISIBLE_DEVICES leaves visible: index -> UUID of the GPU, or of the slice of it named first.

    uuids  index and UUID of each GPU, and index of its GPU and UUID of each MIG slice

    As CUDA does, it takes indices and UUIDs, which may be abbreviated, and ends at the first word that names no GPU,
    such as -1. Indices are nvidia-smi's, and CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID; by default CUDA's first card is
    the fastest.
    """
    words, found = os.environ.get("CUDA_VISIBLE_DEVICES"), dict[int, str]()
    if words is None:
        return dict(uuids)
    uuids = tuple(uuids)
    for word in map(str.strip, words.split(",")):
        named = [one for one in uuids if _names(word, *one)]
        if len(named) != 1:
            break
        found.setdefault(*named[0])
    return found


def _names(word: str, index: int, uuid: str) -> bool:
    if word.isdecimal():
        return int(word) == index and not uuid.startswith("MIG-")
    return word.startswith(("GPU-", "MIG-")) and uuid.startswith(word)


def _ask(program: str, *arguments: str) -> str:
    """nvidia-smi's output. Raises HostError."""
    try:
        answer = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise HostError("nvidia-smi does not answer", remedy="the driver hangs: see the kernel's log") from None
    except OSError as error:
        raise HostError("nvidia-smi cannot be started", why=error.strerror or str(error)) from None
    if answer.returncode:
        raise HostError("nvidia-smi fails", why=(answer.stderr or answer.stdout).strip(), remedy="see the kernel's log")
    return answer.stdout


def _slices(listing: str) -> list[tuple[int, str]]:
    """Index of its GPU and UUID of each MIG slice, from `nvidia-smi -L`, which lists a GPU's slices below it."""
    index, out = -1, []
    for line in listing.splitlines():
        if gpu := re.match(r"GPU (\d+):", line):
            index = int(gpu[1])
        elif one := re.search(r"UUID: (MIG-[^)]+)\)", line):
            out.append((index, one[1]))
    return out


def _mib(word: str) -> int | None:
    """A size; None for "[N/A]" and "[Insufficient Permissions]"."""
    return None if word.startswith("[") else int(float(word))


def _gpu(line: str) -> Gpu:
    try:
        index, name, capability, driver, total, used, uuid = (word.strip() for word in line.split(","))
        major, _, minor = capability.partition(".")
        return Gpu(
            index=int(index), name=name, sm=10 * int(major) + int(minor), driver=driver, total_mib=_mib(total),
            used_mib=_mib(used), uuid=uuid,
        )  # fmt: skip
    except ValueError:
        raise HostError("nvidia-smi says something unexpected", why=line) from None
