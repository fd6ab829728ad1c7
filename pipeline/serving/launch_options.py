"""Options for the start of a server and of its gateway, checked before anything is started."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trtpipe.configs import facts
from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.json_input import read_json
from trtpipe.engines.passport import Passport, read_passport
from trtpipe.pipeline.gateway import access
from trtpipe.pipeline.gateway.model_names import require_free
from trtpipe.pipeline.gateway.options import (
    GatewayOptions,
    ServedModel,
    require_origins,
    require_pair,
    require_tool_format,
)
from trtpipe.pipeline.gateway.traces import traces_url
from trtpipe.pipeline.serving.model_control import READY_SECONDS
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.repositories import SERVERS, find_repository
from trtpipe.pipeline.serving.servers import Served
from trtpipe.triton_repo.launch import ENGINE_MODEL
from trtpipe.triton_repo.layout import ADAPTER_FOLDER, ENGINE_FOLDER

FRONTS = ("triton", "native")
SHM_SIZE = "2g"
# A number of bytes as Docker takes it.
SIZE = re.compile(r"(?=.*[1-9])\d+(\.\d+)?[kmgt]?b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Options for the start of a server.

    front                triton, or native: the runtime's own server (`vllm serve`, `trtllm-serve`)
    server               auto, local (this environment's tritonserver) or docker (the toolchain's image)
    image                image of a docker server, in place of the toolchain's
    host                 address to listen on
    http, grpc, metrics  ports; 0 takes a free one
    openai               port of the OpenAI-compatible gateway; None starts none
    gateway_workers      number of the gateway's processes
    api_keys_file        the gateway's keys, one a line; None and no TRTPIPE_API_KEYS serves everybody who reaches it
    tls_cert, tls_key    the gateway's certificate and key, PEM files
    tool_format          format in which the only target's model writes calls of tools; that of its model file, or of
                         its chat template, if left out
    reasoning            whether the models' reasoning is apart from the text of answers
    model_names          names of the only target's model at the gateway; the target's name if left out
    cors_origins         origins whose pages may call the gateway from a browser
    gpus                 indices of the GPUs a container gets; None for all visible ones
    shm_size             shared memory of a container, SHM_SIZE if None; each Python model and rank takes some
    engine_python        interpreter of the engine process; None takes vLLM's environment beside this one, or this one
    allow_model_code     whether code of unknown templates may run
    otlp_endpoint        collector of traces; None asks OpenTelemetry's environment variables
    timeout_s            seconds from a request's arrival at the gateway to the end of its answer
    ready_s              seconds that the server may take to become ready
    drain_s              seconds that requests in flight have to end once the server is told to; None gives
                         tritonserver.DRAIN_S to those of Triton, GatewayOptions.drain_s to those of the gateway
    """

    front: str = "triton"
    server: str = "auto"
    image: str | None = None
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
    tool_format: str | None = None
    reasoning: bool = True
    cors_origins: tuple[str, ...] = ()
    gpus: tuple[int, ...] | None = None
    shm_size: str | None = None
    engine_python: str | None = None
    allow_model_code: bool = False
    otlp_endpoint: str | None = None
    timeout_s: float = GatewayOptions.timeout_s
    ready_s: int = READY_SECONDS
    drain_s: int | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for options that are wrong whatever is served."""
        if self.front not in FRONTS:
            raise UsageError(f"unknown front '{self.front}'", remedy=suggestion(self.front, FRONTS))
        if not all(name.strip() for name in self.model_names):
            raise UsageError("--served-model-name is empty", remedy="give a name, or leave it out")
        if self.server not in SERVERS:
            raise UsageError(f"unknown server '{self.server}'", remedy=suggestion(self.server, SERVERS))
        if self.shm_size is not None and not SIZE.fullmatch(self.shm_size):
            raise UsageError(f"--shm-size {self.shm_size} is not a size", remedy="give for example 512m or 2g")
        require_tool_format(self.tool_format)
        require_origins(self.cors_origins)
        require_pair(self.tls_cert, self.tls_key)


def of_gateway(options: LaunchOptions) -> list[str]:
    """Given options that only a gateway of ours takes, as the command line names them."""
    given = {
        "--api-keys-file": options.api_keys_file is not None,
        "--tls-cert": options.tls_cert is not None,
        "--tls-key": options.tls_key is not None,
        "--cors-origin": bool(options.cors_origins),
        "--tool-format": options.tool_format is not None,
        "--no-reasoning": not options.reasoning,
        "--gateway-workers": options.gateway_workers != 1,
        "--otlp-endpoint": options.otlp_endpoint is not None,
        "--timeout": options.timeout_s != GatewayOptions.timeout_s,
    }
    return [option for option, is_given in given.items() if is_given]


def require_gateway(options: LaunchOptions) -> None:
    """Raises UsageError for an option of the gateway where none is started."""
    given = [*of_gateway(options), *(["--served-model-name"] if options.model_names else [])]
    if options.openai is None and options.front == "triton" and given:
        raise UsageError(
            f"{given[0]} is for the gateway, and --no-openai starts none",
            remedy=f"leave out {given[0]} or --no-openai",
        )


def check_alone(options: LaunchOptions, targets: int) -> None:
    """Check what needs no more than the number of targets, before anything is read.

    Raises UsageError, InputDataError for unusable keys or an unusable certificate, HostError for traces without
    OpenTelemetry.
    """
    for option, given in (("--served-model-name", options.model_names), ("--tool-format", options.tool_format)):
        if given and targets > 1:
            raise UsageError(f"{option} is for one target", remedy="leave it out, or serve the targets apart")
    if options.front == "native":
        if targets > 1:
            raise UsageError("a runtime's own server is of one target", remedy="serve them by several commands")
        _require_own(options)
        return
    if options.openai is not None:
        access.check_files(options.api_keys_file, options.tls_cert, options.tls_key)
    traces_url(options.otlp_endpoint)


def _require_own(options: LaunchOptions) -> None:
    """Raises UsageError for an option of the gateway, and for a name that cannot be a folder's."""
    if options.openai is None:
        given = ["--no-openai"]
    elif access.read_keys(options.api_keys_file):
        given = ["--api-keys-file or TRTPIPE_API_KEYS"]
    else:
        given = of_gateway(options)
    if given:
        raise UsageError(
            f"{given[0]} is for the gateway",
            why="with --front native the runtime's own server stands alone",
            remedy="leave it out, or serve with --front triton",
        )
    # The first name is the name of a folder too.
    if any("/" in name or name in (".", "..") for name in options.model_names):
        raise UsageError("a name of --served-model-name holds a /", remedy="give one without")


def check_container_options(options: LaunchOptions, kind: str) -> None:
    """Raises UsageError for options of a container where there is none."""
    for option, value in (("--image", options.image), ("--shm-size", options.shm_size), ("--gpus", options.gpus)):
        if kind == "local" and value is not None:
            raise UsageError(
                f"{option} is for a container, and this server runs without one", remedy=f"leave {option} out"
            )


def server_image(options: LaunchOptions, passport: Passport) -> str:
    """Image of a docker server. Raises UsageError where none is given and none is known."""
    image = options.image or passport.image
    if image is None:
        raise UsageError(
            f"no image with tritonserver and TensorRT-LLM {passport.toolchain} is known",
            why="no document of NVIDIA's names one",
            remedy="give --image, one that holds both",
        )
    return image


def exposure(options: LaunchOptions, gateway: GatewayOptions | None, *, keyed: bool) -> str | None:
    """A warning where other machines reach a server that asks for no key; None on loopback.

    keyed  whether the gateway asks for one
    """
    if _is_loopback(options.host):
        return None
    triton = "its port" if options.front == "native" else "HTTP, gRPC and metrics"
    ports = triton + ("" if keyed or gateway is None else ", and the gateway")
    advice = "close these ports to others" if keyed or gateway is None else "pass --api-keys-file, and close the others"
    return f"warning: whoever reaches {options.host} can use {ports}: they ask for no key; {advice}"


def gateway_exposure(gateway: GatewayOptions) -> str | None:
    """The same warning of a gateway alone."""
    if _is_loopback(gateway.host) or access.read_keys(gateway.api_keys_file):
        return None
    return f"warning: whoever reaches {gateway.host} can use the gateway: it asks for no key; pass --api-keys-file"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def gateway_options(
    served: Sequence[Served], passports: Sequence[Passport], models: Path, endpoints: Endpoints, port: int,
    options: LaunchOptions,
) -> GatewayOptions:  # fmt: skip
    """Options of the gateway, checked before anything is started; `models` will be the server's own repository.

    Raises UsageError, InputDataError for its files.
    """
    chosen = GatewayOptions(
        models=gateway_models(served, passports, models),
        # A server that listens on all addresses is reached on loopback.
        grpc_url=endpoints.grpc_url.replace("0.0.0.0", "127.0.0.1"),
        host=options.host,
        port=port,
        workers=options.gateway_workers,
        api_keys_file=options.api_keys_file,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        cors_origins=options.cors_origins,
        timeout_s=options.timeout_s,
        drain_s=GatewayOptions.drain_s if options.drain_s is None else options.drain_s,
        traces_url=traces_url(options.otlp_endpoint),
    )
    access.check(chosen)
    return chosen


def gateway_models(served: Sequence[Served], passports: Sequence[Passport], models: Path) -> tuple[ServedModel, ...]:
    """The models of a server as its gateway serves them; `models` is the server's own repository. Raises UsageError
    for an adapter that has the name of a model."""
    for one in served:
        for placed in AdapterFolder(one.repository / ADAPTER_FOLDER).all():
            require_free([name for other in served for name in other.model_names], one.model_names, placed.name)
    return tuple(
        _gateway_model(one, passport, models / one.model(ADAPTER_FOLDER))
        for one, passport in zip(served, passports, strict=True)
    )


def _gateway_model(served: Served, passport: Passport, adapters: Path) -> ServedModel:
    built_from = passport.weights.get("model")
    return ServedModel(
        name=served.model_names[0],
        aliases=served.model_names[1:],
        tokenizer=served.tokenizer,
        triton_model=served.model(ENGINE_MODEL),
        max_input_len=passport.build_config["max_input_len"],
        max_seq_len=passport.build_config["max_seq_len"],
        vocab_size=_vocab_size(served.repository / ENGINE_FOLDER / "config.json"),
        tool_format=served.tool_format or (facts.find_tool_format(built_from) if built_from else None),
        reasoning=served.reasoning,
        adapters=adapters if (served.repository / ADAPTER_FOLDER).is_dir() else None,
    )


def _vocab_size(config: Path) -> int | None:
    """Tokens that an engine gives logits for, of its own config.json or that of a Hugging Face folder."""
    raw = read_json(config, "engine config") if config.is_file() else {}
    size = raw.get("pretrained_config", raw).get("vocab_size")
    return size if isinstance(size, int) else None


def gateway_model(
    target: str, names: tuple[str, ...], tool_format: str | None, *, reasoning: bool = True
) -> ServedModel:
    """A target's model at a gateway of its own, under `names` if given. Raises UsageError, ArtefactRefused."""
    found = find_repository(target)
    passport = read_passport(found.folder / ENGINE_FOLDER)
    served = Served(name=found.name, repository=found.folder, names=names, tool_format=tool_format, reasoning=reasoning)
    return _gateway_model(served, passport, found.folder / ADAPTER_FOLDER)
