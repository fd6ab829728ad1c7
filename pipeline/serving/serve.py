"""Serving of model repositories with a real tritonserver: start it, test it with one request, record it, end it."""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.errors import ArtefactRefused, HostError, StageFailed, UsageError, suggestion
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.execution.executors import DockerExecutor
from trtpipe.pipeline.gateway import access
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.run_folder import RUNS, SEE_TARGETS, RunFolder, find_run
from trtpipe.pipeline.serving import engine_python, http_streams, tritonserver
from trtpipe.pipeline.serving.servers import (
    Served,
    Server,
    end_watcher,
    find_running,
    forget,
    recorded,
    remember,
    running,
)
from trtpipe.pipeline.serving.tritonserver import Endpoints
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check import check_repository, require_sound
from trtpipe.triton_repo.combine import link_models
from trtpipe.triton_repo.launch import ENGINE_MODEL
from trtpipe.triton_repo.layout import ENGINE_FOLDER, model_names

# Shows the stage of a server's start, and a detail of it that changes.
Show = Callable[[str, str], None]
SERVERS = ("auto", "local", "docker")
# Exception of Triton 2.51 now and then when many Python models start on a busy machine; the next start succeeds.
START_CRASH = "boost::interprocess::lock_exception"


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for the start of a server.

    server               auto, local (this environment's tritonserver) or docker (the toolchain's image)
    host                 address to listen on
    http, grpc, metrics  ports; 0 takes a free one
    openai               port of the OpenAI-compatible gateway; None starts none
    gateway_workers      number of the gateway's processes
    api_keys_file        the gateway's keys, one a line; None and no TRTPIPE_API_KEYS serves everybody who reaches it
    tls_cert, tls_key    the gateway's certificate and key, PEM files
    model_names          names of the only target's model at the gateway; the target's name if left out
    cors_origins         origins whose pages may call the gateway from a browser
    gpus                 indices of the GPUs a container gets; None for all
    shm_size             shared memory of a container; each Python model and rank takes some
    engine_python        interpreter of the engine process; None takes vLLM's environment beside this one, or this one
    allow_model_code     whether code of unknown templates may run
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
    model_names: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    gpus: tuple[int, ...] | None = None
    shm_size: str = "2g"
    engine_python: str | None = None
    allow_model_code: bool = False


def find_repository(target: str | None) -> tuple[str, Path]:
    """(name, folder) of the repository to serve: a target of ./runs, a folder, or the newest run. Raises UsageError."""
    if target is None:
        runs = sorted(RUNS.glob("*/repository"), key=lambda link: link.lstat().st_mtime)
        if not runs:
            raise UsageError(
                "there is nothing to serve in ./runs", remedy="run `trtpipe build --recipe smollm2-cpu` first"
            )
        target = runs[-1].parent.name
    run = find_run(target)
    if run is not None:
        return run.path.name, run.linked("repository")
    folder = Path(target)
    if (folder / "repository").is_dir():
        return folder.resolve().name, (folder / "repository").resolve()
    if (folder / "tensorrt_llm" / "config.pbtxt").is_file():
        return folder.resolve().name, folder.resolve()
    raise UsageError(
        f"'{target}' is neither a target in ./runs nor a model repository",
        remedy=SEE_TARGETS,
    )


def imports(target: str, repository: Path) -> tuple[str, ...]:
    """A phrase for each artefact of a target in ./runs that was made elsewhere; none for a folder."""
    run = RunFolder.of(target)
    own = (run.path / "repository").is_dir() and run.linked("repository") == repository.resolve()
    return tuple(run.imports()) if own else ()


def check_passport(repository: Path) -> Passport:
    """Refuse an engine that this machine cannot run. Raises ArtefactRefused."""
    passport = read_passport(repository / ENGINE_FOLDER)
    compatibility.examine(passport).require(repository / ENGINE_FOLDER)
    return passport


def _served_by(passport: Passport) -> ServedBy:
    return load_backend(passport.runtime).SERVED_BY


def choose_server(asked: str, passport: Passport) -> str:
    """The server that runs the engine: local or docker. Raises UsageError for an unknown one, ArtefactRefused for one
    that cannot run it."""
    usual = "local" if _served_by(passport) is ServedBy.ENGINE_PROCESS else "docker"
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


def launch(
    targets: Sequence[tuple[str, Path]], store: Store, options: LaunchOptions, note: Callable[[str], None],
    show: Show = lambda stage, detail: None,
) -> tuple[Server, subprocess.Popen[bytes]]:  # fmt: skip
    """Start one server for the repositories of `targets`, (name, folder) each; return when each has answered a request.

    Raises UsageError (a target twice), HostError (port taken, no tritonserver, no Docker), InputDataError (a
    repository that would not load, keys, a certificate), ArtefactRefused, or StageFailed with the server's own reason.
    """
    if options.model_names and len(targets) > 1:
        raise UsageError("--served-model-name is for one target", remedy="leave it out, or serve the targets apart")
    passports = [check_passport(repository) for _, repository in targets]
    require_alike([target for target, _ in targets], passports)
    for name, repository in targets:
        called = name if (RUNS / name / "repository").is_dir() else str(repository)
        compatibility.require_trusted(called, repository, store, allow_code=options.allow_model_code)
        require_sound(called, check_repository(repository), remedy=f"run `trtpipe check {called}` for all")
    passport = passports[0]
    kind = choose_server(options.server, passport)
    python = sys.executable
    if _served_by(passport) is ServedBy.ENGINE_PROCESS:
        backend = load_backend(passport.runtime)
        python = engine_python.choose(backend, on_cpu=passport.sm is None, asked=options.engine_python)
    name = "+".join(target for target, _ in targets)
    for server in running(store):
        if server.name == name and server.watcher != os.getpid():
            raise HostError(
                f"{name} is already served at {server.endpoints.http_url}", remedy="run `trtpipe stop` first"
            )
    # The LLM API's models take text, and the gateway does not support them.
    openai = None if _served_by(passport) is ServedBy.LLM_API else options.openai
    endpoints = tritonserver.choose_endpoints(options.host, options.http, options.grpc, options.metrics, openai)
    folder = store.home / "servers" / name
    alone = len(targets) == 1
    served = tuple(
        Served(
            name=target,
            repository=repository,
            prefix="" if alone else f"{target}.",
            imported=imports(target, repository),
            names=options.model_names,
        )
        for target, repository in targets
    )
    gateway = None if openai is None else _gateway_options(served, passports, endpoints, openai, options)
    keyed = gateway is not None and bool(access.read_keys(gateway.api_keys_file))
    exposed = exposure(options, gateway, keyed=keyed)
    if exposed is not None:
        note(exposed)
    models = lay_out_models(served, folder)
    if not alone:
        _check_together(models, passport, note)
    warning = http_streams.warning(passports, http_streams.capacity())
    if warning is not None:
        note(warning)
    names = sorted(path.name for path in models.iterdir())
    log = _log(store, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    if kind == "local":
        installation = tritonserver.find_installation()
        backends = folder / "backends"
        tritonserver.prepare_backends(installation, backends, passport.runtime, python)
        start = partial(tritonserver.start_local, installation, models, names, backends, endpoints, log)
    else:
        assert passport.image is not None
        DockerExecutor(passport.image).require()
        start = partial(
            tritonserver.start_docker,
            passport.image, models, names, _container_reads(served, folder, store), endpoints, log,
            world_size=passport.world_size if _served_by(passport) is ServedBy.TENSORRTLLM else 1,
            gpus=options.gpus, shm_size=options.shm_size,
        )  # fmt: skip
    process = start_until_ready(start, endpoints, log, note, tritonserver.Loading(names, log, show))
    server = Server(name=name, pid=process.pid, served=served, log=log, endpoints=endpoints, keyed=keyed)
    try:
        for one in served:
            show(f"asking {one.name} for an answer", "")
            smoke(server, one)
        if gateway is not None:
            show("starting the gateway", "")
            pid, url = gateway_process.start(gateway, log.with_suffix(".gateway.log"))
            server = replace(server, gateway_pid=pid, gateway_url=url)
        remember(store, server)
    except BaseException as error:
        end(server)
        tritonserver.remove_shared_memory(endpoints)
        if isinstance(error, StageFailed):
            raise explain(error, log, "serve", tritonserver.last_start(log)) from None
        raise
    return server, process


def exposure(options: LaunchOptions, gateway: GatewayOptions | None, *, keyed: bool) -> str | None:
    """A warning where other machines reach a server that asks for no key; None on loopback.

    keyed  whether the gateway asks for one
    """
    if options.host == "localhost" or options.host.startswith("127."):
        return None
    ports = "HTTP, gRPC and metrics" + ("" if keyed or gateway is None else ", and the gateway")
    advice = "close these ports to others" if keyed or gateway is None else "pass --api-keys-file, and close the others"
    return f"warning: whoever reaches {options.host} can use {ports}: they ask for no key; {advice}"


def start_until_ready(
    start: Callable[[], subprocess.Popen[bytes]], endpoints: Endpoints, log: Path, note: Callable[[str], None],
    tick: Callable[[], None] = lambda: None,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Wait until a server is ready; start it once more where it broke down in START_CRASH. Raises StageFailed."""
    for attempt in (1, 2):
        process = start()
        try:
            tritonserver.wait_ready(process, endpoints, log, tick)
        except BaseException as error:
            tritonserver.end(process.pid)
            tritonserver.remove_shared_memory(endpoints)
            if not isinstance(error, StageFailed):
                raise
            if attempt == 2 or START_CRASH not in error.why:
                raise explain(error, log, "serve", tritonserver.last_start(log)) from None
            note(f"{error}; starting it again")
        else:
            break
    return process


def require_alike(names: Sequence[str], passports: Sequence[Passport]) -> None:
    """Refuse targets that one server cannot hold. Raises UsageError for a target named twice, ArtefactRefused."""
    if len(set(names)) < len(names):
        raise UsageError("a target is named twice", remedy="name each once")
    first = passports[0]
    for name, passport in zip(names, passports, strict=True):
        if (passport.runtime, passport.image) != (first.runtime, first.image):
            raise ArtefactRefused(
                f"{name} is for {passport.runtime} {passport.image or ''}".rstrip(),
                why=f"{names[0]} is for {first.runtime} {first.image or ''}".rstrip() + ", and a server is of one kind",
                remedy="serve them by two commands, on ports of their own",
            )
        if len(names) > 1 and _served_by(passport) is ServedBy.TENSORRTLLM and passport.world_size > 1:
            raise ArtefactRefused(
                f"{name} is an engine of {passport.world_size} ranks",
                why="its ranks are servers of their own, which would load the other models as well",
                remedy="serve it alone",
            )


def _check_together(models: Path, passport: Passport, note: Callable[[str], None]) -> None:
    """Check the models together: each repository was checked alone when it was made; conflicts show only now."""
    for fault in check_repository(models):
        if fault.rule == "shared-gpu" and passport.gpu == "cpu":
            continue
        note(f"{fault.path}, {fault.where}: {fault.what}; {fault.remedy}")


def _container_reads(served: Sequence[Served], folder: Path, store: Store) -> list[Path]:
    """The folders that links in the models lead to, which the container mounts."""
    # The folder of all repositories, where one of them is in it: those that are loaded later must be visible as well.
    packages = (store.home / "artefacts" / "package").resolve()
    reads = {packages if packages in one.repository.resolve().parents else one.repository for one in served}
    return sorted(reads | {folder / "linked"})


def _gateway_options(
    served: Sequence[Served], passports: Sequence[Passport], endpoints: Endpoints, port: int, options: LaunchOptions
) -> GatewayOptions:
    """Options of the gateway, checked before anything is started. Raises UsageError, InputDataError for its files."""
    chosen = GatewayOptions(
        models=tuple(_gateway_model(one, passport) for one, passport in zip(served, passports, strict=True)),
        # A server that listens on all addresses is reached on loopback.
        grpc_url=endpoints.grpc_url.replace("0.0.0.0", "127.0.0.1"),
        host=options.host,
        port=port,
        workers=options.gateway_workers,
        api_keys_file=options.api_keys_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        cors_origins=options.cors_origins,
    )
    access.check(chosen)
    return chosen


def _gateway_model(served: Served, passport: Passport) -> ServedModel:
    return ServedModel(
        name=served.model_names[0],
        aliases=served.model_names[1:],
        tokenizer=served.tokenizer,
        triton_model=served.model(ENGINE_MODEL),
        max_input_len=passport.build_config["max_input_len"],
        max_seq_len=passport.build_config["max_seq_len"],
    )


def gateway_model(target: str, names: tuple[str, ...]) -> ServedModel:
    """A target's model at a gateway of its own, under `names` if given. Raises UsageError, ArtefactRefused."""
    found, repository = find_repository(target)
    passport = read_passport(repository / ENGINE_FOLDER)
    if _served_by(passport) is ServedBy.LLM_API:
        raise ArtefactRefused(
            f"a gateway cannot serve an engine of {passport.runtime}",
            why="its models take text, and the gateway sends tokens",
            remedy="ask Triton itself, or build with --runtime tensorrt_llm",
        )
    return _gateway_model(Served(name=found, repository=repository, names=names), passport)


def end(server: Server) -> None:
    """End a server and its gateway. Requests in flight have some seconds to end."""
    if server.gateway_pid is not None:
        gateway_process.end(server.gateway_pid)
    tritonserver.end(server.pid)


def lay_out_models(served: Sequence[Served], folder: Path) -> Path:
    """Make `folder`/models, links to every model: the served path stays the same when its content changes."""
    models, linked = folder / "models", folder / "linked"
    models.mkdir(parents=True, exist_ok=True)
    linked.mkdir(exist_ok=True)
    stale = list(linked.iterdir())
    wanted: dict[str, Path] = {}
    for one in served:
        wanted |= link_models(one.repository, one.prefix, Path(tempfile.mkdtemp(dir=linked)))
    for link in models.iterdir():
        if link.name not in wanted:
            link.unlink()
    for name, path in wanted.items():
        partial = folder / f".{name}.{os.getpid()}"
        partial.unlink(missing_ok=True)
        partial.symlink_to(path)
        partial.replace(models / name)
    for left in stale:
        shutil.rmtree(left)
    return models


def reload(
    store: Store, name: str | None, target: str | None, *, allow_model_code: bool = False
) -> tuple[Server, list[Served]]:
    """Load the current repositories of a running server's targets, model by model, without ending it; with `target`
    that one alone. Returns the server and what was loaded.

    Raises ArtefactRefused for an engine of another kind, StageFailed with the server's message when a model does not
    load: the server then keeps what it has.
    """
    server = find_running(store, name)
    if target is None:
        fresh = {one.name: find_repository(one.name)[1] for one in server.served}
    else:
        found, repository = find_repository(target)
        # A server's only target may be replaced by a target of another name.
        fresh = {server.find(found if len(server.served) > 1 else None).name: repository}
    for one in server.served:
        if one.name in fresh:
            compatibility.require_trusted(one.name, fresh[one.name], store, allow_code=allow_model_code)
            _require_same_kind(one, fresh[one.name])
    served = tuple(
        replace(one, repository=fresh[one.name], imported=imports(target or one.name, fresh[one.name]))
        if one.name in fresh else one
        for one in server.served
    )  # fmt: skip
    lay_out_models(served, store.home / "servers" / server.name)
    renewed = replace(server, served=served)
    loaded = [one for one in served if one.name in fresh]
    for one in loaded:
        names = [one.model(model) for model in model_names(one.repository)]
        tritonserver.load_models(server.endpoints, names, server.log)
        smoke(renewed, one)
    remember(store, renewed)
    return renewed, loaded


def _require_same_kind(served: Served, repository: Path) -> None:
    passport = check_passport(repository)
    before = read_passport(served.repository / ENGINE_FOLDER)
    if (passport.runtime, passport.world_size) != (before.runtime, before.world_size):
        raise ArtefactRefused(
            f"{served.name} runs {before.runtime} with {before.world_size} rank(s)",
            why=f"the new engine is for {passport.runtime} with {passport.world_size}",
            remedy="stop the server and serve the new one",
        )


def smoke(server: Server, served: Served) -> None:
    """Run one generation through the whole chain: a ready ensemble can still fail on its first request."""
    import httpx

    length = "sampling_param_max_tokens" if served.front == served.model(ENGINE_MODEL) else "max_tokens"
    body = {"text_input": "Hello", length: 1}
    try:
        url = f"{server.endpoints.http_url}/v2/models/{served.front}/generate"
        response = httpx.post(url, json=body, timeout=120)
        reply = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise StageFailed(
            "the smoke request failed", why=str(error), remedy=f"the server's log is {server.log}"
        ) from None
    if "text_output" not in reply:
        why = str(reply.get("error", reply))
        raise StageFailed("the smoke request failed", why=why, remedy=f"the server's log is {server.log}")


def read_log(store: Store, name: str | None, *, lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` of a server's log, and with `follow` the lines that are added while the server runs.

    A server that has ended has a log too. Raises UsageError for a name without one, and for an ambiguous None.
    """
    name = name or _whose_log(store)
    path = _log(store, name)
    if not path.is_file():
        left = _logged(store)
        remedy = suggestion(name, left) if left else "run `trtpipe serve`"
        raise UsageError(f"there is no log of a server named '{name}'", remedy=remedy)
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


def _log(store: Store, name: str) -> Path:
    return store.home / "logs" / f"serve-{name}.log"


def _logged(store: Store) -> list[str]:
    """The servers that have a log, running or not."""
    logs = sorted((store.home / "logs").glob("serve-*.log"))
    names = {log.stem.removeprefix("serve-") for log in logs}
    return sorted(name for name in names if name.removesuffix(".gateway") not in names - {name})


def _whose_log(store: Store) -> str:
    """Name of the only running server or, where none runs, of the only one that died, or the only one with a log.
    Raises UsageError."""
    servers = recorded(store)
    if any(server.died is None for server in servers):
        return find_running(store, None).name
    left = [server.name for server in servers] or _logged(store)
    if not left:
        raise UsageError("no server is running, and none has left a log", remedy="run `trtpipe serve`")
    if len(left) > 1:
        raise UsageError(
            "no server is running, and several have left a log", remedy="name one with --server: " + ", ".join(left)
        )
    return left[0]


def stop(store: Store, name: str | None, *, everything: bool = False) -> list[Server]:
    """End the server of that name, the only one, or all. Returns those that were ended, and those that had died, whose
    record goes too. Raises UsageError for an unknown name, and where no name leaves a choice."""
    servers = recorded(store) if name is not None or everything else running(store)
    if name is not None:
        servers = [server for server in servers if server.name == name]
        if not servers:
            raise UsageError(f"no server named '{name}' is running", remedy="see `trtpipe ps`")
    elif len(servers) > 1 and not everything:
        names = ", ".join(server.name for server in servers)
        raise UsageError("several servers are running", remedy=f"name one, or pass --all: {names}")
    for server in servers:
        if server.died is None:
            end_watcher(server)
            if tritonserver.alive(server.pid):
                end(server)
        forget(store, server)
    return servers
