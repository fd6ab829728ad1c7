"""`trtpipe probe`: what it writes, what it keeps, and what it says where nothing can be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import nvidia_smi
from trtpipe.configs.facts import find_gpu
from trtpipe.configs.home import default_home
from trtpipe.engines import probe_worker as worker
from trtpipe.engines.errors import HostError
from trtpipe.engines.nvidia import Gpu
from trtpipe.pipeline.planner import probe

FOUND = {
    "name": "NVIDIA H100 80GB HBM3", "count": 2, "torch": "2.11.0", "cpu_score": 30.0, "bandwidth_gbs": 3000.0,
    "host_gbs": 55.0, "launch_us": 6.0, "tflops": {"bf16": 700.0, "fp8": 1300.0}, "nvlink_gbs": 300.0,
    "allreduce_us": 20.0, "ranks": 2,
}  # fmt: skip
CARD = Gpu(index=0, name="NVIDIA H100 80GB HBM3", sm=90, driver="570.1", total_mib=81559, used_mib=0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(probe, "read_gpus", lambda: (CARD, CARD))
    monkeypatch.setattr(probe, "_measure", lambda gpus: FOUND)
    return CARD


@pytest.mark.usefixtures("card")
def test_what_was_measured_goes_before_the_data_sheet() -> None:
    gpu, path = probe.probe()
    assert path.name == "h100.yaml"
    assert gpu.measured is not None
    assert gpu.measured.bandwidth_gbs == 3000.0
    assert gpu.measured.host.startswith("2 x NVIDIA H100 80GB HBM3, ")
    read = find_gpu("h100")
    assert read.measured == gpu.measured
    assert read.bandwidth_gbs == 3350  # the sheet stays what it says


@pytest.mark.usefixtures("card")
def test_a_price_of_one_s_own_stays() -> None:
    _, path = probe.probe()
    path.write_text("price_per_hour: 2.5\n")
    gpu, _ = probe.probe()
    assert find_gpu("h100").price_per_hour == 2.5
    assert find_gpu("h100").measured == gpu.measured


def test_a_card_that_nobody_knows_gets_a_file_of_its_own(card: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Gpu(index=0, name="NVIDIA X1", sm=90, driver="570.1", total_mib=40960, used_mib=0)
    monkeypatch.setattr(probe, "read_gpus", lambda: (other,))
    monkeypatch.setattr(probe, "_measure", lambda gpus: {**FOUND, "name": "NVIDIA X1"})
    gpu, path = probe.probe()
    assert (gpu.name, path.name) == ("nvidia-x1", "nvidia-x1.yaml")
    assert (find_gpu("nvidia-x1").sm, find_gpu("nvidia-x1").memory_gib) == (90, 40)


# What torch would tell of four cards, as CUDA orders them.
WORKER = """
import json, os, sys
found, names = json.loads(sys.argv[1])
names = names if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" else sorted(names, reverse=True)
devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
print(json.dumps({**found, "name": names[int(devices[0])], "count": len(devices)}))
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("visible", "file", "host"),
    [
        (None, "a100", "2 x NVIDIA A100-SXM4-80GB"), ("3,2,1", "h100", "2 x NVIDIA H100 80GB HBM3"),
        ("2", "a100", "1 x NVIDIA A100-SXM4-80GB"),
    ],
)  # fmt: skip
def test_of_different_cards_those_of_the_file_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, file: str, host: str
) -> None:
    cards = (nvidia_smi.A100, nvidia_smi.H100, nvidia_smi.A100, nvidia_smi.H100)
    nvidia_smi.install(monkeypatch, tmp_path, *cards)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    told = json.dumps([FOUND, [card.partition(",")[0] for card in cards]])
    monkeypatch.setattr(probe, "python_command", lambda module: [sys.executable, "-c", WORKER, told])
    gpu, path = probe.probe()
    assert (gpu.name, path.name) == (file, f"{file}.yaml")
    assert gpu.measured is not None
    assert gpu.measured.host.startswith(f"{host}, ")


def test_figures_of_another_card_are_refused(card: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measure", lambda gpus: {**FOUND, "name": f"{card.name} MIG 1g.10gb"})
    with pytest.raises(HostError) as error:
        probe.probe()
    assert str(error.value) == (
        "NVIDIA H100 80GB HBM3 cannot be measured: torch measured NVIDIA H100 80GB HBM3 MIG 1g.10gb; "
        "measure a whole GPU"
    )
    assert not list(default_home().glob("gpus/*"))


def test_probe_is_refused_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HostError, match="this machine has no NVIDIA driver"):
        probe.probe()


@pytest.mark.process
def test_torch_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(index=0, name="NVIDIA X1", sm=90, driver="570.1", total_mib=40960, used_mib=0)
    monkeypatch.setattr(probe, "read_gpus", lambda: (gpu,))
    with pytest.raises(HostError, match=r"torch \S+ finds no GPU; install a torch that is built for this machine"):
        probe.probe()


def test_the_shipped_figures_are_those_of_a_pair_of_h200() -> None:
    found = find_gpu("h200").measured
    assert found is not None
    assert found.host.startswith("2 x NVIDIA H200")
    assert 0.8 < found.bandwidth_gbs / 4800 < 0.95
    assert 0.7 < found.tflops["bf16"] / 989.4 < 0.9
    assert found.ranks == 2


def test_the_score_of_a_core_is_a_rate() -> None:
    assert 1 < worker.cpu_score() < 1000


def test_what_the_worker_says_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        stdout, stderr = json.dumps({**FOUND, "tflops": {}}), ""

    def run(*arguments: Any, **options: Any) -> Done:
        return Done()

    monkeypatch.setattr(subprocess, "run", run)
    assert probe._measure([CARD])["tflops"] == {}
    Done.stdout, Done.stderr = "", "Traceback\nRuntimeError: CUDA error: out of memory\n"
    with pytest.raises(Exception, match="measuring failed: RuntimeError: CUDA error: out of memory"):
        probe._measure([CARD])
    Done.stderr = "ModuleNotFoundError: No module named 'torch'"
    with pytest.raises(HostError, match="measuring needs torch"):
        probe._measure([CARD])
