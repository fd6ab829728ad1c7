"""Serving a model repository with a real tritonserver: start, prove it with one request, remember it, end it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from engines.errors import ArtefactRefused, HostError, StageFailed, UsageError
from engines.passport import Passport, read_passport
from pipeline import guard, tritonserver
from pipeline.diagnosis import explain
from pipeline.folders import write_whole
from pipeline.runner import RUNS, RunFolder
from pipeline.store import Store
from pipeline.tritonserver import Endpoints
from triton_repo.render import ENGINE_FOLDER, TOKENIZER_FOLDER


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, as remembered in the store."""

    name: str
    pid: int
    repository: Path
    log: Path
    endpoints: Endpoints

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
    if (folder / "ensemble").is_dir():
        return folder.resolve().name, folder.resolve()
    raise UsageError(
        f"'{target}' is neither a target in ./runs nor a model repository",
        remedy="run `trtpipe build`, or see `ls runs`",
    )


def check_passport(repository: Path) -> Passport:
    """Refuse an engine that this machine, or its tritonserver, cannot run. Raises ArtefactRefused."""
    passport = read_passport(repository / ENGINE_FOLDER)
    guard.examine(passport).require(repository / ENGINE_FOLDER)
    if passport.runtime != "reference":
        raise ArtefactRefused(
            f"this engine is for the {passport.runtime} runtime on {passport.target()}",
            why="the tritonserver here runs reference engines",
            remedy=f"serve it with {passport.image}, or build with `--gpu cpu`",
        )
    return passport


def launch(
    name: str, repository: Path, store: Store, *, host: str, http: int, grpc: int, metrics: int
) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start a server for `repository` and wait until it has answered one request.

    Raises HostError (port taken, no tritonserver), ArtefactRefused, or StageFailed with the server's own reason.
    """
    check_passport(repository)
    for server in running(store):
        if server.name == name:
            raise HostError(
                f"{name} is already served at {server.endpoints.http_url}", remedy="run `trtpipe stop` first"
            )
    installation = tritonserver.find_installation()
    endpoints = tritonserver.choose_endpoints(host, http, grpc, metrics)
    backends = store.home / "servers" / name
    tritonserver.prepare_backends(installation, backends)
    log = store.home / "logs" / f"serve-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = tritonserver.start(installation, repository, backends, endpoints, log)
    server = Server(name=name, pid=process.pid, repository=repository, log=log, endpoints=endpoints)
    try:
        tritonserver.wait_ready(process, endpoints, log)
        smoke(server)
        _remember(store, server)
    except BaseException as error:
        tritonserver.end(process.pid)
        if isinstance(error, StageFailed):
            raise explain(error, log, "serve") from None
        raise
    return server, process


def smoke(server: Server) -> None:
    """One generation through the whole chain: a ready ensemble can still fail on its first request."""
    import httpx

    body = {"text_input": "Hello", "max_tokens": 1}
    try:
        response = httpx.post(f"{server.endpoints.http_url}/v2/models/ensemble/generate", json=body, timeout=120)
        reply = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise StageFailed(
            "the smoke request failed", why=str(error), remedy=f"the server's log is {server.log}"
        ) from None
    if "text_output" not in reply:
        why = str(reply.get("error", reply))
        raise StageFailed("the smoke request failed", why=why, remedy=f"the server's log is {server.log}")


def attend(
    server: Server,
    process: subprocess.Popen[bytes],
    store: Store,
    *,
    ready: Callable[[], None],
    stopping: Callable[[], None],
) -> None:
    """Stay with a server until Ctrl-C, a TERM signal or its own end. Raises StageFailed for the last.

    `ready` is called once signals are looked after, so that a Ctrl-C right after its words ends the server too.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        ready()
        status = process.wait()
    except KeyboardInterrupt:
        stopping()
        tritonserver.end(server.pid)
        return
    finally:
        signal.signal(signal.SIGTERM, previous)
        _forget(store, server)
    if status != 0:
        error = StageFailed(
            f"tritonserver ended by itself (status {status})",
            why=tritonserver.failure(server.log),
            remedy=f"its log is {server.log}",
        )
        raise explain(error, server.log, "serve")


def stop(store: Store, name: str | None) -> list[Server]:
    """End the server of that name, or all. Returns those that were ended. Raises UsageError for an unknown name."""
    servers = running(store)
    if name is not None:
        servers = [server for server in servers if server.name == name]
        if not servers:
            raise UsageError(f"no server named '{name}' is running", remedy="see `trtpipe status`")
    for server in servers:
        tritonserver.end(server.pid)
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
            )
        except (OSError, ValueError, KeyError, TypeError):
            path.unlink(missing_ok=True)
            continue
        if tritonserver.alive(server.pid):
            out.append(server)
        else:
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
