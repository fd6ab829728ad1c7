"""The gRPC transport against a real gRPC server on loopback that speaks Triton's ModelStreamInfer."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engines.errors import HostError, StageFailed, UsageError
from pipeline.bench.load import ClosedLoop, ClosedLoopDriver
from pipeline.bench.record import RequestFailed, RequestRecord
from pipeline.bench.transports import connect

INPUTS = ["text_input", "max_tokens", "min_tokens", "end_id", "top_k", "stream", "return_num_output_tokens"]
Answer = Callable[[Any, Any], AsyncIterator[Any]]


def tensor(name: str) -> Any:
    return service_pb2.ModelMetadataResponse.TensorMetadata(name=name, datatype="X", shape=[-1, 1])


class Triton(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Describes itself and leaves ModelStreamInfer to `answer`, an async generator of (request, server)."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[Any] = []
        self.half_closed = 0
        self.server = grpc.aio.server()

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        inputs = {"ensemble": INPUTS, "old": INPUTS[:-1], "tensorrt_llm": ["input_ids"]}
        if request.name not in inputs:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        outputs = {"ensemble": ["text_output", "num_output_tokens"], "old": ["text_output"]}.get(request.name, [])
        return service_pb2.ModelMetadataResponse(
            name=request.name,
            versions=["1"],
            inputs=[tensor(name) for name in inputs[request.name]],
            outputs=[tensor(name) for name in outputs],
        )

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        entry = service_pb2.RepositoryIndexResponse.ModelIndex
        return service_pb2.RepositoryIndexResponse(
            models=[
                entry(name="ensemble", state="READY"),
                entry(name="tensorrt_llm", state="READY"),
                entry(name="broken", state="UNAVAILABLE", reason="no engine"),
            ]
        )

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        async for request in request_iterator:
            self.requests.append(request)
            async for message in self.answer(request, context):
                yield message
        self.half_closed += 1


def message(text: str | None, tokens: int | None = None, *, final: bool = False) -> Any:
    """A response with text and count; without either when `text` is None, as Triton's empty final one."""
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


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[str, Triton]]:
    triton = Triton(answer)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(triton, triton.server)
    port = triton.server.add_insecure_port("127.0.0.1:0")
    await triton.server.start()
    try:
        yield f"127.0.0.1:{port}", triton
    finally:
        await triton.server.stop(None)


def ask(answer: Answer, *, model: str = "ensemble") -> tuple[RequestRecord, Triton]:
    async def scenario() -> tuple[RequestRecord, Triton]:
        made = RequestRecord(request_id="r-1", slot=0, warmup=False, input_tokens=2, max_tokens=3, due_ns=0)
        async with serving(answer) as (url, triton):
            transport = await connect("grpc", url, model)
            try:
                await asyncio.wait_for(transport.send("two words", made), 10)
            except RequestFailed as error:
                made.failure = error.failure
            finally:
                await transport.close()
        return made, triton

    return asyncio.run(scenario())


def failure(record: RequestRecord) -> tuple[str, str]:
    assert record.failure is not None
    return record.failure.kind, record.failure.message


@pytest.mark.loopback
def test_a_stream_whose_last_tokens_carry_the_final_flag() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hel", 1)
        await asyncio.sleep(0.03)
        yield message("lo é", 2, final=True)

    made, triton = ask(answer)
    assert made.failure is None
    assert [(response.tokens, response.text) for response in made.responses] == [(1, "Hel"), (2, "lo é")]
    first, second = made.responses
    assert made.sent_ns is not None
    assert made.sent_ns < first.stamp_ns
    assert second.stamp_ns - first.stamp_ns >= 25_000_000
    # The stream is half-closed after one request, so that its end is the request's end.
    assert (len(triton.requests), triton.half_closed) == (1, 1)


@pytest.mark.loopback
def test_an_empty_final_response_is_asked_for_and_is_not_a_token() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hello", 3)
        if request.parameters["triton_enable_empty_final_response"].bool_param:
            yield message(None, final=True)

    made, _ = ask(answer)
    assert made.failure is None
    assert len(made.responses) == 1


@pytest.mark.loopback
def test_a_stream_that_closes_without_a_final_response_is_truncated() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hel", 1)

    made, _ = ask(answer)
    assert failure(made) == ("TruncatedStream", "the stream ended after 1 responses without a final one")


@pytest.mark.loopback
def test_the_request_as_the_ensemble_wants_it() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("x", 3, final=True)

    _, triton = ask(answer)
    (request,) = triton.requests
    sent = {
        item.name: (item.datatype, list(item.shape), raw)
        for item, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    assert (request.model_name, request.id) == ("ensemble", "r-1")
    assert sent == {
        # The batch dimension is there: max_batch_size of the ensemble is above 0.
        "text_input": ("BYTES", [1, 1], b"\x09\x00\x00\x00two words"),
        "max_tokens": ("INT32", [1, 1], b"\x03\x00\x00\x00"),
        "end_id": ("INT32", [1, 1], b"\xff\xff\xff\xff"),
        "min_tokens": ("INT32", [1, 1], b"\x03\x00\x00\x00"),
        "top_k": ("INT32", [1, 1], b"\x01\x00\x00\x00"),
        "stream": ("BOOL", [1, 1], b"\x01"),
        "return_num_output_tokens": ("BOOL", [1, 1], b"\x01"),
    }
    assert [item.name for item in request.outputs] == ["text_output", "num_output_tokens"]


@pytest.mark.loopback
def test_a_model_without_counts_is_not_asked_for_them() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("x", final=True)

    made, triton = ask(answer, model="old")
    assert made.responses[0].tokens is None
    assert "return_num_output_tokens" not in [item.name for item in triton.requests[0].inputs]
    assert [item.name for item in triton.requests[0].outputs] == ["text_output"]


@pytest.mark.loopback
def test_an_error_message_inside_the_stream_fails_the_request() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hel", 1)
        yield service_pb2.ModelStreamInferResponse(error_message="in ensemble,\nengine died")

    made, _ = ask(answer)
    assert failure(made) == ("ServerError", "in ensemble, engine died")
    assert len(made.responses) == 1


@pytest.mark.loopback
@pytest.mark.parametrize("status", [grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_status_of_the_servers_is_a_class_of_its_own(status: grpc.StatusCode) -> None:
    # CANCELLED from the server must not look like a cancellation of the client's own task.
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hel", 1)
        await context.abort(status, "not today")

    made, _ = ask(answer)
    assert failure(made) == (f"grpc {status.name}", "not today (after 1 responses)")


@pytest.mark.loopback
def test_a_response_without_the_text_is_malformed() -> None:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message(None, 3, final=True)

    made, _ = ask(answer)
    kind, text = failure(made)
    assert kind == "MalformedResponse"
    assert "num_output_tokens" in text


@pytest.mark.loopback
def test_a_server_killed_mid_stream_and_gone_afterwards() -> None:
    async def scenario() -> list[RequestRecord]:
        async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
            yield message("Hel", 1)
            stopping.append(asyncio.ensure_future(triton.server.stop(0)))
            await asyncio.sleep(5)

        stopping: list[asyncio.Future[Any]] = []
        async with serving(answer) as (url, triton):
            transport = await connect("grpc", url, "ensemble")
            driver = ClosedLoopDriver(
                ClosedLoop(concurrency=1, requests=2, warmup=0),
                transport,
                iter(["a b"] * 2),
                input_tokens=2,
                output_tokens=3,
                timeout_s=5,
            )
            await driver.run()
            await transport.close()
            await asyncio.gather(*stopping)
        return driver.records

    first, second = asyncio.run(scenario())
    assert failure(first)[0] == "grpc UNAVAILABLE"
    assert failure(first)[1].endswith("(after 1 responses)")
    assert failure(second)[0] == "grpc UNAVAILABLE"
    assert failure(second)[1].endswith("(after 0 responses)")


@pytest.mark.loopback
def test_a_stall_times_out_cancels_the_call_and_the_next_request_is_answered() -> None:
    cancelled = asyncio.Event()

    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        yield message("Hel", 1)
        if request.id == first_id.setdefault("id", request.id):
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                cancelled.set()
                raise
        yield message("lo", 2, final=True)

    first_id: dict[str, str] = {}

    async def scenario() -> list[RequestRecord]:
        async with serving(answer) as (url, _):
            transport = await connect("grpc", url, "ensemble")
            driver = ClosedLoopDriver(
                ClosedLoop(concurrency=1, requests=2, warmup=0),
                transport,
                iter(["a b"] * 2),
                input_tokens=2,
                output_tokens=3,
                timeout_s=0.3,
            )
            await driver.run()
            await asyncio.wait_for(cancelled.wait(), 5)
            await transport.close()
        return driver.records

    first, second = asyncio.run(scenario())
    assert failure(first) == ("Timeout", "not finished 0.3 s after it was sent")
    assert second.failure is None


async def nothing(request: Any, context: Any) -> AsyncIterator[Any]:
    raise AssertionError("nobody asked")
    yield


def try_connect(model: str) -> None:
    async def scenario() -> None:
        async with serving(nothing) as (url, _):
            transport = await connect("grpc", url, model)
            await transport.close()

    asyncio.run(scenario())


@pytest.mark.loopback
def test_an_unknown_model_names_the_served_ones() -> None:
    with pytest.raises(UsageError, match=r"served: ensemble, tensorrt_llm; name one that is"):
        try_connect("zzz")


@pytest.mark.loopback
def test_a_model_that_failed_to_load_gives_its_reason() -> None:
    with pytest.raises(StageFailed, match=r"'broken' .* not ready \(UNAVAILABLE\): no engine"):
        try_connect("broken")


@pytest.mark.loopback
def test_a_model_without_text_is_refused() -> None:
    with pytest.raises(UsageError, match="declares no text_input"):
        try_connect("tensorrt_llm")


@pytest.mark.loopback
def test_nothing_at_the_url_is_a_host_error_that_says_how_to_start_one() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(HostError, match=r"no Triton answers over gRPC .* `trtpipe serve`"):
        asyncio.run(connect("grpc", url, "ensemble"))


@pytest.mark.parametrize("url", ["http://host:8001", "host"])
def test_an_address_that_is_not_grpc(url: str) -> None:
    with pytest.raises(UsageError, match="give host:port"):
        asyncio.run(connect("grpc", url, "ensemble"))
