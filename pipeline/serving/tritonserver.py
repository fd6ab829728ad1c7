"""Servers on this machine, started and ended with all that belongs to them, here or in Docker.

A tritonserver of this environment needs both library folders (the package's own, and the interpreter's, without which
a stub takes another libpython), and this environment's `bin` first on PATH, through which the stub finds its packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.engines.errors import HostError
from trtpipe.engines.process import open_log, python_command, terminate, words_of
from trtpipe.pipeline.execution.executors import DockerExecutor
from trtpipe.pipeline.serving import owner_only
from trtpipe.pipeline.serving.environment import without_secrets
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.server_log import STARTED
from trtpipe.pipeline.serving.triton_package import Installation
from trtpipe.triton_repo.launch import ServerOptions, region_prefix, server_command

STOP_SECONDS = 30.0
# Of these, what requests in flight have to end.
DRAIN_S = 15
PROGRAM = "tritonserver"
# Module of the process that stands for a server in Docker, and its time limit to remove the container by force.
STAND_IN, REMOVE_SECONDS = "trtpipe.pipeline.serving.docker_server", 10.0


def fetch_image(image: str, show: Callable[[str, str], None]) -> None:
    """Have Docker pull an image that it lacks, before a server of it is started: that may take longer than a server has
    to become ready. `show` gets the stage and its progress. Raises HostError."""

    def progress(done: int, total: int) -> None:
        show("pulling the image", f"{done / total:.0%} of {total / 1e9:.1f} GB" if total else "")

    executor = DockerExecutor(image)
    executor.require()
    executor.prepare(progress)


def remove_container(out: Path) -> None:
    """Remove the container that writes to `out`, where Docker answers: a stand-in that was killed has left it, with its
    ports and its GPU."""
    with contextlib.suppress(HostError):
        DockerExecutor("").remove_left(out)


def start_local(
    installation: Installation, models: Path, names: Sequence[str], backends: Path, endpoints: Endpoints, log: Path, *,
    drain_s: int = DRAIN_S, traces_url: str | None = None, more: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start the server of this environment on the repository `models`, which is also its working folder. `more` are
    environment variables of its processes."""
    options = ServerOptions(
        program=str(installation.server),
        repository=str(models),
        models=names,
        host=endpoints.host,
        http=endpoints.http,
        grpc=endpoints.grpc,
        metrics=endpoints.metrics,
        backends=str(backends),
        caches=str(installation.caches),
        exit_timeout=drain_s,
        traces_url=traces_url,
    )
    libraries = [str(installation.libraries), sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    environment = {
        **(more or {}),
        "LD_LIBRARY_PATH": ":".join(folder for folder in libraries if folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}",
    }
    command = [sys.executable, "-I", owner_only.__file__, *server_command(options)]
    return spawn(command, environment, models, log)


def start_docker(
    image: str, models: Path, names: Sequence[str], reads: Sequence[Path], endpoints: Endpoints, log: Path, *,
    world_size: int, gpus: tuple[int, ...] | None, shm_size: str, drain_s: int = DRAIN_S, traces_url: str | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start the server of a toolchain's image on the repository `models`; `reads` are the folders it links to."""
    options = ServerOptions(
        repository=str(models),
        models=names,
        host=endpoints.host,
        http=endpoints.http,
        grpc=endpoints.grpc,
        metrics=endpoints.metrics,
        exit_timeout=drain_s,
        histograms=True,
        root=os.geteuid() == 0,
        traces_url=traces_url,
    )
    command = server_command(options, world_size=world_size)
    grace = STOP_SECONDS - 5 + max(0, drain_s - DRAIN_S)
    return spawn_in_docker(image, command, reads, models, log, gpus=gpus, shm_size=shm_size, grace=grace)


def spawn_in_docker(
    image: str, command: Sequence[str], reads: Sequence[Path], folder: Path, log: Path, *,
    gpus: tuple[int, ...] | None, shm_size: str, grace: float = STOP_SECONDS - 5,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a server's command line in an image, in `folder`, which it may write; `reads` are mounted too. Told to end,
    it has `grace` seconds."""
    spec = {
        "image": image,
        "command": list(command),
        "reads": [str(path) for path in reads],
        "out": str(folder),
        "gpus": gpus,
        "shm_size": shm_size,
        "grace": grace,
    }
    return spawn([*python_command(STAND_IN, outlives=True), json.dumps(spec)], {}, folder, log)


def spawn(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that we decide whether to pass on a Ctrl-C."""
    with open_log(log) as output:
        output.write(f"{STARTED}{time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        output.flush()
        return subprocess.Popen(
            command,
            cwd=folder,
            env={**without_secrets(os.environ), **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(pid: int, program: str = PROGRAM, *, drain_s: int = 0) -> bool:
    """End a server started here, and all it started; a second Ctrl-C kills it. True when it ended by itself, False when
    it was killed. `drain_s` are seconds that its requests were given beyond DRAIN_S, or more."""
    try:
        return terminate(pid, lambda pid: alive(pid, program), STOP_SECONDS + drain_s)
    finally:
        if STAND_IN.encode() in words_of(pid):  # it alone removes its container: by force at this signal
            terminate(pid, lambda pid: alive(pid, program), REMOVE_SECONDS, signal.SIGINT)
        # A stub or an engine process that outlived its server is still in the server's process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server at once, with its Python processes: clients that wait for an answer see their connection end. The
    stand-in of a container is asked to end instead, since a container outlives a stand-in that is killed."""
    if STAND_IN.encode() in words_of(process.pid):
        end(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_stubs(backends: Path) -> None:
    """Kill the Python processes that a crashed server has left, because nothing tells them that it is gone."""
    stub = os.fsencode(backends / "python")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if path.read_bytes().startswith(stub):
                os.kill(int(path.parent.name), signal.SIGKILL)


@dataclass(frozen=True)
class InFlight:
    """Requests that processes of the backend hold; `all` includes those of scripts."""

    all: int
    of_scripts: int


def requests_in_flight(backends: Path, model: str, pid: int | None = None) -> InFlight:
    """Requests that the processes of a model hold, or held when they died; with `pid`, those of that process alone."""
    whole = scripts = 0
    for path in (backends / "tensorrtllm").glob(f"in-flight.{model}.{'*' if pid is None else pid}"):
        with contextlib.suppress(OSError, struct.error):  # the process has just ended
            counts = struct.unpack("qq", path.read_bytes())
            whole, scripts = whole + counts[0], scripts + counts[1]
    return InFlight(whole, scripts)


def remove_shared_memory(endpoints: Endpoints) -> None:
    """Delete the regions that a killed server has left in /dev/shm.

    Regions of another server that has its port by now lose only their names, which nobody uses after the start.
    """
    for region in Path("/dev/shm").glob(f"{region_prefix(endpoints.http)}*"):
        with contextlib.suppress(OSError):  # another user's file
            region.unlink()


def alive(pid: int, program: str = PROGRAM) -> bool:
    """Whether `pid` is a running server or the stand-in of one in Docker, and not another program with that process id.

    program  a word of its command line, or the name of its file
    """
    with contextlib.suppress(ChildProcessError):  # another process started it
        os.waitpid(pid, os.WNOHANG)  # ours: collect it, or it stays as a zombie
    words = words_of(pid) or [b""]
    own = {program.encode(), STAND_IN.encode()}
    return not own.isdisjoint([words[0].rpartition(b"/")[2], *words])
