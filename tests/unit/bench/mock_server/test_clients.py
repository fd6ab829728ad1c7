"""The mock server's answers in clients that are not ours."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.h2 import run
from tests.support.mock_server import MS, Bench, asked, come, grpc_client, http_client, infer, post, serving
from trtpipe.pipeline.bench.mock_server.http import HttpLink
from trtpipe.pipeline.bench.mock_server.script import Truth
from trtpipe.pipeline.bench.mock_server.server import MockServer
from trtpipe.pipeline.net.h2 import triton
from trtpipe.pipeline.net.h2.connection import Connection
from trtpipe.pipeline.net.h2.status import Status


def inference(request_id: str, tokens: int, *, empty_final: bool = True) -> Any:
    return service_pb2.ModelInferRequest.FromString(
        infer("hello", tokens, request_id, empty_final=empty_final, stream=True, return_num_output_tokens=True)
    )


def decoded(response: Any) -> tuple[str, bool, dict[str, bytes]]:
    reply = response.infer_response
    outputs = {output.name: data for output, data in zip(reply.outputs, reply.raw_output_contents, strict=True)}
    return reply.id, reply.parameters[triton.FINAL].bool_param, outputs


TOKEN = {"text_output": b"\4\0\0\0 the", "num_output_tokens": b"\1\0\0\0"}


@pytest.mark.loopback
def test_many_streams_on_one_connection_and_on_several() -> None:
    async def one(channel: Any, request_id: str, tokens: int) -> None:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(inference(request_id, tokens))
        await call.done_writing()
        seen = [decoded(response) async for response in call]
        assert seen == [(request_id, False, TOKEN)] * tokens + [(request_id, True, {})]
        assert await call.code() is grpc.StatusCode.OK

    async def scenario() -> list[Truth]:
        async with serving() as server, contextlib.AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(grpc_client(server)) for _ in range(3)]
            await asyncio.gather(*(one(channels[n % 3], str(n), n % 7 + 1) for n in range(60)))
            return server.truth

    truth = run(scenario())
    assert sorted((int(one.id), one.tokens) for one in truth) == [(n, n % 7 + 1) for n in range(60)]
    assert [one.arrival_ns for one in truth] == sorted(one.arrival_ns for one in truth)


@pytest.mark.loopback
def test_several_requests_on_one_stream() -> None:
    async def scenario() -> dict[str, list[bool]]:
        async with serving() as server, grpc_client(server) as channel:
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            for request_id, tokens in (("a", 5), ("b", 2), ("c", 0)):
                await call.write(inference(request_id, tokens))
            seen: dict[str, list[bool]] = {"a": [], "b": [], "": []}
            for _ in range(6 + 3 + 1):
                response = await call.read()
                if response.error_message:
                    assert response.error_message == "a request without max_tokens of one or more"
                request_id, final, _ = decoded(response)
                seen[request_id].append(final)
            # The stream goes on until its client ends it.
            await call.write(inference("b", 1, empty_final=False))
            assert decoded(await call.read()) == ("b", True, TOKEN)
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            return seen

    assert run(scenario()) == {"a": [False] * 5 + [True], "b": [False] * 2 + [True], "": [False]}


@pytest.mark.loopback
def test_token_ids_of_the_engine_s_own_model() -> None:
    async def scenario() -> None:
        async with serving(size=2) as server, grpc_client(server) as channel:
            message = triton.infer_request(
                "tensorrt_llm",
                [
                    triton.Tensor("input_ids", "INT32", (1, 2), b"\1\0\0\0\2\0\0\0"),
                    triton.Tensor("request_output_len", "INT32", (1, 1), b"\3\0\0\0"),
                    triton.Tensor("streaming", "BOOL", (1, 1), b"\1"),
                ],
                request_id="t",
            )
            call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
            await call.write(service_pb2.ModelInferRequest.FromString(message))
            await call.done_writing()
            two = {"output_ids": b"\7\0\0\0" * 2, "sequence_length": b"\2\0\0\0"}
            last = {"output_ids": b"\7\0\0\0", "sequence_length": b"\1\0\0\0"}
            assert [decoded(response) async for response in call] == [
                ("t", False, two), ("t", False, last), ("t", True, {})
            ]  # fmt: skip

    run(scenario())


@pytest.mark.loopback
def test_what_the_server_says_of_itself_over_grpc() -> None:
    async def scenario() -> None:
        async with serving() as server, grpc_client(server) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            assert (await stub.ServerLive(service_pb2.ServerLiveRequest())).live
            assert (await stub.ServerReady(service_pb2.ServerReadyRequest())).ready
            assert (await stub.ServerMetadata(service_pb2.ServerMetadataRequest())).name == "known_server"
            for name, ready in (("ensemble", True), ("tensorrt_llm", True), ("none", False)):
                assert (await stub.ModelReady(service_pb2.ModelReadyRequest(name=name))).ready is ready
            metadata = await stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="ensemble"))
            assert list(metadata.versions) == ["1"]
            assert {"text_input", "max_tokens", "stream"} <= {tensor.name for tensor in metadata.inputs}
            assert [tensor.name for tensor in metadata.outputs] == ["text_output", "num_output_tokens"]
            config = (await stub.ModelConfig(service_pb2.ModelConfigRequest(name="tensorrt_llm"))).config
            assert config.model_transaction_policy.decoupled
            index = await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
            assert [(model.name, model.state) for model in index.models] == [
                ("ensemble", "READY"), ("tensorrt_llm", "READY")
            ]  # fmt: skip
            for refused, code in (
                (stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="nö")), grpc.StatusCode.NOT_FOUND),
                (stub.ModelStatistics(service_pb2.ModelStatisticsRequest()), grpc.StatusCode.UNIMPLEMENTED),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await refused
                assert caught.value.code() is code
                if code is grpc.StatusCode.NOT_FOUND:
                    assert caught.value.details() == "Request for unknown model: 'nö' is not found"

    run(scenario())


@pytest.mark.loopback
def test_no_stamp_is_before_its_due_time_or_after_its_arrival_at_the_client() -> None:
    async def scenario() -> tuple[list[Truth], dict[str, int], dict[str, list[int]]]:
        sent: dict[str, int] = {}
        seen: dict[str, list[int]] = {}
        async with serving(ttft_ms=20, itl_ms=3) as server:
            connection = await Connection.open("127.0.0.1", server.grpc_port)
            ends: list[asyncio.Future[Status]] = []
            for index in range(20):
                name, end = str(index), asyncio.get_running_loop().create_future()
                seen[name] = []

                def data(message: bytes, stamp: int, kept: list[int] = seen[name]) -> None:
                    if triton.parse(message).outputs:
                        kept.append(stamp)

                def ended(status: Status, stamp: int, end: asyncio.Future[Status] = end) -> None:
                    end.set_result(status)

                ends.append(end)
                sent[name] = time.monotonic_ns()
                connection.start(triton.STREAM_INFER, infer("hello", 10, name), on_data=data, on_end=ended)
                await asyncio.sleep(0.001)
            assert all(status.ok for status in await asyncio.gather(*ends))
            connection.close()
            return server.truth, sent, seen

    truth, sent, seen = run(scenario())
    assert len(truth) == 20
    for one in truth:
        assert sent[one.id] <= one.arrival_ns
        dues = [one.arrival_ns + 20 * MS + index * 3 * MS for index in range(10)]
        assert all(due <= stamp for due, stamp in zip(dues, one.stamps_ns, strict=True))
        assert all(stamp <= later for stamp, later in zip(one.stamps_ns, seen[one.id], strict=True))
        assert one.end_ns == one.stamps_ns[-1]


@pytest.mark.loopback
def test_a_request_arrives_when_it_reaches_the_machine_and_not_when_the_server_reads_it() -> None:
    """The kernel begins to stamp a while after it was first asked to, and until then tells when it was read."""

    async def scenario() -> tuple[list[Truth], dict[str, int]]:
        read: dict[str, int] = {}
        async with serving(ttft_ms=1) as server, contextlib.AsyncExitStack() as stack:
            for number in range(20):
                peer = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port)))
                peer.sendall(post(asked(str(number), 1)))
                time.sleep(0.2)  # the server stands still
                read[str(number)] = time.monotonic_ns()
                while len(server.truth) <= number:
                    await asyncio.sleep(0.001)
                if server.truth[-1].arrival_ns <= read[str(number)] - 100 * MS:
                    break
            while not server.truth[-1].tokens:
                await asyncio.sleep(0.001)
            return server.truth, read

    truth, read = run(scenario())
    assert truth[-1].arrival_ns <= read[truth[-1].id] - 100 * MS
    assert truth[-1].stamps_ns[0] >= read[truth[-1].id], "late, and known to be"


def test_what_happened_is_told_in_the_order_in_which_requests_came() -> None:
    bench = Bench()
    for name, stamp in (("a", 7), ("b", 5), ("c", 6)):
        bench.connect(HttpLink)[0].feed(post(asked(name, 1)), stamp)
    alarm: Any = bench
    listeners: Any = [SimpleNamespace(port=port) for port in (8001, 8000)]
    server = MockServer(bench.hub, alarm, listeners)
    assert [one.id for one in server.truth] == ["b", "c", "a"]


@pytest.mark.loopback
def test_openai_s_own_client() -> None:
    import openai

    async def scenario() -> list[Truth]:
        async with serving(size=2) as server:
            url = f"http://127.0.0.1:{server.http_port}/v1"
            plain = openai.DefaultAsyncHttpxClient(trust_env=False)
            async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0, http_client=plain) as client:
                assert [model.id async for model in client.models.list()] == ["ensemble"]
                chat = await client.chat.completions.create(
                    model="ensemble",
                    messages=[{"role": "system", "content": "s"}, {"role": "user", "content": "two words"}],
                    max_completion_tokens=5,
                    stream=True,
                    stream_options={"include_usage": True},
                    extra_headers={"X-Request-Id": "chat"},
                )
                chunks = [chunk async for chunk in chat]
                first, *content, last, usage = chunks
                assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
                assert [chunk.choices[0].delta.content for chunk in content] == [" the the", " the the", " the"]
                assert (last.choices[0].finish_reason, last.choices[0].delta.content) == ("length", None)
                assert usage.choices == []
                assert usage.usage is not None
                assert (usage.usage.prompt_tokens, usage.usage.completion_tokens) == (2, 5)
                assert [chunk.usage for chunk in chunks[:-1]] == [None] * 5
                text = await client.completions.create(
                    model="ensemble", prompt="!short 2", max_tokens=5, stream=True,
                    extra_headers={"X-Request-Id": "text"},
                )  # fmt: skip
                pieces = [(chunk.choices[0].text, chunk.choices[0].finish_reason) async for chunk in text]
                assert pieces == [(" the the", None), ("", "stop")]
                with pytest.raises(openai.RateLimitError, match="status 429"):
                    await client.completions.create(model="ensemble", prompt="!status 429", stream=True)
                with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
                    await client.completions.create(model="other", prompt="x", stream=True)
                with pytest.raises(openai.BadRequestError, match="streams only"):
                    await client.completions.create(model="ensemble", prompt="x")
            return server.truth

    assert [(one.id, one.tokens) for one in run(scenario())] == [("chat", 5), ("text", 2), ("", 0)]


def test_the_role_of_a_chat_goes_out_before_any_token() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    body = {"model": "ensemble", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
    come(link, post(body, "/v1/chat/completions"))
    head = wire.take()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert head.count(b"data:") == head.count(b'"role":"assistant"') == 1
    bench.until(50 * MS)
    assert wire.take().count(b'"content":" the"') == 1
    assert bench.hub.truth[0].stamps_ns.tolist() == [50 * MS]


@pytest.mark.loopback
def test_what_the_server_says_of_itself_over_http() -> None:
    async def scenario() -> None:
        async with serving() as server, http_client(server) as client:
            assert (await client.get("/v2")).json()["name"] == "known_server"
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/v2/models/ensemble/ready")).status_code == 200
            metadata = (await client.get("/v2/models/ensemble")).json()
            assert metadata["versions"] == ["1"]
            assert metadata["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1, -1]}
            index = (await client.post("/v2/repository/index")).json()
            assert [(model["name"], model["state"]) for model in index] == [
                ("ensemble", "READY"), ("tensorrt_llm", "READY")
            ]  # fmt: skip
            counted = 'nv_inference_request_success{model="ensemble",version="1"} '
            assert counted + "0" in (await client.get("/metrics")).text
            path = "/v2/models/ensemble/generate_stream"
            for body in (asked("a", 2), asked("b", 1)):
                answer = await client.post(path, json=body)
                assert answer.headers["content-type"].startswith("text/event-stream")
                assert answer.text.count("data:") == body["max_tokens"]
            assert counted + "2" in (await client.get("/metrics")).text
            refusals = [
                (await client.get("/v2/models/none"), 404),
                (await client.get("/nowhere"), 404),
                (await client.post("/v2/models/none/generate_stream", json=asked("c", 1)), 404),
                (await client.post(path, json={"max_tokens": 1}), 400),
                (await client.post(path, json=asked("c", 0)), 400),
                (await client.post(path, json=asked("c", 1, stream=False)), 400),
                (await client.post(path, content=b"[]"), 400),
                (await client.post(path, content=b"{"), 400),
            ]
            assert [answer.status_code for answer, _ in refusals] == [status for _, status in refusals]
            assert all(answer.json()["error"] for answer, _ in refusals)

    run(scenario())


def test_one_request_after_the_other_on_a_connection() -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    for number in range(3):
        come(link, post(asked(str(number), 1)))
        bench.until(bench.now + 50 * MS)
        assert wire.take().startswith(b"HTTP/1.1 200 OK")
    last = post(asked("3", 1)).replace(b"host: x", b"connection: close")
    come(link, last)
    bench.until(bench.now + 50 * MS)
    assert wire.closed
    assert list(bench.stamps) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("strange", [b"\x16\x03\x01 hello", post(asked("b", 1))])
def test_what_comes_into_an_answer_cuts_it(strange: bytes) -> None:
    bench = Bench()
    link, wire = bench.connect(HttpLink)
    come(link, post(asked("a", 5)))
    bench.until(60 * MS)
    come(link, strange)
    assert wire.closed
    bench.until(1000 * MS)
    assert [(truth.id, truth.tokens, truth.end_ns) for truth in bench.hub.truth] == [("a", 2, None)]


def test_what_is_not_http_is_told_so() -> None:
    link, wire = Bench().connect(HttpLink)
    come(link, b"\x16\x03\x01 hello")
    assert wire.take().startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert wire.closed
