"""The HTTP transport against a real HTTP server on loopback that speaks Triton's generate_stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import HostError, StageFailed, UsageError
from pipeline.bench.client import Transport
from pipeline.bench.client_http import SseDecoder
from pipeline.bench.load import ClosedLoop, ClosedLoopDriver
from pipeline.bench.record import RequestFailed, RequestRecord
from pipeline.bench.transports import connect

INPUTS = ["text_input", "max_tokens", "min_tokens", "end_id", "top_k", "stream", "return_num_output_tokens"]
Answer = Callable[[asyncio.StreamWriter, dict[str, Any]], Awaitable[None]]


def metadata(name: str, inputs: list[str], outputs: list[str]) -> dict[str, Any]:
    def tensors(names: list[str]) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": "X", "shape": [-1, 1]} for name in names]

    return {"name": name, "versions": ["1"], "inputs": tensors(inputs), "outputs": tensors(outputs)}


MODELS = {
    "ensemble": metadata("ensemble", INPUTS, ["text_output", "num_output_tokens"]),
    "old": metadata("old", INPUTS[:-1], ["text_output"]),
    "tensorrt_llm": metadata("tensorrt_llm", ["input_ids"], ["output_ids"]),
}
INDEX = [{"name": name, "state": "READY"} for name in MODELS] + [
    {"name": "broken", "state": "UNAVAILABLE", "reason": "no engine"}
]


@contextlib.asynccontextmanager
async def triton(answer: Answer) -> AsyncIterator[str]:
    """A server that describes MODELS and leaves generate_stream to `answer`; gives its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                method, path, _ = head.decode().split(" ", 2)
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(length[0].split(b":")[1])) if length else b""
                name = path.split("/")[3] if path.count("/") > 2 else ""
                if path == "/v2":
                    reply(writer, 200, {"name": "triton", "version": "2.51.0"})
                elif path == "/v2/repository/index":
                    reply(writer, 200, INDEX)
                elif method == "GET" and name in MODELS:
                    reply(writer, 200, MODELS[name])
                elif method == "GET":
                    reply(writer, 400, {"error": f"Request for unknown model: '{name}' is not found"})
                else:
                    await answer(writer, json.loads(body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def reply(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    body = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def head(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")


def chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def event(writer: asyncio.StreamWriter, **value: Any) -> None:
    chunk(writer, b"data: " + json.dumps({"model_name": "ensemble", **value}).encode() + b"\n\n")


def new_record(max_tokens: int = 3) -> RequestRecord:
    return RequestRecord(request_id="r-1", slot=0, warmup=False, input_tokens=2, max_tokens=max_tokens, due_ns=0)


async def ask(answer: Answer, *, model: str = "ensemble") -> RequestRecord:
    """One request to a server that answers so; raises what the transport raises."""
    made = new_record()
    async with triton(answer) as url:
        transport = await connect("http", url, model)
        try:
            await transport.send("two words", made)
        except RequestFailed as error:
            made.failure = error.failure
        finally:
            await transport.close()
    return made


def failure(record: RequestRecord) -> tuple[str, str]:
    assert record.failure is not None
    return record.failure.kind, record.failure.message


@pytest.mark.loopback
def test_a_stream_is_read_to_its_end_with_a_stamp_and_a_count_for_each_response() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        bodies.append(body)
        head(writer)
        event(writer, text_output="Hel", num_output_tokens=1)
        await writer.drain()
        await asyncio.sleep(0.03)
        event(writer, text_output="lo é", num_output_tokens=2)
        chunk(writer, b"")

    made = asyncio.run(ask(answer))
    assert [(response.tokens, response.text) for response in made.responses] == [(1, "Hel"), (2, "lo é")]
    first, second = made.responses
    assert made.sent_ns is not None
    assert made.sent_ns < first.stamp_ns
    assert second.stamp_ns - first.stamp_ns >= 25_000_000
    assert bodies == [
        {
            "id": "r-1",
            "text_input": "two words",
            "max_tokens": 3,
            "end_id": -1,
            "min_tokens": 3,
            "top_k": 1,
            "stream": True,
            "return_num_output_tokens": True,
        }
    ]


@pytest.mark.loopback
def test_a_model_without_counts_is_not_asked_for_them() -> None:
    bodies: list[dict[str, Any]] = []

    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        bodies.append(body)
        head(writer)
        event(writer, text_output="x")
        chunk(writer, b"")

    made = asyncio.run(ask(answer, model="old"))
    assert made.responses[0].tokens is None
    assert "return_num_output_tokens" not in bodies[0]


@pytest.mark.loopback
def test_an_error_inside_a_200_stream_fails_the_request() -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        head(writer)
        event(writer, text_output="x", num_output_tokens=1)
        chunk(writer, b'data: {"error": "in ensemble, engine died"}\n\n')
        chunk(writer, b"")

    made = asyncio.run(ask(answer))
    assert failure(made) == ("ServerError", "in ensemble, engine died")
    assert len(made.responses) == 1


@pytest.mark.loopback
def test_a_connection_cut_mid_stream() -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        head(writer)
        event(writer, text_output="x", num_output_tokens=1)
        await writer.drain()
        writer.close()

    kind, message = failure(asyncio.run(ask(answer)))
    assert kind == "ConnectionLost"
    assert message.endswith("(after 1 responses)")


@pytest.mark.loopback
def test_a_body_that_ends_well_within_an_event_is_truncated() -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        head(writer)
        chunk(writer, b'data: {"text_output": "x", "num_out')
        chunk(writer, b"")

    assert failure(asyncio.run(ask(answer)))[0] == "TruncatedStream"


@pytest.mark.loopback
@pytest.mark.parametrize("data", [b"data: [DONE]\n\n", b'data: {"text_output": ["a", "b"]}\n\n', b"data: {}\n\n"])
def test_a_response_of_another_shape_is_malformed(data: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        head(writer)
        chunk(writer, data)
        chunk(writer, b"")

    assert failure(asyncio.run(ask(answer)))[0] == "MalformedResponse"


@pytest.mark.loopback
def test_a_status_other_than_200_is_its_own_class_with_the_servers_words() -> None:
    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        reply(writer, 500, {"error": "out of\nblocks"})

    assert failure(asyncio.run(ask(answer))) == ("http 500", "out of blocks")


async def level(answer: Answer, *, requests: int, timeout_s: float, concurrency: int = 1) -> list[RequestRecord]:
    async with triton(answer) as url:
        transport: Transport = await connect("http", url, "ensemble")
        driver = ClosedLoopDriver(
            ClosedLoop(concurrency=concurrency, requests=requests, warmup=0),
            transport,
            iter(["a b"] * requests),
            input_tokens=2,
            output_tokens=1,
            timeout_s=timeout_s,
        )
        try:
            await asyncio.wait_for(driver.run(), 10)
        finally:
            await transport.close()
        return driver.records


@pytest.mark.loopback
def test_a_stalled_stream_times_out_and_the_next_request_is_answered() -> None:
    seen = 0

    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        head(writer)
        event(writer, text_output="x", num_output_tokens=1)
        await writer.drain()
        if seen == 1:
            await asyncio.sleep(1)  # longer than the request may take
        chunk(writer, b"")

    first, second = asyncio.run(level(answer, requests=2, timeout_s=0.3))
    assert failure(first) == ("Timeout", "not finished 0.3 s after it was sent")
    assert second.failure is None


@pytest.mark.loopback
def test_more_than_a_hundred_streams_are_open_at_once() -> None:
    # httpx stops at 100 connections unless told otherwise.
    waiting = asyncio.Event()
    inside = 0

    async def answer(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        nonlocal inside
        inside += 1
        if inside == 120:
            waiting.set()
        await waiting.wait()
        head(writer)
        event(writer, text_output="x", num_output_tokens=1)
        chunk(writer, b"")

    records = asyncio.run(level(answer, requests=120, timeout_s=9, concurrency=120))
    assert [record.failure for record in records] == [None] * 120


async def nothing(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    raise AssertionError("nobody asked")


async def try_connect(model: str) -> None:
    async with triton(nothing) as url:
        transport = await connect("http", url, model)
        await transport.close()


@pytest.mark.loopback
def test_an_unknown_model_names_the_served_ones() -> None:
    with pytest.raises(UsageError, match=r"served: ensemble, old, tensorrt_llm; did you mean 'ensemble'\?"):
        asyncio.run(try_connect("ensembel"))


@pytest.mark.loopback
def test_a_model_that_failed_to_load_gives_its_reason() -> None:
    with pytest.raises(StageFailed, match=r"'broken' .* not ready \(UNAVAILABLE\): no engine"):
        asyncio.run(try_connect("broken"))


@pytest.mark.loopback
def test_a_model_without_text_is_refused() -> None:
    with pytest.raises(UsageError, match="declares no text_input, max_tokens, stream, text_output"):
        asyncio.run(try_connect("tensorrt_llm"))


@pytest.mark.loopback
def test_nothing_at_the_url_is_a_host_error_that_says_how_to_start_one(unused_tcp_url: str) -> None:
    with pytest.raises(HostError, match=r"no Triton answers over HTTP .* `trtpipe serve`"):
        asyncio.run(connect("http", unused_tcp_url, "ensemble"))


@pytest.mark.loopback
def test_a_server_that_dies_before_a_request_refuses_the_connection() -> None:
    async def scenario() -> RequestRecord:
        made = new_record()
        async with triton(nothing) as url:
            transport = await connect("http", url, "ensemble")
            await transport.close()
        # A fresh client, so that no kept connection hides the refusal.
        gone = type(transport)(_client(url), transport.endpoint, lambda: 0)
        with pytest.raises(RequestFailed) as caught:
            await gone.send("a b", made)
        await gone.close()
        made.failure = caught.value.failure
        return made

    assert failure(asyncio.run(scenario()))[0] == "ConnectFailed"


def _client(url: str) -> Any:
    import httpx

    return httpx.AsyncClient(base_url=url, trust_env=False)


@pytest.fixture
def unused_tcp_url() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("url", ["ftp://host:1", "http://", "http://host:port"])
def test_an_address_that_is_not_http(url: str) -> None:
    with pytest.raises(UsageError, match="is not an HTTP URL"):
        asyncio.run(connect("http", url, "ensemble"))


EVENTS = st.lists(st.binary(min_size=1).map(lambda data: data.replace(b"\n", b"").replace(b"\r", b"")), max_size=8)


@given(EVENTS, st.lists(st.integers(1, 9), min_size=1), st.sampled_from([b"\n", b"\r\n"]))
def test_events_do_not_depend_on_how_the_bytes_were_cut(events: list[bytes], cuts: list[int], end: bytes) -> None:
    stream = b"".join(b"data: " + data + end + end for data in events)
    decoder = SseDecoder()
    out: list[bytes] = []
    at = 0
    for number in range(len(stream)):
        size = cuts[number % len(cuts)]
        out += decoder.feed(stream[at : at + size])
        at += size
    assert out == events
    assert not decoder.unfinished


def test_comments_other_fields_and_several_data_lines() -> None:
    assert SseDecoder().feed(b": hi\nid: 3\ndata:a\ndata: b\n\n\n") == [b"a\nb"]
