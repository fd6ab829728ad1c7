"""Commands of trtpipe as forks of one process that has imported what they import: a new Python takes a second for it.

`python forked.py DESCRIPTOR` is that process. Over the socket it gets the words, the folder and the environment of a
command, and descriptors: one for its number and then how it ended, and its standard streams.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Ended:
    """A command that has ended; `grown` is by how many bytes its memory grew at most."""

    status: int
    out: str
    err: str
    seconds: float
    grown: int


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], text: str = "", *, seconds: float,
    limits: Mapping[int, int] | None = None,
) -> Ended:  # fmt: skip
    """Run `trtpipe WORDS` with `text` as its input; kill it after `seconds`. `limits` are those of `setrlimit`."""
    asked = {
        "words": list(words), "folder": str(folder), "environment": dict(environment),
        "limits": list((limits or {}).items()),
    }  # fmt: skip
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, _lock:
                descriptors = [theirs.fileno(), *(stream.fileno() for stream in (given, out, err))]
                control = _started()
                started = time.monotonic()
                socket.send_fds(control, [json.dumps(asked).encode()], descriptors)
            late = threading.Timer(seconds, os.kill, (int(ours.recv(64)), signal.SIGKILL))
            late.start()
            status, grown = map(int, ours.recv(64).split())
            late.cancel()
        return Ended(status, _text(out), _text(err), time.monotonic() - started, grown)


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
        # The kernel counts what a process had when it was forked as its own.
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        os.write(told, str(command).encode())
        _, status, usage = os.wait4(command, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)} {(usage.ru_maxrss - before) * 1024}".encode())
        os._exit(0)
    os.close(told)
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    for kind, most in asked["limits"]:
        resource.setrlimit(kind, (most, most))
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
    # Nearly every command asks for some of these.
    facts = importlib.import_module("trtpipe.configs.facts")
    for load in (facts.load_gpus, facts.load_models, facts.load_quant_recipes, facts.load_toolchains):
        load()
    gc.freeze()  # what no fork collects, all share
    main(socket.socket(fileno=int(sys.argv[1])))
    launch.main()
