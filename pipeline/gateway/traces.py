"""Traces of requests: a span for each request, sent to an OpenTelemetry collector by OTLP over HTTP.

OpenTelemetry is an extra, and is imported only when traces are on. Its own environment variables set what has no option
here: the sampler, headers and certificates for the collector, the service's name, the size of batches.
"""

from __future__ import annotations

import importlib.util
import os
import struct
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trtpipe import __version__
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.extras import install_command

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from trtpipe.pipeline.gateway.choices import Choice, Order

# Key of the span in a request's scope.
SPAN = "trtpipe.span"
SERVICE = "trtpipe-gateway"
PATH = "/v1/traces"
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
# Most seconds that the end of a worker waits for its last spans to be sent.
FLUSH_SECONDS = 2.0
# Outputs of an engine model: times of a request in ns, on the engine's clock. The input asks the engine for them.
TIMES = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
TIMES_INPUT = "return_perf_metrics"

_INT64 = struct.Struct("<q")


def traces_url(endpoint: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The URL that traces are sent to; None where they are off.

    endpoint  base URL of a collector, such as http://localhost:4318; None to read OpenTelemetry's variables

    Raises UsageError for an invalid URL and for another protocol, HostError where OpenTelemetry is not installed.
    """

    def variable(name: str) -> str:
        return environment.get(f"OTEL_{name}", "").strip()

    if variable("SDK_DISABLED").lower() == "true" or variable("TRACES_EXPORTER").lower() == "none":
        return None
    given, url = "--otlp-endpoint", endpoint
    if url is None and variable("EXPORTER_OTLP_TRACES_ENDPOINT"):
        given, url = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", variable("EXPORTER_OTLP_TRACES_ENDPOINT")
    elif url is None:
        given, url = "OTEL_EXPORTER_OTLP_ENDPOINT", variable("EXPORTER_OTLP_ENDPOINT")
        if not url:
            return None
    collector_port(given, url)
    name = next((one for one in ("TRACES_PROTOCOL", "PROTOCOL") if variable(f"EXPORTER_OTLP_{one}")), None)
    if name is not None and variable(f"EXPORTER_OTLP_{name}") != "http/protobuf":
        raise UsageError(
            f"OTEL_EXPORTER_OTLP_{name} is {variable(f'EXPORTER_OTLP_{name}')}, but traces are sent by http/protobuf",
            remedy="unset it, and give the collector's HTTP port, which is 4318 unless it was changed",
        )
    if not _installed():
        raise HostError(
            "traces are on, but OpenTelemetry is not installed",
            why=f"{given} is given",
            remedy=f"run `{install_command('traces')}`, or set OTEL_SDK_DISABLED=true",
        )
    return url if given.endswith("TRACES_ENDPOINT") else url.rstrip("/") + PATH


def collector_port(given: str, url: str) -> int:
    """Port of the URL of a collector. Raises UsageError, naming the option `given`, for another text."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.port or {"http": 80, "https": 443}[parts.scheme]
    except ValueError:
        pass
    raise UsageError(f"{given} '{url}' is not a URL of a collector", remedy="give one such as http://localhost:4318")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


class Traces:
    """Creates the spans of one worker, and sends them in batches to the collector at `url`."""

    def __init__(self, url: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override our values.
        self._provider = TracerProvider(
            resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._exporter: Any = OTLPSpanExporter(endpoint=url)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("trtpipe", __version__)

    def begin(self, scope: Scope) -> RequestSpan | None:
        """Begin the span of a request; None for a request that is not sampled.

        The span is a child of the client's span if the request has a `traceparent`.
        """
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind

        operation = OPERATIONS[scope["path"]]
        fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        span = self._tracer.start_span(
            operation,
            propagate.extract(fields),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": operation,
                "http.request.method": scope["method"],
                "url.path": scope["path"],
                "url.scheme": scope["scheme"],
            },
        )
        return RequestSpan(span, operation) if span.is_recording() else None

    def close(self) -> None:
        """Send the spans that are left; give up after FLUSH_SECONDS."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # ends its retries
            ending.join(FLUSH_SECONDS)


class TraceMiddleware:
    """ASGI middleware that puts a span into the scope of each request of the routes in OPERATIONS."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = self._traces.begin(scope) if scope["type"] == "http" and scope["path"] in OPERATIONS else None
        if span is None:
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.status = message["status"]
            await send(message)

        scope[SPAN] = span
        try:
            await self._app(scope, receive, sending)
        finally:
            span.end()


class RequestSpan:
    """Span of one request.

    status    HTTP status of the answer; 500 until it is known, 499 where the client left
    metadata  headers for the gRPC call to tritonserver, which make its spans children of this one
    """

    def __init__(self, span: Any, operation: str) -> None:
        from opentelemetry import propagate
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        propagate.inject(carrier, set_span_in_context(span))
        self.metadata = tuple(carrier.items())
        self.status = 500
        self._span = span
        self._operation = operation

    def prepared(self, order: Order) -> None:
        """Record the request's parameters and prompt lengths, once its prompts are tokens."""
        self._span.update_name(f"{self._operation} {order.model}")
        self._span.set_attributes(
            {
                "gen_ai.request.model": order.model,
                "gen_ai.request.max_tokens": order.max_tokens,
                "gen_ai.request.choice.count": len(order.requests) // len(order.prompt_lengths),
                "gen_ai.response.id": order.id,
                "gen_ai.usage.input_tokens": sum(order.prompt_lengths),
            }
        )
        self._span.add_event("prepared")

    def first_token(self) -> None:
        self._span.add_event("first token")

    def answered(self, choices: list[Choice], status: int) -> None:
        """Record the answer's tokens, finish reasons and HTTP status, and the engine's times."""
        self.status = status
        self._span.set_attributes(
            {
                "gen_ai.usage.output_tokens": sum(choice.count for choice in choices),
                "gen_ai.response.finish_reasons": [choice.finish or "" for choice in choices],
            }
        )
        longest: dict[str, float] = {}
        for choice in choices:
            end = time.time_ns() - int((time.monotonic() - choice.last) * 1e9)
            for name, begin, seconds in engine_phases(choice.generation.last, end):
                self._span.add_event(name, {"choice": choice.index, "seconds": seconds}, begin)
                longest[name] = max(longest.get(name, 0.0), seconds)
        # The longest of the choices, under the names that vLLM and TensorRT-LLM use in their own spans.
        self._span.set_attributes({LATENCIES[name]: seconds for name, seconds in longest.items()})

    def end(self) -> None:
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("http.response.status_code", self.status)
        if self.status >= 500:
            self._span.set_attribute("error.type", str(self.status))
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


LATENCIES = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}


def engine_phases(outputs: Mapping[str, bytes], end: int) -> list[tuple[str, int, float]]:
    """(name, begin in ns, seconds) of the phases of a request in the engine.

    outputs  outputs of the request's last response, with TIMES; without all of them no phase is known
    end      when the last token came, in ns of this machine's clock. The engine may run on another machine, so only
             differences of its times are used

    A time of 0 means unknown: the phases before and after it are left out.
    """
    if not outputs.keys() >= set(TIMES):
        return []
    times = [_INT64.unpack_from(outputs[name])[0] for name in TIMES]
    last = times[-1]
    return [
        (name, end - (last - begin), (until - begin) / 1e9)
        for name, begin, until in zip(LATENCIES, times, times[1:], strict=False)
        if begin and until
    ]
