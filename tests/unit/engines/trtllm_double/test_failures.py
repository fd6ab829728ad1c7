"""Ways in which the double of trtllm-build fails."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.doubles import trtllm_build
from tests.support.tiny_builds import FP8, NO_FP8, TWO, Output, build, checkpoint
from trtpipe.engines.quantization import UNQUANTIZED, Quantization


@pytest.mark.parametrize(
    ("fail", "quantization", "logged", "told"),
    [
        ("oom", UNQUANTIZED, "[TRT] [W] Requested amount of GPU memory (33555480576 bytes) could not be allocated. "
         "There may not be enough free memory for allocation to succeed.", NO_FP8),
        ("oom", UNQUANTIZED, "[TRT] [E] [globWriter.cpp::makeResizableGpuMemory::433] Error Code 2: OutOfMemory "
         "(no further information)",
         NO_FP8),
        ("wrong-sm", FP8, "Networks with FP8 precision require hardware with FP8 support.", NO_FP8),
        ("wrong-sm", UNQUANTIZED, "The engine plan file is generated on an incompatible device, expecting compute 9.0 "
         "got compute 8.0, please rebuild.", NO_FP8),
    ],
)  # fmt: skip
def test_failures_of_tensorrt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
    fail: str,
    quantization: Quantization,
    logged: str,
    told: str,
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", fail)
    assert build(checkpoint(tmp_path / "checkpoint", quantization)) == 1
    output = capsys.readouterr()
    assert logged in output.out
    assert output.err.splitlines()[-1] == told
    assert list((tmp_path / "engine").iterdir()) == []


def test_a_full_disk_leaves_a_partial_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "disk-full")
    assert build(checkpoint(tmp_path / "checkpoint")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "OSError: [Errno 28] No space left on device"
    part = (tmp_path / "engine" / "rank0.engine").read_bytes()
    assert part.startswith(b"CONTRACT DOUBLE, NO ENGINE\n")
    assert not part.endswith(b"}\n")


def test_wrong_arguments_come_before_any_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "killed")
    assert build(checkpoint(tmp_path / "checkpoint"), "--tp_size", "1") == 2


def test_a_build_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SLEEP", "0.35")
    begun = time.monotonic()
    assert build(checkpoint(tmp_path / "checkpoint", mapping=TWO, toolchain="0.21.0")) == 0
    assert time.monotonic() - begun >= 0.35
    # Once a build, not once a rank; a busy machine may sleep longer at a time.
    assert 1 <= capsys.readouterr().out.count("Profiling tactics") <= 4


def test_less_is_logged_when_less_is_asked_for(tmp_path: Path, capsys: Output) -> None:
    assert build(checkpoint(tmp_path / "checkpoint"), "--log_level", "error") == 0
    assert capsys.readouterr().out == "[TensorRT-LLM] TensorRT-LLM version: 1.2.1\n"


def command(folder: Path) -> list[str]:
    """The double as a program: a copy in a folder of its own, in a Python without packages."""
    copy = folder / "trtllm-build"
    shutil.copyfile(trtllm_build.__file__, copy)
    out, cache = str(folder / "engine"), str(folder / "model.cache")
    arguments = ["--checkpoint_dir", str(folder / "checkpoint"), "--output_dir", out, "--output_timing_cache", cache]
    return [sys.executable, "-I", "-S", str(copy), *arguments]


@pytest.mark.process
def test_the_file_needs_nothing_but_python(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoint")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "engine" / "rank0.engine").is_file()


@pytest.mark.process
@pytest.mark.parametrize(
    ("fail", "status", "left"),
    [("killed", -signal.SIGKILL, ["config.json", "rank0.engine"]), ("crash", -signal.SIGSEGV, [])],
)
def test_a_build_that_is_ended_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: str, status: int, left: list[str]
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", fail)
    checkpoint(tmp_path / "checkpoint")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert "Build TensorRT engine Unnamed Network 0" in done.stdout
    assert sorted(path.name for path in (tmp_path / "engine").iterdir()) == left


@pytest.mark.process
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_hangs_ends_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "hang")
    checkpoint(tmp_path / "checkpoint")
    # A shell starts what it runs in the background so.
    ignoring = ["sh", "-c", "trap '' INT TERM; exec \"$@\"", "sh", *command(tmp_path)]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert any("Global timing cache in use" in line for line in child.stdout)
            child.send_signal(ending)
            assert child.wait(timeout=60) == -ending
        finally:
            child.kill()
