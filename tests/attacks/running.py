"""Running of the trtpipe command, within this process or in one of its own, under limits of time, memory and files."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

from tests.support import forked
from trtpipe.engines.errors import TrtpipeError
from trtpipe.pipeline.cli import app as cli

LIMIT_S = 15.0
# Of memory beyond which a run is a fault, and beyond which it is stopped; of a file that a run writes.
LIMIT_BYTES = 500 << 20
STOP_BYTES = 4 << 30
SPACE_BYTES = 16 << 30
LIMIT_FILE = 512 << 20
# A command that is stopped has hung; a busy machine is not to be taken for that.
STOP_S = 4 * LIMIT_S


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `trace` is the traceback of an exception that left the command."""

    code: int | None
    err: str
    trace: str
    seconds: float
    peak: int


Run = Callable[[Iterable[str]], Outcome]


class Hang(BaseException):
    """A command has not ended in time."""


def run_here(arguments: Iterable[str]) -> Outcome:
    """Run the command within this process, without children and connections."""
    out, err = io.StringIO(), io.StringIO()
    code, trace, started = None, "", time.monotonic()
    with _limits() as peak, _alarm(LIMIT_S), mock.patch.object(sys, "argv", ["trtpipe", *arguments]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
            except KeyboardInterrupt:
                raise
            except BaseException:
                trace = traceback.format_exc()
        return Outcome(code, err.getvalue(), trace, time.monotonic() - started, peak())


def read_here(read: Callable[[], object]) -> Outcome:
    """Call a function that reads, within this process. A TrtpipeError is an end as good as any: its code is 3."""
    code, err, trace, started = None, "", "", time.monotonic()
    with _limits() as peak, _alarm(LIMIT_S):
        try:
            read()
            code = 0
        except TrtpipeError as error:
            code, err = 3, str(error)
        except KeyboardInterrupt:
            raise
        except BaseException:
            trace = traceback.format_exc()
        return Outcome(code, err, trace, time.monotonic() - started, peak())


def run_apart(arguments: Iterable[str]) -> Outcome:
    """Run the command as a user does, in a process of its own and in the current folder."""
    limits = {resource.RLIMIT_AS: SPACE_BYTES, resource.RLIMIT_FSIZE: LIMIT_FILE}
    ended = forked.run(list(arguments), Path.cwd(), os.environ, seconds=STOP_S, limits=limits)
    return Outcome(ended.status, ended.err, "", ended.seconds, ended.grown)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """No programs, no connections, and one parser of arguments instead of one for each run, which takes 60 ms."""

    def absent(*arguments: Any, **options: Any) -> NoReturn:
        raise FileNotFoundError(2, "the fuzzer starts no program")

    def bound(*arguments: Any) -> None:
        """As if the port were free."""

    def closed(*arguments: Any) -> NoReturn:
        raise ConnectionRefusedError(111, "Connection refused")

    with (
        mock.patch.object(cli, "command", cache(cli.command)),
        mock.patch.object(subprocess, "Popen", absent),
        mock.patch.object(socket.socket, "connect", closed),
        mock.patch.object(socket.socket, "bind", bound),
        mock.patch("trtpipe.pipeline.bench.protocols.h2_sender.CONNECT_TIMEOUT_S", 0.01),
    ):
        yield


@contextlib.contextmanager
def _limits() -> Iterator[Callable[[], int]]:
    """Limits that keep the machine whole; gives how many bytes the process has grown at most."""
    status = Path("/proc/self/status").read_text()
    before = _status_bytes(status, "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    kept = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)}
    space = _status_bytes(status, "VmSize") + STOP_BYTES
    for kind, most in ((resource.RLIMIT_AS, space), (resource.RLIMIT_FSIZE, LIMIT_FILE)):
        resource.setrlimit(kind, (most, kept[kind][1]))
    try:
        yield lambda: _status_bytes(Path("/proc/self/status").read_text(), "VmHWM") - before
    finally:
        for kind, limits in kept.items():
            resource.setrlimit(kind, limits)


def _status_bytes(status: str, name: str) -> int:
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith(name))


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raises Hang after so many seconds. pytest-timeout has the same timer, which goes on afterwards."""

    def ring(number: int, frame: FrameType | None) -> NoReturn:
        raise Hang(f"not ended after {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left, interval)
        signal.signal(signal.SIGALRM, handler)
