"""Progress on stderr: a bar with bytes, rate and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from trtpipe.pipeline.cli import console, console_progress
from trtpipe.pipeline.cli.console_progress import Work, duration, hashing, working

MB = 1_000_000


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds that progress sees."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def test_bytes_have_a_rate_and_the_time_left(now: list[float]) -> None:
    work = Work("download", "first run")
    assert work.line() == "download  running"
    work(0, 92 * MB)
    now[0] += 60  # until the first bytes
    work(23 * MB, 92 * MB)
    assert work.line() == "download  23.0 MB of 92.0 MB"
    now[0] += 10
    work(46 * MB, 92 * MB)
    assert work.line() == "download  46.0 MB of 92.0 MB, 2.3 MB/s, 20 s left"


@pytest.mark.parametrize("done", [92_860_000, 92_900_000])
def test_work_that_goes_on_after_its_last_byte_says_so(now: list[float], done: int) -> None:
    work = Work("download", "first run")
    work(done, 92_900_000)
    assert work.line() == "download  92.9 MB done, going on"


def test_a_second_phase_is_counted_on_with_a_rate_of_its_own(now: list[float]) -> None:
    work = Work("download", "first run")
    now[0] += 50
    work(92 * MB, 92 * MB)
    work(20 * MB, 80 * MB)
    now[0] += 2
    work(40 * MB, 80 * MB)
    assert work.line() == "download  132.0 MB of 172.0 MB, 10.0 MB/s, 4 s left"  # never back to less
    assert (work.done, work.total) == (132 * MB, 172 * MB)


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h")]
)
def test_times_are_told_in_the_largest_unit_that_has_two(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_a_terminal_has_a_bar_of_the_share_that_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    with working("convert", "of [link=http://x]y[/link]") as work:
        work(25 * MB, 100 * MB)
        work._bars.refresh()  # type: ignore[attr-defined]
    told = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err.getvalue())
    assert "\u2501" * 5 + "\u257a" in told
    assert re.search(r"0:00:0\d .* convert   25\.0 MB of 100\.0 MB .*\(of \[link=http://x\]y\[/link\]\)", told)


def test_a_pipe_gets_lines_as_work_and_its_steps_begin_and_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"reading": threading.Event(), "writing": threading.Event()}
    note = console.note

    def seen(line: str) -> None:
        note(line)
        if ", for " in line:
            told[line.split()[1].rstrip(",")].set()

    monkeypatch.setattr(console, "note", seen)
    monkeypatch.setattr(console_progress, "PERIOD_S", 0.01)
    with working("download", "first run") as work:
        work.step("reading", "1 of 2")
        work.step("reading", "2 of 2")
        assert told["reading"].wait(30)
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
        work.step("writing")  # each step has its own time
        assert told["writing"].wait(30)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["download  running  (first run)", "download  reading"]
    assert "download  reading  2 of 2, for 0 s now" in lines
    assert lines[-1] == "download  writing, for 0 s now"


def test_quiet_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(console.FLAGS, "quiet", True)
    with working("convert", "why") as work:
        work(1, 2)
        work.step("reading")
    assert capsys.readouterr().err == ""


def test_hashing_is_shown_once_it_takes_two_seconds(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with hashing(Path("model.gguf"), 16_000 * MB) as tell:
        now[0] += 1.9
        tell(1_000 * MB)
        assert capsys.readouterr().err == ""
        now[0] += 0.2
        tell(2_000 * MB)
    assert capsys.readouterr().err == "hashing   running  (model.gguf)\n"


def test_hashing_within_other_work_is_a_step_of_it(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with working("convert", "first run") as work, hashing(Path("/store/rank0.safetensors"), 200 * MB) as tell:
        now[0] += 3
        tell(100 * MB)
        assert work.line() == "convert   hashing rank0.safetensors  100.0 MB of 200.0 MB"
        tell(200 * MB)
        assert work.line() == "convert   hashing rank0.safetensors  200.0 MB of 200.0 MB"
    assert capsys.readouterr().err == "convert   running  (first run)\nconvert   hashing rank0.safetensors\n"
