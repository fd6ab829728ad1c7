"""`trtpipe serve`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.gateway import (
    PORT,
    ApiKeysFile,
    CorsOrigin,
    NoReasoning,
    OtlpEndpoint,
    ServedModelName,
    Timeout,
    TlsCert,
    TlsKey,
    ToolFormat,
)
from trtpipe.pipeline.cli.options import AllowModelCode, Json, Targets, numbers, own_store

OPENAI_PORT = 9000

ReadyTimeout = Annotated[
    int, typer.Option(min=1, help="Seconds that the server may take to become ready, once its image is there.")
]


def serve(
    targets: Targets = None,
    front: Annotated[
        str,
        typer.Option(help="triton, or native: the runtime's own server (vllm serve, trtllm-serve) at --openai-port."),
    ] = "triton",
    server: Annotated[
        str,
        typer.Option(
            help="Server to start: local (tritonserver here), docker (the toolchain's image) or auto.",
            autocompletion=complete.words("auto", "local", "docker"),
        ),
    ] = "auto",
    image: Annotated[str | None, typer.Option(help="Image of a docker server; the toolchain's if left out.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.", **PORT)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.", **PORT)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0 takes a free one.", **PORT)] = 8002,
    openai_port: Annotated[
        int, typer.Option(help="Port of the OpenAI-compatible gateway; 0 takes a free one.", **PORT)
    ] = OPENAI_PORT,
    no_openai: Annotated[bool, typer.Option("--no-openai", help="Start no gateway.")] = False,
    gateway_workers: Annotated[int, typer.Option(min=1, help="Number of gateway processes.")] = 1,
    api_keys_file: ApiKeysFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    served_model_name: ServedModelName = None,
    tool_format: ToolFormat = None,
    no_reasoning: NoReasoning = False,
    cors_origin: CorsOrigin = None,
    otlp_endpoint: OtlpEndpoint = None,
    timeout: Timeout = 600,
    ready_timeout: ReadyTimeout = 600,
    drain: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seconds that requests in flight have when the server ends; 15, at the gateway 5, if left out."
        ),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(help="GPUs of the container, such as 0,1; all visible ones if left out.")
    ] = None,
    shm_size: Annotated[str | None, typer.Option(help="Shared memory of the container; 2g if left out.")] = None,
    engine_python: Annotated[
        str | None,
        typer.Option(help="Python that runs engines; for vLLM that of the environment beside this one if left out."),
    ] = None,
    allow_model_code: AllowModelCode = False,
    restart: Annotated[
        int, typer.Option(min=0, help="Number of times that a server which ends by itself is started again.")
    ] = 0,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when the server is ready; `trtpipe stop` ends it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Serve a target with tritonserver, or with the runtime's own server.

    The command returns, or reports that the server is ready, after one request has been answered.

    \b
    Examples:
      trtpipe serve llama3-8b.h100.fp8
      trtpipe serve llama3-8b.h100.fp8.vllm --front native --detach
    """
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.passport import read_passport
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.cli.config import read_config
    from trtpipe.pipeline.serving import background, launch_options, repositories, serve, watchdog
    from trtpipe.triton_repo.layout import ENGINE_FOLDER

    if no_openai and openai_port != OPENAI_PORT:
        raise UsageError(
            "--openai-port is for the gateway, and --no-openai starts none",
            remedy="leave out --openai-port or --no-openai",
        )
    if drain is not None and front == "native":
        raise UsageError(
            "--drain is for tritonserver and its gateway",
            why="with --front native the runtime's own server stands alone",
            remedy="leave it out, or serve with --front triton",
        )
    store = own_store()
    found = (
        [repositories.find_repository(target) for target in targets]
        if targets
        else [repositories.find_repository(None)]
    )
    if engine_python is None:
        # The runtime of the first: targets of two are refused.
        engine_python = read_config().python_for(lambda: read_passport(found[0].folder / ENGINE_FOLDER).runtime)
    options = launch_options.LaunchOptions(
        front=front, server=server, image=image, host=host, http=http_port, grpc=grpc_port, metrics=metrics_port,
        openai=None if no_openai else openai_port, gateway_workers=gateway_workers, api_keys_file=api_keys_file,
        tls_cert=tls_cert, tls_key=tls_key, model_names=tuple(served_model_name or ()),
        tool_format=tool_format, reasoning=not no_reasoning, cors_origins=tuple(cors_origin or ()),
        gpus=None if gpus is None else tuple(numbers(gpus, whole=True) or ()), shm_size=shm_size,
        engine_python=engine_python,
        allow_model_code=allow_model_code, otlp_endpoint=otlp_endpoint, timeout_s=timeout,
        ready_s=ready_timeout, drain_s=drain,
    )  # fmt: skip
    # Here, since a server that is started again leaves out the gateway where that goes on.
    launch_options.require_gateway(options)
    launch_options.check_alone(options, len(found))
    program = "the runtime's own server" if front == "native" else "tritonserver"
    console.note(f"starting {program} with " + ", ".join(one.name for one in found))

    def work(leave: background.Ready | None) -> None:
        with console_progress.working("serve", announce=False) as progress:
            progress.step("checking the repository")
            running, process = serve.launch(found, store, options, console.note, progress.step)

        def announce() -> None:
            console_serve.started(running, attached=leave is None, as_json=as_json, certificate=tls_cert)
            if leave is not None:
                leave(running.log)

        watchdog.attend(
            running, process, store, options, restarts=restart,
            ready=announce, stopping=lambda: console.note("stopping"), note=console.note,
        )  # fmt: skip

    if detach:
        sys.exit(background.run(work))  # not returned: the child has said that it was interrupted
    work(None)
