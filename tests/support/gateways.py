"""A gateway in front of a mock Triton, both in the test's own loop, and what a client asks of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import grpc
import httpx
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from tests.support.factories import write_tokenizer
from trtpipe.pipeline.gateway.app import build
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.prompts import ForkServer
from trtpipe.pipeline.gateway.server import Server
from trtpipe.pipeline.gateway.shared_counters import SharedCounters

T = TypeVar("T")
END = 1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
INPUTS = [
    "input_ids",
    "seed",
    "min_tokens",
    "return_log_probs",
    "exclude_input_in_output",
    "stop",
    "embedding_bias",
    "guided_decoding_guide_type",
    "guided_decoding_guide",
]
# Of the Python-based backend alone.
OWN_INPUTS = ["return_prompt_log_probs"]


def write_model(path: Path, template: str = TEMPLATE) -> Path:
    """What a gateway reads of a model."""
    path.mkdir(exist_ok=True)
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text(template)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 0]}))
    return path


def tokens_of(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


class Asked:
    """A request as the engine sees it."""

    def __init__(self, request: Any, metadata: dict[str, str]) -> None:
        self.raw = {item.name: raw for item, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        self.shapes = {item.name: list(item.shape) for item in request.inputs}
        self.model = request.model_name
        self.wanted = [item.name for item in request.outputs]
        self.metadata = metadata

    def number(self, name: str) -> Any:
        kind = {"temperature": "<f", "runtime_top_p": "<f", "repetition_penalty": "<f", "presence_penalty": "<f",
                "frequency_penalty": "<f", "seed": "<Q"}.get(name, "<i")  # fmt: skip
        return struct.unpack(kind, self.raw[name])[0]

    @property
    def prompt(self) -> list[int]:
        return list(struct.unpack(f"<{len(self.raw['input_ids']) // 4}i", self.raw["input_ids"]))


Script = Callable[[Asked, Any], AsyncIterator[Any]]
_FORK_SERVERS: dict[Any, ForkServer] = {}


def fork_server(options: GatewayOptions) -> ForkServer:
    """One for the same models in all tests: it takes a second to start. It ends with this process."""
    alike = (options.models, options.max_choices, options.default_max_tokens)
    if alike not in _FORK_SERVERS:
        _FORK_SERVERS[alike] = ForkServer(options)
    return _FORK_SERVERS[alike]


def end_fork_servers() -> None:
    for server in _FORK_SERVERS.values():
        server.stop()
    _FORK_SERVERS.clear()


def response(
    tokens: list[int],
    *,
    final: bool = False,
    log_probs: list[float] | None = None,
    prompt: tuple[list[float], list[int]] | None = None,
) -> Any:
    """`prompt` holds the log-probabilities of a prompt and of its likeliest tokens, and these tokens."""
    out = service_pb2.ModelStreamInferResponse()
    reply = out.infer_response
    reply.parameters["triton_final_response"].bool_param = final
    if tokens or not final:
        for name, data in (
            ("output_ids", struct.pack(f"<{len(tokens)}i", *tokens)),
            ("sequence_length", struct.pack("<i", len(tokens))),
            ("output_log_probs", struct.pack(f"<{len(log_probs or [])}f", *(log_probs or []))),
        ):
            if name != "output_log_probs" or log_probs is not None:
                reply.outputs.add(name=name, datatype="INT32", shape=[1, len(data) // 4])
                reply.raw_output_contents.append(data)
    if prompt is not None:
        values, likeliest = prompt
        reply.outputs.add(name="prompt_log_probs", datatype="FP32", shape=[1, 2, len(likeliest)])
        reply.raw_output_contents.append(struct.pack(f"<{len(values)}f", *values))
        reply.outputs.add(name="prompt_likeliest", datatype="INT32", shape=[1, len(likeliest)])
        reply.raw_output_contents.append(struct.pack(f"<{len(likeliest)}i", *likeliest))
    return out


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, script: Script) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.running = 0
        self.cancelled = 0
        self.stopped: list[str] = []  # ids that are to be ended, as asked
        self.deaf = 0  # stop requests that it takes no notice of
        self.inputs = INPUTS
        self.outputs = ["output_ids", "sequence_length", "output_log_probs"]
        self.parameters: dict[str, str] = {}
        self.decoupled = True
        self.server = grpc.aio.server()

    async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelReadyResponse(ready=request.name == "tensorrt_llm")

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        if request.name != "tensorrt_llm":
            await context.abort(grpc.StatusCode.NOT_FOUND, "Request for unknown model")
        config = model_config_pb2.ModelConfig(name="tensorrt_llm")
        config.model_transaction_policy.decoupled = self.decoupled
        for name in self.inputs:
            config.input.add(name=name)
        for name in self.outputs:
            config.output.add(name=name)
        for name, value in self.parameters.items():
            config.parameters[name].string_value = value
        return service_pb2.ModelConfigResponse(config=config)

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in request_iterator:
            asked = Asked(request, dict(context.invocation_metadata()))
            if "stop" in asked.raw:
                self.deaf -= 1
                if self.deaf < 0:
                    self.stopped.append(request.id)
                yield response([], final=True)
                continue
            self.asked.append(asked)
            self.running += 1
            try:
                async for message in self.script(asked, context):
                    yield message
                    if request.id in self.stopped:
                        yield response([], final=True)
                        break
            except (asyncio.CancelledError, GeneratorExit):
                self.cancelled += 1
                raise
            finally:
                self.running -= 1


def saying(folder: Path, text: str, *, end: bool = True, pause: float = 0.0, cut: int = 1) -> Script:
    """An engine that says `text`, so many tokens a response, as far as max_tokens allows."""
    ids = tokens_of(folder, text) + ([END] if end else [])

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        limit = min(len(ids), asked.number("request_output_len"))
        with_probs = "return_log_probs" in asked.raw
        for start in range(0, limit, cut):
            part = ids[start : min(start + cut, limit)]
            probs = [-0.5 - 0.25 * (start + place) for place in range(len(part))]
            yield response(part, final=start + cut >= limit, log_probs=probs if with_probs else None)
            await asyncio.sleep(pause)

    return script


@contextlib.asynccontextmanager
async def mock_triton(script: Script, **fields: Any) -> AsyncIterator[tuple[str, Triton]]:
    """A mock Triton in this loop, with its host and port. `fields` are attributes of it."""
    mock = Triton(script)
    mock.__dict__.update(fields)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(mock, mock.server)
    port = mock.server.add_insecure_port("127.0.0.1:0")
    await mock.server.start()
    try:
        yield f"127.0.0.1:{port}", mock
    finally:
        await mock.server.stop(None)


@contextlib.asynccontextmanager
async def serving(
    script: Script,
    folder: Path,
    *,
    model: dict[str, Any] | None = None,
    others: dict[str, Path] | None = None,
    more: tuple[ServedModel, ...] = (),
    triton: dict[str, Any] | None = None,
    most_connections: int = 1000,
    **options: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Triton]]:
    """A gateway in this loop, in front of a Triton in this loop. `others` are the tokenizers of more models."""
    served = ServedModel(name="llama", tokenizer=folder, **(model or {}))
    more += tuple(ServedModel(name=name, tokenizer=path) for name, path in (others or {}).items())
    async with mock_triton(script, **(triton or {})) as (address, mock):
        gateway = GatewayOptions(models=(served, *more), grpc_url=address, **options)
        app, connections = build(gateway, SharedCounters(), fork_server(gateway), most_connections=most_connections)
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        server = Server(app, connections)
        running = asyncio.ensure_future(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=100, trust_env=False, verify=False) as client:
                yield client, mock
        finally:
            server.should_exit = True
            await running


def run(scenario: Coroutine[Any, Any, T], seconds: float) -> T:
    return asyncio.run(asyncio.wait_for(scenario, seconds))


def ask(
    script: Script,
    folder: Path,
    scenario: Callable[[httpx.AsyncClient, Triton], Awaitable[T]],
    *,
    seconds: float = 120,
    **options: Any,
) -> T:
    async def whole() -> T:
        async with serving(script, folder, **options) as (client, triton):
            return await scenario(client, triton)

    return run(whole(), seconds)


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "llama", "messages": [{"role": "user", "content": text}], **fields}


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events, [DONE] checked and left out."""
    async with client.stream("POST", path, json={"stream": True, **body}) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = (await answer.aread()).decode()
    parts = raw.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def spoken(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        await asyncio.sleep(0.005)
