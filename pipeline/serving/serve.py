"""Serving of model repositories with a real tritonserver: start it, test it with one request, record it, end it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline import compatibility
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.execution.executors import DockerExecutor
from trtpipe.pipeline.gateway import access
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.gateway.options import GatewayOptions
from trtpipe.pipeline.gateway.traces import traces_url
from trtpipe.pipeline.serving import (
    adapters,
    engine_python,
    http_streams,
    model_control,
    model_links,
    native,
    ports,
    server_log,
    temporary,
    triton_package,
    tritonserver,
)
from trtpipe.pipeline.serving.host_memory import require_host_memory
from trtpipe.pipeline.serving.launch_options import (
    SHM_SIZE,
    LaunchOptions,
    check_alone,
    check_container_options,
    exposure,
    gateway_options,
    server_image,
)
from trtpipe.pipeline.serving.logs import log_path
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.repositories import (
    Found,
    called,
    check_passport,
    choose_server,
    imports,
    require_alike,
    served_by,
)
from trtpipe.pipeline.serving.servers import (
    Served,
    Server,
    end_watcher,
    forget,
    none_running,
    output_folder,
    recorded,
    remember,
    require_not_starting,
    running,
    starting,
)
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check import check_repository, require_sound
from trtpipe.triton_repo.launch import ENGINE_MODEL
from trtpipe.triton_repo.layout import ENGINE_FOLDER

# Shows the stage of a server's start, and a detail of it that changes.
Show = Callable[[str, str], None]
# Exception of Triton 2.51 now and then when many Python models start on a busy machine; the next start succeeds.
START_CRASH = "boost::interprocess::lock_exception"


def launch(
    targets: Sequence[Found], store: Store, options: LaunchOptions, note: Callable[[str], None],
    show: Show = lambda stage, detail: None, *, again: bool = False,
) -> tuple[Server, subprocess.Popen[bytes]]:  # fmt: skip
    """Start one server for the repositories of `targets`; return when each has answered a request. `again` where it
    has ended by itself: it then keeps the adapters that were added to it.

    Raises UsageError (a target twice, or served already), HostError (port taken, no tritonserver, no Docker),
    InputDataError (a repository that would not load, keys, a certificate), ArtefactRefused, or StageFailed with the
    server's own reason.
    """
    check_alone(options, len(targets))
    name = "+".join(target.name for target in targets)
    _require_not_served(targets, name, store)  # before the check of the repository, which may take seconds
    passports = [check_passport(name, repository, options.gpus) for name, repository, _ in targets]
    require_alike([target.name for target in targets], passports)
    for (name, repository, _), passport in zip(targets, passports, strict=True):
        place = called(name, repository)
        compatibility.require_trusted(place, repository, store, allow_code=options.allow_model_code)
        require_sound(place, check_repository(repository), remedy=f"run `trtpipe check {place}` for all")
        require_host_memory(place, repository, passport)
    passport = passports[0]
    kind = choose_server(options.server, passport)
    check_container_options(options, kind)
    if kind == "local":
        backend = load_backend(passport.runtime)
        python = engine_python.choose(backend, on_cpu=passport.sm is None, asked=options.engine_python)
        options = replace(options, engine_python=python)
    with starting(store, name):
        _require_not_served(targets, name, store)
        if not again:
            shutil.rmtree(adapters.added_folder(store.home / "servers" / name), ignore_errors=True)
        return _launch(name, targets, passports, kind, store, options, note, show)


def require_programs(runtime: str, *, on_cpu: bool, asked: str | None) -> None:
    """Raises HostError, as `launch` would, where a server of `runtime` lacks its Python and tritonserver, or Docker.

    asked  the Python that is to run engines; None for the usual one
    """
    backend = load_backend(runtime)
    if backend.SERVED_BY is ServedBy.ENGINE_PROCESS:
        engine_python.choose(backend, on_cpu=on_cpu, asked=asked)
        triton_package.find_installation()
    else:
        DockerExecutor("").require()


def _require_not_served(targets: Sequence[Found], name: str, store: Store) -> None:
    """Raises UsageError where another command serves these targets."""
    for server in running(store):
        if server.name == name and server.watcher != os.getpid():
            raise UsageError(
                f"{name} is already served at {server.endpoints.http_url}",
                why="" if server.alive else "it is being started again, see `trtpipe ps`",
                remedy=f"run `trtpipe stop` first, or serve it as NAME: `ln -s {targets[0].name} runs/NAME`",
            )


def _launch(
    name: str, targets: Sequence[Found], passports: Sequence[Passport], kind: str, store: Store,
    options: LaunchOptions, note: Callable[[str], None], show: Show,
) -> tuple[Server, subprocess.Popen[bytes]]:  # fmt: skip
    passport = passports[0]
    if options.front == "native":
        exposed = exposure(options, None, keyed=False)
        if exposed is not None:
            note(exposed)
        (one,) = _served(targets, options)
        return native.launch(one, passport, store, log_path(store, name), options, show)
    traces = traces_url(options.otlp_endpoint)
    if kind == "docker":
        tritonserver.remove_container(output_folder(store, name, native=False))
    endpoints = ports.choose_endpoints(options.host, options.http, options.grpc, options.metrics, options.openai)
    folder = store.home / "servers" / name
    if kind == "local":
        triton_package.check_folder(folder)
    served = _served(targets, options)
    gateway = None
    if options.openai is not None:
        gateway = gateway_options(served, passports, folder / "models", endpoints, options.openai, options)
    keyed = gateway is not None and bool(access.read_keys(gateway.api_keys_file))
    exposed = exposure(options, gateway, keyed=keyed)
    if exposed is not None:
        note(exposed)
    models = model_links.lay_out(served, folder)
    if len(targets) > 1:
        _check_together(models, passport, note)
    warning = http_streams.warning(passports, http_streams.capacity())
    if warning is not None:
        note(warning)
    names = sorted(path.name for path in models.iterdir())
    log = log_path(store, name)
    log.parent.mkdir(parents=True, exist_ok=True)
    drain_s = tritonserver.DRAIN_S if options.drain_s is None else options.drain_s
    if kind == "local":
        installation = triton_package.find_installation()
        backends = folder / "backends"
        triton_package.prepare_backends(
            installation, backends, passport.runtime, options.engine_python or sys.executable
        )
        start = partial(
            tritonserver.start_local, installation, models, names, backends, endpoints, log,
            drain_s=drain_s, traces_url=traces,
            # A runtime of another environment, which is vLLM, leaves files behind.
            more=temporary.make(folder) if load_backend(passport.runtime).NEEDS else None,
        )  # fmt: skip
    else:
        image = server_image(options, passport)
        tritonserver.fetch_image(image, show)
        start = partial(
            tritonserver.start_docker,
            image, models, names, _container_reads(served, folder, store), endpoints, log,
            world_size=passport.world_size if served_by(passport) is ServedBy.TENSORRTLLM else 1,
            gpus=options.gpus, shm_size=options.shm_size or SHM_SIZE, drain_s=drain_s, traces_url=traces,
        )  # fmt: skip
    loading = server_log.Loading(names, log, show)
    try:
        process = start_until_ready(start, endpoints, log, note, loading, seconds=options.ready_s)
    except BaseException:
        temporary.remove(folder)
        raise
    server = Server(
        name=name, pid=process.pid, served=served, log=log, endpoints=endpoints, keyed=keyed, docker=kind == "docker",
        drain_s=options.drain_s or 0, ready_s=options.ready_s,
    )  # fmt: skip
    try:
        for one in served:
            show(f"asking {one.name} for an answer", "")
            smoke(server, one)
        if gateway is not None:
            show("starting the gateway", "")
            server = _with_gateway(server, gateway)
        remember(store, server)
    except BaseException as error:
        try:
            end(server)
        finally:  # also at a second Ctrl-C
            forget(store, server)
        if isinstance(error, StageFailed):
            raise explain(error, log, "serve", server_log.last_start(log)) from None
        raise
    return server, process


def _with_gateway(server: Server, options: GatewayOptions) -> Server:
    pid, url = gateway_process.start(options, gateway_log(server))
    return replace(server, gateway_pid=pid, gateway_url=url, keyed=bool(access.read_keys(options.api_keys_file)))


def gateway_log(server: Server) -> Path:
    return server.log.with_suffix(".gateway.log")


def start_gateway_again(server: Server, store: Store, options: LaunchOptions) -> Server:
    """Start the gateway of a running server at its old address, after it has ended; returns the server with it.

    Raises HostError where the port is still taken when the old workers have had their time, else what `launch` raises
    for the gateway.
    """
    assert server.gateway_url is not None
    models = store.home / "servers" / server.name / "models"
    passports = [read_passport(one.repository / ENGINE_FOLDER) for one in server.served]
    port = int(server.gateway_url.rpartition(":")[2])
    gateway = gateway_options(server.served, passports, models, server.endpoints, port, options)
    deadline = time.monotonic() + gateway_process.STOP_SECONDS + server.drain_s
    while True:
        try:
            return _with_gateway(server, gateway)
        except HostError:  # workers of the ended gateway may still hold the port: the kernel tells them to end with it
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _served(targets: Sequence[Found], options: LaunchOptions) -> tuple[Served, ...]:
    alone = len(targets) == 1
    return tuple(
        Served(
            name=found.name,
            repository=found.folder,
            source=found.source,
            prefix="" if alone else f"{found.name}.",
            imported=imports(found),
            names=options.model_names,
            tool_format=options.tool_format,
            reasoning=options.reasoning,
        )
        for found in targets
    )


def start_until_ready(
    start: Callable[[], subprocess.Popen[bytes]], endpoints: Endpoints, log: Path, note: Callable[[str], None],
    tick: Callable[[], None] = lambda: None, *, seconds: int = model_control.READY_SECONDS,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Wait until a server is ready, at most `seconds`; start it once more where it broke down in START_CRASH. Raises
    StageFailed."""
    for attempt in (1, 2):
        process = start()
        try:
            model_control.wait_ready(process, endpoints.ready_url, log, tick, seconds=seconds)
        except BaseException as error:
            tritonserver.end(process.pid)
            tritonserver.remove_shared_memory(endpoints)
            if not isinstance(error, StageFailed):
                raise
            if attempt == 2 or START_CRASH not in error.why:
                raise explain(error, log, "serve", server_log.last_start(log)) from None
            note(f"{error}; starting it again")
        else:
            break
    return process


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


def end(server: Server) -> None:
    """End a server and its gateway. Requests in flight have some seconds to end."""
    try:
        if server.gateway_pid is not None:
            gateway_process.end(server.gateway_pid, drain_s=server.drain_s)
    finally:
        tritonserver.end(server.pid, server.program, drain_s=server.drain_s)


def smoke(server: Server, served: Served) -> None:
    """Run one generation through the whole chain: a ready ensemble can still fail on its first request."""
    import httpx

    length = "sampling_param_max_tokens" if served.front == served.model(ENGINE_MODEL) else "max_tokens"
    body = {"text_input": "Hello", length: 1}
    try:
        url = f"{server.endpoints.http_url}/v2/models/{served.front}/generate"
        with model_control.http_client(120) as client:
            reply = client.post(url, json=body).json()
    except (httpx.HTTPError, ValueError) as error:
        raise StageFailed(
            "the smoke request failed", why=str(error), remedy=f"the server's log is {server.log}"
        ) from None
    if "text_output" not in reply:
        why = str(reply.get("error", reply))
        raise StageFailed("the smoke request failed", why=why, remedy=f"the server's log is {server.log}")


def stop(store: Store, name: str | None, *, everything: bool = False) -> list[Server]:
    """End the server of that name, the only one, or all. Returns those that were ended, and those that had died, whose
    record goes too. Raises UsageError for an unknown name, a name beside `everything`, and where no name leaves a
    choice; HostError for one that had died and is being started."""
    if name is not None and everything:
        raise UsageError(f"--all takes no name, got '{name}'", remedy="leave out one of the two")
    servers = recorded(store) if name is not None or everything else running(store)
    if name is not None:
        servers = [server for server in servers if server.name == name]
        if not servers:
            raise none_running(store, name)
        if servers[0].died is not None:
            require_not_starting(store, name)
    elif len(servers) > 1 and not everything:
        names = ", ".join(server.name for server in servers)
        raise UsageError("several servers are running", remedy=f"name one, or pass --all: {names}")
    for server in servers:
        if server.died is None:
            end_watcher(server)  # which goes on to end the server where this command is interrupted
        try:
            if server.died is None and server.alive:
                end(server)
        finally:  # also at a second Ctrl-C, which kills it
            forget(store, server)
    return servers
