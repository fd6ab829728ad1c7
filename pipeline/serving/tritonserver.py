"""tritonserver on this machine: found inside the nvidia-pytriton package, given our backends, started and ended.

The package carries the server, the Python backend and one stub for each Python; only the binary is used, not the
PyTriton API. This module arranges what the binary needs: a backend folder with the stub of this very Python, both
library folders (the package's own, and the interpreter's, without which a stub takes another libpython), and this
environment's `bin` first on PATH, through which the stub finds its packages.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from trtpipe import triton_repo
from trtpipe.engines import load_backend
from trtpipe.engines.engine_process import protocol
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.extras import install_command
from trtpipe.engines.json_input import parse_json
from trtpipe.engines.process import python_command, tail, terminate, words_of
from trtpipe.pipeline.serving import owner_only
from trtpipe.pipeline.serving.environment import without_secrets
from trtpipe.triton_repo.launch import ServerOptions, region_prefix, server_command

if TYPE_CHECKING:
    import httpx

WIRE = Path(protocol.__file__)
BACKEND = Path(triton_repo.__file__).parent / "backends" / "tensorrtllm"
READY_SECONDS = 600.0
# Time between two looks into the log of a starting server.
LOOK_SECONDS = 0.5
# Limit for an unload: a model goes when its last request has been answered.
UNLOAD_SECONDS = 60.0
STOP_SECONDS = 30.0
PROGRAM = "tritonserver"
# A larger log is set aside when a server starts; the last start is searched for in the last part of a log.
LOG_BYTES = 16 << 20
# Line before a server's output, because a log holds every start.
STARTED = "--- server is started "
# "failed to load 'tensorrt_llm' version 1: Internal: <reason>", as Triton logs it, line ends written as \\n; the
# class of a Python exception stands before its message, its traceback after it.
LOAD_FAILURE = re.compile(
    r"failed to load '(?P<model>[^']+)' version \d+: [\w ]+: (?:TritonModelException: )?(?P<reason>.*?)(?:\\n|\"?$)",
    re.MULTILINE,
)


# Last line of a Python traceback, as vLLM and TensorRT-LLM write it: after the process and the place in the source.
RAISED = re.compile(
    r"^(?:\([^)\n]*\) )?(?:[A-Z]+ [\d:. -]+)?(?:\[[^]\n]*\] )*((?:\w+\.)*\w*(?:Error|Exception): .+)$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Installation:
    """Paths of the parts of a Triton Inference Server."""

    server: Path
    python_backend: Path
    stub: Path
    libraries: Path
    caches: Path
    version: str


@dataclass(frozen=True, kw_only=True)
class Endpoints:
    """Addresses on which a server listens."""

    host: str
    http: int
    grpc: int
    metrics: int

    @property
    def http_url(self) -> str:
        return f"http://{self.host}:{self.http}"

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc}"

    @property
    def ready_url(self) -> str:
        return f"{self.http_url}/v2/health/ready"

    @property
    def metrics_url(self) -> str:
        return f"http://{self.host}:{self.metrics}/metrics"


def find_installation() -> Installation:
    """The tritonserver of this environment. Raises HostError naming what is missing."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise HostError(
            "no tritonserver in this environment",
            why="it comes with the package nvidia-pytriton",
            remedy=f"run `{install_command('serve')}`",
        )
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = Installation(
        server=root / "bin" / "tritonserver",
        python_backend=root / "backends" / "python",
        stub=root / "python_backend_stubs" / python / "triton_python_backend_stub",
        libraries=package.parent / "nvidia_pytriton.libs",
        caches=root / "caches",
        version=importlib.metadata.version("nvidia-pytriton"),
    )
    if not found.stub.is_file():
        raise HostError(f"nvidia-pytriton {found.version} has no stub for Python {python}", remedy="use Python 3.11")
    check_numpy()
    check_libpython()
    return found


def check_numpy() -> None:
    """Triton's Python backend returns empty tensors under numpy 2, without an error. Raises HostError."""
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise HostError(
            f"numpy {version} breaks Triton's Python backend",
            why="models become ready and then return empty tensors",
            remedy="run `pip install 'numpy<2'`",
        )


def check_libpython() -> None:
    """Check for libpython, which the stub loads: a Python without a shared one cannot serve. Raises HostError."""
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR") or "", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib"]
    if not any((Path(folder) / name).is_file() for folder in folders if folder):
        raise HostError(
            f"this Python has no {name}",
            why="Triton's Python backend loads it",
            remedy="install your distribution's libpython package, or a Python built with --enable-shared",
        )


def choose_endpoints(host: str, http: int, grpc: int, metrics: int, openai: int | None = None) -> Endpoints:
    """Check that the ports are free; 0 takes a free one. Raises HostError for a port in use, UsageError for no port.

    openai  the gateway's port, checked with the others although the gateway binds it
    """
    chosen = free_ports(host, http=http, grpc=grpc, metrics=metrics, **({} if openai is None else {"openai": openai}))
    return Endpoints(host=host, http=chosen["http"], grpc=chosen["grpc"], metrics=chosen["metrics"])


def free_ports(host: str, **ports: int) -> dict[str, int]:
    """The ports by name, 0 replaced by a free one. Raises HostError for a port in use, UsageError for no port."""
    chosen: dict[str, int] = {}
    with contextlib.ExitStack() as probes:  # held together, or one free port could be chosen twice
        for name, port in ports.items():
            if not 0 <= port < 1 << 16:
                raise UsageError(f"--{name}-port {port} is not a port", remedy="give a number from 0 to 65535")
            if port in chosen.values():
                raise UsageError(f"port {port} is asked for twice", remedy=f"pass --{name}-port 0 to choose a free one")
            probe = probes.enter_context(socket.socket())
            if port:
                # As the server does it: a port whose last connection is only closing counts as free.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise HostError(
                    f"port {port} on {host} cannot be taken",
                    why=error.strerror or str(error),
                    remedy=f"stop what listens there, or pass --{name}-port 0 to choose a free one"
                    if error.errno in (errno.EADDRINUSE, errno.EACCES)
                    else "pass an IPv4 address of this machine as --host",
                ) from None
            chosen[name] = probe.getsockname()[1]
    return chosen


def prepare_backends(
    installation: Installation, folder: Path, runtime: str = "reference", python: str = sys.executable
) -> None:
    """Fill `folder` with the backends that a repository made here needs: `python`, and our `tensorrtllm`.

    python  the interpreter of the engine process, which may live in another environment than the server
    """
    shutil.rmtree(folder, ignore_errors=True)
    stubs = folder / "python"
    stubs.mkdir(parents=True)
    for source in installation.python_backend.iterdir():
        if source.is_file():
            # Not a link: the server refuses a library that resolves to a place outside its backend folder.
            shutil.copyfile(source, stubs / source.name)
    shutil.copy(installation.stub, stubs / "triton_python_backend_stub")
    ours = folder / "tensorrtllm"
    ours.mkdir()
    for source in BACKEND.glob("*.py"):
        shutil.copyfile(source, ours / source.name)
    shutil.copyfile(WIRE, ours / "trtpipe_wire.py")
    launch = {
        "command": [
            *python_command("trtpipe.engines.engine_process.server", python, outlives=True),
            "--runtime",
            load_backend(runtime).PROCESS,
        ],
        # torch must not see the server's own library folders.
        "library_path": os.environ.get("LD_LIBRARY_PATH"),
    }
    (ours / "engine.json").write_text(json.dumps(launch), encoding="utf-8")


def start_local(
    installation: Installation, models: Path, names: Sequence[str], backends: Path, endpoints: Endpoints, log: Path, *,
    traces_url: str | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start the server of this environment on the repository `models`, which is also its working folder."""
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
        exit_timeout=int(STOP_SECONDS) // 2,
        traces_url=traces_url,
    )
    libraries = [str(installation.libraries), sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    environment = {
        "LD_LIBRARY_PATH": ":".join(folder for folder in libraries if folder),
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH') or os.defpath}",
    }
    command = [sys.executable, "-I", owner_only.__file__, *server_command(options)]
    return spawn(command, environment, models, log)


def start_docker(
    image: str, models: Path, names: Sequence[str], reads: Sequence[Path], endpoints: Endpoints, log: Path, *,
    world_size: int, gpus: tuple[int, ...] | None, shm_size: str, traces_url: str | None = None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start the server of a toolchain's image on the repository `models`; `reads` are the folders it links to."""
    options = ServerOptions(
        repository=str(models),
        models=names,
        host=endpoints.host,
        http=endpoints.http,
        grpc=endpoints.grpc,
        metrics=endpoints.metrics,
        exit_timeout=int(STOP_SECONDS) // 2,
        histograms=True,
        root=os.geteuid() == 0,
        traces_url=traces_url,
    )
    command = server_command(options, world_size=world_size)
    return spawn_in_docker(image, command, reads, models, log, gpus=gpus, shm_size=shm_size)


def spawn_in_docker(
    image: str, command: Sequence[str], reads: Sequence[Path], folder: Path, log: Path, *,
    gpus: tuple[int, ...] | None, shm_size: str,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a server's command line in an image, in `folder`, which it may write; `reads` are mounted too."""
    spec = {
        "image": image,
        "command": list(command),
        "reads": [str(path) for path in reads],
        "out": str(folder),
        "gpus": gpus,
        "shm_size": shm_size,
        "grace": STOP_SECONDS - 5,
    }
    return spawn(
        [*python_command("trtpipe.pipeline.serving.docker_server", outlives=True), json.dumps(spec)], {}, folder, log
    )


def spawn(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start it in a session of its own, so that we decide whether to pass on a Ctrl-C."""
    with _open_log(log) as output:
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


def _open_log(log: Path) -> BinaryIO:
    """Open for appending, so that the stack that an error message referred to stays. A model's error may quote a
    prompt, so nobody else may read the log."""
    if log.exists() and log.stat().st_size > LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def last_start(log: Path) -> int:
    """The byte of a log at which the output of its last start begins; 0 for a log without a start."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        begin = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(begin)
        written = file.read()
        start = written.rfind(STARTED.encode())
        if start >= 0:
            return begin + written.index(b"\n", start) + 1
    return 0


class Loading:
    """Shows, each time it is called, how far a starting server is by its log."""

    def __init__(self, models: Sequence[str], log: Path, show: Callable[[str, str], None]) -> None:
        self._models = models
        self._log = log
        self._show = show
        self._next = 0.0

    def __call__(self) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[last_start(self._log) :].decode(errors="replace")
            left = [name for name in self._models if f"successfully loaded '{name}'" not in text]
            pulled = re.findall(r"^pulling .*: (\d+% of .*)$", text, re.MULTILINE)
            if pulled and len(left) == len(self._models) and "loading: " not in text:
                self._show("pulling the image", pulled[-1])
            else:
                done = len(self._models) - len(left)
                self._show("loading the models", f"{done} of {len(self._models)}, left: {', '.join(left)}")


def wait_ready(
    process: subprocess.Popen[bytes], url: str, log: Path, tick: Callable[[], None] = lambda: None,
    *, program: str = PROGRAM,
) -> None:  # fmt: skip
    """Return when a GET of `url` is answered with 200. Raises StageFailed with the server's own reason."""
    import httpx

    deadline = time.monotonic() + READY_SECONDS
    with http_client(2) as client:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise StageFailed(f"{program} does not start", why=failure(log), remedy=f"its log is {log}")
            try:
                if client.get(url).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            tick()
            time.sleep(0.05)
    raise StageFailed(
        f"{program} is not ready after {READY_SECONDS:.0f} s",
        why=tail(log, begin=last_start(log)),
        remedy=f"its log is {log}",
    )


def http_client(timeout: float) -> httpx.Client:
    """Client of a server's plain HTTP. `httpx.get` reads all certificate authorities first, which takes 30 ms."""
    import httpx

    return httpx.Client(timeout=timeout, verify=False)


def load_models(endpoints: Endpoints, names: Sequence[str], log: Path) -> None:
    """Load models again; each serves its old version until the new one is ready. Raises StageFailed with the reason."""
    for name in names:
        _control(endpoints, name, "load", log)


def unload_model(endpoints: Endpoints, name: str, log: Path) -> None:
    """Take a model out of service: it counts as not ready at once. Raises StageFailed."""
    _control(endpoints, name, "unload", log)


def load_unloaded(endpoints: Endpoints, name: str, log: Path) -> None:
    """Load a model that is unloaded or about to be. Raises StageFailed with the reason."""
    deadline = time.monotonic() + UNLOAD_SECONDS
    while True:
        try:
            return _control(endpoints, name, "load", log)
        except StageFailed:  # it is still being unloaded
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _control(endpoints: Endpoints, name: str, verb: str, log: Path) -> None:
    import httpx

    url = f"{endpoints.http_url}/v2/repository/models/{name}/{verb}"
    try:
        with http_client(READY_SECONDS) as client:
            reply = client.post(url, json={})
        error = "" if reply.status_code == 200 else str(parse_json(reply.content)["error"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as failed:
        error = str(failed) or type(failed).__name__
    if error:
        raise StageFailed(f"{name} does not {verb}", why=error, remedy=f"the server's log is {log}")


def failure(log: Path) -> str:
    """Why the server that wrote last ended: the first model's reason, else its exception, else its first error, else
    its last lines."""
    begin = last_start(log)
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace") if log.exists() else ""
    found = LOAD_FAILURE.search(text)
    if found:
        return f"model {found['model']}: {found['reason'].strip()}"
    thrown = re.findall(r"^ *what\(\): *(.+)$", text, re.MULTILINE)
    if thrown:
        return f"it crashed: {thrown[-1].strip()}"
    raised = [reason for reason in RAISED.findall(text) if "See root cause above" not in reason]
    if raised:
        return str(raised[-1])
    errors = [line.split("] ", 1)[-1].strip().strip('"') for line in text.splitlines() if re.match(r"E\d{4} ", line)]
    # Every server without a GPU logs the first error, and continues.
    errors = [error for error in errors if "CudaDriverHelper" not in error]
    return errors[0] if errors else tail(log, begin=begin)


def end(pid: int, program: str = PROGRAM) -> bool:
    """End a server started here, and all it started. True when it ended by itself, False when it was killed."""
    left = terminate(pid, lambda pid: alive(pid, program), STOP_SECONDS)
    # A stub or an engine process that outlived its server is still in the server's process group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return left


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server at once, with its Python processes: clients that wait for an answer see their connection end."""
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
    own = {program.encode(), b"trtpipe.pipeline.serving.docker_server"}
    return not own.isdisjoint([words[0].rpartition(b"/")[2], *words])
