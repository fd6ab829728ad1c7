"""Process of the gateway beside a server: it is started, given other models, found again and ended by its process id.

`python -m trtpipe.pipeline.gateway.process OPTIONS MODELS_FILE` is that process; a line of its log says where it
listens, or why it does not. At a HUP signal it serves the models of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.engines.errors import StageFailed, TrtpipeError
from trtpipe.engines.json_input import parse_json, read_json
from trtpipe.engines.process import (
    describe_status,
    error_from_json,
    error_to_json,
    open_log,
    python_command,
    tail,
    terminate,
    words_of,
)
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel

if TYPE_CHECKING:
    from trtpipe.pipeline.gateway.supervisor import Gateway

# Longer than the supervisor waits for its workers, whose own words say more.
READY_SECONDS = 70.0
STOP_SECONDS = 15.0
LISTENS = re.compile(r"^gateway at (\S+)$", re.MULTILINE)
RELOADED = re.compile(r"^gateway (reloaded)$", re.MULTILINE)
FAILED = re.compile(r"^gateway failed: (\{.*\})$", re.MULTILINE)


def start(options: GatewayOptions, log: Path) -> tuple[int, str]:
    """Start the gateway and wait until it listens; its process id and address. Raises its error, or StageFailed."""
    with open_log(log) as output:
        begin = output.seek(0, os.SEEK_END)  # the log holds every start
        process = subprocess.Popen(
            [
                *python_command("trtpipe.pipeline.gateway.process", outlives=True),
                options.to_json(),
                str(_models_file(log)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    try:
        return process.pid, _await_line(LISTENS, log, begin, lambda: process.poll() is None, "start")
    except BaseException:  # a Ctrl-C as well: nobody else knows the process yet
        # Not `end`: the command line of a process that starts this moment is not there to be read.
        if not terminate(process.pid, lambda pid: process.poll() is None, STOP_SECONDS):
            process.kill()  # its workers follow it
        process.wait()
        raise


def reload(pid: int, models: tuple[ServedModel, ...], log: Path) -> None:
    """Let a gateway serve `models`, and wait until it does. Raises a worker's own error, or StageFailed: the gateway
    goes on as it was then."""
    begin, file = log.stat().st_size, _models_file(log)
    try:
        file.write_text(json.dumps({"models": [asdict(model) for model in models]}, default=str), encoding="utf-8")
        os.kill(pid, signal.SIGHUP)
        _await_line(RELOADED, log, begin, lambda: alive(pid), "reload")
    finally:
        file.unlink(missing_ok=True)


def _models_file(log: Path) -> Path:
    return log.with_suffix(".models.json")


def _await_line(line: re.Pattern[str], log: Path, begin: int, running: Callable[[], bool], what: str) -> str:
    """Wait for a line in the log after byte `begin`, and return its group. Raises the gateway's own error, or
    StageFailed."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        ran = running()
        said = log.read_bytes()[begin:].decode(errors="replace")
        if found := line.search(said):
            return found[1]
        if told := FAILED.search(said):
            raise error_from_json(parse_json(told[1]))
        if not ran or time.monotonic() > deadline:
            raise StageFailed(f"the gateway does not {what}", why=tail(log, begin=begin), remedy=f"its log is {log}")
        time.sleep(0.05)


def end(pid: int) -> None:
    """End the gateway and its workers: they are asked first, and killed after STOP_SECONDS or a second Ctrl-C."""
    try:
        if alive(pid):
            terminate(pid, alive, STOP_SECONDS)
    finally:
        if alive(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # its workers follow it


def alive(pid: int) -> bool:
    """Whether `pid` is a gateway, and not another program with that process id."""
    with contextlib.suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, os.WNOHANG)
    return b"trtpipe.pipeline.gateway.process" in words_of(pid)


def ended(pid: int) -> str | None:
    """Exit status, in words, of a gateway that this process started; None while it runs."""
    with contextlib.suppress(ChildProcessError):  # `alive` has collected it
        collected, status = os.waitpid(pid, os.WNOHANG)
        if collected:
            return describe_status(os.waitstatus_to_exitcode(status))
    return None if alive(pid) else "its status is not known"


def main() -> None:
    from trtpipe.pipeline.gateway.supervisor import serve

    asked = threading.Event()
    signal.signal(signal.SIGHUP, lambda number, frame: asked.set())

    def reload_if_asked(gateway: Gateway) -> None:
        if not asked.is_set():
            return
        asked.clear()
        try:
            models = read_json(Path(sys.argv[2]), "list of models")["models"]
            gateway.serve_models(tuple(ServedModel.from_json(model) for model in models))
        except TrtpipeError as error:
            _tell_failure(error)
        else:
            print("gateway reloaded", flush=True)

    try:
        options = GatewayOptions.from_json(sys.argv[1])
        serve(options, ready=lambda gateway: print(f"gateway at {gateway.url}", flush=True), tick=reload_if_asked)
    except TrtpipeError as error:
        _tell_failure(error)
        raise SystemExit(error.exit_code) from None


def _tell_failure(error: TrtpipeError) -> None:
    print(f"gateway failed: {json.dumps(error_to_json(error))}", flush=True)


if __name__ == "__main__":
    main()
