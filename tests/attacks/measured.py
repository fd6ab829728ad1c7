"""Runs commands one after the other and measures each: python measured.py, a JSON object a line in, one out.

    {"command": [...], "cwd": "...", "env": {...}, "out": "a file", "err": "a file", "seconds": 15}
    {"status": 0, "seconds": 0.4, "peak": bytes of memory at most}

A process of its own, and a small one: the kernel counts what a process had before it became another program as that
program's own.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def run(command: list[str], cwd: str, env: dict[str, str], out: str, err: str, seconds: float) -> dict[str, float]:
    started = time.monotonic()
    with Path(out).open("wb") as stdout, Path(err).open("wb") as stderr:
        child = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
        )
        timer = threading.Timer(seconds, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        _, status, usage = os.wait4(child.pid, 0)
        timer.cancel()
    child.returncode = os.waitstatus_to_exitcode(status)  # nobody else waits for it
    return {"status": child.returncode, "seconds": time.monotonic() - started, "peak": usage.ru_maxrss * 1024}


def main() -> None:
    # Of a child's memory and files: what keeps the machine whole, beyond what is a fault.
    for kind, most in ((resource.RLIMIT_AS, 16 << 30), (resource.RLIMIT_FSIZE, 512 << 20)):
        resource.setrlimit(kind, (most, most))
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
