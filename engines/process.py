"""Run a child process: echo the command into its log, keep the log, and fail with its telling last lines.

A worker of ours (see `python_command`) also has a channel back: a pipe that carries a JSON object a line, `{"done":
n, "total": n}` for progress and `{"error": class, "what": ..., "why": ..., "remedy": ...}` for a failure with a name.
`serve_worker` is the worker's end of it.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trtpipe.engines import errors
from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError

TAIL_LINES = 5
# How much of a log is read for them.
TAIL_BYTES = 64 << 10
# How long a process may take to end when asked, before it is killed.
GRACE_SECONDS = 10.0
# How long a line may wait in the log before it is shown.
FOLLOW_SECONDS = 0.1
# Environment variable that tells a worker which file descriptor its channel is.
CHANNEL = "TRTPIPE_CHANNEL"

# What every Python process of ours is started through.
LAUNCHER = Path(__file__).parents[1].absolute() / "launch.py"

Progress = Callable[[int, int], None]


def python_command(module: str, python: str | None = None) -> list[str]:
    """The words that run `module` as `python -m` does, without looking for modules in the current folder.

    python  another interpreter than this one's, by path or by a name on PATH; trtpipe need not be installed there

    Raises HostError when there is no such interpreter.
    """
    found = sys.executable if python is None else shutil.which(python)
    if found is None:
        raise HostError(f"{python} cannot be started", why="it is not an executable file", remedy="name a Python")
    return [str(Path(found).absolute()), str(LAUNCHER), module]


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
    """Run `command` to its end with output appended to `log`, each line of it passed to `show`. No shell is involved.

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
        raise StageFailed(f"{what} failed ({describe_status(status)})", why=why, remedy=f"the log is {log}")


class Lines:
    """Output as it comes, passed on as lines that say something. A carriage return ends one too: progress is shown."""

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
        """Pass on a last line that no line end closed."""
        self.feed(b"\n")


def _follow(child: subprocess.Popen[bytes], log: Path, begin: int, show: Callable[[str], None]) -> int:
    """Wait for a child as `wait` does, and show what it writes to its log after byte `begin`."""
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
    """Run a module of ours with `spec` as its one JSON argument: how heavy imports stay out of this process.

    Raises what `run` raises, or the named error the worker ended with.
    """
    read, write = os.pipe()
    failures: list[TrtpipeError] = []

    def listen() -> None:
        with os.fdopen(read, encoding="utf-8", errors="replace") as channel:
            for line in channel:
                with contextlib.suppress(ValueError, TypeError, KeyError):  # a library's print, not ours
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


def serve_worker(work: Callable[[dict[str, Any], Progress], None]) -> None:
    """Be a worker: call `work(spec, progress)`, and end with status 1 after telling of an error with a name."""
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
    """A failure for another process of ours, as the one of the five classes that it is."""
    kind = next(cls.__name__ for cls in type(error).__mro__ if hasattr(errors, cls.__name__))
    return {"error": kind, "what": error.what, "why": error.why, "remedy": error.remedy}


def error_from_json(message: dict[str, str]) -> TrtpipeError:
    cls: type[TrtpipeError] = getattr(errors, message["error"])
    return cls(message["what"], why=message["why"], remedy=message["remedy"])


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
    try:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        text = ""
    telling = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return " | ".join(telling[-lines:])
