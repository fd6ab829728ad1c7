"""A collector of traces: an HTTP server that decodes what OpenTelemetry exporters send."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Spans that have arrived, each with its service's name as (service, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def named(self, name: str) -> list[Any]:
        return [span for _, span in self.spans if span.name == name]

    def take(self, headers: dict[str, str], body: bytes) -> None:
        self.headers.append(headers)
        if headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        if headers["content-type"] == "application/json":
            message = ParseDict(_in_base64(json.loads(body)), ExportTraceServiceRequest())
        else:
            message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            service = attributes(resource.resource)["service.name"]
            self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]


def _in_base64(value: Any) -> Any:
    """OTLP's JSON in the form of protobuf's: it writes ids in hexadecimal digits."""
    if isinstance(value, list):
        return [_in_base64(one) for one in value]
    if not isinstance(value, dict):
        return value
    ids = ("traceId", "spanId", "parentSpanId")
    return {
        name: base64.b64encode(bytes.fromhex(one)).decode() if name in ids else _in_base64(one)
        for name, one in value.items()
    }


def attributes(holder: Any) -> dict[str, Any]:
    """Attributes of a span, an event or a resource as a dict."""

    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(inner) for inner in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {pair.key: value(pair.value) for pair in holder.attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    """A collector on a free port of loopback."""
    made = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(fields["content-length"]))
            if self.path == "/v1/traces":
                made.take(fields, body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
