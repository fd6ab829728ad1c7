"""Options of the gateway. Plain data: they go to the worker processes as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.gateway.tools.formats import FORMATS

# Of each its memory: some 60 MB.
MOST_WORKERS = 256
# A scheme, a host in small letters and a port, as browsers write an origin.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")


def require_pair(certificate: Path | None, key: Path | None) -> None:
    """Raises UsageError for a certificate without a key, or a key without a certificate."""
    if (certificate is None) != (key is None):
        raise UsageError("TLS needs a certificate and a key", remedy="give both files or neither")


def require_tool_format(name: str | None) -> None:
    """Raises UsageError for an unknown format of tool calls; None is none."""
    if name is not None and name not in FORMATS:
        raise UsageError(f"unknown format of tool calls '{name}'", remedy=suggestion(name, FORMATS))


def require_origins(origins: Iterable[str]) -> None:
    """Raises UsageError for what no browser sends as an origin."""
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise UsageError(
                f"'{origin}' is not an origin, and no browser would send it",
                remedy="give a scheme and a host without a path, such as https://app.example, or *",
            )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model as clients see it.

    name           its name for clients, which answers bear
    aliases        further names that requests may give
    tokenizer      folder with tokenizer.json and its configs, as in the repository
    triton_model   name of its engine model in Triton
    max_input_len  longest prompt in tokens, None when unknown here (the engine refuses by itself)
    max_seq_len    tokens of prompt and answer together; also limits an answer without `max_tokens`
    vocab_size     tokens that the engine gives logits for, None when it is the tokenizer's number
    adapters       folder of its LoRA adapters, see `engines.adapters`; adapters may be added and removed
    tool_format    name of the format of its tool calls; None to recognise it by the chat template
    reasoning      whether its reasoning, if its chat template knows any, is apart from the text of an answer
    """

    name: str
    tokenizer: Path
    aliases: tuple[str, ...] = ()
    triton_model: str = "tensorrt_llm"
    max_input_len: int | None = None
    max_seq_len: int | None = None
    vocab_size: int | None = None
    adapters: Path | None = None
    tool_format: str | None = None
    reasoning: bool = True

    def __post_init__(self) -> None:
        require_tool_format(self.tool_format)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ServedModel:
        tokenizer, adapters = Path(raw["tokenizer"]), raw["adapters"] and Path(raw["adapters"])
        return cls(**{**raw, "tokenizer": tokenizer, "aliases": tuple(raw["aliases"]), "adapters": adapters})


@dataclass(frozen=True, kw_only=True)
class GatewayOptions:
    """Options of the gateway: addresses, models, access and limits.

    models         at least one; the names must differ
    grpc_url       host:port of Triton
    host, port     address to listen on; port 0 takes a free one
    workers        processes that share the port
    connections    number of connections to Triton, for each worker
    api_keys_file  one key a line; None with no keys in TRTPIPE_API_KEYS either serves everybody
    max_body_bytes largest body of a request
    max_requests   requests that one worker answers at once; more get 429. 0 for no limit
    max_choices    the most answers (`n` times prompts) of one request
    default_max_tokens  limit of a chat answer, where neither the request nor max_seq_len gives one
    timeout_s      seconds from a request's arrival to the end of its answer
    tls_cert, tls_key   PEM files; both or none
    cors_origins   origins whose pages may call the gateway from a browser; * for all
    linger_s       seconds after a TERM signal in which requests are still taken. Meanwhile /health/ready says no, and
                   each answer ends its connection, so that clients go elsewhere before the port closes
    drain_s        seconds that running answers then have to end
    traces_url     URL that spans of requests are sent to, see traces.traces_url; None for no traces
    """

    models: tuple[ServedModel, ...]
    grpc_url: str
    host: str = "127.0.0.1"
    port: int = 9000
    workers: int = 1
    connections: int = 1
    api_keys_file: Path | None = None
    max_body_bytes: int = 4 << 20
    max_requests: int = 0
    max_choices: int = 32
    default_max_tokens: int = 1024
    timeout_s: float = 600.0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    linger_s: int = 0
    drain_s: int = 5
    traces_url: str | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for invalid options."""
        names = [name for model in self.models for name in model.names]
        if not names or not all(names) or len(set(names)) != len(names):
            raise UsageError(
                "a gateway needs models, each with a name of its own",
                why="given: " + ", ".join(f"'{name}'" for name in names),
                remedy="give each name once",
            )
        require_origins(self.cors_origins)
        require_pair(self.tls_cert, self.tls_key)
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"port {self.port} is not a port", remedy="give a number from 0 to 65535")
        for name in ("workers", "connections", "max_body_bytes", "max_choices", "default_max_tokens", "timeout_s"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above 0, not {getattr(self, name)}")
        if self.workers > MOST_WORKERS:
            raise UsageError(f"{self.workers} gateway workers", remedy=f"give at most {MOST_WORKERS}, one for a core")
        if self.linger_s < 0 or self.drain_s < 0:
            raise UsageError("--linger and --drain are times", remedy="give seconds, 0 or more")
        self.upstream()

    def upstream(self) -> tuple[str, int]:
        """Host and port of Triton's gRPC endpoint. Raises UsageError."""
        host, separator, port = self.grpc_url.removeprefix("grpc://").rstrip("/").rpartition(":")
        if not separator or not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise UsageError(f"'{self.grpc_url}' is not a gRPC address", remedy="give host:port, as localhost:8001")
        return host.strip("[]"), int(port)

    def find(self, name: str) -> ServedModel | None:
        """The model with that name or alias."""
        return next((model for model in self.models if name in model.names), None)

    @property
    def url(self) -> str:
        """With TLS that of this machine where it listens at all addresses: no certificate names the one for all."""
        reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host) if self.tls_cert else self.host
        host = f"[{reached}]" if ":" in reached else reached
        return f"{'https' if self.tls_cert else 'http'}://{host}:{self.port}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> GatewayOptions:
        raw = parse_json(text)
        models = tuple(ServedModel.from_json(model) for model in raw.pop("models"))
        raw["cors_origins"] = tuple(raw["cors_origins"])
        for name in ("api_keys_file", "tls_cert", "tls_key"):
            raw[name] = raw[name] and Path(raw[name])
        return cls(models=models, **raw)
