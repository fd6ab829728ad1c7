"""GPUs beside the load: what NVML tells, what it does not, and where there is none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from trtpipe.pipeline.bench.monitors.gpu import GpuSampler, Reading, summarise
from trtpipe.pipeline.bench.monitors.server import ServerMonitor

SECOND = 1_000_000_000


class Nvml:
    """As the library is, for two GPUs of which the second tells neither energy nor clock."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM = 1

    def __init__(self, count: int = 2, driver: bool = True) -> None:
        self.count, self.driver, self.open = count, driver, 0
        self.joules = 1000.0

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise self.NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}a8b"

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return f"GPU {handle}"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=90 if handle == 0 else 0)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(used=5 * 2**30)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 400_000

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError
        return 1980

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        if handle:
            raise self.NVMLError
        self.joules += 100
        return round(self.joules * 1000)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    made = Nvml()
    use(made, monkeypatch)
    return made


def use(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpipe.pipeline.bench.monitors.gpu.has_driver", lambda: True)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_what_two_gpus_tell(nvml: Nvml) -> None:
    beside = ServerMonitor("127.0.0.1:8001", None)
    with beside:
        pass
    said = beside.said(50, 0)
    assert said is not None
    first, second = said["nvml"]["gpus"].values()
    assert first == {
        "name": "GPU 0", "utilization_percent": 90.0, "memory_peak_bytes": 5 * 2**30, "power_w": 400.0,
        "sm_clock_mhz": 1980.0, "energy_j": 100.0,
    }  # fmt: skip
    assert (second["sm_clock_mhz"], second["utilization_percent"]) == (None, 0.0)
    # Of the one that worked alone.
    assert said["nvml"]["energy_j_per_token"] == 2.0
    assert len(said["nvml"]["series"]["t_s"]) == len(said["nvml"]["series"]["gpu 0 sm_clock"]) == 2
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "names"), [("1", ["GPU 1"]), ("GPU-1a", ["GPU 1"]), ("0,-1,1", ["GPU 0"]), ("-1", []), ("MIG-1", [])]
)
def test_gpus_that_cuda_may_not_see_are_not_sampled(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = GpuSampler.find("http://localhost:8000")
    assert ([] if found is None else found.names) == names


@pytest.mark.parametrize("url", ["10.0.0.7:8001", "http://triton:8000", "https://example.org/v1"])
def test_a_server_elsewhere_has_other_gpus(nvml: Nvml, url: str) -> None:
    assert GpuSampler.find(url) is None


@pytest.mark.parametrize(("count", "driver"), [(0, True), (2, False)])
def test_a_machine_without_a_gpu_has_no_sampler(monkeypatch: pytest.MonkeyPatch, count: int, driver: bool) -> None:
    use(Nvml(count, driver), monkeypatch)
    assert GpuSampler.find("http://localhost:8000") is None


def reading(at_s: float, power: float | None, energy: float | None, utilization: float = 50.0) -> Reading:
    return Reading(round(at_s * SECOND), utilization, 1.0, power, 1000.0, energy)


def test_energy_by_the_counter_and_without_one_by_power() -> None:
    counted = [reading(0, 100, 10.0), reading(1, 300, 260.0)]
    powered = [reading(0, 100, None), reading(2, 300, None), reading(3, 300, None)]
    said = summarise(["a", "b"], [counted, powered], 10, 0)
    assert [gpu["energy_j"] for gpu in said["gpus"].values()] == [250.0, 700.0]
    assert said["energy_j_per_token"] == 95.0
    silent = summarise(["a", "b"], [counted, [reading(0, None, None), reading(1, 5, None)]], 10, 0)
    assert silent["energy_j_per_token"] is None
    assert summarise(["a"], [counted], None, 0)["energy_j_per_token"] is None


def test_a_machine_without_the_driver_s_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    use(Nvml(), monkeypatch)
    assert GpuSampler.find("http://localhost:8000") is not None
    monkeypatch.undo()
    monkeypatch.setattr("ctypes.CDLL", missing)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it would raise
    assert GpuSampler.find("http://localhost:8000") is None
