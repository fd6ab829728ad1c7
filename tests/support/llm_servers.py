"""Servers that remember what they were asked, read by other people's code: grpcio's own and the standard library's."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

Answer = Callable[[Any, Any], AsyncIterator[Any]]

# Name -> datatype and shape of its inputs, and of its outputs.
TEXT_INPUTS = {
    "text_input": "BYTES", "max_tokens": "INT32", "min_tokens": "INT32", "end_id": "INT32", "stream": "BOOL",
    "top_k": "INT32", "temperature": "FP32", "seed": "UINT64", "stop_words": "BYTES",
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, str], list[str]]] = {
    "ensemble": ({**TEXT_INPUTS, "return_num_output_tokens": "BOOL"}, ["text_output", "num_output_tokens"]),
    "uncounted": (TEXT_INPUTS, ["text_output"]),
    "tensorrt_llm": (
        {"input_ids": "INT32", "input_lengths": "INT32", "request_output_len": "INT32", "streaming": "BOOL",
         "runtime_top_k": "INT32", "exclude_input_in_output": "BOOL"},
        ["output_ids", "sequence_length"],
    ),
    "resnet": ({"pixels": "FP32", "stream": "BOOL"}, ["classes"]),
}  # fmt: skip
BROKEN = {"name": "broken", "state": "UNAVAILABLE", "reason": "no engine"}
INDEX = [{"name": name, "state": "READY", "reason": ""} for name in MODELS] + [BROKEN]


def metadata(name: str) -> dict[str, Any]:
    inputs, outputs = MODELS[name]
    return {
        "name": name,
        "versions": ["1", "3"],
        "inputs": [{"name": key, "datatype": kind, "shape": [-1, 1]} for key, kind in inputs.items()],
        "outputs": [{"name": key, "datatype": "BYTES", "shape": [-1, 1]} for key in outputs],
    }


# gRPC


def response(text: str | None, tokens: int | None = None, *, final: bool = False) -> Any:
    """With text and count; without either when `text` is None, as Triton's empty final one."""
    out = service_pb2.ModelStreamInferResponse()
    reply = out.infer_response
    reply.parameters["triton_final_response"].bool_param = final
    if text is not None:
        reply.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
        reply.raw_output_contents.append(struct.pack("<I", len(text.encode())) + text.encode())
    if tokens is not None:
        reply.outputs.add(name="num_output_tokens", datatype="INT32", shape=[1, 1])
        reply.raw_output_contents.append(struct.pack("<i", tokens))
    return out


async def one_word(request: Any, context: Any) -> AsyncIterator[Any]:
    yield response("word", 1, final=True)


class GrpcTriton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Describes MODELS, and answers ModelStreamInfer by `answer`, an async generator of (request, context)."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.metadata: list[dict[str, str]] = []
        self.has_index = True

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name not in MODELS:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        return service_pb2.ModelMetadataResponse(**metadata(request.name))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if not self.has_index:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such thing")
        return service_pb2.RepositoryIndexResponse(models=INDEX)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.metadata.append(dict(context.invocation_metadata()))
        async for request in request_iterator:
            self.requests.append(request)
            async for message in self.answer(request, context):
                yield message


@contextlib.asynccontextmanager
async def serving_grpc(
    answer: Answer = one_word, *, tls: tuple[bytes, bytes] | None = None, **settings: int
) -> AsyncIterator[tuple[int, GrpcTriton]]:
    """Its port and itself; `tls` are a key and its certificate, `settings` grpcio's options."""
    triton = GrpcTriton(answer)
    server = grpc.aio.server(options=[(f"grpc.{name}", value) for name, value in settings.items()])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, server)
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([tls]))
    await server.start()
    try:
        yield port, triton
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def serving_no_triton() -> AsyncIterator[int]:
    """A gRPC server without Triton's services."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def contents(request: Any) -> dict[str, tuple[str, list[int], bytes]]:
    """Datatype, shape and bytes of each input."""
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), raw)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }


# HTTP


class HttpServer(ThreadingHTTPServer):
    """In a thread of its own, since who asks it for its models blocks.

    resources  (method, path) -> status and JSON, or text
    streams    path -> the events with which a POST is answered
    requests   (path, headers in lower case, JSON) of each POST that was streamed
    left       a client did not stay to the end of a stream
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.resources: dict[tuple[str, str], tuple[int, Any]] = {
            ("GET", "/v2"): (200, {"name": "triton", "version": "2.51.0"}),
            ("POST", "/v2/repository/index"): (200, INDEX),
            ("GET", "/v1/models"): (200, {"object": "list", "data": [{"id": "ensemble"}, {"id": "other"}]}),
            **{("GET", f"/v2/models/{name}"): (200, metadata(name)) for name in MODELS},
        }
        text = {"choices": [{"text": "word"}]}
        delta = {"choices": [{"delta": {"content": "word"}}]}
        self.left = threading.Event()
        self.streams: dict[str, Iterable[Any]] = {
            "/v2/models/ensemble/generate_stream": [{"text_output": "word", "num_output_tokens": 1}],
            "/v2/models/tensorrt_llm/generate_stream": [{"output_ids": [5, 6]}],
            "/v1/completions": [text, "[DONE]"],
            "/v1/chat/completions": [delta, "[DONE]"],
        }
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HttpServer

    def do_GET(self) -> None:
        self._resource()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path not in self.server.streams:
            self._resource()
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.path, headers, json.loads(body)))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in self.server.streams[self.path]:
                data = b"data: " + (event if isinstance(event, str) else json.dumps(event)).encode() + b"\n\n"
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True
            self.server.left.set()

    def _resource(self) -> None:
        status, value = self.server.resources.get((self.command, self.path), (404, {"error": "not found"}))
        data = (value if isinstance(value, str) else json.dumps(value)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: object) -> None: ...


@contextlib.contextmanager
def serving_http(context: ssl.SSLContext | None = None) -> Iterator[HttpServer]:
    with HttpServer() as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def serving_words(words: bytes) -> Iterator[int]:
    """The port of something that says `words` to whoever connects, and leaves."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(words)
                    peer.recv(1000)

        thread = threading.Thread(target=speak)
        thread.start()
        try:
            yield int(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
