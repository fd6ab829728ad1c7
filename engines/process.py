"""Child processes: command and output go to a log, and a failure reports the last lines of the log.

A worker of this project (see `python_command`) also has a channel to its parent: a pipe with one JSON object per line,
`{"done": n, "total": n}` for progress, `{"error": class, "what": ..., "why": ..., "remedy": ...}` for a TrtpipeError.
`serve_worker` is the worker's end of the pipe.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trtpipe.engines import errors
from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError
from trtpipe.engines.extras import install_command
from trtpipe.engines.files import FULL, DiskFull

TAIL_LINES = 5
# Bytes at the end of a log that are read for the last lines.
TAIL_BYTES = 64 << 10
# A larger log of a server is set aside when a server starts; the last start is searched for in its last part.
LOG_BYTES = 16 << 20
# Time between SIGTERM and SIGKILL for a process that is to end.
GRACE_SECONDS = 10.0
# Longest time between a line's arrival in the log and its display.
FOLLOW_SECONDS = 0.1
# Environment variable with the file descriptor of a worker's channel.
CHANNEL = "TRTPIPE_CHANNEL"

# Script that starts every Python process of this project.
LAUNCHER = Path(__file__).parents[1].absolute() / "launch.py"

Progress = Callable[[int, int], None]


def python_command(module: str, python: str | None = None, *, outlives: bool = False) -> list[str]:
    """Command that runs `module` like `python -m`, without importing modules from the current folder.

    python    another interpreter, as a path or a name on PATH; trtpipe need not be installed there
    outlives  whether the process may outlive this one; else it gets SIGTERM when the thread that starts it ends

    Raises HostError when there is no such interpreter.
    """
    found = sys.executable if python is None else shutil.which(python)
    if found is None:
        raise HostError(f"{python} cannot be started", why="it is not an executable file", remedy="name a Python")
    parent = [] if outlives else ["--parent", str(os.getpid())]
    return [str(Path(found).absolute()), str(LAUNCHER), *parent, module]


def run(
    command: Sequence[str],
    log: Path,
    *,
    what: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
    show: Callable[[str], None] | None = None,
) -> None:
    """Run `command` to its end without a shell; append its output to `log` and pass each line to `show`.

    The child gets its own process group, which ends with this call, so that no grandchild is left after Ctrl-C or
    after the child has ended. Raises HostError when the program cannot be started, StageFailed with the last lines of
    its log when the exit status is not 0.
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
                cwd=cwd,
                start_new_session=True,
                pass_fds=pass_fds,
            )
        except OSError as error:
            raise HostError(f"{command[0]} cannot be started", why=error.strerror or str(error)) from None
        try:
            status = child.wait() if show is None else _follow(child, log, begin, show)
        finally:
            end_group(child)
    if status:
        why = tail(log, begin=begin)
        full = FULL.search(why)
        if full and "/dev/shm" not in why:
            raise DiskFull(f"{what} failed, the disk is full", why=full.group())
        raise StageFailed(f"{what} failed ({describe_status(status)})", why=why, remedy=f"the log is {log}")


class Lines:
    """Splits output into non-blank lines and passes them on. A carriage return also ends a line, for progress bars."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def feed(self, chunk: bytes) -> None:
        *whole, self._rest = re.split(r"[\r\n]", self._rest + self._decoder.decode(chunk))
        for line in whole:
            if line.strip():
                self._show(line)

    def close(self) -> None:
        """Pass on a last line without a line end."""
        self.feed(b"\n")


def _follow(child: subprocess.Popen[bytes], log: Path, begin: int, show: Callable[[str], None]) -> int:
    """Wait for a child, return its exit status, and show what it writes to its log after byte `begin`."""
    lines = Lines(show)
    with log.open("rb") as file:
        file.seek(begin)
        status = None
        while status is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(timeout=FOLLOW_SECONDS)
            lines.feed(file.read())
    lines.close()
    return status


def run_worker(
    module: str, spec: dict[str, Any], log: Path, *, what: str, progress: Progress = lambda done, total: None
) -> None:
    """Run a module of this project with `spec` as its JSON argument, so that this process avoids heavy imports.

    Raises what `run` raises, the TrtpipeError that the worker reported, or HostError without torch, with which every
    worker computes.
    """
    require_torch(what)
    read, write = os.pipe()
    failures: list[TrtpipeError] = []

    def listen() -> None:
        with os.fdopen(read, encoding="utf-8", errors="replace") as channel:
            for line in channel:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that a library printed
                    message = json.loads(line)
                    if "error" in message:
                        failures.append(error_from_json(message))
                    else:
                        progress(message["done"], message["total"])

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        command = [*python_command(module), json.dumps(spec)]
        run(command, log, what=what, env={CHANNEL: str(write)}, pass_fds=(write,))
    except StageFailed:
        os.close(write)
        write = -1
        listener.join()
        if failures:
            raise failures[0] from None
        raise
    finally:
        if write >= 0:
            os.close(write)
        listener.join()


def require_torch(what: str) -> None:
    """Raises HostError when torch is not installed, which `what` needs."""
    if importlib.util.find_spec("torch") is None:
        raise HostError(f"{what} needs torch", remedy=f"run `{install_command('quantize')}`")


def serve_worker(work: Callable[[dict[str, Any], Progress], None]) -> None:
    """Main function of a worker: call `work(spec, progress)`; report a TrtpipeError and exit with status 1."""
    descriptor = os.environ.get(CHANNEL)
    with os.fdopen(int(descriptor), "w") if descriptor else contextlib.nullcontext(sys.stderr) as channel:

        def tell(message: dict[str, Any]) -> None:
            channel.write(json.dumps(message) + "\n")
            channel.flush()

        try:
            work(json.loads(sys.argv[1]), lambda done, total: tell({"done": done, "total": total}))
        except TrtpipeError as error:
            tell(error_to_json(error))
            raise SystemExit(1) from None


def error_to_json(error: TrtpipeError) -> dict[str, str]:
    """JSON form of an error for another process of this project; narrower classes become one of the five."""
    kind = next(cls.__name__ for cls in type(error).__mro__ if hasattr(errors, cls.__name__))
    return {"error": kind, "what": error.what, "why": error.why, "remedy": error.remedy}


def error_from_json(message: dict[str, str]) -> TrtpipeError:
    cls: type[TrtpipeError] = getattr(errors, message["error"])
    return cls(message["what"], why=message["why"], remedy=message["remedy"])


def end_group(child: subprocess.Popen[bytes]) -> None:
    """End a child that has its own session, and its descendants: SIGTERM first, SIGKILL after GRACE_SECONDS.

    Descendants that outlive the child are killed at once.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE_SECONDS)
        finally:  # also at a second Ctrl-C
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def words_of(pid: int) -> list[bytes]:
    """The command line of a running process, by which it is known from a later one with its id; else nothing."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return []


def terminate(pid: int, alive: Callable[[int], bool], seconds: float, number: signal.Signals = signal.SIGTERM) -> bool:
    """Send a signal to a process, and wait; whether it has ended, by `alive`, within `seconds`."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    return f"ended by {name}" + (", usually for want of memory" if name == "SIGKILL" else "")


def open_log(log: Path) -> BinaryIO:
    """Open for appending, so that the stack that an error message referred to stays. A model's error may quote a
    prompt, so nobody else may read the log. Where a large one is set aside, this process's own output goes on in the
    new one, if it went into it."""
    own: list[int] = []
    if log.exists() and log.stat().st_size > LOG_BYTES:
        own = [stream for stream in (1, 2) if _leads_to(stream, log)]
        log.replace(log.with_suffix(".log.1"))
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    for stream in own:
        os.dup2(descriptor, stream)
    return os.fdopen(descriptor, "wb")


def _leads_to(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):  # it is closed
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def tail(log: Path, lines: int = TAIL_LINES, *, begin: int = 0) -> str:
    """The last non-blank lines of a log after byte `begin`, joined into one line."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = ""
    telling = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return " | ".join(telling[-lines:])
