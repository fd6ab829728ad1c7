"""A runtime's own OpenAI-compatible server in place of Triton: started, tried with one request, recorded."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import NativeServer
from trtpipe.engines.errors import StageFailed
from trtpipe.engines.passport import Passport
from trtpipe.engines.process import python_command
from trtpipe.pipeline.execution.diagnosis import explain
from trtpipe.pipeline.serving import model_control, ports, server_log, temporary, tritonserver
from trtpipe.pipeline.serving.launch_options import SHM_SIZE, server_image
from trtpipe.pipeline.serving.openai_client import post
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served, Server, output_folder, remember
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ENGINE_FOLDER

if TYPE_CHECKING:
    from trtpipe.pipeline.serving.launch_options import LaunchOptions
    from trtpipe.pipeline.serving.serve import Show


def launch(
    served: Served, passport: Passport, store: Store, log: Path, options: LaunchOptions, show: Show
) -> tuple[Server, subprocess.Popen[bytes]]:
    """Start the runtime's own server on the engine of a repository; return when it has answered a request.

    Raises UsageError for a runtime without one, HostError (port taken, no Docker), or
    StageFailed with the server's own reason.
    """
    assert options.openai is not None
    make = partial(
        load_backend(passport.runtime).native_server, tokenizer=served.tokenizer.resolve(), host=options.host,
        names=served.model_names, on_cpu=passport.gpu == "cpu",
    )  # fmt: skip
    artefact = (served.repository / ENGINE_FOLDER).resolve()
    # What the runtime refuses is said before its port is looked at.
    docker = make(artefact, port=options.openai).in_image
    if docker:
        tritonserver.remove_container(output_folder(store, served.name, native=True))
    port = ports.free_ports(options.host, openai=options.openai)["openai"]
    folder = output_folder(store, served.name, native=True)
    engine = folder / served.model_names[0]
    folder.mkdir(parents=True, exist_ok=True)
    for link in folder.iterdir():
        link.unlink()
    engine.symlink_to(artefact)
    spec = make(engine, port=port)
    image = server_image(options, passport) if docker else None
    if image is not None:
        tritonserver.fetch_image(image, show)
    log.parent.mkdir(parents=True, exist_ok=True)
    if not docker:
        spec = replace(spec, environment={**spec.environment, **temporary.make(folder.parent)})
    process = _start(spec, image, served, folder, log, options)
    endpoints = Endpoints(host=options.host, http=port, grpc=0, metrics=port)
    # A server that listens on all addresses is reached on loopback.
    url = endpoints.http_url.replace("0.0.0.0", "127.0.0.1")
    try:
        model_control.wait_ready(
            process, f"{url}/health", log, lambda: show(f"starting {spec.name}", ""), program=spec.name,
            seconds=options.ready_s,
        )  # fmt: skip
        show(f"asking {served.name} for an answer", "")
        post(url, "/v1/completions", {"model": served.model_names[0], "prompt": "Hello", "max_tokens": 1})
        server = Server(
            name=served.name,
            pid=process.pid,
            served=(served,),
            log=log,
            endpoints=endpoints,
            gateway_url=url,
            native=spec.program,
            docker=docker,
        )
        remember(store, server)
    except BaseException as error:
        tritonserver.end(process.pid, spec.program)
        temporary.remove(folder.parent)
        if isinstance(error, StageFailed):
            raise explain(error, log, "serve", server_log.last_start(log)) from None
        raise
    return server, process


def _start(
    spec: NativeServer, image: str | None, served: Served, folder: Path, log: Path, options: LaunchOptions
) -> subprocess.Popen[bytes]:
    if spec.in_image:
        assert image is not None
        reads = [served.repository.resolve()]
        return tritonserver.spawn_in_docker(
            image,
            (spec.program, *spec.command),
            reads,
            folder,
            log,
            gpus=options.gpus,
            shm_size=options.shm_size or SHM_SIZE,
        )
    python = options.engine_python or sys.executable
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH') or os.defpath}"
    command = [*python_command(spec.program, python, outlives=True), *spec.command]
    return tritonserver.spawn(command, {**spec.environment, "PATH": path}, folder, log)
