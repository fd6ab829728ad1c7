"""`trtpipe gateway`, and the options of gateways."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trtpipe.pipeline.cli import completion as complete
from trtpipe.pipeline.cli.options import FILE

PORT: Any = {"min": 0, "max": 65535}
ServedModelName = Annotated[
    list[str] | None,
    typer.Option(
        help="Name of the model at the gateway; repeatable, answers bear the first; the target's if left out."
    ),
]
ToolFormat = Annotated[
    str | None,
    typer.Option(
        help="Format of the model's tool calls: hermes, llama3_json, mistral or pythonic; the model file's if left out."
    ),
]
NoReasoning = Annotated[
    bool,
    typer.Option("--no-reasoning", help="Leave a model's reasoning in the text of answers, as the model writes it."),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Origin whose pages may call the gateway, such as https://app.example, or *; repeatable."),
]
ApiKeysFile = Annotated[
    Path | None, typer.Option(help="File of API keys, one a line; or set TRTPIPE_API_KEYS.", **FILE)
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Collector of OpenTelemetry traces, OTLP over HTTP: http://localhost:4318; or set "
        "OTEL_EXPORTER_OTLP_ENDPOINT."
    ),
]
Timeout = Annotated[
    int,
    typer.Option(min=1, help="Seconds from a request's arrival to the end of its answer; the gateway then ends it."),
]
TlsCert = Annotated[Path | None, typer.Option(help="TLS certificate of the gateway (PEM).", **FILE)]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).", **FILE)]


def gateway(
    target: Annotated[
        str, typer.Argument(help="A target in ./runs, or a model repository.", autocompletion=complete.targets)
    ],
    triton: Annotated[str, typer.Option(help="Address of the Triton that serves it, gRPC.")] = "127.0.0.1:8001",
    served_model_name: ServedModelName = None,
    tool_format: ToolFormat = None,
    no_reasoning: NoReasoning = False,
    cors_origin: CorsOrigin = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", **PORT)] = 9000,
    workers: Annotated[int, typer.Option(help="Number of processes.")] = 1,
    api_keys_file: ApiKeysFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    otlp_endpoint: OtlpEndpoint = None,
    timeout: Timeout = 600,
    linger: Annotated[
        int, typer.Option(help="Seconds after SIGTERM in which requests are still taken, while clients leave.")
    ] = 0,
    drain: Annotated[int, typer.Option(help="Seconds that running answers have to end after that.")] = 5,
) -> None:
    """Run an OpenAI-compatible gateway in front of a Triton that runs already.

    `trtpipe serve` starts one itself. This is for a Triton that something else has started, such as a container beside
    this one.

    \b
    Examples:
      trtpipe gateway llama3-8b.h100.fp8 --triton gpu-7:8001
      trtpipe gateway /models --served-model-name llama3-8b --host 0.0.0.0
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.gateway import access, supervisor
    from trtpipe.pipeline.gateway.options import GatewayOptions
    from trtpipe.pipeline.gateway.traces import traces_url
    from trtpipe.pipeline.serving import launch_options

    options = GatewayOptions(
        models=(
            launch_options.gateway_model(
                target, tuple(served_model_name or ()), tool_format, reasoning=not no_reasoning
            ),
        ),
        grpc_url=triton, host=host, port=port,
        cors_origins=tuple(cors_origin or ()),
        workers=workers, api_keys_file=api_keys_file, tls_cert=tls_cert, tls_key=tls_key,
        timeout_s=timeout, linger_s=linger, drain_s=drain, traces_url=traces_url(otlp_endpoint),
    )  # fmt: skip
    access.check(options)
    exposed = launch_options.gateway_exposure(options)
    if exposed is not None:
        console.note(exposed)
    if not _answers(options.upstream()):
        console.note(f"nothing answers at {triton} yet: requests fail until a Triton does; --triton names another")
    supervisor.serve(
        options,
        ready=lambda made: console.result(f"gateway at {made.url}/v1; Ctrl-C ends it"),
        note=console.note,
    )


def _answers(address: tuple[str, int]) -> bool:
    import socket

    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True
