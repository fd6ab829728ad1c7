"""The doctor names what is missing and how to get it, and changes nothing."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from tests.support import nvidia_smi
from tests.support.hub_server import Hub, serving
from tests.unit.sources.test_hub import use
from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.engines.extras import install_command
from trtpipe.pipeline.cli import doctor
from trtpipe.pipeline.serving import engine_python, triton_package
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Server
from trtpipe.pipeline.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with no program of NVIDIA's, no Docker, and no vLLM."""
    monkeypatch.setattr(engine_python, "_version", lambda python, package: "")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


def findings(store: Store) -> dict[str, tuple[str, str]]:
    return {finding.subject: (finding.state, finding.detail) for finding in doctor.examine(store)}


def test_it_examines_everything_and_changes_nothing(store: Store, tmp_path: Path) -> None:
    found = findings(store)
    assert list(found)[:13] == [
        "python", "store", "tritonserver", "http streams", "reference runtime", "vllm runtime", "GGUF reader",
        "quantization",
        "nvidia driver", "toolchains", "trtllm-build", "docker", "hugging face",
    ]  # fmt: skip
    assert re.fullmatch(r"\d+ at once without loss; for more raise net.core.wmem_default", found["http streams"][1])
    assert {state for state, _ in found.values()} <= {"ok", "missing", "fault"}
    assert list(tmp_path.iterdir()) == []


def test_what_a_bare_machine_lacks_has_a_remedy(store: Store) -> None:
    found = findings(store)
    assert found["nvidia driver"] == (
        "missing",
        "this machine has no NVIDIA driver; use one with a GPU: here GPU targets can be planned, converted and "
        "quantized, not built or served",
    )
    assert found["trtllm-build"] == (
        "missing",
        "not in this environment: engines are built in the toolchain's image, with --executor docker",
    )
    assert found["docker"][0] == "missing"
    assert found["docker"][1].startswith("Docker cannot be reached at unix://")


@pytest.mark.parametrize(
    ("package", "findings_and_extras"),
    [("torch", {"reference runtime": "serve", "GGUF reader": "gguf"}), ("xgrammar", {"reference runtime": "serve"})],
)
def test_a_package_that_is_missing_names_its_extra(
    store: Store, monkeypatch: pytest.MonkeyPatch, package: str, findings_and_extras: dict[str, str]
) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = findings(store)
    for finding, extra in findings_and_extras.items():
        assert found[finding] == ("missing", f"no {package}; run `{install_command(extra)}`")


@pytest.mark.parametrize(("error", "state"), [(HostError("no server"), "missing"), (StageFailed("odd"), "fault")])
def test_a_check_that_fails_is_a_finding(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception, state: str
) -> None:
    def find_installation() -> None:
        raise error

    monkeypatch.setattr(triton_package, "find_installation", find_installation)
    assert findings(store)["tritonserver"] == (state, str(error))


def test_the_store_s_disk(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 123_456_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    assert findings(store)["store"] == ("ok", f"{store.home}, 123 GB free")
    free = 1_900_000_000
    assert findings(store)["store"] == (
        "missing",
        f"{store.home} has 1.9 GB free; free some space or set TRTPIPE_HOME",
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert findings(store)["store"] == (
        "missing",
        f"{tmp_path} cannot be written; set TRTPIPE_HOME to a folder of yours",
    )
    store.home.write_text("a file")
    assert findings(store)["store"] == (
        "missing",
        f"{store.home} is not a folder; set TRTPIPE_HOME to a folder of yours",
    )


@pytest.mark.process
def test_the_driver_and_what_it_can_run(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.install(monkeypatch, tmp_path / "bin", nvidia_smi.H100, nvidia_smi.A100, driver="575.57.08")
    found = findings(store)
    assert found["nvidia driver"] == (
        "ok",
        "575.57.08; GPU 0 NVIDIA H100 80GB HBM3 (SM90); GPU 1 NVIDIA A100-SXM4-80GB (SM80)",
    )
    assert found["toolchains"] == ("ok", "this driver runs 1.0.0, 0.21.0")
    nvidia_smi.install(monkeypatch, tmp_path / "bin", nvidia_smi.H100, driver="535.104")
    assert findings(store)["toolchains"] == (
        "missing",
        "driver 535.104 is too old for all of them; update it to 575.51.03 or newer",
    )
    nvidia_smi.install_script(monkeypatch, tmp_path / "bin", "echo 'Failed to initialize NVML' >&2; exit 9")
    failed = ("missing", "nvidia-smi fails: Failed to initialize NVML; see the kernel's log")
    assert findings(store)["nvidia driver"] == failed


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        use(running, tmp_path / "hf", monkeypatch)
        yield running
        huggingface_hub.close_session()


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("options", "token", "state", "detail"),
    [
        ({}, None, "ok", "are open to you"),
        ({"gated": True}, None, "missing", "is gated: "),
        ({"gated": True}, "hf_granted", "ok", "are open to you"),
        (None, None, "ok", "and has no "),
    ],
)
def test_the_hub_is_asked_once_whether_it_gives_a_gated_model(
    store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any] | None, token: str | None,
    state: str, detail: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_HUB_OFFLINE")
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    if options is not None:
        hub.add(doctor.GATED, {"config.json": b"{}"}, **options)
    found = findings(store)["hugging face"]
    assert found[0] == state
    assert detail in found[1]
    assert len(hub.asked) == 1


@pytest.mark.loopback
def test_an_offline_mode_that_is_set_to_0_is_off(store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """As huggingface_hub reads it, which takes 1, on, yes and true, in capitals or not."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    hub.add(doctor.GATED, {"config.json": b"{}"})
    assert findings(store)["hugging face"][0] == "ok"
    assert len(hub.asked) == 1
    monkeypatch.setenv("HF_HUB_OFFLINE", "true")
    assert findings(store)["hugging face"][1].startswith("not asked: HF_HUB_OFFLINE is set")
    assert len(hub.asked) == 1


@pytest.mark.loopback
def test_the_remedy_of_a_hub_that_fails_is_not_of_a_download(
    store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.failing = 500
    state, detail = findings(store)["hugging face"]
    assert (state, detail.rpartition("; ")[2]) == ("missing", "check the connection and HF_ENDPOINT")


def test_a_hub_that_may_not_be_asked_is_not_called_well(store: Store) -> None:
    assert findings(store)["hugging face"] == (
        "missing",
        "not asked: HF_HUB_OFFLINE is set; what is in the local cache can be used",
    )


def test_running_servers_are_listed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoints = Endpoints(host="127.0.0.1", http=8000, grpc=8001, metrics=8002)
    server = Server(name="x.cpu.bf16", pid=os.getpid(), served=(), log=Path("l"), endpoints=endpoints)
    monkeypatch.setattr(doctor, "running", lambda store: [server])
    assert findings(store)["server x.cpu.bf16"] == ("ok", "http://127.0.0.1:8000")
