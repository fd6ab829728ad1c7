"""Commands of trtpipe as forks of one process that has imported what they import: a new Python takes a second for it.

`python forked.py DESCRIPTOR` is that process. Over the socket it gets the words, the folder and the environment of a
command, and descriptors: one for its exit status, and its standard streams.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

TRTPIPE = Path(sys.executable).with_name("trtpipe")
MOST_BYTES = 1 << 17
# Nearly all that commands import; of packages each module.
PACKAGES = (
    "trtpipe.pipeline", "trtpipe.pipeline.cli", "trtpipe.pipeline.stages", "trtpipe.pipeline.serving",
    "trtpipe.engines.backends", "trtpipe.engines.families", "trtpipe.triton_repo.check",
)  # fmt: skip
MODULES = ("trtpipe.pipeline.bench.run", "jinja2", "pydantic.main", "rich.console", "tokenizers")
_lock = threading.Lock()
_process: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], text: str, seconds: float
) -> tuple[int, str, str]:
    """Run `trtpipe WORDS` with `text` as its input. Exit status, output and errors; TimeoutError after `seconds`."""
    asked = {"words": words, "folder": str(folder), "environment": dict(environment)}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        ours, theirs = socket.socketpair()
        with ours:
            with theirs, _lock:
                descriptors = [theirs.fileno(), *(stream.fileno() for stream in (given, out, err))]
                socket.send_fds(_started(), [json.dumps(asked).encode()], descriptors)
            ours.settimeout(seconds)
            status = int(ours.recv(16))
        return status, _text(out), _text(err)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _started() -> socket.socket:
    global _process
    if _process is None:
        # Each message arrives whole.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            _process = subprocess.Popen(command, pass_fds=[theirs.fileno()]), ours
    return _process[1]


def end() -> None:
    """End the process, where there is one."""
    global _process
    if _process is not None:
        process, ours = _process
        ours.close()
        process.wait()
        _process = None


def main(control: socket.socket) -> None:
    """Return in each fork, as the command that it is to run; exit when the socket is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for commands
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MOST_BYTES, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _become(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(asked: dict[str, Any], told: int, *streams: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    command = os.fork()
    if command:
        for stream in streams:
            os.close(stream)
        os.write(told, str(os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])).encode())
        os._exit(0)
    os.close(told)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = [str(TRTPIPE), *asked["words"]]


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    from trtpipe import launch

    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.iter_modules(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()  # what no fork collects, all share
    main(socket.socket(fileno=int(sys.argv[1])))
    launch.main()
