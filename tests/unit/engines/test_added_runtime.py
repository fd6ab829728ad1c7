"""A runtime is added as one module, and is built, checked, packaged, served and deployed by what the module says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.factories import hf_folder
from tests.unit.test_runner import build, plan
from trtpipe import engines
from trtpipe.engines.backends import reference
from trtpipe.engines.backends.base import ServedBy, require_nodes
from trtpipe.engines.errors import ArtefactRefused, UsageError
from trtpipe.engines.passport import read_passport
from trtpipe.pipeline.deploy import launch
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.serving.repositories import choose_server
from trtpipe.pipeline.serving.triton_package import Installation, prepare_backends
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check import check_repository


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of a runtime that executes reference engines by a program of its own, on one node."""
    module = ModuleType("echo_backend")
    vars(module).update({name: value for name, value in vars(reference).items() if not name.startswith("__")})
    vars(module).update(PROCESS="echo.runtime", SEQUENCES_PER_STUB=2, ONE_NODE="echoes do not carry")
    vars(module).update(tool_versions=lambda toolchain: {"echo": "7"})
    monkeypatch.setitem(sys.modules, "echo_backend", module)
    monkeypatch.setitem(engines.BACKENDS, "echo", "echo_backend")
    return module


def test_an_engine_of_it_is_built_packaged_and_checked(echo: ModuleType, in_folder: Path, tmp_path: Path) -> None:
    spec, store = (
        plan(hf_folder(in_folder / "tiny"), "build.max_batch_size=5", runtime="echo"),
        Store(tmp_path / "home"),
    )
    # Two sequences a stub.
    assert (spec.runtime, spec.serving.engine_instance_count) == ("echo", 3)
    build(spec, store)
    run = RunFolder.of(spec.target)
    passport = read_passport(run.path / "engine")
    assert (passport.runtime, passport.versions) == ("echo", {"echo": "7"})
    assert check_repository(run.path / "repository") == []
    assert choose_server("auto", passport) == "local"
    assert launch.own_image(passport)
    with pytest.raises(UsageError, match="echoes do not carry"):
        require_nodes("echo", 2, 2)


def test_its_module_says_what_it_cannot_do(echo: ModuleType, in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    window = "serving.max_attention_window_size"
    echo.FIXED = {window: (None, "echoes last")}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="max_attention_window_size is not for the echo runtime: echoes last"):
        plan(model, f"{window}=8", runtime="echo")
    echo.ON_CPU = False  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="runtime echo needs an NVIDIA GPU"):
        plan(model, runtime="echo")


def test_its_engine_process_loads_its_module(echo: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "python").mkdir(parents=True)
    for name in ("server", "stub", "python/libtriton_python.so"):
        (package / name).touch(0o755)
    installation = Installation(
        server=package / "server", python_backend=package / "python", stub=package / "stub",
        libraries=package, caches=package, version="0",
    )  # fmt: skip
    prepare_backends(installation, tmp_path / "backends", "echo")
    command = json.loads((tmp_path / "backends" / "tensorrtllm" / "engine.json").read_text())["command"]
    assert command[-2:] == ["--runtime", "echo.runtime"]


def test_an_engine_of_an_unknown_runtime_is_refused() -> None:
    with pytest.raises(ArtefactRefused, match="the runtime 'llama_cpp' is not known: this trtpipe has reference,"):
        engines.load_backend("llama_cpp")
    assert engines.find_backend("llama_cpp") is None
    assert engines.load_backend("tensorrt_llm").SERVED_BY is ServedBy.TENSORRTLLM
