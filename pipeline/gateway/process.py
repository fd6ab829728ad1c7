"""Process of the gateway beside a server: it is started, given other models, found again and ended by its process id.

`python -m trtpipe.pipeline.gateway.process OPTIONS MODELS_FILE` is that process; a line of its log says where it
listens, or why it does not. At a HUP signal it serves the models of the file, and answers in a file beside it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from trtpipe.engines.errors import InputDataError, StageFailed, TrtpipeError
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
from trtpipe.pipeline.errors import translate
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.store.folders import write_whole

if TYPE_CHECKING:
    from trtpipe.pipeline.gateway.supervisor import Gateway

T = TypeVar("T")
# Longer than the supervisor waits for its workers, whose own words say more.
READY_SECONDS = 70.0
STOP_SECONDS = 15.0
LISTENS = re.compile(r"^gateway at (\S+)$", re.MULTILINE)
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
        url = _await(lambda: _address(log, begin), lambda: process.poll() is None, log, begin, "start")
        return process.pid, url
    except BaseException:  # a Ctrl-C as well: nobody else knows the process yet
        # Not `end`: the command line of a process that starts this moment is not there to be read.
        if not terminate(process.pid, lambda pid: process.poll() is None, STOP_SECONDS):
            process.kill()  # its workers follow it
        process.wait()
        raise


def reload(pid: int, models: tuple[ServedModel, ...], log: Path) -> None:
    """Let a gateway serve `models`, and wait until it does. Raises a worker's own error, or StageFailed: the gateway
    goes on as it was then."""
    begin, file = log.stat().st_size if log.exists() else 0, _models_file(log)
    # The gateway may still have to answer a reload that was interrupted.
    asked = secrets.token_hex(8)
    try:
        wanted = {"id": asked, "models": [asdict(model) for model in models]}
        write_whole(file, json.dumps(wanted, default=str))
        os.kill(pid, signal.SIGHUP)
        answer = _await(lambda: _answer(file, asked), lambda: alive(pid), log, begin, "reload")
    finally:
        file.unlink(missing_ok=True)
        _answer_file(file).unlink(missing_ok=True)
    if answer["error"] is not None:
        raise error_from_json(answer["error"])


def _models_file(log: Path) -> Path:
    return log.with_suffix(".models.json")


def _answer_file(models: Path) -> Path:
    return models.with_suffix(".answer.json")


def _address(log: Path, begin: int) -> str | None:
    """Where the gateway listens, as its log says after byte `begin`; None until then. Raises its own error."""
    said = log.read_bytes()[begin:].decode(errors="replace")
    if failed := FAILED.search(said):
        raise error_from_json(parse_json(failed[1]))
    found = LISTENS.search(said)
    return found[1] if found else None


def _answer(models: Path, asked: str) -> dict[str, Any] | None:
    """The gateway's answer to the reload with that id; None until there is one."""
    file = _answer_file(models)
    answer = read_json(file, "answer of the gateway") if file.exists() else {}
    return answer if answer.get("id") == asked else None


def _await(find: Callable[[], T | None], running: Callable[[], bool], log: Path, begin: int, what: str) -> T:
    """Wait until `find` returns what it looks for. Raises StageFailed, with what the log says after byte `begin`, when
    the gateway ends or takes too long to `what`."""
    deadline = time.monotonic() + READY_SECONDS
    while True:
        ran = running()
        if (found := find()) is not None:
            return found
        if not ran or time.monotonic() > deadline:
            raise StageFailed(f"the gateway does not {what}", why=tail(log, begin=begin), remedy=f"its log is {log}")
        time.sleep(0.05)


def end(pid: int, *, drain_s: int = 0) -> None:
    """End the gateway and its workers: they are asked first, and killed after STOP_SECONDS and `drain_s` more, which
    running answers were given, or a second Ctrl-C."""
    try:
        if alive(pid):
            terminate(pid, alive, STOP_SECONDS + drain_s)
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
        file = Path(sys.argv[2])
        with contextlib.suppress(InputDataError):  # no file: the reload was interrupted
            wanted = read_json(file, "list of models")
            error = _serve_models(gateway, wanted["models"])
            answer = {"id": wanted["id"], "error": error and error_to_json(error)}
            with contextlib.suppress(OSError):  # a full disk; the reload waits no longer than READY_SECONDS
                write_whole(_answer_file(file), json.dumps(answer))

    try:
        options = GatewayOptions.from_json(sys.argv[1])
        serve(
            options,
            ready=lambda gateway: print(f"gateway at {gateway.url}", flush=True),
            tick=reload_if_asked,
            note=_say,
        )
    except TrtpipeError as error:
        _tell_failure(error)
        raise SystemExit(error.exit_code) from None


def _serve_models(gateway: Gateway, models: list[dict[str, Any]]) -> TrtpipeError | None:
    """Let the gateway serve `models`. Returns why it does not, in which case it goes on as it was."""
    try:
        gateway.serve_models(tuple(ServedModel.from_json(model) for model in models))
    except (TrtpipeError, OSError) as error:
        known = translate(error) or StageFailed("the gateway does not reload", why=str(error))
        _tell_failure(known)
        return known
    _say("gateway reloaded")
    return None


def _tell_failure(error: TrtpipeError) -> None:
    _say(f"gateway failed: {json.dumps(error_to_json(error))}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk costs lines of the log, not the server
        print(text, flush=True)


if __name__ == "__main__":
    main()
