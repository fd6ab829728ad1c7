"""Liveness of a tritonserver: it answers, and none of its models' Python processes has died.

Triton never ends a request that waits in a dead Python process, and still calls itself live and ready. This file is the
program of a container's probe, so it needs the standard library alone:

    python3 -c TEXT PORT /proc FOLDER

It counts as lost only what an earlier call has seen since the container's start and noted in FOLDER, so that it never
fails where Triton has no such processes, or calls them otherwise.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import sys
from pathlib import Path

STUB = b"triton_python_backend_stub"
# As Triton calls an instance of a model on the command line of its process.
INSTANCE = re.compile(rb"[^/]+_\d+_\d+")


def lost(proc: Path, folder: Path) -> list[str]:
    """Instances of models that had a process in an earlier call and have none now. Raises OSError."""
    # A container that is started again in its pod finds the folder of before.
    started = (proc / "1" / "stat").read_text().rpartition(")")[2].split()[19]
    seen = folder / f"python-processes-{started}"
    seen.mkdir(exist_ok=True)
    alive = instances(proc)
    for name in alive:
        (seen / name).touch()
    return sorted({path.name for path in seen.iterdir()} - alive)


def instances(proc: Path) -> set[str]:
    """Instances of models whose processes run. One that has ended and is not collected yet has no command line."""
    found: set[str] = set()
    for path in proc.glob("[0-9]*/cmdline"):
        words = []
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")
        if words and words[0].endswith(STUB):
            found.update(word.decode() for word in words[1:] if INSTANCE.fullmatch(word))
    return found


def main(port: str, proc: str, folder: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=5)
    connection.request("GET", "/v2/health/live")
    status = connection.getresponse().status
    if status != 200:
        sys.exit(f"tritonserver answers with status {status}")
    with contextlib.suppress(OSError):  # what cannot be read says nothing against the server
        dead = lost(Path(proc), Path(folder))
        if dead:
            sys.exit(f"a Python process has died: {', '.join(dead)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
