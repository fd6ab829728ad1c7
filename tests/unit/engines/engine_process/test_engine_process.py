"""The engine process, run as a stub runs it: what it has started goes with it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


def test_what_it_started_ends_with_the_server(tmp_path: Path) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    command = [
        sys.executable, "-m", "trtpipe.engines.engine_process.server",
        "--runtime", "tests.support.doubles.runtime_with_child", "--engine", str(tmp_path),
        "--address", f"trtpipe-test-{os.getpid()}", "--server", str(server.pid),
    ]  # fmt: skip
    engine = subprocess.Popen(command, start_new_session=True)
    try:
        child = number(tmp_path / "child")
        server.kill()
        assert select.select([child], [], [], 30)[0]
        assert engine.wait(30) != 0
    finally:
        for process in (server, engine):
            process.kill()
            process.wait()


def number(path: Path) -> int:
    """A descriptor of the process whose number is in a file that is being written."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return os.pidfd_open(int(path.read_text()))
        time.sleep(0.02)
    raise AssertionError("the engine has not started its process")
