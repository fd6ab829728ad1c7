"""A command that is told to end ends what it has started, whatever tells it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.factories import hf_folder
from trtpipe.engines.process import python_command
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess

pytestmark = [pytest.mark.real, pytest.mark.process]


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Under nohup a process ignores SIGHUP, and so do its children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


IMPORTING = """
import sys
from trtpipe import launch

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "trtpipe.pipeline.cli.app":
            raise KeyboardInterrupt

launch.isolate = lambda: sys.meta_path.insert(0, Interrupt())
launch.main()
"""


def test_an_interrupt_while_modules_are_imported_is_told_in_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
)
def test_a_command_ends_its_worker(in_folder: Path, number: int, status: int) -> None:
    hf_folder(in_folder / "model")
    (in_folder / "text.txt").write_text("one two three four\n" * 100)
    command = [
        *python_command("trtpipe"), "verify", "model", "model", "--text", "text.txt", "--rows", "1", "--seq-len", "8",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (workers := psutil.Process(process.pid).children()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in told) == (status, status > 0)
    gone, _ = psutil.wait_procs(workers, timeout=10)
    assert gone == workers


@pytest.mark.parametrize("nohup", [False, True], ids=["hangup", "nohup"])
def test_the_end_of_the_terminal_loses_no_measurement(
    known: MockServerProcess, tokenizer: Path, in_folder: Path, *, nohup: bool
) -> None:
    command = [
        *python_command("trtpipe"), "bench", "--grpc-url", f"127.0.0.1:{known.grpc_port}", "--concurrency", "2",
        "--tokenizer", str(tokenizer), "--duration", "3" if nohup else "600", "--report", "report.json",
    ]  # fmt: skip
    pid, terminal = pty.fork()
    if pid == 0:
        if nohup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.execvp(command[0], command)
    shown = b""
    while not re.search(rb"\d\d done, ", shown):
        shown += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (4 if nohup else 129)  # 4: standard output cannot be written
    report = json.loads(Path("report.json").read_text())
    assert report["partial"] is not nohup
    assert report["levels"][0]["requests"]["measured"] > 0
