"""Child processes: the command echoed, the log kept, the telling lines shown, and nothing left running."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from trtpipe.engines import process
from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.engines.extras import install_command
from trtpipe.engines.process import Lines, describe_status, end_group, run, run_worker, tail

pytestmark = pytest.mark.process


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "stage.log"


def sh(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


def gone(pid: int) -> bool:
    """Whether a process ends within a second; one that nobody has reaped yet has ended."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.005)
    return False


def last_number(log: Path) -> int:
    """The last line of the log, once it is a whole number."""
    while True:
        text = log.read_text() if log.exists() else ""
        if text.endswith("\n") and text.splitlines()[-1].isdigit():
            return int(text.splitlines()[-1])
        time.sleep(0.005)


def test_command_and_output_are_in_the_log(log: Path) -> None:
    log.write_text("before\n")
    run(sh("echo out; echo err >&2"), log, what="echo")
    assert log.read_text() == "before\n$ /bin/sh -c 'echo out; echo err >&2'\nout\nerr\n"


def test_no_shell_is_involved(log: Path) -> None:
    run(["/bin/echo", "$HOME; exit 3", "*"], log, what="echo")
    assert log.read_text().splitlines()[-1] == "$HOME; exit 3 *"


def test_nothing_is_read_from_the_terminal(log: Path) -> None:
    run(["/bin/cat"], log, what="cat")
    assert log.read_text() == "$ /bin/cat\n"


def test_env_adds_to_our_own(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OURS", "1")
    run(sh("echo $OURS $MORE"), log, what="echo", env={"MORE": "2"})
    assert log.read_text().splitlines()[-1] == "1 2"


def test_cwd_is_where_it_runs(log: Path, tmp_path: Path) -> None:
    run(sh("pwd"), log, what="pwd", cwd=tmp_path)
    assert log.read_text().splitlines()[-1] == str(tmp_path)


@pytest.mark.clock
def test_lines_are_shown_as_they_come(log: Path) -> None:
    came: list[tuple[str, float]] = []
    script = "echo begin; sleep 0.5; printf '10%%\\r20%%\\r\\n\\nend'"
    run(sh(script), log, what="it", show=lambda line: came.append((line, time.monotonic())))
    assert [line for line, _ in came] == ["begin", "10%", "20%", "end"]
    assert came[1][1] - came[0][1] > 0.3
    assert log.read_bytes().endswith(b"\nbegin\n10%\r20%\r\n\nend"), "the log keeps every byte"


def test_what_is_shown_is_of_this_command_alone(log: Path) -> None:
    log.write_text("before\n")
    lines: list[str] = []
    with pytest.raises(StageFailed):
        run(sh("echo this; exit 1"), log, what="it", show=lines.append)
    assert lines == ["this"]


def test_an_error_in_showing_ends_the_child(log: Path) -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(sh("sleep 60 & echo $!; wait"), log, what="it", show=interrupt)
    assert gone(last_number(log))


def test_lines_of_chunks_cut_anywhere() -> None:
    text = "one\r\ntwo \N{SNOWMAN}\n \nthree\r".encode() + b"\xff four"
    for size in range(1, len(text)):
        out: list[str] = []
        lines = Lines(out.append)
        for begin in range(0, len(text), size):
            lines.feed(text[begin : begin + size])
        lines.close()
        assert out == ["one", "two \N{SNOWMAN}", "three", "\N{REPLACEMENT CHARACTER} four"]


def test_a_failure_shows_the_last_lines_and_names_the_log(log: Path) -> None:
    with pytest.raises(StageFailed) as error:
        run(sh("for n in 1 2 3 4 5 6 7; do echo line $n; echo; done; exit 7"), log, what="counting")
    assert error.value.exit_code == 5
    assert str(error.value) == (
        f"counting failed (exit status 7): line 3 | line 4 | line 5 | line 6 | line 7; the log is {log}"
    )


def test_a_silent_failure_is_not_given_the_lines_of_another_command(log: Path) -> None:
    run(sh("echo all well"), log, what="first")
    with pytest.raises(StageFailed) as error:
        run(sh("exit 1"), log, what="second")
    assert str(error.value) == f"second failed (exit status 1); the log is {log}"


def test_a_signal_is_named(log: Path) -> None:
    with pytest.raises(StageFailed, match=r"it failed \(ended by SIGKILL, usually for want of memory\)"):
        run(sh("kill -9 $$"), log, what="it")


def test_a_program_that_is_not_there(log: Path) -> None:
    with pytest.raises(HostError) as error:
        run(["/nowhere/trtllm-build", "x"], log, what="building")
    assert error.value.exit_code == 4
    assert str(error.value) == "/nowhere/trtllm-build cannot be started: No such file or directory"


def test_a_program_that_is_no_program(log: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(HostError, match="cannot be started: Permission denied"):
        run([str(tmp_path / "text")], log, what="it")


@pytest.mark.parametrize("status", [0, 3])
def test_what_a_child_leaves_running_is_ended(log: Path, status: int) -> None:
    try:
        run(sh(f"sleep 60 & echo $!; exit {status}"), log, what="it")
    except StageFailed:
        assert status
    assert gone(last_number(log))


def test_what_a_child_leaves_running_and_will_not_end_is_killed(log: Path) -> None:
    run(sh("trap '' TERM; sleep 60 & echo $!"), log, what="it")
    assert gone(last_number(log))


def test_ctrl_c_ends_the_child_and_its_children(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = subprocess.Popen.wait
    pids: list[int] = []

    def interrupted(child: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        monkeypatch.setattr(subprocess.Popen, "wait", wait)
        pids.extend([child.pid, last_number(log)])
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(sh("sleep 60 & echo $!; wait"), log, what="it")
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_child_that_will_not_end_is_killed(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.05)
    with log.open("wb") as file:
        child = subprocess.Popen(
            sh("trap '' TERM; echo 1; while :; do sleep 60; done"), stdout=file, start_new_session=True
        )
    last_number(log)
    end_group(child)
    assert child.returncode == -signal.SIGKILL


def test_a_child_that_has_ended_already(log: Path) -> None:
    child = subprocess.Popen(sh("exit 4"), start_new_session=True)
    child.wait()
    end_group(child)
    assert child.returncode == 4


def test_a_worker_without_torch_names_the_command_that_installs_it(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HostError) as caught:
        run_worker("trtpipe.engines.nothing", {}, log, what="running the model")
    assert str(caught.value) == f"running the model needs torch; run `{install_command('quantize')}`"


def test_a_worker_gets_its_job_as_json(log: Path) -> None:
    with pytest.raises(
        StageFailed, match=r"working failed \(exit status 1\): .*No module named trtpipe.engines.nothing"
    ):
        run_worker("trtpipe.engines.nothing", {"text": "a 'b' \"c\""}, log, what="working")
    words = shlex.split(log.read_text().splitlines()[0])
    launch = [sys.executable, str(process.LAUNCHER), "--parent", str(os.getpid()), "trtpipe.engines.nothing"]
    assert words[-6:-1] == launch
    assert json.loads(words[-1]) == {"text": "a 'b' \"c\""}


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "exit status 1"),
        (-15, "ended by SIGTERM"),
        (-9, "ended by SIGKILL, usually for want of memory"),
        (-40, "ended by signal 40"),  # a real-time signal has no name
    ],
)
def test_statuses_in_words(status: int, text: str) -> None:
    assert describe_status(status) == text


def test_tail(log: Path) -> None:
    assert tail(log) == ""
    log.write_bytes(b"one\n\n  two  \nprogress 1%\rprogress 2%\r\n\xff\n")
    assert tail(log) == "one | two | progress 1% | progress 2% | \N{REPLACEMENT CHARACTER}"
    assert tail(log, 2) == "progress 2% | \N{REPLACEMENT CHARACTER}"
    assert tail(log, begin=4) == "two | progress 1% | progress 2% | \N{REPLACEMENT CHARACTER}"


def test_the_tail_of_a_huge_log_takes_no_memory(log: Path) -> None:
    with log.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b"\nthe cause\n")
    assert tail(log, lines=1) == "the cause"


def test_output_goes_on_in_the_log_that_takes_the_place_of_a_large_one(tmp_path: Path) -> None:
    """That of a `serve --detach` which starts its server again."""
    script = (
        "import sys; from pathlib import Path; from trtpipe.engines import process; print('old', flush=True); "
        "process.LOG_BYTES = 3; process.open_log(Path(sys.argv[1])).close(); print('new', flush=True)"
    )
    log, other = tmp_path / "a.log", tmp_path / "b.log"
    other.write_text("large\n")
    with log.open("ab") as output:
        for opened in (log, other):
            subprocess.run([sys.executable, "-c", script, opened], stdout=output, check=True)
            output.truncate()
    assert (tmp_path / "a.log.1").read_text() == "old\nold\nnew\n"
    assert log.read_text() == "new\n"


PARENT = """
import subprocess, sys
from trtpipe.engines.process import python_command
command = [*python_command("timeit", outlives=sys.argv[1] == "outlives"), "-n1", "-r1", sys.argv[2]]
subprocess.Popen(command, start_new_session=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("outlives", [False, True])
def test_a_python_child_ends_with_a_killed_parent_unless_it_may_outlive_it(*, outlives: bool) -> None:
    child_code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", PARENT, "outlives" if outlives else "ends", child_code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert gone(child) is not outlives
    if outlives:
        psutil.Process(child).kill()


@pytest.mark.parametrize(("trap", "number"), [("", signal.SIGTERM), ("trap '' TERM; ", signal.SIGKILL)])
def test_a_python_child_of_a_parent_that_has_ended_does_not_begin(trap: str, number: int) -> None:
    """Nor where it ignores SIGTERM, as the processes of an engine do."""
    here, launcher, _, _, module = process.python_command("timeit")
    command = ["sh", "-c", f'{trap}exec "$@"', "sh", here, launcher, "--parent", "1", module, "-h"]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-number, b"")


@pytest.mark.parametrize(
    ("told", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "none")]
)
def test_threads_of_a_python_child_leave_the_cores_to_others(told: dict[str, str], spins: str) -> None:
    """Unless the user says how threads wait."""
    statement = "import os; print(os.environ.get('GOMP_SPINCOUNT', 'none'))"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [*process.python_command("timeit"), "-n1", "-r1", statement], env=environment | told, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[0] == spins
