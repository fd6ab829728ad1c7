"""The command as tests run it: in a folder of the test's own, with what it printed and its exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.factories import hf_folder
from tests.unit.test_runner import SIZES
from trtpipe.pipeline.cli import app as cli
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.store.store import Store

SETTINGS = [part for size in SIZES for part in ("--set", size)]


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = self.err.splitlines()
        assert "Traceback" not in self.err
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
        return lines[-1].removeprefix("error: ")


Run = Callable[..., Outcome]


@pytest.fixture
def run(in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run trtpipe with these arguments, in a folder of the test's own."""

    def trtpipe(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/trtpipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, captured.out, captured.err)

    return trtpipe


@pytest.fixture
def build(run: Run) -> Run:
    return lambda model, *more: run("build", "--model", model, "--gpu", "cpu", "--dtype", "fp32", *SETTINGS, *more)


@pytest.fixture
def model(in_folder: Path) -> Path:
    return hf_folder(in_folder / "tiny")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def rows(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def remember(
    store: Store, name: str, pid: int = 1, log: Path = Path("/l"), repository: Path = Path("/r"),
    source: Path | None = None, gateway_pid: int | None = None, gateway_url: str | None = None,
) -> None:  # fmt: skip
    from trtpipe.pipeline.serving import servers

    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = tuple(Served(name=one, repository=repository, source=source) for one in name.split("+"))
    servers.remember(
        store,
        Server(
            name=name, pid=pid, served=served, log=log, endpoints=points,
            gateway_pid=gateway_pid, gateway_url=gateway_url,
        ),
    )  # fmt: skip
