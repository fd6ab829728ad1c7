"""GPU monitor of this machine, by NVML: clocks and energy, which no server publishes, and all other figures where the
server publishes nothing about its GPUs. A thread reads them twice a second."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic_ns
from typing import Any

from trtpipe.engines.nvidia import visible
from trtpipe.pipeline.bench.options import is_local

PERIOD_S = 0.5


@dataclass(frozen=True)
class Reading:
    """One GPU at one moment; None for a value that the GPU does not report.

    utilization  percent of the last sampling period in which a kernel ran
    memory       bytes in use
    power        W
    sm_clock     MHz
    energy       J since the driver was loaded
    """

    at_ns: int
    utilization: float | None
    memory: float | None
    power: float | None
    sm_clock: float | None
    energy: float | None


def has_driver() -> bool:
    """Whether NVML's library is installed. Without it, importing pynvml would waste time and memory."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


class GpuSampler:
    """Samples GPUs from `start` to `stop`, including both ends. Made by `find`."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._handles = handles
        self.names = [str(nvml.nvmlDeviceGetName(handle)) for handle in handles]
        self.readings: list[list[Reading]] = [[] for _ in handles]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    @classmethod
    def find(cls, url: str) -> GpuSampler | None:
        """Sampler of this machine's GPUs that CUDA_VISIBLE_DEVICES leaves visible, if the server at `url` runs here;
        None without GPUs or a driver, and for a MIG slice, of which NVML tells no figures but those of its GPU."""
        if not is_local(url) or not has_driver():
            return None
        import pynvml  # type: ignore[import-untyped]

        try:
            pynvml.nvmlInit()
            every = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            found = visible((index, str(pynvml.nvmlDeviceGetUUID(handle))) for index, handle in enumerate(every))
            handles = [handle for index, handle in enumerate(every) if index in found]
        except pynvml.NVMLError:
            return None
        return cls(pynvml, handles) if handles else None

    def start(self) -> None:
        self._read()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._read()
        self._nvml.nvmlShutdown()

    def _follow(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._read()

    def _read(self) -> None:
        for handle, mine in zip(self._handles, self.readings, strict=True):
            mine.append(self._one(handle))

    def _one(self, handle: Any) -> Reading:
        nvml = self._nvml

        def told(read: Any, *words: Any) -> Any:
            with contextlib.suppress(nvml.NVMLError):  # a MIG slice, for example, reports less than a whole GPU
                return read(handle, *words)
            return None

        used = told(nvml.nvmlDeviceGetUtilizationRates)
        memory = told(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts, millijoules = told(nvml.nvmlDeviceGetPowerUsage), told(nvml.nvmlDeviceGetTotalEnergyConsumption)
        return Reading(
            at_ns=monotonic_ns(),
            utilization=None if used is None else float(used.gpu),
            memory=None if memory is None else float(memory.used),
            power=None if milliwatts is None else milliwatts / 1e3,
            sm_clock=told(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            energy=None if millijoules is None else millijoules / 1e3,
        )


def summarise(
    names: Sequence[str], readings: Sequence[Sequence[Reading]], tokens: int | None, start_ns: int
) -> dict[str, Any]:
    """Figures of each GPU over the load point, and their time series, for the report. Energy per token is that of all
    GPUs that worked; `tokens` as in server.summarise."""
    gpus: dict[str, Any] = {}
    series: dict[str, Any] = {"t_s": [round((one.at_ns - start_ns) / 1e9, 3) for one in readings[0]]}
    worked: list[float | None] = []
    for index, (name, mine) in enumerate(zip(names, readings, strict=True)):
        energy = _energy(mine)
        gpus[str(index)] = {
            "name": name,
            "utilization_percent": _mean([one.utilization for one in mine]),
            "memory_peak_bytes": max((one.memory for one in mine if one.memory is not None), default=None),
            "power_w": _mean([one.power for one in mine]),
            "sm_clock_mhz": _mean([one.sm_clock for one in mine]),
            "energy_j": energy,
        }
        if any(one.utilization for one in mine):
            worked.append(energy)
        for key in ("utilization", "memory", "power", "sm_clock"):
            series[f"gpu {index} {key}"] = [getattr(one, key) for one in mine]
    known = [energy for energy in worked if energy is not None]
    total = sum(known) if known and len(known) == len(worked) else None
    return {"gpus": gpus, "energy_j_per_token": total / tokens if total and tokens else None, "series": series}


def _energy(mine: Sequence[Reading]) -> float | None:
    """J from the first reading to the last: from the energy counter, else from power integrated over time."""
    first, last = mine[0].energy, mine[-1].energy
    if first is not None and last is not None:
        return last - first
    parts = []
    for before, after in pairwise(mine):
        if before.power is None or after.power is None:
            return None
        parts.append((before.power + after.power) / 2 * (after.at_ns - before.at_ns) / 1e9)
    return sum(parts)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
