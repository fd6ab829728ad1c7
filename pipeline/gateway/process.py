"""Process of the gateway beside a server: it is started, found again and ended by its process id.

`python -m trtpipe.pipeline.gateway.process OPTIONS` is that process; a line of its log says where it listens, or why
it does not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from trtpipe.engines.errors import StageFailed, TrtpipeError
from trtpipe.engines.json_input import parse_json
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
from trtpipe.pipeline.gateway.options import GatewayOptions

READY_SECONDS = 60.0
STOP_SECONDS = 15.0
LISTENS = re.compile(r"^gateway at (\S+)$", re.MULTILINE)
FAILED = re.compile(r"^gateway failed: (\{.*\})$", re.MULTILINE)


def start(options: GatewayOptions, log: Path) -> tuple[int, str]:
    """Start the gateway and wait until it listens; its process id and address. Raises its error, or StageFailed."""
    with open_log(log) as output:
        begin = output.seek(0, os.SEEK_END)  # the log holds every start
        process = subprocess.Popen(
            [*python_command("trtpipe.pipeline.gateway.process", outlives=True), options.to_json()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def said() -> str:
        return log.read_bytes()[begin:].decode(errors="replace")

    deadline = time.monotonic() + READY_SECONDS
    listens = None
    try:
        while time.monotonic() < deadline:
            listens = LISTENS.search(said())
            if listens:
                return process.pid, listens[1]
            if process.poll() is not None:
                break
            time.sleep(0.05)
    finally:  # a Ctrl-C as well: nobody else knows the process yet
        if listens is None:
            end(process.pid)
            process.wait()
    told = FAILED.search(said())
    if told:
        raise error_from_json(parse_json(told[1]))
    raise StageFailed("the gateway does not start", why=tail(log, begin=begin), remedy=f"its log is {log}")


def end(pid: int) -> None:
    """End the gateway and its workers: they are asked first, and killed after STOP_SECONDS."""
    if alive(pid) and not terminate(pid, alive, STOP_SECONDS):
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

    try:
        options = GatewayOptions.from_json(sys.argv[1])
        serve(options, ready=lambda gateway: print(f"gateway at {gateway.url}", flush=True))
    except TrtpipeError as error:
        print(f"gateway failed: {json.dumps(error_to_json(error))}", flush=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
