"""The guard: a unit test can reach neither the network nor another process. Markers lift it where that is the point.

real      real servers, commands as a user starts them, and the real model; fixtures in tests/e2e/conftest.py
loopback  a small server of the test's own on 127.0.0.1
process   a child process of the test's own
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import socket
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.support import forked
from tests.support.factories import write_tokenizer
from trtpipe.configs import facts as configs
from trtpipe.launch import SPINS
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing

# Without a GPU its kernels run number by number. Triton asks when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Processes of tests share the cores: threads of torch, which is not imported yet, wait as those of workers do.
os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

# A test on a busy machine is slow, not wrong. `make test-slow` runs the thorough profile.
settings.register_profile("trtpipe", deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("trtpipe"), max_examples=400)
settings.load_profile("trtpipe")


# Files that run in one process: those that share servers, and those that import the same large packages, which takes a
# process ten seconds: ModelOpt and transformers, and then transformers alone.
TOGETHER = (
    ("tests/e2e/smollm2/",),
    ("tests/e2e/commands/",),
    ("tests/e2e/faults/",),
    ("tests/e2e/features/",),
    ("tests/e2e/test_engine.py", "tests/e2e/test_docker.py"),
    (
        "tests/unit/engines/quantize/", "tests/unit/engines/accuracy/", "tests/unit/engines/families/test_phi3.py",
        "tests/unit/engines/reference/test_quantized.py", "tests/unit/stages/test_stored.py",
    ),
    ("tests/unit/engines/reference/",),
)  # fmt: skip
# What takes long begins first, and of the files that wait for the build of SmolLM2 one alone.
FIRST = (
    *TOGETHER[0], *TOGETHER[-1], *TOGETHER[-2], "tests/e2e/test_engine.py", "tests/unit/cluster/", *TOGETHER[1],
    "tests/e2e/test_vllm.py", "tests/e2e/", "tests/unit/bench/workers/test_ray.py", "tests/attacks/",
    "tests/unit/registry/test_transfer.py",
)  # fmt: skip


class _FilesAndServers(LoadFileScheduling):  # type: ignore[misc]
    """Tests of one file run in one process, and so do all files that share a server or a large package."""

    def _split_scope(self, nodeid: str) -> str:
        shared = (folders[0] for folders in TOGETHER if nodeid.startswith(folders))
        return next(shared, str(super()._split_scope(nodeid)))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _FilesAndServers(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """All that is imported and collected stays: garbage collections meanwhile take a tenth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test at a clock that `make test` would not find, which looks for the mark in the text of its file."""
    for path in {item.path for item in items if item.get_closest_marker("clock")}:
        if "mark.clock" not in path.read_text():
            raise pytest.UsageError(f"{path} has tests marked clock: write pytest.mark.clock there")
    items.sort(key=lambda item: next((i for i, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST)))


class Guarded(AssertionError):
    """A unit test tried to reach the outside."""


@pytest.fixture(autouse=True)
def guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No sockets, no child processes, and a home folder that is the test's own."""
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    # No test outlives a power cut, and each flush takes milliseconds.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    markers = {marker.name for marker in request.node.iter_markers()}
    if "real" in markers:
        return

    def refuse(what: str) -> Any:
        def refused(*args: object, **kwargs: object) -> None:
            raise Guarded(f"a unit test tried to {what}: {args[:2]}")

        return refused

    if "loopback" in markers:
        real_connect = socket.socket.connect

        def connect(self: socket.socket, address: Any) -> None:
            if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1"):
                raise Guarded(f"a test tried to connect to {address}")
            real_connect(self, address)

        monkeypatch.setattr(socket.socket, "connect", connect)
    else:
        monkeypatch.setattr(socket.socket, "connect", refuse("connect"))
        monkeypatch.setattr(socket.socket, "bind", refuse("listen"))
    if "process" not in markers:
        monkeypatch.setattr(subprocess, "Popen", refuse("start a process"))
        monkeypatch.setattr(os, "fork", refuse("fork"))


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """What is there before a file's tests stays: a collection that walks all tests and packages takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_stray_processes() -> Iterator[None]:
    """What a test starts it ends: at the end of the session no child is left."""
    yield
    forked.end()
    import psutil

    left = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    for child in left:
        child.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, where ./runs will appear."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of configs/ that a test may spoil."""
    folder = tmp_path / "configs"
    shutil.copytree(configs.CONFIGS, folder)
    monkeypatch.setattr(configs, "CONFIGS", folder)
    return folder


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServerProcess]:
    """The server of known timing: 10 ms to the first token, 2 ms between tokens."""
    server = MockServerProcess.start(Timing(ttft_s=0.01, itl_s=0.002), tmp_path_factory.mktemp("known") / "truth.jsonl")
    yield server
    server.stop()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


@pytest.fixture(params=[asyncio.SelectorEventLoop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """In which nothing may fail unseen."""
    made: asyncio.AbstractEventLoop = request.param()
    faults: list[dict[str, Any]] = []
    made.set_exception_handler(lambda _, context: faults.append(context))
    yield made
    made.close()
    assert faults == []
