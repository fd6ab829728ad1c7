"""Run a child process: echo the command into its log, keep the log, and fail with its telling last lines."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.errors import StageFailed

TAIL_LINES = 5


def run(command: Sequence[str], log: Path, *, what: str, env: Mapping[str, str] | None = None) -> None:
    """Run `command` to its end with output appended to `log`. No shell is involved.

    The child gets its own process group, which is ended with this call, so that Ctrl-C leaves no grandchild.
    Raises StageFailed with the log's last lines when the exit status is not 0.
    """
    with log.open("ab") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=None if env is None else {**os.environ, **env},
            start_new_session=True,
        )
        try:
            status = child.wait()
        except BaseException:
            end_group(child)
            raise
    if status:
        raise StageFailed(f"{what} failed ({describe_status(status)})", why=tail(log), remedy=f"the log is {log}")


def run_worker(module: str, spec: dict[str, Any], log: Path, *, what: str) -> None:
    """Run `python -m module` with `spec` as its one JSON argument: how heavy imports stay out of this process."""
    run([sys.executable, "-m", module, json.dumps(spec)], log, what=what)


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child started with its own session, and everything it started."""
    try:
        os.killpg(child.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    try:
        child.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    return f"ended by {name}" + (", usually for want of memory" if name == "SIGKILL" else "")


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log that say something, joined into one."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    telling = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return " | ".join(telling[-lines:])
