"""Records of the servers started from a store: what each serves and where, kept in files, checked with the system."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError, UsageError, suggestion
from trtpipe.engines.json_input import read_json
from trtpipe.engines.process import terminate, words_of
from trtpipe.pipeline.gateway import process
from trtpipe.pipeline.serving import server_log, temporary, tritonserver
from trtpipe.pipeline.serving.model_control import READY_SECONDS
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.store.folders import write_whole
from trtpipe.pipeline.store.store import Store, machine
from trtpipe.triton_repo.layout import model_names, tokenizer_folder

# Largest process id that Linux can be configured to use.
MAX_PID = 1 << 22
# Time limit for a watchdog to end its server and gateway.
WATCHER_SECONDS = tritonserver.STOP_SECONDS + process.STOP_SECONDS + 5
BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """The kernel's name of this start of the machine; "" where it tells none."""
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return ""


@dataclass(frozen=True, kw_only=True)
class Served:
    """One repository in a server.

    name    of the target it comes from
    names   of the model at the gateway, whose answers bear the first; the target's name if left out
    source  run folder that it comes from, or the folder itself; None in records of earlier versions
    prefix  prefix of its models' names; empty where it is the server's only one
    imported  a phrase for each artefact behind it that was made elsewhere
    tool_format, reasoning  as LaunchOptions has them
    """

    name: str
    repository: Path
    prefix: str = ""
    imported: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    source: Path | None = None
    tool_format: str | None = None
    reasoning: bool = True

    def comes_from(self, run: Path) -> bool:
        """Whether it was served from the run folder `run`. By name alone in records of earlier versions."""
        return self.name == run.name if self.source is None else self.source.resolve() == run.resolve()

    def called(self, name: str | None) -> bool:
        """Whether `name` names this target; a folder, such as runs/NAME, is named by its last part."""
        return name is not None and Path(name).name in (self.name, self.target)

    @property
    def target(self) -> str:
        """Name of the target that is served now: `reload` may have loaded another one than the server's."""
        if self.source is None:
            return self.name
        return (self.source if (self.source / "plan.json").is_file() else self.source.resolve()).name

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.names or (self.name,)

    def model_name(self, adapter: str | None = None) -> str:
        """Name of the model at the gateway, alone or with one of its adapters."""
        return self.model_names[0] if adapter is None else f"{self.model_names[0]}:{adapter}"

    @property
    def tokenizer(self) -> Path:
        return tokenizer_folder(self.repository)

    @property
    def front(self) -> str:
        """The model that takes text."""
        return self.model("ensemble" if "ensemble" in model_names(self.repository) else "tensorrt_llm")

    def model(self, name: str) -> str:
        """Name in the server of a model of the repository."""
        return self.prefix + name


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server, with the process id and address of its gateway and the process id of its watchdog, if any.

    keyed  whether its gateway asks for a key
    died   why it ended by itself; None while it runs
    native program of the runtime's own server, by which its process is known; "" for a tritonserver. It has one
           address, which is that of its HTTP API, of its OpenAI API and of its metrics
    machine  where it runs; this one in records of earlier versions
    boot     start of that machine since which it has run, as the kernel names it: process ids recur after another. This
             one in records of earlier versions
    docker   whether it runs in a container
    drain_s  seconds that requests in flight have to end, where such were asked for; 0 for the defaults
    ready_s  seconds that its models have to load
    """

    name: str
    pid: int
    log: Path
    endpoints: Endpoints
    served: tuple[Served, ...]
    gateway_pid: int | None = None
    gateway_url: str | None = None
    watcher: int | None = None
    keyed: bool = False
    died: str | None = None
    native: str = ""
    machine: str = field(default_factory=machine)
    boot: str = field(default_factory=boot)
    docker: bool = False
    drain_s: int = 0
    ready_s: int = READY_SECONDS

    @property
    def program(self) -> str:
        """The word of its command line by which its process is known."""
        return self.native or tritonserver.PROGRAM

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self.boot == boot() and tritonserver.alive(self.pid, self.program)

    def find(self, name: str | None) -> Served:
        """The served repository of that name, or the only one. Raises UsageError."""
        names = [served.name for served in self.served]
        if name is None:
            if len(names) > 1:
                raise UsageError(
                    f"{self.name} serves several models", remedy=f"name one, by --target: {', '.join(names)}"
                )
            return self.served[0]
        for served in self.served:
            if served.called(name):
                return served
        raise UsageError(f"{self.name} does not serve '{name}'", remedy=suggestion(name, names))


def state(server: Server) -> str:
    """died, running, restarting (its watchdog starts tritonserver or the gateway again), or no gateway (the gateway
    has ended, and so has the watchdog)."""
    if server.died is not None:
        return "died"
    if not server.alive:
        return "restarting"
    if server.gateway_pid is None or process.alive(server.gateway_pid):
        return "running"
    return "restarting" if watched(server) else "no gateway"


def running(store: Store) -> list[Server]:
    """Servers started on this machine from this store that run or are being started again."""
    return [server for server in recorded(store) if server.died is None]


def recorded(store: Store) -> list[Server]:
    """Servers started on this machine from this store that run, and those that ended by themselves, until the same is
    served again or `stop` names it. Damaged records are dropped; those that only another version can read stay, see
    `unreadable`."""
    out = []
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            server = read_server(path)
        except (OSError, ValueError, InputDataError):
            if os.access(path, os.R_OK) and _names_a_server(path) is None:  # else it is another user's
                with contextlib.suppress(OSError):
                    path.unlink()
            continue
        if server.machine != machine():  # its process ids are of that machine
            continue
        if _gone(server):  # its watchdog may have recorded why, and left, since the record was read
            try:
                server = read_server(path)
            except (OSError, ValueError, InputDataError):
                continue
        if _gone(server):
            if server.gateway_pid is not None and server.boot == boot():
                process.end(server.gateway_pid, drain_s=server.drain_s)
            server = bury(store, server, server_log.failure(server.log))
        out.append(server)
    return out


def _gone(server: Server) -> bool:
    """Whether the server's process and watchdog have ended although its record says that it runs."""
    return server.died is None and not server.alive and not watched(server)


def unreadable(store: Store) -> dict[str, str]:
    """Records of servers that this version cannot read, by server: which file it is, and what to do."""
    out = {}
    for path in sorted((store.home / "servers").glob("*.json")):
        try:
            read_server(path)
        except (OSError, ValueError, InputDataError):
            if (pid := _names_a_server(path)) is not None:
                out[path.stem] = (
                    f"{path} is damaged or of another version of trtpipe: stop the server with that version, or "
                    f"remove the file if process {pid} is gone"
                )
    return out


def _names_a_server(path: Path) -> int | None:
    """Process id of the server where the file is a record, of whatever version."""
    with contextlib.suppress(OSError, InputDataError):
        raw = read_json(path, "record")
        if isinstance(raw, dict) and raw.get("name") == path.stem and type(raw.get("pid")) is int:
            return int(raw["pid"])
    return None


def _known(cls: type[Any], raw: dict[str, Any]) -> dict[str, Any]:
    """What this version knows of a record: a later one may write more."""
    names = {one.name for one in fields(cls)}
    return {name: value for name, value in raw.items() if name in names}


def read_server(path: Path) -> Server:
    """A record that `remember` wrote. Raises OSError, ValueError or InputDataError for anything else.

    Read without pydantic, whose import takes 50 ms: every command that asks a server reads its record first.
    """
    raw = read_json(path, "record")
    try:
        served = [
            Served(
                **{
                    **_known(Served, one),
                    "repository": Path(one["repository"]),
                    "imported": tuple(one.get("imported", ())),
                    "source": None if one.get("source") is None else Path(one["source"]),
                }
            )
            for one in raw["served"]
        ]
        points = Endpoints(**_known(Endpoints, raw["endpoints"]))
        values = {"log": Path(raw["log"]), "endpoints": points, "served": tuple(served)}
        server = Server(**{**_known(Server, raw), **values})
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no record of a server: {error}") from None
    # Processes are queried and ended by these ids, and files are removed by the name.
    pids = [pid for pid in (server.pid, server.gateway_pid, server.watcher) if pid is not None]
    numbers = (*pids, points.http, points.grpc, points.metrics, server.drain_s, server.ready_s)
    texts = (
        server.name,
        server.native,
        server.machine,
        server.boot,
        points.host,
        "" if server.gateway_url is None else server.gateway_url,
        *(t for s in served for t in (s.name, s.prefix, s.tool_format or "")),
    )
    if not all(type(number) is int for number in numbers) or not all(type(text) is str for text in texts):
        raise ValueError(f"{path} is no record of a server: a value is of another type")
    if server.name != path.stem or not server.served or not all(0 < pid < MAX_PID for pid in pids):
        raise ValueError(f"{path} is of another server")
    return server


def watched(server: Server) -> bool:
    """Whether the server's `trtpipe serve` process runs, and not another program with the same process id."""
    return server.watcher is not None and server.boot == boot() and b"serve" in words_of(server.watcher)


def end_watcher(server: Server) -> None:
    """Ask the `trtpipe serve` process of a server to end it, and wait; kill that process when it does not."""
    if server.watcher is None or not watched(server):
        return
    # First the gateway's requests have the time, then Triton's.
    if not terminate(server.watcher, lambda pid: watched(server), WATCHER_SECONDS + 2 * server.drain_s):
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.watcher, signal.SIGKILL)


def find_running(store: Store, name: str | None, target: str | None = None) -> Server:
    """The running server of that name, or the only one, or of several the only one that serves `target`. Raises
    UsageError."""
    servers = [server for server in running(store) if name in (None, server.name)]
    if len(servers) > 1:
        servers = [one for one in servers if any(served.called(target) for served in one.served)] or servers
    if not servers:
        raise none_running(store, name)
    if len(servers) > 1:
        names = ", ".join(server.name for server in servers)
        raise UsageError("several servers are running", remedy=f"name one with --server: {names}")
    return servers[0]


def find_ready(store: Store, name: str | None, target: str | None = None) -> Server:
    """As `find_running`, for requests. Raises HostError for a server whose process is being started again."""
    found = find_running(store, name, target)
    if not found.alive:
        raise HostError(f"{found.name} is being started again", remedy="wait until `trtpipe ps` says running")
    return found


def none_running(store: Store, name: str | None) -> UsageError:
    """The error where no server of that name runs, or none at all; it names those that run, or that have died."""
    found = recorded(store)
    died = [one for one in found if one.died is not None and name in (None, one.name)]
    others = ", ".join(one.name for one in found if one.died is None)
    remedies = [f"see {one.log}" for one in died]
    abroad = [one for one in _of_other_machines(store) if name in (None, one.name)]
    unread = [told for server, told in unreadable(store).items() if name in (None, server)]
    if name is not None and abroad:
        record = store.home / "servers" / f"{name}.json"
        remedies.append(f"give the command on {abroad[0].machine}, or remove {record} if that machine is gone")
    else:
        remedies.append(f"name one that runs: {others}" if others else "run `trtpipe serve`")
    return UsageError(
        "no server is running" if name is None else f"no server named '{name}' is running",
        why="; ".join(
            [*(f"{one.name} died: {one.died}" for one in died),
             *(f"{one.name} was started on {one.machine}, which shares the store" for one in abroad), *unread]
        ),
        remedy="; ".join(remedies),
    )  # fmt: skip


def _of_other_machines(store: Store) -> Iterator[Server]:
    for path in sorted((store.home / "servers").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, InputDataError):
            server = read_server(path)
            if server.machine != machine() and server.died is None:
                yield server


@contextlib.contextmanager
def starting(store: Store, name: str) -> Iterator[None]:
    """Hold the server's name while it is started; the process that has started it holds it as one that serves. Raises
    HostError while another command starts it, and where another machine serves it: the two would replace each other's
    files."""
    with store.alone(_starts(name), _being_started(name)):
        for server in _of_other_machines(store):
            # What a container left that was killed is no obstacle to the next one.
            if server.name == name and store.held(_serves(name)):
                record = store.home / "servers" / f"{name}.json"
                raise HostError(
                    f"{name} is already served on {server.machine}, which shares the store",
                    remedy=f"run `trtpipe stop {name}` on it first, or remove {record} if that machine is gone",
                )
        yield
        store.hold(_serves(name))


def _being_started(name: str) -> HostError:
    return HostError(
        f"{name} is being started by another command, which may be `trtpipe prove`",
        remedy="wait until `trtpipe ps` lists it, or until that command has ended",
    )


def _starts(name: str) -> str:
    return f"serve-{name}"


def _serves(name: str) -> str:
    return f"serves-{name}"


def require_not_starting(store: Store, name: str) -> None:
    """Raises HostError while another command starts the server of that name."""
    if store.held(_starts(name)):
        raise _being_started(name)


def require_own(server: Server) -> None:
    """Raises UsageError for a server of another user, who could not replace what this one writes into its folder."""
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        owner = Path(f"/proc/{server.pid}").stat().st_uid
        if owner != os.geteuid():
            user = _user(owner)
            raise UsageError(
                f"{server.name} is served by {user}",
                why=f"{user} could not replace what {_user(os.geteuid())} writes into its folder",
                remedy=f"give the command as that user, as with `sudo -u {user}`",
            )


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:  # as in a container
        return f"#{number}"


def reloading(store: Store, name: str) -> AbstractContextManager[None]:
    """Hold the server's name while its models are replaced. Raises HostError while another command does."""
    return store.alone(
        f"reload-{name}",
        HostError(f"{name} is being reloaded by another command", remedy="wait until that has ended"),
    )


def as_recorded(store: Store, server: Server) -> Server:
    """The server as its record has it now: `reload` may have changed what it serves, its watchdog its processes."""
    return next((one for one in running(store) if one.name == server.name), server)


def remember(store: Store, server: Server) -> None:
    path = store.home / "servers" / f"{server.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asdict(server), indent=2, default=str) + "\n")  # `running` drops what it cannot read


def bury(store: Store, server: Server, why: str) -> Server:
    """Record that a server has ended by itself, and remove what it may have left."""
    dead = replace(server, died=why)
    with contextlib.suppress(OSError):  # a full disk, or another user's folder: the next command says it again
        remember(store, dead)
    clean_up(store, server)
    return dead


def forget(store: Store, server: Server) -> None:
    """Drop the record of a server, and remove what it may have left. Of one that had died, `bury` has removed it, and
    the same may be about to be served again."""
    with contextlib.suppress(FileNotFoundError):
        (store.home / "servers" / f"{server.name}.json").unlink()
    if server.died is None:
        clean_up(store, server)


def backends_folder(store: Store, server: Server) -> Path:
    return store.home / "servers" / server.name / "backends"


def output_folder(store: Store, name: str, *, native: bool) -> Path:
    """The folder that a server in a container may write."""
    return store.home / "servers" / name / ("native" if native else "models")


def clean_up(store: Store, server: Server) -> None:
    """Remove what a server that has ended may have left: its container, Python processes, shared memory and temporary
    files."""
    if server.docker:
        tritonserver.remove_container(output_folder(store, server.name, native=bool(server.native)))
    tritonserver.end_stubs(backends_folder(store, server))
    tritonserver.remove_shared_memory(server.endpoints)
    temporary.remove(store.home / "servers" / server.name)
