"""Serving a model repository with a real tritonserver: start, prove it with one request, remember it, end it."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from engines.errors import ArtefactRefused, HostError, StageFailed, UsageError, suggestion
from engines.passport import Passport, read_passport
from pipeline import gateway_process, guard, tritonserver
from pipeline.diagnosis import explain
from pipeline.executors import DockerExecutor
from pipeline.folders import write_whole
from pipeline.gateway.options import GatewayOptions, ServedModel
from pipeline.runner import RUNS, RunFolder
from pipeline.store import Store
from pipeline.tritonserver import Endpoints
from triton_repo.render import ENGINE_FOLDER, TOKENIZER_FOLDER

SERVERS = ("auto", "local", "docker")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How a server is started.

    server               auto, local (this environment's tritonserver) or docker (the toolchain's image)
    host                 address to listen on
    http, grpc, metrics  ports; 0 takes a free one
    openai               port of the OpenAI-compatible gateway; None starts none
    gateway_workers      its processes
    api_keys_file        its keys, one a line; None and no TRTPIPE_API_KEYS serves everybody who reaches it
    tls_cert, tls_key    its certificate and key, PEM files
    gpus                 indices of the GPUs a container gets; None for all
    shm_size             shared memory of a container; each Python model and rank takes some
    engine_python        interpreter of the engine process, where vLLM is installed in another environment
    """

    server: str = "auto"
    host: str = "127.0.0.1"
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    openai: int | None = None
    gateway_workers: int = 1
    api_keys_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    gpus: tuple[int, ...] | None = None
    shm_size: str = "2g"
    engine_python: str = sys.executable


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, as remembered in the store; with the number and address of its gateway, if it has one."""

    name: str
    pid: int
    repository: Path
    log: Path
    endpoints: Endpoints
    gateway_pid: int | None = None
    gateway_url: str | None = None

    @property
    def tokenizer(self) -> Path:
        return self.repository / TOKENIZER_FOLDER


def find_repository(target: str | None) -> tuple[str, Path]:
    """(name, folder) of what is to be served: a target of ./runs, a folder, or the newest run. Raises UsageError."""
    if target is None:
        runs = sorted(RUNS.glob("*/repository"), key=lambda link: link.lstat().st_mtime)
        if not runs:
            raise UsageError("there is nothing to serve in ./runs", remedy="run `trtpipe build` first")
        target = runs[-1].parent.name
    # By name only: the server's own folder and log are named after it, so a path must not pass as one.
    if target in {run.name for run in RUNS.glob("*")}:
        return target, RunFolder.of(target).linked("repository")
    folder = Path(target)
    if (folder / "repository").is_dir():
        return folder.resolve().name, (folder / "repository").resolve()
    if (folder / "tensorrt_llm" / "config.pbtxt").is_file():
        return folder.resolve().name, folder.resolve()
    raise UsageError(
        f"'{target}' is neither a target in ./runs nor a model repository",
        remedy="run `trtpipe build`, or see `ls runs`",
    )


def check_passport(repository: Path) -> Passport:
    """Refuse an engine that this machine cannot run. Raises ArtefactRefused."""
    passport = read_passport(repository / ENGINE_FOLDER)
    guard.examine(passport).require(repository / ENGINE_FOLDER)
    return passport


def choose_server(asked: str, passport: Passport) -> str:
    """local or docker: which server runs the engine. Raises UsageError for an unknown one, ArtefactRefused for one
    that cannot."""
    usual = "local" if passport.runtime in tritonserver.RUNTIMES else "docker"
    if asked not in SERVERS:
        raise UsageError(f"unknown server '{asked}'", remedy=suggestion(asked, SERVERS))
    if asked == "docker" and usual == "local":
        raise ArtefactRefused(
            f"this engine is for the {passport.runtime} runtime",
            why="NVIDIA's image does not hold it",
            remedy="serve it with --server local",
        )
    if asked == "local" and usual == "docker":
        raise ArtefactRefused(
            f"this engine is for the {passport.runtime} runtime on {passport.target()}",
            why="the tritonserver of this environment runs reference and vllm engines",
            remedy=f"serve it with --server docker, from {passport.image}",
        )
    return usual


def launch(name: str, repository: Path, store: Store, options: LaunchOptions) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start a server for `repository` and wait until it has answered one request.

    Raises HostError (port taken, no tritonserver, no Docker), ArtefactRefused, or StageFailed with the server's own
    reason.
    """
    passport = check_passport(repository)
    kind = choose_server(options.server, passport)
    for server in running(store):
        if server.name == name:
            raise HostError(
                f"{name} is already served at {server.endpoints.http_url}", remedy="run `trtpipe stop` first"
            )
    endpoints = tritonserver.choose_endpoints(options.host, options.http, options.grpc, options.metrics)
    folder = store.home / "servers" / name
    models = link_models(repository, folder / "models")
    names = sorted(path.name for path in models.iterdir())
    log = store.home / "logs" / f"serve-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if kind == "local":
        installation = tritonserver.find_installation()
        backends = folder / "backends"
        tritonserver.prepare_backends(installation, backends, passport.runtime, options.engine_python)
        process = tritonserver.start_local(installation, models, names, backends, endpoints, log)
    else:
        assert passport.image is not None
        DockerExecutor(passport.image).require()
        # The folder of all repositories, where this one is in it: what is loaded later must be seen as well.
        packages = (store.home / "artefacts" / "package").resolve()
        reads = [packages if packages in repository.resolve().parents else repository]
        process = tritonserver.start_docker(
            passport.image, models, names, reads, endpoints, log,
            # The LLM API starts its own ranks.
            world_size=passport.world_size if passport.runtime == "tensorrt_llm" else 1,
            gpus=options.gpus, shm_size=options.shm_size,
        )  # fmt: skip
    server = Server(name=name, pid=process.pid, repository=repository, log=log, endpoints=endpoints)
    try:
        tritonserver.wait_ready(process, endpoints, log)
        smoke(server)
        server = _with_gateway(server, passport, options)
        _remember(store, server)
    except BaseException as error:
        tritonserver.end(process.pid)
        if isinstance(error, StageFailed):
            raise explain(error, log, "serve") from None
        raise
    return server, process


def _with_gateway(server: Server, passport: Passport, options: LaunchOptions) -> Server:
    """Start the gateway, where one is asked for and the repository has models that it can speak to."""
    if options.openai is None or passport.runtime == "trtllm_pytorch":
        return server
    limits = passport.build_config
    served = ServedModel(
        name=server.name,
        tokenizer=server.tokenizer,
        max_input_len=limits["max_input_len"],
        max_seq_len=limits["max_seq_len"],
    )
    chosen = GatewayOptions(
        models=(served,),
        # What listens everywhere is reached here.
        grpc_url=server.endpoints.grpc_url.replace("0.0.0.0", "127.0.0.1"),
        host=options.host,
        port=options.openai,
        workers=options.gateway_workers,
        api_keys_file=options.api_keys_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
    )
    pid, url = gateway_process.start(chosen, server.log.with_suffix(".gateway.log"))
    return replace(server, gateway_pid=pid, gateway_url=url)


def _end(server: Server) -> None:
    if server.gateway_pid is not None:
        gateway_process.end(server.gateway_pid)
    tritonserver.end(server.pid)


def link_models(repository: Path, folder: Path) -> Path:
    """A folder of links to the repository's models: what is served stays at one place when its content changes."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in repository.iterdir() if (path / "config.pbtxt").is_file()}
    for link in folder.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, path in wanted.items():
        partial = folder.with_name(f".{name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        partial.symlink_to(path)
        partial.replace(folder / name)
    return folder


def reload(store: Store, name: str | None, target: str | None) -> Server:
    """Give a running server the repository its target has now, model by model, without ending it.

    Raises ArtefactRefused for an engine of another kind, StageFailed with the server's words when a model does not
    load: the server then goes on with what it has.
    """
    server = find_running(store, name)
    _, repository = find_repository(target or server.name)
    passport = check_passport(repository)
    before = read_passport(server.repository / ENGINE_FOLDER)
    if (passport.runtime, passport.world_size) != (before.runtime, before.world_size):
        raise ArtefactRefused(
            f"{server.name} runs {before.runtime} with {before.world_size} rank(s)",
            why=f"the new engine is for {passport.runtime} with {passport.world_size}",
            remedy="stop the server and serve the new one",
        )
    models = link_models(repository, store.home / "servers" / server.name / "models")
    tritonserver.load_models(server.endpoints, sorted(path.name for path in models.iterdir()), server.log)
    renewed = replace(server, repository=repository)
    smoke(renewed)
    _remember(store, renewed)
    return renewed


def smoke(server: Server) -> None:
    """One generation through the whole chain: a ready ensemble can still fail on its first request."""
    import httpx

    front = "ensemble" if (server.repository / "ensemble").is_dir() else "tensorrt_llm"
    length = "max_tokens" if front == "ensemble" else "sampling_param_max_tokens"
    body = {"text_input": "Hello", length: 1}
    try:
        response = httpx.post(f"{server.endpoints.http_url}/v2/models/{front}/generate", json=body, timeout=120)
        reply = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise StageFailed(
            "the smoke request failed", why=str(error), remedy=f"the server's log is {server.log}"
        ) from None
    if "text_output" not in reply:
        why = str(reply.get("error", reply))
        raise StageFailed("the smoke request failed", why=why, remedy=f"the server's log is {server.log}")


def attend(
    server: Server, process: subprocess.Popen[bytes], store: Store, options: LaunchOptions, *, restarts: int,
    ready: Callable[[], None], stopping: Callable[[], None], note: Callable[[str], None],
) -> None:  # fmt: skip
    """Stay with a server until Ctrl-C, a TERM signal or its own end; start one that ended by itself `restarts` times.

    `ready` is called once signals are looked after, so that a Ctrl-C right after its words ends the server too.
    Raises StageFailed when the server ends by itself once more.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        ready()
        while (status := process.wait()) != 0:
            error = explain(_ended(status, server.log), server.log, "serve")
            if restarts == 0:
                raise error
            restarts -= 1
            note(f"{error}; starting it again")
            _end(server)  # what it left running
            _forget(store, server)
            points = server.endpoints
            openai = int(server.gateway_url.rpartition(":")[2]) if server.gateway_url else None
            again = replace(options, http=points.http, grpc=points.grpc, metrics=points.metrics, openai=openai)
            server, process = launch(server.name, server.repository, store, again)
            note(f"{server.name} serves again")
    except KeyboardInterrupt:
        stopping()
        _end(server)
    finally:
        signal.signal(signal.SIGTERM, previous)
        _forget(store, server)


def _ended(status: int, log: Path) -> StageFailed:
    return StageFailed(
        f"tritonserver ended by itself (status {status})",
        why=tritonserver.failure(log),
        remedy=f"its log is {log}",
    )


def read_log(store: Store, name: str | None, *, lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` of a server's log, and with `follow` what comes after them while the server runs.

    A server that has ended has a log too. Raises UsageError for a name without one.
    """
    if name is None:
        server: Server | None = find_running(store, None)
        assert server is not None
        name = server.name
    path = store.home / "logs" / f"serve-{name}.log"
    if not path.is_file():
        raise UsageError(f"there is no log of a server named '{name}'", remedy="see `trtpipe ps`")
    with path.open(encoding="utf-8", errors="replace") as file:
        yield "".join(collections.deque(file, maxlen=lines))
        while follow:
            piece = file.read()
            if piece:
                yield piece
            elif not any(server.name == name for server in running(store)):
                return
            else:
                time.sleep(0.2)


def stop(store: Store, name: str | None) -> list[Server]:
    """End the server of that name, or all. Returns those that were ended. Raises UsageError for an unknown name."""
    servers = running(store)
    if name is not None:
        servers = [server for server in servers if server.name == name]
        if not servers:
            raise UsageError(f"no server named '{name}' is running", remedy="see `trtpipe ps`")
    for server in servers:
        _end(server)
        _forget(store, server)
    return servers


def running(store: Store) -> list[Server]:
    """Servers started from this store that still run; records of others are dropped."""
    out = []
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            server = Server(
                name=raw["name"],
                pid=raw["pid"],
                repository=Path(raw["repository"]),
                log=Path(raw["log"]),
                endpoints=Endpoints(**raw["endpoints"]),
                gateway_pid=raw["gateway_pid"],
                gateway_url=raw["gateway_url"],
            )
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if tritonserver.alive(server.pid):
            out.append(server)
        else:
            if server.gateway_pid is not None:
                gateway_process.end(server.gateway_pid)
            _forget(store, server)
    return out


def find_running(store: Store, name: str | None) -> Server:
    """The server to talk to: by name, or the only one. Raises UsageError."""
    servers = running(store)
    if name is not None:
        servers = [server for server in servers if server.name == name]
    if not servers:
        raise UsageError(
            f"no server named '{name}' is running" if name else "no server is running", remedy="run `trtpipe serve`"
        )
    if len(servers) > 1:
        raise UsageError("several servers are running", remedy="name one: " + ", ".join(s.name for s in servers))
    return servers[0]


def _remember(store: Store, server: Server) -> None:
    value = {**asdict(server), "repository": str(server.repository), "log": str(server.log)}
    path = store.home / "servers" / f"{server.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(value, indent=2) + "\n")  # `running` drops what it cannot read


def _forget(store: Store, server: Server) -> None:
    with contextlib.suppress(FileNotFoundError):
        (store.home / "servers" / f"{server.name}.json").unlink()
    tritonserver.remove_shared_memory(server.endpoints)
