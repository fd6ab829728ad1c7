"""`trtpipe serve` and commands for servers and repositories: list, logs, reload, stop, check, top, generate, deploy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trtpipe.pipeline.cli.help import SectionedCommand, SectionedGroup
from trtpipe.pipeline.cli.options import (
    FILE,
    AllowModelCode,
    Json,
    ServerName,
    Target,
    TargetName,
    Targets,
    numbers,
    own_store,
)

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
TlsCert = Annotated[Path | None, typer.Option(help="TLS certificate of the gateway (PEM).", **FILE)]
TlsKey = Annotated[Path | None, typer.Option(help="Private key of --tls-cert (PEM).", **FILE)]


def serve(
    targets: Targets = None,
    front: Annotated[
        str,
        typer.Option(help="triton, or native: the runtime's own server (vllm serve, trtllm-serve) at --openai-port."),
    ] = "triton",
    server: Annotated[
        str, typer.Option(help="Server to start: local (tritonserver here), docker (the toolchain's image) or auto.")
    ] = "auto",
    image: Annotated[str | None, typer.Option(help="Image of a docker server; the toolchain's if left out.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 takes a free one.", **PORT)] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 takes a free one.", **PORT)] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0 takes a free one.", **PORT)] = 8002,
    openai_port: Annotated[
        int, typer.Option(help="Port of the OpenAI-compatible gateway; 0 takes a free one.", **PORT)
    ] = 9000,
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
    gpus: Annotated[str | None, typer.Option(help="GPUs of the container, such as 0,1; all if left out.")] = None,
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
) -> int | None:
    """Serve a target with tritonserver, or with the runtime's own server.

    The command returns, or reports that the server is ready, after one request has been answered.

    \b
    Examples:
      trtpipe serve llama3-8b.h100.fp8
      trtpipe serve llama3-8b.h100.vllm.fp8 --front native --detach
    """
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.cli.config import read_config
    from trtpipe.pipeline.serving import background, launch_options, repositories, serve, watchdog

    store = own_store()
    configured = str(read_config().engine_python or "") or None
    found = (
        [repositories.find_repository(target) for target in targets]
        if targets
        else [repositories.find_repository(None)]
    )
    options = launch_options.LaunchOptions(
        front=front, server=server, image=image, host=host, http=http_port, grpc=grpc_port, metrics=metrics_port,
        openai=None if no_openai else openai_port, gateway_workers=gateway_workers, api_keys_file=api_keys_file,
        tls_cert=tls_cert, tls_key=tls_key, model_names=tuple(served_model_name or ()),
        tool_format=tool_format, reasoning=not no_reasoning, cors_origins=tuple(cors_origin or ()),
        gpus=None if gpus is None else tuple(numbers(gpus, whole=True) or ()), shm_size=shm_size,
        engine_python=engine_python or configured,
        allow_model_code=allow_model_code, otlp_endpoint=otlp_endpoint,
    )  # fmt: skip
    program = "the runtime's own server" if front == "native" else "tritonserver"
    console.note(f"starting {program} with " + ", ".join(name for name, _ in found))

    def work(leave: background.Ready | None) -> None:
        with console_progress.working("serve", announce=False) as progress:
            progress.step("checking the repository")
            running, process = serve.launch(found, store, options, console.note, progress.step)

        def announce() -> None:
            console_serve.started(running, attached=leave is None, as_json=as_json)
            if leave is not None:
                leave(running.log)

        watchdog.attend(
            running, process, store, options, restarts=restart,
            ready=announce, stopping=lambda: console.note("stopping"), note=console.note,
        )  # fmt: skip

    if detach:
        return background.run(work)
    work(None)
    return None


def gateway(
    target: Annotated[str, typer.Argument(help="A target in ./runs, or a model repository.")],
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
        linger_s=linger, drain_s=drain, traces_url=traces_url(otlp_endpoint),
    )  # fmt: skip
    access.check(options)
    if not _answers(triton):
        console.note(f"nothing answers at {triton} yet: requests fail until a Triton does; --triton names another")
    supervisor.serve(options, ready=lambda made: console.result(f"gateway at {made.url}/v1; Ctrl-C ends it"))


def _answers(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True


def ps(as_json: Json = False) -> None:
    """List the servers that run, and those that died.

    One that died is listed until it is served again, or until `trtpipe stop` names it.

    \b
    Examples:
      trtpipe ps
      trtpipe ps --json
    """
    from trtpipe.pipeline.cli import console, console_serve
    from trtpipe.pipeline.serving import servers

    found = servers.recorded(own_store())
    if as_json:
        console.result_json([console_serve.facts(server) for server in found])
    else:
        console_serve.servers(found)


def logs(
    server: Annotated[
        str | None,
        typer.Option(help="Name of a server, running or ended; the only one if left out."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=10**9, help="Number of last lines.")] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C or the server's end.")
    ] = False,
) -> None:
    """Print the log of a server, running or not.

    On a terminal, control characters in it are shown as escapes.

    \b
    Examples:
      trtpipe logs -f
      trtpipe logs --server llama3-8b.h100.fp8
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving import logs

    for piece in logs.read_log(own_store(), server, lines=lines, follow=follow):
        console.text(piece)


def reload(
    target: Annotated[str | None, typer.Argument(help="Target to load; the server's own if left out.")] = None,
    server: ServerName = None,
    allow_model_code: AllowModelCode = False,
    as_json: Json = False,
) -> None:
    """Load a changed repository into a running server.

    The models are loaded one by one; the server goes on.

    \b
    Examples:
      trtpipe reload
      trtpipe reload llama3-8b.h100.fp8
    """
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.serving import serve

    with console_progress.working("reload", announce=False):
        renewed, loaded = serve.reload(own_store(), server, target, allow_model_code=allow_model_code)
    if as_json:
        console.result_json({"server": renewed.name, "loaded": [one.repository for one in loaded]})
        return
    console.result(*(f"{renewed.name} serves {one.repository}" for one in loaded))
    console.result(f"next: {console_serve.first_steps(renewed)[0]}")


def stop(
    name: Annotated[str | None, typer.Argument(help="A server's name; the only one if left out.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Stop every server.")] = False,
    as_json: Json = False,
) -> None:
    """Stop servers that `trtpipe serve` started.

    \b
    Examples:
      trtpipe stop llama3-8b.h100.fp8
      trtpipe stop --all
    """
    from trtpipe.pipeline.cli import console, console_progress, console_serve
    from trtpipe.pipeline.serving import serve

    with console_progress.working("stopping", announce=False):
        ended = serve.stop(own_store(), name, everything=everything)
    if as_json:
        console.result_json([console_serve.facts(server, stopped=True) for server in ended])
    else:
        told = [f"stopped {one.name}" if one.died is None else f"dropped {one.name}, which had died" for one in ended]
        console.result(*told or ["no server is running"])


def check(
    repository: Annotated[Path, typer.Argument(help="A model repository, ours or anybody's, or a target in ./runs.")],
    toolchain: Annotated[
        str | None, typer.Option(help="TensorRT-LLM release that will serve it; detected if left out.")
    ] = None,
    here: Annotated[bool, typer.Option("--here", help="Also check that this machine's GPUs can serve it.")] = False,
    allow_model_code: AllowModelCode = False,
    as_json: Json = False,
) -> None:
    """Check a model repository before Triton loads it.

    Fails when something is wrong. Code that is of no known template is named: `serve` refuses it without --allow-
    model-code.

    \b
    Examples:
      trtpipe check llama3-8b.h100.fp8
      trtpipe check MODEL_REPOSITORY --json
    """
    import dataclasses

    from trtpipe.pipeline.api.check import check as find_faults
    from trtpipe.pipeline.cli import console
    from trtpipe.triton_repo.check import require_sound

    faults = find_faults(repository, toolchain=toolchain, here=here, allow_model_code=allow_model_code)
    if as_json:
        console.result_json([dataclasses.asdict(fault) for fault in faults])
    else:
        console.faults(faults)
    require_sound(str(repository), faults)


def top(
    server: ServerName = None,
    url: Annotated[str | None, typer.Option(help="Metrics of an external server: host:8002.")] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading over one interval.")] = False,
    as_json: Json = False,
) -> None:
    """Watch a server: requests, tokens, KV cache, latency.

    \b
    Examples:
      trtpipe top
      trtpipe top --once --json
    """
    from trtpipe.pipeline.cli import console_top
    from trtpipe.pipeline.serving import servers

    found = None if url is not None else servers.find_running(own_store(), server)
    name = found.name if found else str(url)
    where = found.endpoints.metrics_url if found else str(url)
    console_top.run(where, name, interval=interval, once=once, as_json=as_json)


def monitoring(
    target: Target = None,
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder in which monitoring/ is written.")] = Path(),
    metrics: Annotated[
        str, typer.Option(help="Addresses of the servers' metrics: host:port,...; of the running server if left out.")
    ] = "",
    gateways: Annotated[
        str, typer.Option(help="Addresses of the gateways: host:port,...; of the running server if left out.")
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option(help="File that holds a key of the gateways, as Prometheus finds it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a Grafana dashboard, scrape config and alerts.

    \b
    Examples:
      trtpipe monitoring llama3-8b.h100.fp8 -o monitoring
      trtpipe monitoring -o monitoring
    """
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.deploy.monitoring import GATEWAYS, SERVERS, write_monitoring
    from trtpipe.pipeline.serving import repositories, servers

    name, repository = repositories.find_repository(target)
    models = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    found = [one for one in servers.running(own_store()) if name in {served.name for served in one.served}]
    written = write_monitoring(
        models, out,
        targets=metrics.split(",") if metrics else [one.endpoints.metrics_url for one in found] or SERVERS,
        gateways=gateways.split(",") if gateways else [one.gateway_url for one in found if one.gateway_url] or GATEWAYS,
        key_file=api_key_file,
    )  # fmt: skip
    if as_json:
        console.result_json({"folder": written, "files": sorted(path.name for path in written.iterdir())})
        return
    if not gateways and api_key_file is None and any(one.keyed for one in found):
        console.note("the gateway asks Prometheus for a key too: name a file with one by --api-key-file")
    console.result(str(written))


def generate(
    prompt: Annotated[str, typer.Argument(help="Prompt.")],
    server: ServerName = None,
    target: TargetName = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; greedy if 0 or left out.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of likeliest tokens to sample from.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability mass to sample from.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Penalty of tokens that occurred before.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling.")] = None,
    stop_word: Annotated[list[str] | None, typer.Option("--stop", help="Stop at this text; repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Send the text without the chat template.")] = False,
    as_json: Json = False,
) -> None:
    """Stream an answer from a running server.

    On a terminal, control characters in it are shown as escapes.

    \b
    Examples:
      trtpipe generate "Why is the sky blue?"
      trtpipe generate "def fib(n):" --raw --max-tokens 64
    """
    from trtpipe.engines.sampling import SamplingParams
    from trtpipe.pipeline.api.serve import Client, Sampling
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.serving.generate import check_options

    sampling: Sampling = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty,
        "seed": seed,
    }  # fmt: skip
    check_options(SamplingParams(**sampling), max_tokens)
    client = Client(target, server=server)
    text = prompt if raw else client.prompt(prompt)
    pieces = client.stream(text, max_tokens=max_tokens, stop=stop_word or (), **sampling)
    if as_json:
        console.result_json({"prompt": text, "text": "".join(pieces)})
        return
    for piece in pieces:
        console.text(piece)
    console.text("\n")


deploy = typer.Typer(
    name="deploy", cls=SectionedGroup, help="Write what a cluster needs to serve a target.", rich_markup_mode=None
)


@deploy.callback()
def _deploy() -> None:
    """One command for each kind of cluster."""


@deploy.command(cls=SectionedCommand)
def k8s(
    target: Annotated[str, typer.Argument(help="A target in ./runs, or a model repository.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="Folder to write: new or empty.")],
    pvc: Annotated[str | None, typer.Option(help="PersistentVolumeClaim that holds the repository.")] = None,
    model_image: Annotated[str | None, typer.Option(help="Container image that holds the repository.")] = None,
    host_path: Annotated[str | None, typer.Option(help="Folder of the node that holds the repository.")] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of the resources.")] = "default",
    image: Annotated[str | None, typer.Option(help="Image of the server; the toolchain's if left out.")] = None,
    gateway_image: Annotated[
        str | None, typer.Option(help="Image of the OpenAI-compatible gateway beside the server, with trtpipe in it.")
    ] = None,
    no_openai: Annotated[bool, typer.Option("--no-openai", help="Put no gateway into the pod.")] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Collector that the gateway sends traces to: http://collector:4318.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting: replicas_max=8; repeatable.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a kustomize base, a Helm chart and KServe's resources that serve a target.

    They hold a Deployment or a LeaderWorkerSet, a Service, probes, autoscaling and a disruption budget.

    \b
    Examples:
      trtpipe deploy k8s llama3-8b.h100.fp8 -o out --pvc models --gateway-image registry.example/trtpipe:1
      trtpipe deploy k8s --help
    """
    from trtpipe.configs import facts, read
    from trtpipe.engines.errors import UsageError
    from trtpipe.engines.passport import read_passport
    from trtpipe.pipeline.cli import console
    from trtpipe.pipeline.deploy.config import DeployConfig
    from trtpipe.pipeline.deploy.kubernetes import write
    from trtpipe.pipeline.serving import repositories
    from trtpipe.pipeline.spec import set_layer
    from trtpipe.triton_repo.layout import ENGINE_FOLDER

    name, repository = repositories.find_repository(target)
    passport = read_passport(repository / ENGINE_FOLDER)
    given = {"name": name, "namespace": namespace, "image": image, "pvc": pvc, "model_image": model_image,
             "host_path": host_path, "gateway_image": gateway_image, "openai": False if no_openai else None,
             "otlp_endpoint": otlp_endpoint, **set_layer(settings or [])[1]}  # fmt: skip
    chosen = {key: value for key, value in given.items() if value is not None}
    made = read.build(DeployConfig, chosen, "--set", UsageError)
    paths = write(passport, facts.find_gpu(passport.gpu), made, out)
    if as_json:
        console.result_json({"folder": out, "files": [path.relative_to(out) for path in paths]})
        return
    console.table(("written",), [(path,) for path in paths])
    console.result(f"next: kubectl apply -k {out}/base, or helm install NAME {out}/chart   ({out}/README.md says more)")
