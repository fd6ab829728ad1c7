"""A command that goes on in the background, run as a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from trtpipe.pipeline.serving import background

def work(ready):
    print("begins", flush=True)
    if sys.argv[2] == "fails":
        sys.exit(5)
    if sys.argv[2] == "waits":
        try:
            Path(sys.argv[1] + ".waits").touch()
            for _ in range(3000):  # one long sleep would miss a signal that comes just before it
                time.sleep(0.02)
        except KeyboardInterrupt:
            try:
                print("leaves", flush=True)
                if len(sys.argv) > 3:
                    time.sleep(60)
            except KeyboardInterrupt:
                print("at once", flush=True)
            sys.exit(130)
    print("is ready", flush=True)
    ready(Path(sys.argv[1]))
    print("goes on as", os.getpid(), flush=True)
    time.sleep(600)

for number in (signal.SIGINT, signal.SIGTERM):  # a test run in the background ignores the first
    signal.signal(number, signal.default_int_handler)
try:
    sys.exit(background.run(work))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def left() -> Iterator[list[int]]:
    """Processes to end after the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def command(log: Path, how: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(log), how]


def test_it_returns_when_the_work_is_under_way_and_lets_go_of_the_terminal(tmp_path: Path, left: list[int]) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    # Ends only when nobody holds the pipes any more.
    done = subprocess.run(command(log, "works"), capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("begins\nis ready\n", "")
    deadline = time.monotonic() + 30
    while "goes on" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert log.read_text().startswith("earlier\n")
    pid = int(log.read_text().split()[-1])
    left.append(pid)
    assert os.getsid(pid) == pid
    assert Path(f"/proc/{pid}/fd/0").resolve() == Path(os.devnull)


def test_one_that_fails_before_has_its_status(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "log", "fails"), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (5, "begins\n")


def test_whoever_is_killed_before_takes_the_work_along(tmp_path: Path) -> None:
    """As a script that gives up waiting does with what it started."""
    process = subprocess.Popen(command(tmp_path / "log", "waits"), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "log.waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (-signal.SIGKILL, "begins\nleaves\n")


@pytest.mark.parametrize(
    ("end", "number"), [(os.killpg, signal.SIGINT), (os.kill, signal.SIGINT), (os.kill, signal.SIGTERM)]
)
def test_until_then_ctrl_c_and_sigterm_are_passed_on_once(tmp_path: Path, end: Any, number: int) -> None:
    """Ctrl-C in a terminal goes to all processes of a group, that of a supervisor to the command alone."""
    process = waiting(tmp_path)
    end(process.pid, number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "begins\nleaves\n")


def test_a_second_ctrl_c_is_passed_on_too(tmp_path: Path) -> None:
    process = waiting(tmp_path, "long")
    assert process.stdout is not None
    process.send_signal(signal.SIGINT)
    assert [process.stdout.readline() for _ in range(2)] == ["begins\n", "leaves\n"]
    time.sleep(0.2)  # it sleeps by then
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "at once\n")


def waiting(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A command whose work waits."""
    process = subprocess.Popen(
        [*command(folder / "log", "waits"), *words], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 30
    while not (folder / "log.waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process
