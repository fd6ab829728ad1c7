"""Watchdog of a server: recovers from the death of its gateway or of a Python process of Triton, and from its end.

Triton 2.51 never ends a request that waits in a dead Python process, and still calls itself ready. So the watchdog
takes the model out of service at once and loads it again; where requests wait, it kills the server and starts it
again, because their clients can only be told by the end of their connections.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import FrameType

from trtpipe.engines.errors import InputDataError, StageFailed, TrtpipeError
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.gateway import process as gateway_process
from trtpipe.pipeline.net import triton_metrics
from trtpipe.pipeline.serving import model_control, server_log, tritonserver
from trtpipe.pipeline.serving.launch_options import LaunchOptions
from trtpipe.pipeline.serving.python_processes import Stubs, is_zombie
from trtpipe.pipeline.serving.repositories import Found
from trtpipe.pipeline.serving.serve import end, launch, start_gateway_again
from trtpipe.pipeline.serving.servers import Server, as_recorded, backends_folder, bury, clean_up, forget, remember
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.launch import ENGINE_MODEL

# Triton collects a dead process when its last request is gone, after a second in which Triton checks its liveness.
RELEASE_SECONDS = 1.6
ASK_SECONDS = 1.0
WAITING = "requests wait for it, which Triton would not end"
PENDING = "nv_inference_pending_request_count"
# A model whose Python processes have died this often within this time counts as broken; so does a gateway.
MAX_DEATHS, DEATHS_SECONDS = 10, 20.0


def attend(
    server: Server, process: subprocess.Popen[bytes], store: Store, options: LaunchOptions, *, restarts: int,
    ready: Callable[[], None], stopping: Callable[[], None], note: Callable[[str], None],
) -> None:  # fmt: skip
    """Watch a server until Ctrl-C, a TERM signal or its own end. A server that ends by itself is started again
    `restarts` times; one whose gateway or Python process has died is repaired every time.

    `ready` is called once signals are handled, so that a Ctrl-C right after its message ends the server too.
    Raises StageFailed when the server ends by itself once more, or it or its gateway does not start again.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second one, as `timeout` sends, must not interrupt the clean-up
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, leave)
    death = None
    try:
        server = replace(server, watcher=os.getpid())
        remember(store, server)  # or end: `stop` could not find this process, and it would start again what was stopped
        stubs = Stubs(server.pid)
        deaths: dict[str, list[float]] = {}
        ready()
        while True:
            stubs.wait()
            status = process.poll()
            if status == 0:
                return
            if status is None:
                how = None if server.gateway_pid is None else gateway_process.ended(server.gateway_pid)
                if how is not None:
                    note(f"the gateway has ended ({how}); starting it again")
                    _count_death(deaths, "the gateway", server)
                    server = start_gateway_again(as_recorded(store, server), store, options)
                    _record(store, server, note)
                    note(f"the gateway answers again at {server.gateway_url}")
                died = stubs.died()
                if not died:
                    continue
                names = ", ".join(sorted(set(died.values())))
                note(f"a Python process of {names} has died; loading it again")
                for name in set(died.values()):
                    _count_death(deaths, f"Python processes of {name}", server)
                obstacle = _load_again(server, process, died, stubs, backends_folder(store, server), options)
                if obstacle is None:
                    note(f"{names} is loaded again")
                    continue
                note(f"{obstacle}; starting tritonserver again")
                tritonserver.kill(process)
            else:
                error = _ended(status, server)
                if restarts == 0:
                    raise error
                restarts -= 1
                note(f"{error}; starting it again")
            stubs.close()
            server, process = _start_again(server, store, options, note)
            stubs = Stubs(server.pid)
            note(f"{server.name} serves again")
    except (KeyboardInterrupt, SystemExit) as left:
        with contextlib.suppress(OSError, SystemExit):  # the terminal, or the reader of the output, is gone
            stopping()
        end(server)
        if isinstance(left, SystemExit):
            raise
    except BaseException as error:
        if process.poll() is None:
            tritonserver.kill(process)
        death = f"{error.what}: {error.why}" if isinstance(error, TrtpipeError) else str(error)
        raise
    finally:
        if server.gateway_pid is not None:
            gateway_process.end(server.gateway_pid, drain_s=server.drain_s)
        signal.signal(signal.SIGTERM, previous)
        if death is None:
            forget(store, server)
        else:
            bury(store, server, death)


def _load_again(
    server: Server, process: subprocess.Popen[bytes], died: dict[int, str], stubs: Stubs, backends: Path,
    options: LaunchOptions,
) -> str | None:  # fmt: skip
    """Load the models of dead processes again. Returns why the server has to be started again instead, or None.

    From the first moment the models count as not ready, and Triton refuses requests for them.
    """
    models = sorted(set(died.values()))
    failures: list[str] = []

    def load(model: str) -> None:
        try:
            model_control.load_unloaded(server.endpoints, model, server.log, seconds=options.ready_s)
        except StageFailed as error:
            failures.append(str(error))

    def requests_wait() -> bool:
        return any(_held(backends, pid, model) for pid, model in died.items()) or _queued(server, models)

    try:
        for model in models:
            model_control.unload_model(server.endpoints, model, server.log)
    except StageFailed as error:
        return str(error)
    if requests_wait():
        return WAITING
    loading = [threading.Thread(target=load, args=(model,), daemon=True) for model in models]
    for thread in loading:
        thread.start()
    deadline = time.monotonic() + RELEASE_SECONDS
    while any(map(is_zombie, died)) and time.monotonic() < deadline:
        waiting = requests_wait()
        if not all(map(threading.Thread.is_alive, loading)):
            break  # a model is available again: waiting requests may wait for it
        if waiting:
            return WAITING
        time.sleep(0.05)
    while any(map(threading.Thread.is_alive, loading)):
        if process.poll() is not None or stubs.died():
            return "another process of the server has died meanwhile"
        time.sleep(0.05)
    return failures[0] if failures else None


def _held(backends: Path, pid: int, model: str) -> bool:
    """Whether requests wait for ever for a dead process: for an engine's process, the requests it held; for a script's
    process, those of an engine that waits for the script to take an answer."""
    base = model.rpartition(".")[2]
    if base == ENGINE_MODEL:
        return tritonserver.requests_in_flight(backends, model, pid).all > 0
    engine = model.removesuffix(base) + ENGINE_MODEL
    return tritonserver.requests_in_flight(backends, engine).of_scripts > 0


def _queued(server: Server, models: Iterable[str]) -> bool:
    """Whether requests queue for dead processes: Triton fails one of them a second."""
    import httpx

    try:
        with model_control.http_client(ASK_SECONDS) as client:
            scrape = triton_metrics.parse(client.get(server.endpoints.metrics_url).text, 0.0)
    except (httpx.HTTPError, InputDataError):
        return False
    return any(scrape.total(PENDING, model=model) for model in models)


def _start_again(
    server: Server, store: Store, options: LaunchOptions, note: Callable[[str], None]
) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start an ended server again at its old ports; its gateway continues, unless it has ended as well."""
    server = as_recorded(store, server)
    tritonserver.end(server.pid, server.program)
    clean_up(store, server)
    kept = server.gateway_pid is not None and gateway_process.alive(server.gateway_pid)
    openai = None if kept or server.gateway_url is None else int(server.gateway_url.rpartition(":")[2])
    points = server.endpoints
    at_its_ports = replace(options, http=points.http, grpc=points.grpc, metrics=points.metrics, openai=openai)
    started, process = launch(
        [Found(one.name, one.repository, one.source) for one in server.served], store, at_its_ports, note, again=True
    )
    if kept:
        started = replace(started, gateway_pid=server.gateway_pid, gateway_url=server.gateway_url, keyed=server.keyed)
    started = replace(started, watcher=os.getpid())
    _record(store, started, note)
    return started, process


def _record(store: Store, server: Server, note: Callable[[str], None]) -> None:
    """Record a server that has been repaired. It goes on where that fails, as on a full disk."""
    try:
        remember(store, server)
    except OSError as error:
        note(f"`trtpipe ps` will tell what is out of date: the record cannot be written: {error.strerror}")


def _ended(status: int, server: Server) -> StageFailed:
    error = StageFailed(
        f"{server.program} ended by itself (status {status})",
        why=server_log.failure(server.log),
        remedy=f"its log is {server.log}",
    )
    return explain(error, server.log, "serve", server_log.last_start(server.log))


def _count_death(deaths: dict[str, list[float]], what: str, server: Server) -> None:
    """Add a death of `what` to the times of earlier ones. Raises StageFailed where they are too many."""
    now = time.monotonic()
    deaths[what] = [at for at in deaths.get(what, ()) if now - at < DEATHS_SECONDS] + [now]
    if len(deaths[what]) > MAX_DEATHS:
        raise StageFailed(
            f"{what} died {MAX_DEATHS + 1} times within {DEATHS_SECONDS:.0f} s",
            why="what dies as soon as it is started is not started again",
            remedy=f"its log is {server.log}",
        )
