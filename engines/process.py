"""Run a child process: echo the command into its log, keep the log, and fail with its telling last lines."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.errors import HostError, StageFailed

TAIL_LINES = 5
# How long a process may take to end when asked, before it is killed.
GRACE_SECONDS = 10.0


def run(command: Sequence[str], log: Path, *, what: str, env: Mapping[str, str] | None = None) -> None:
    """Run `command` to its end with output appended to `log`. No shell is involved.

    The child gets its own process group, which is ended with this call, so that neither Ctrl-C nor a child that
    left something running leaves a grandchild. Raises HostError when the program cannot be started, StageFailed with
    its last lines when the exit status is not 0.
    """
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        begin = file.tell()
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=None if env is None else {**os.environ, **env},
                start_new_session=True,
            )
        except OSError as error:
            raise HostError(f"{command[0]} cannot be started", why=error.strerror or str(error)) from None
        try:
            status = child.wait()
        finally:
            end_group(child)
    if status:
        why = tail(log, begin=begin)
        raise StageFailed(f"{what} failed ({describe_status(status)})", why=why, remedy=f"the log is {log}")


def run_worker(module: str, spec: dict[str, Any], log: Path, *, what: str) -> None:
    """Run `python -m module` with `spec` as its one JSON argument: how heavy imports stay out of this process."""
    run([sys.executable, "-m", module, json.dumps(spec)], log, what=what)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child started with its own session, and everything it started: asked first, killed after GRACE_SECONDS.

    What outlives the child itself is killed at once.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=GRACE_SECONDS)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"ended by {name}" + (", usually for want of memory" if name == "SIGKILL" else "")


def tail(log: Path, lines: int = TAIL_LINES, *, begin: int = 0) -> str:
    """The last lines after byte `begin` of a log that say something, joined into one."""
    text = log.read_bytes()[begin:].decode(errors="replace") if log.exists() else ""
    telling = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return " | ".join(telling[-lines:])
