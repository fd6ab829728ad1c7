"""Every protocol through every transport: against the server of known timing in a process of its own, and against
other people's servers where it matters what a request holds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpcore
import httpx
import pytest

from tests.support.certificates import with_openssl, write_certificate
from tests.support.llm_servers import (
    HttpServer,
    contents,
    response,
    serving_grpc,
    serving_http,
    serving_no_triton,
    serving_words,
)
from tests.support.loops import run
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.mock_server.script import TOKEN_TEXT, Truth
from trtpipe.pipeline.bench.options import PROTOCOLS
from trtpipe.pipeline.bench.protocols.connect import TRANSPORTS, Wiring, connect
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.library import HttpxSender, _unproxied
from trtpipe.pipeline.bench.protocols.transport import Answer, BadAnswer, Client

pytestmark = [pytest.mark.loopback, pytest.mark.process]

MOCK_SERVER = "trtpipe.pipeline.bench.mock_server.server"

WAYS = [pytest.param(protocol, transport) for protocol in PROTOCOLS for transport in TRANSPORTS]
# Through every way, and with the kernel's stamps where those are.
WIRINGS = [(protocol, Wiring(transport=transport)) for protocol in PROTOCOLS for transport in TRANSPORTS] + [
    (protocol, Wiring(kernel_stamps=True)) for protocol in PROTOCOLS
]
PROMPT = 'zwei "Wörter"\n\\ und {"error": 3} 中 \U0001f600'


def tokenize(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@contextlib.asynccontextmanager
async def client_of(
    protocol: str, grpc_port: int, http_port: int, wiring: Wiring, *, model: str = "ensemble", host: str = "127.0.0.1"
) -> AsyncIterator[Client]:
    url = {
        "grpc": f"{host}:{grpc_port}",
        "http": f"http://{host}:{http_port}",
    }.get(protocol, f"http://{host}:{http_port}/v1")
    client = await connect(protocol, url, model, tokenize, wiring)
    try:
        yield client
    finally:
        await client.sender.close()


def known_client(
    known: MockServerProcess, protocol: str, wiring: Wiring, **options: Any
) -> contextlib.AbstractAsyncContextManager[Client]:
    return client_of(protocol, known.grpc_port, known.http_port, wiring, **options)


NUMBERS = itertools.count()


def request(client: Client, prompt: str = "hello", max_tokens: int = 5, **options: Any) -> InFlightRequest:
    identity = f"r-{next(NUMBERS)}"
    message = client.codec.encode(identity, prompt, max_tokens, options)
    return InFlightRequest(identity, message, input_tokens=1, max_tokens=max_tokens)


def start(client: Client, *exchanges: InFlightRequest) -> list[asyncio.Future[InFlightRequest]]:
    """A future for the end of each, of which there may be only one."""
    ends = []
    for exchange in exchanges:
        ended: asyncio.Future[InFlightRequest] = asyncio.get_running_loop().create_future()
        exchange.on_ended = ended.set_result
        ends.append(ended)
    client.sender.start(exchanges)
    return ends


async def ask(client: Client, prompt: str = "hello", max_tokens: int = 5, **options: Any) -> InFlightRequest:
    exchange = request(client, prompt, max_tokens, **options)
    await start(client, exchange)[0]
    return exchange


def outcome(client: Client, exchange: InFlightRequest) -> Answer | tuple[str, str]:
    """The answer, or the class of the failure and its words."""
    if exchange.failure is not None:
        return exchange.failure.kind, exchange.failure.message
    try:
        return client.codec.decode(exchange)
    except BadAnswer as bad:
        return bad.kind, str(bad)


def tokens(client: Client, exchange: InFlightRequest) -> int:
    """Of an answer that is one. OpenAI's servers count the whole, Triton's each response."""
    answer = outcome(client, exchange)
    assert isinstance(answer, Answer), answer
    if answer.tokens is not None:
        assert len(answer.tokens) == len(answer.stamps_ns)
        return sum(answer.tokens)
    assert answer.usage is not None
    assert answer.text == TOKEN_TEXT * answer.usage
    return answer.usage


def failure(client: Client, exchange: InFlightRequest) -> tuple[str, str]:
    found = outcome(client, exchange)
    assert not isinstance(found, Answer), found
    return found


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MockServerProcess]:
    process = MockServerProcess.start(Timing(ttft_s=0.002, itl_s=0.001), tmp_path_factory.mktemp("known") / "truth")
    yield process
    process.stop()


# What is measured


def test_what_is_read_is_what_the_server_wrote_and_not_before_it_did(tmp_path: Path) -> None:
    """Both ends have one clock."""
    timing = Timing(ttft_s=0.003, itl_s=0.001, tokens_per_response=3)
    known = MockServerProcess.start(timing, tmp_path / "truth")
    read: list[tuple[str, InFlightRequest, Answer]] = []

    async def scenario() -> None:
        for protocol, wiring in WIRINGS:
            async with known_client(known, protocol, wiring) as client:
                await client.sender.warm(4)
                exchanges = [await ask(client, max_tokens=7)]
                more = [request(client, max_tokens=1 + 3 * number) for number in range(4)]
                await asyncio.gather(*start(client, *more))
                for exchange in [*exchanges, *more]:
                    answer = outcome(client, exchange)
                    assert isinstance(answer, Answer), answer
                    assert tokens(client, exchange) == exchange.max_tokens
                    assert client.codec.text(exchange) == TOKEN_TEXT * exchange.max_tokens
                    read.append((protocol, exchange, answer))

    try:
        run(scenario())
    finally:
        truth = {one.id: one for one in known.stop()}
    assert len(truth) == len(read) == 5 * len(WIRINGS)
    for protocol, exchange, answer in read:
        true: Truth = truth[exchange.id]
        assert true.protocol == (protocol if protocol in ("grpc", "http") else "openai")
        assert (true.tokens, true.then) == (exchange.max_tokens, "finish")
        assert exchange.sent_ns is not None
        assert exchange.end_ns is not None
        assert true.end_ns is not None
        assert exchange.sent_ns <= true.arrival_ns
        assert answer.stamps_ns == sorted(answer.stamps_ns)
        assert len(answer.stamps_ns) == len(true.stamps_ns) == -(-exchange.max_tokens // 3)
        assert all(wrote <= saw for wrote, saw in zip(true.stamps_ns, answer.stamps_ns, strict=True))
        assert true.end_ns <= exchange.end_ns
        assert answer.stamps_ns[-1] <= exchange.end_ns
        if protocol in ("grpc", "http"):
            assert answer.tokens == [3] * (exchange.max_tokens // 3) + [1]


@pytest.mark.parametrize(("protocol", "transport"), WAYS)
def test_answers_at_the_same_time_are_not_mixed_up(known: MockServerProcess, protocol: str, transport: str) -> None:
    async def scenario() -> None:
        async with known_client(known, protocol, Wiring(transport=transport)) as client:
            exchanges = [request(client, f"!short {number % 9 + 1} ", 10) for number in range(60)]
            await asyncio.gather(*start(client, *exchanges))
            found = [tokens(client, exchange) for exchange in exchanges]
            assert found == [number % 9 + 1 for number in range(60)]

    run(scenario())


def test_the_engine_s_own_model_has_its_output_ids_counted(known: MockServerProcess) -> None:
    async def scenario() -> None:
        for transport in TRANSPORTS:
            async with known_client(known, "grpc", Wiring(transport=transport), model="tensorrt_llm") as client:
                exchange = await ask(client, "three short words", 8)
                answer = outcome(client, exchange)
                assert isinstance(answer, Answer)
                assert answer.tokens == [1] * 8
                assert client.codec.text(exchange) == "", "ids are not text"

    run(scenario())


def test_what_a_client_says_of_itself(known: MockServerProcess) -> None:
    async def described(protocol: str, wiring: Wiring) -> dict[str, Any]:
        async with known_client(known, protocol, wiring) as client:
            return client.described()

    def said(protocol: str, **wiring: Any) -> dict[str, Any]:
        return run(described(protocol, Wiring(**wiring)))

    grpc = said("grpc", connections=3)
    assert grpc == {
        "protocol": "grpc", "url": f"127.0.0.1:{known.grpc_port}", "server": "known_server 2.0", "model": "ensemble",
        "model_versions": ["1"], "transport": "own HTTP/2", "stamps": "read", "connections": 3,
    }  # fmt: skip
    http = said("http", kernel_stamps=True)
    assert (http["protocol"], http["transport"], http["stamps"]) == ("http", "own HTTP/1.1", "kernel")
    assert said("grpc", kernel_stamps=True)["stamps"] == "kernel"
    chat = said("chat", transport="tritonclient")
    assert (chat["server"], chat["transport"], chat["stamps"]) == ("OpenAI-compatible", "tritonclient", "library")
    assert "late" in chat["known_error"]


# What a request holds


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_grpc_request_as_another_reader_reads_it(transport: str) -> None:
    async def scenario() -> None:
        async with serving_grpc() as (port, server):
            options = {"temperature": 0.5, "seed": 2**63, "stop": ["a", "bé"], "min_tokens": 3, "ignore_eos": True}
            async with client_of("grpc", port, 0, Wiring(transport=transport)) as client:
                exchange = await ask(client, PROMPT, 3, **options)
                assert outcome(client, exchange) == Answer(list(exchange.stamps), [1])
            async with client_of("grpc", port, 0, Wiring(transport=transport), model="tensorrt_llm") as client:
                await ask(client, "one three", 9)
        first, second = server.requests
        assert (first.model_name, first.id) == ("ensemble", exchange.id)
        text = PROMPT.encode()
        # [1, n]: the models have a batch dimension.
        assert contents(first) == {
            "text_input": ("BYTES", [1, 1], struct.pack("<I", len(text)) + text),
            "max_tokens": ("INT32", [1, 1], b"\3\0\0\0"),
            "min_tokens": ("INT32", [1, 1], b"\3\0\0\0"),
            "end_id": ("INT32", [1, 1], b"\xff\xff\xff\xff"),
            "stream": ("BOOL", [1, 1], b"\1"),
            "return_num_output_tokens": ("BOOL", [1, 1], b"\1"),
            "temperature": ("FP32", [1, 1], struct.pack("<f", 0.5)),
            "seed": ("UINT64", [1, 1], b"\0\0\0\0\0\0\0\x80"),
            "stop_words": ("BYTES", [1, 2], b"\1\0\0\0a\3\0\0\0b\xc3\xa9"),
        }
        assert [output.name for output in first.outputs] == ["text_output", "num_output_tokens"]
        assert first.parameters["triton_enable_empty_final_response"].bool_param
        assert contents(second) == {
            "input_ids": ("INT32", [1, 2], b"\3\0\0\0\5\0\0\0"),
            "input_lengths": ("INT32", [1, 1], b"\2\0\0\0"),
            "request_output_len": ("INT32", [1, 1], b"\t\0\0\0"),
            "streaming": ("BOOL", [1, 1], b"\1"),
            "runtime_top_k": ("INT32", [1, 1], b"\1\0\0\0"),
            "exclude_input_in_output": ("BOOL", [1, 1], b"\1"),
        }
        assert [output.name for output in second.outputs] == ["output_ids"]
        # Tritonserver 2.51 may crash after an error of a stream that asks for statuses.
        assert not any("triton_grpc_error" in one for one in server.metadata)

    run(scenario())


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "http": (
        "/v2/models/ensemble/generate_stream",
        {"text_input": PROMPT, "max_tokens": 3, "stream": True, "return_num_output_tokens": True, "temperature": 0.5},
    ),
    "completions": (
        "/v1/completions",
        {"model": "ensemble", "prompt": PROMPT, "max_tokens": 3, "stream": True, "temperature": 0.5,
         "stream_options": {"include_usage": True}},
    ),
    "chat": (
        "/v1/chat/completions",
        {"model": "ensemble", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "stream": True,
         "temperature": 0.5, "stream_options": {"include_usage": True}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_http_requests_as_another_reader_reads_them(transport: str) -> None:
    with serving_http() as server:

        async def scenario() -> list[tuple[str, InFlightRequest]]:
            wiring = Wiring(transport=transport, headers={"Authorization": "Bearer key", "Hostess": "kept"})
            asked = []
            for protocol in BODIES:
                async with client_of(protocol, 0, server.port, wiring) as client:
                    exchange = await ask(client, PROMPT, 3, temperature=0.5)
                    assert isinstance(outcome(client, exchange), Answer)
                    assert client.codec.text(exchange) == "word"
                    asked.append((protocol, exchange))
            return asked

        asked = run(scenario())
    assert len(asked) == len(server.requests) == 3
    for (protocol, exchange), (path, headers, body) in zip(asked, server.requests, strict=True):
        expected_path, expected = BODIES[protocol]
        assert path == expected_path
        assert body == ({"id": exchange.id} if protocol == "http" else {}) | expected
        assert headers["host"] == f"127.0.0.1:{server.port}"
        assert headers["content-type"] == "application/json"
        assert headers["accept-encoding"] == "identity", "compressed answers come in lumps"
        assert (headers["authorization"], headers["hostess"]) == ("Bearer key", "kept")
        assert headers["x-request-id"] == exchange.id


@pytest.fixture
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """The proxy of the environment."""
    for name in ("HTTP_PROXY", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "grpc_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving_http() as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        yield server


@pytest.mark.parametrize("protocol", ["http", "completions", "chat"])
def test_a_server_behind_a_proxy_is_asked_through_it(proxied: HttpServer, protocol: str) -> None:
    site = "http://triton.test:8000"
    proxied.resources = {(method, site + path): value for (method, path), value in proxied.resources.items()}
    proxied.streams = {site + path: events for path, events in proxied.streams.items()}

    async def scenario() -> str:
        url = site + ("" if protocol == "http" else "/v1")
        client = await connect(protocol, url, "ensemble", tokenize, Wiring(transport="tritonclient"))
        exchange = await ask(client)
        assert isinstance(outcome(client, exchange), Answer)
        await client.sender.close()
        return client.codec.text(exchange)

    assert run(scenario()) == "word"
    with pytest.raises(HostError, match="status 404"):
        run(connect("completions", site + "/v2", "ensemble", tokenize, Wiring(transport="tritonclient")))


def test_connecting_is_no_part_of_the_time_to_first_token_through_httpx(
    known: MockServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect_tcp, opened = httpcore.AnyIOBackend.connect_tcp, list[str]()

    async def slow(self: httpcore.AnyIOBackend, *where: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        opened.append("")
        await asyncio.sleep(0.2)
        return await connect_tcp(self, *where, **options)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", slow)

    async def scenario() -> None:
        async with known_client(known, "chat", Wiring(transport="tritonclient")) as client:
            began = time.monotonic_ns()
            cold = await ask(client)
            assert cold.sent_ns is not None
            assert 0.2e9 < cold.sent_ns - began < cold.stamps[0] - began
            await client.sender.warm(5)
            assert len(opened) == 5, "with the one that was there"
            exchanges = [request(client) for _ in range(5)]
            await asyncio.gather(*start(client, *exchanges))
            assert {tokens(client, exchange) for exchange in exchanges} == {5}
            await client.sender.warm(5)
            assert len(opened) == 5

    run(scenario())


@pytest.mark.loopback
@pytest.mark.parametrize("pause_s", [0.01, 0.0], ids=["a stream of events", "a huge page"])
def test_a_page_without_an_end_does_not_hold_the_run(pause_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpipe.pipeline.bench.protocols.library.CONNECT_TIMEOUT_S", 0.5 if pause_s else 10.0)

    async def scenario() -> None:
        left = asyncio.Event()

        async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while not writer.is_closing():
                    writer.write(b"data: 1\n\n" if pause_s else bytes(1 << 16))
                    await writer.drain()
                    await asyncio.sleep(pause_s)
            left.set()

        server = await asyncio.start_server(endless, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        sender = HttpxSender(Site.of(f"http://127.0.0.1:{port}"))
        await asyncio.wait_for(sender.warm(1), 5)
        await asyncio.wait_for(left.wait(), 5)  # the connection is closed
        await sender.close()
        server.close()

    run(scenario())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_this_machine_is_not_asked_through_a_proxy(
    proxied: HttpServer, known: MockServerProcess, protocol: str
) -> None:
    proxied.resources, proxied.streams = {}, {}

    async def scenario() -> None:
        async with known_client(known, protocol, Wiring(transport="tritonclient")) as client:
            exchange = await ask(client)
            assert isinstance(outcome(client, exchange), Answer)

    run(scenario())


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:80", "http://localhost", "https://localhost:443", "http://[::1]:80", "http://[::1]:8000"]
)
def test_this_machine_is_not_asked_through_a_proxy_at_the_usual_ports_either(
    proxied: HttpServer, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """httpx leaves them out of the URL."""
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxied.port}")
    with httpx.Client(mounts=_unproxied(url)) as client:
        assert client._transport_for_url(httpx.URL(url)) is client._transport
        assert client._transport_for_url(httpx.URL("http://triton.test")) is not client._transport
    assert _unproxied("http://triton.test:80") == {}


def test_the_engine_over_http() -> None:
    with serving_http() as server:

        async def scenario() -> None:
            async with client_of("http", 0, server.port, Wiring(), model="tensorrt_llm") as client:
                exchange = await ask(client, "one three", 9)
                assert outcome(client, exchange) == Answer(list(exchange.stamps[:1]), [2])

        run(scenario())
    ((_, _, body),) = server.requests
    assert (body["input_ids"], body["input_lengths"], body["request_output_len"]) == ([3, 5], 2, 9)


# How a request fails


@pytest.mark.parametrize(("protocol", "transport"), WAYS)
def test_every_fault_has_its_class_and_takes_no_other_request_with_it(
    known: MockServerProcess, protocol: str, transport: str
) -> None:
    is_grpc = protocol == "grpc"
    is_library = is_grpc and transport == "tritonclient"

    async def scenario() -> None:
        async with known_client(known, protocol, Wiring(transport=transport)) as client:

            async def asked(prompt: str) -> InFlightRequest:
                exchange = await ask(client, prompt)
                following = await ask(client)
                while is_library and prompt == "!cut 2" and following.failure is not None:
                    following = await ask(client)  # grpcio may notice later that the connection is lost
                assert tokens(client, following) == 5, f"after '{prompt}'"
                return exchange

            assert tokens(client, await asked("!short 3")) == 3
            empty = outcome(client, await asked("!empty"))
            assert isinstance(empty, Answer)
            assert (empty.stamps_ns, empty.tokens or [], empty.text) == ([], [], "")
            assert empty.usage == (None if protocol in ("grpc", "http") else 0)
            assert tokens(client, await asked("!burst")) == 5

            kind, words = failure(client, await asked("!cut 2"))
            assert kind == ("grpc UNAVAILABLE" if is_library else "ConnectionLost")
            if transport == "own":
                assert words.endswith("(after 2 responses)" if is_grpc else " reads)")
            assert failure(client, await asked("!error 2 out of memory")) == ("ServerError", "out of memory")
            assert failure(client, await asked("!garbage 2"))[0] == "MalformedResponse"
            asked_for = "the prompt asked for status 429"
            refused = ("grpc UNAVAILABLE", f"{asked_for} (after 0 responses)") if is_grpc else ("http 429", asked_for)
            assert failure(client, await asked("!status 429")) == refused

    run(scenario())


@pytest.mark.parametrize(("protocol", "transport"), WAYS)
def test_a_stalled_request_is_abandoned_and_the_next_one_answered(
    known: MockServerProcess, protocol: str, transport: str
) -> None:
    async def scenario() -> None:
        async with known_client(known, protocol, Wiring(transport=transport)) as client:
            stalled = request(client, "!stall 2")
            (end,) = start(client, stalled)
            while b"".join(stalled.data).count(TOKEN_TEXT.encode()) < 2:
                await asyncio.sleep(0.001)
            client.sender.cancel(stalled)
            client.sender.cancel(stalled)
            seen = list(stalled.data)
            answered = [await ask(client) for _ in range(3)]
            assert [tokens(client, one) for one in answered] == [5, 5, 5]
            client.sender.cancel(answered[0])
            assert tokens(client, await ask(client)) == 5
            assert not end.done()
            assert (stalled.end_ns, stalled.data) == (None, seen)

    run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_is_told_of_requests_that_were_abandoned(transport: str) -> None:
    async def over_grpc() -> None:
        left = asyncio.Event()

        async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                while True:
                    yield response("word", 1)
                    await asyncio.sleep(0.001)
            finally:
                left.set()

        async with (
            serving_grpc(endless) as (port, _),
            client_of("grpc", port, 0, Wiring(transport=transport)) as client,
        ):
            await abandon(client)
            await left.wait()

    async def over_http(server: HttpServer) -> None:
        async with client_of("chat", 0, server.port, Wiring(transport=transport)) as client:
            await abandon(client)
            assert await asyncio.get_running_loop().run_in_executor(None, server.left.wait, 60)

    run(over_grpc())
    with serving_http() as server:
        server.streams["/v1/chat/completions"] = endless_words()
        run(over_http(server))


def endless_words() -> Iterator[dict[str, Any]]:
    """With a pause after each, so that the client leaves before the answer is too large."""
    while True:
        yield {"choices": [{"delta": {"content": "word"}}]}
        time.sleep(0.01)


async def abandon(client: Client) -> None:
    """A request, once its answer has begun."""
    start(client, asked := request(client))
    while not asked.data:
        assert asked.end_ns is None, asked
        await asyncio.sleep(0.001)
    client.sender.cancel(asked)


@pytest.mark.parametrize(("protocol", "transport"), WAYS)
def test_requests_in_flight_at_the_close_go_with_it(known: MockServerProcess, protocol: str, transport: str) -> None:
    async def scenario() -> None:
        async with known_client(known, protocol, Wiring(transport=transport)) as client:
            (end,) = start(client, stalled := request(client, "!stall 2"))
            while len(stalled.stamps) < 1:
                await asyncio.sleep(0.001)
        if transport == "own":
            assert failure(client, await end)[0] == "ConnectionLost"
        else:
            assert not end.done()

    run(scenario())


class Fleeting:
    """A server of known timing on ports of the test's own, which dies without a word and may come back."""

    def __init__(self) -> None:
        with socket.socket() as one, socket.socket() as other:
            for sock in (one, other):
                sock.bind(("127.0.0.1", 0))
            self.grpc_port, self.http_port = one.getsockname()[1], other.getsockname()[1]
        self.process: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        ports = ["--grpc-port", str(self.grpc_port), "--http-port", str(self.http_port)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", MOCK_SERVER, "--ttft-ms", "1", "--itl-ms", "1", *ports],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert "grpc_port" in self.process.stdout.readline()

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


@pytest.fixture
def fleeting() -> Iterator[Fleeting]:
    made = Fleeting()
    made.begin()
    yield made
    made.kill()


def test_a_server_killed_in_mid_stream_gone_and_back(fleeting: Fleeting) -> None:
    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for protocol, wiring in WIRINGS:
                made = client_of(protocol, fleeting.grpc_port, fleeting.http_port, wiring)
                clients.append((f"{protocol} {wiring}", wiring.transport, await stack.enter_async_context(made)))
            cut = [request(client, "!stall 2") for _, _, client in clients]
            ends = [start(client, one)[0] for (_, _, client), one in zip(clients, cut, strict=True)]
            while any(b"".join(one.data).count(TOKEN_TEXT.encode()) < 2 for one in cut):
                await asyncio.sleep(0.001)
            fleeting.kill()
            await asyncio.gather(*ends)
            for (name, transport, client), one in zip(clients, cut, strict=True):
                library = transport == "tritonclient" and client.codec.protocol == "grpc"
                # grpcio has one word for both.
                assert failure(client, one)[0] == ("grpc UNAVAILABLE" if library else "ConnectionLost"), name
                gone = [await ask(client), await ask(client)]
                kinds = {"grpc UNAVAILABLE" if library else "ConnectFailed"}
                assert {failure(client, refused)[0] for refused in gone} == kinds, name
                assert [refused.sent_ns for refused in gone] == [None, None] or library, name
                if not library:
                    with pytest.raises(HostError, match="connection"):
                        await client.sender.warm(2)
            fleeting.begin()
            for name, transport, client in clients:
                back = await ask(client)
                while transport == "tritonclient" and back.failure is not None:  # grpcio waits before it tries again
                    back = await ask(client)
                assert tokens(client, back) == 5, name
                await client.sender.warm(3)

    run(scenario())


def test_a_server_that_was_started_anew_while_nobody_looked(fleeting: Fleeting) -> None:
    """Prompts of a load point take a while to make, and the loop does not turn meanwhile."""

    async def scenario() -> None:
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for protocol, wiring in WIRINGS:
                if wiring.transport == "own":
                    made = client_of(protocol, fleeting.grpc_port, fleeting.http_port, replace(wiring, connections=2))
                    clients.append(await stack.enter_async_context(made))
            for client in clients:
                await client.sender.warm(2)
            fleeting.kill()
            fleeting.begin()
            for client in clients:
                await client.sender.warm(2)
                ends = start(client, *(request(client) for _ in range(4)))
                assert [tokens(client, await end) for end in ends] == [5] * 4
                assert client.sender.described().get("connections", 2) == 2, "as many as before"

    run(scenario())


def test_a_server_that_allows_four_calls_at_once() -> None:
    running: list[int] = [0, 0]

    async def slow(request: Any, context: Any) -> AsyncIterator[Any]:
        running[0] += 1
        running[1] = max(running)
        await asyncio.sleep(0.005)
        running[0] -= 1
        yield response("word", 1, final=True)

    async def scenario() -> None:
        async with serving_grpc(slow, max_concurrent_streams=4) as (port, server):
            for connections in (1, 2):
                running[:] = [0, 0]
                server.requests.clear()
                most = 4 * connections
                async with client_of("grpc", port, 0, Wiring(connections=connections)) as client:
                    asked = [request(client) for _ in range(30)]
                    await asyncio.gather(*start(client, *asked))
                    assert [outcome(client, one) for one in asked] == [Answer(list(one.stamps), [1]) for one in asked]
                assert len(server.requests) == 30
                assert (running[0], most) == (0, max(most, running[1]))
                # What waited says so: it left when another one had ended.
                sent = sorted(one.sent_ns or 0 for one in asked)
                assert sent[most] >= min(one.end_ns or 0 for one in asked) > sent[most - 1]

    run(scenario())


# What answers, and what does not


@pytest.mark.parametrize(("protocol", "transport"), WAYS)
def test_nothing_listens(protocol: str, transport: str) -> None:
    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            with pytest.raises(HostError, match=r"^no .* answers over (gRPC|HTTP).*; start one with `trtpipe serve`"):
                async with client_of(protocol, port, port, Wiring(transport=transport)):
                    pass

    run(scenario())


def refused(kind: type[Exception], words: str, *args: Any, **options: Any) -> None:
    """`client_of` fails so."""

    async def scenario() -> None:
        with pytest.raises(kind, match=words):
            async with client_of(*args, **options):
                pass

    run(scenario())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_of_another_protocol_is_refused(known: MockServerProcess, transport: str) -> None:
    wiring = Wiring(transport=transport)
    refused(HostError, "no Triton answers over gRPC", "grpc", known.http_port, 0, wiring)
    with serving_words(b"SSH-2.0-OpenSSH_9.2p1\r\n") as port:
        refused(HostError, "no Triton answers over gRPC", "grpc", port, 0, wiring)
        refused(HostError, "no Triton answers over HTTP .*: (SSH-2.0|Server disconnected)", "http", 0, port, wiring)
        refused(HostError, "no OpenAI-compatible server answers over HTTP", "chat", 0, port, wiring)
    refused(HostError, "HTTP/1.1; is it a gRPC port.; start one", "http", 0, known.grpc_port, wiring)

    async def scenario() -> None:
        async with serving_no_triton() as port:
            with pytest.raises(HostError, match=r"is not Triton's gRPC endpoint: .*; .* Triton's gRPC port \(8001"):
                async with client_of("grpc", port, 0, wiring):
                    pass

    run(scenario())
    with serving_http() as server:
        for answer in ((404, "<html>not found</html>"), (200, ["version"]), (200, {"name": "x"}), (200, "version")):
            server.resources["GET", "/v2"] = answer
            refused(HostError, "is not Triton's HTTP endpoint: GET /v2", "http", 0, server.port, wiring)
        listings: list[tuple[int, Any]] = [
            (404, {"detail": "no"}),
            (200, []),
            (200, "x"),
            (200, {"data": [{"name": 1}]}),
        ]
        for listing in listings:
            server.resources["GET", "/v1/models"] = listing
            telling = rf"is not an OpenAI-compatible server: GET /v1/models gives status {listing[0]} and no list"
            refused(HostError, telling, "completions", 0, server.port, wiring)
        server.resources["GET", "/v1/models"] = (401, {"error": {"message": "no key"}})
        refused(UsageError, "asks for a key; give it in TRTPIPE_API_KEY", "completions", 0, server.port, wiring)
        keyed = replace(wiring, headers={"Authorization": "Bearer wrong"})
        refused(UsageError, "does not accept the key; give another in", "completions", 0, server.port, keyed)
        # A proxy in front of the server says it so.
        server.resources["GET", "/v1/models"] = (403, {"message": "Forbidden"})
        refused(UsageError, "does not accept the key; give another in", "completions", 0, server.port, keyed)
        telling = "is not an OpenAI-compatible server: GET /v1/models gives status 403 and no list"
        refused(HostError, telling, "completions", 0, server.port, wiring)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_models_that_cannot_be_asked(known: MockServerProcess, transport: str) -> None:
    wiring = Wiring(transport=transport)
    ports = known.grpc_port, known.http_port
    for protocol in ("grpc", "http"):
        served = r"'zzz' is not served at .*: served: ensemble, tensorrt_llm; name one that is"
        refused(UsageError, served, protocol, *ports, wiring, model="zzz")
        near = r"served: ensemble, tensorrt_llm; did you mean 'ensemble'\?"
        refused(UsageError, near, protocol, *ports, wiring, model="ensembel")
    for protocol in ("completions", "chat"):
        served = "'zzz' is not served at .*; name one by --openai-model, known: ensemble"
        refused(UsageError, served, protocol, *ports, wiring, model="zzz")
        refused(UsageError, r"did you mean 'ensemble'\?", protocol, *ports, wiring, model="ensembel")


def test_models_of_a_server_that_cannot_be_asked() -> None:
    async def scenario() -> None:
        async with serving_grpc() as (port, triton):
            for model, kind, words in [
                ("broken", StageFailed, r"'broken' .* not ready \(UNAVAILABLE\): no engine"),
                ("resnet", UsageError, "takes no prompt: it declares no text_input, max_tokens, text_output"),
            ]:
                for transport in TRANSPORTS:
                    with pytest.raises(kind, match=words):
                        async with client_of("grpc", port, 0, Wiring(transport=transport), model=model):
                            pass
            triton.has_index = False
            for transport in TRANSPORTS:
                with pytest.raises(UsageError, match="'zzz' is not served"):
                    async with client_of("grpc", port, 0, Wiring(transport=transport), model="zzz"):
                        pass

    run(scenario())
    with serving_http() as server:
        failed = r"'broken' .* not ready \(UNAVAILABLE\): no engine"
        refused(StageFailed, failed, "http", 0, server.port, Wiring(), model="broken")
        refused(UsageError, "takes no prompt", "http", 0, server.port, Wiring(), model="resnet")
        # A model's name may hold anything.
        refused(UsageError, "'a/b c' is not served", "http", 0, server.port, Wiring(), model="a/b c")
        del server.resources["POST", "/v2/repository/index"]
        refused(UsageError, "'zzz' is not served", "http", 0, server.port, Wiring(), model="zzz")


GRPC_ADDRESSES = [
    "host",
    "http://host:8001",
    "host:",
    ":8001",
    "host:port",
    "host:99999",
    "host:-1",
    "host:1/path",
    "",
    "a..b:8001",
]
HTTP_ADDRESSES = [
    "ftp://host:1",
    "http://",
    "http://host:port",
    "http://host:99999",
    "http://[::1",
    "",
    "://host",
    "http://a..b",
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("protocol", "url"),
    [*(("grpc", url) for url in GRPC_ADDRESSES), *(("http", url) for url in HTTP_ADDRESSES), ("chat", "ftp://host/v1")],
)
def test_an_address_that_is_none(protocol: str, url: str, transport: str) -> None:
    with pytest.raises(UsageError, match=r"' is not a(n HTTP URL| gRPC address); give "):
        run(connect(protocol, url, "ensemble", tokenize, Wiring(transport=transport)))


def test_an_address_of_version_six() -> None:
    async def scenario() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", MOCK_SERVER, "--host", "::1", "--ttft-ms", "1", "--itl-ms", "1",
            stdout=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        ports = json.loads(await process.stdout.readline())
        try:
            for protocol, wiring in WIRINGS:
                made = client_of(protocol, ports["grpc_port"], ports["http_port"], wiring, host="[::1]")
                async with made as client:
                    assert tokens(client, await ask(client)) == 5
        finally:
            process.terminate()
            await process.wait()

    run(scenario())


@pytest.mark.parametrize(
    ("protocol", "url"), [("grpc", "grpcs://host:8001"), ("http", "https://host"), ("chat", "https://host/v1")]
)
def test_tls_is_for_the_library(protocol: str, url: str) -> None:
    """Said before anybody is asked: `host` does not exist."""
    with pytest.raises(UsageError, match=r"is TLS, which our own reader does not speak; use --transport tritonclient"):
        run(connect(protocol, url, "ensemble", tokenize, Wiring()))


ASKING = """
import asyncio, sys
from trtpipe.pipeline.bench.protocols.connect import Wiring, connect
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest

async def ask(protocol, url):
    client = await connect(protocol, url, "ensemble", str.split, Wiring(transport="tritonclient"))
    exchange = InFlightRequest("r", client.codec.encode("r", "p", 1, {}), input_tokens=1, max_tokens=1)
    ended = asyncio.Event()
    exchange.on_ended = lambda exchange: ended.set()
    client.sender.start([exchange])
    await ended.wait()
    assert exchange.failure is None, exchange.failure
    print(client.codec.text(exchange))
    await client.sender.close()

async def main():
    for protocol, url in zip(sys.argv[1::2], sys.argv[2::2]):
        await ask(protocol, url)

asyncio.run(main())
"""


@with_openssl
def test_tls_through_the_library(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    # The system's certificates, as its libraries let one name them.
    trusting = {**os.environ, "SSL_CERT_FILE": str(cert), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(cert)}

    async def scenario(http_port: int) -> str:
        async with serving_grpc(tls=(key.read_bytes(), cert.read_bytes())) as (port, _):
            asked = ["grpc", f"grpcs://localhost:{port}", "http", f"https://127.0.0.1:{http_port}"]
            asked += ["chat", f"https://localhost:{http_port}/v1"]
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", ASKING, *asked, env=trusting, stdout=subprocess.PIPE
            )
            out, _ = await child.communicate()
            return out.decode()

    with serving_http(context) as server:
        assert run(scenario(server.port)).split() == ["word", "word", "word"]
        # Trusted by nobody here.
        with pytest.raises(
            HostError, match=r"no TLS connection to https://.*: self.signed certificate; is it https there"
        ):
            Site.of(f"https://localhost:{server.port}").ask("GET", "/v2", "Triton")


def test_tls_with_a_server_that_speaks_none(known: MockServerProcess) -> None:
    with (
        serving_http() as server,
        pytest.raises(HostError, match=r"no TLS connection to .*: \w+; is it"),
    ):
        Site.of(f"https://localhost:{server.port}").ask("GET", "/v2", "Triton")
    url = f"grpcs://localhost:{known.grpc_port}"
    with pytest.raises(HostError, match=f"no Triton answers over gRPC at {url}: .*; is it TLS there. GRPC_DEFAULT_SSL"):
        run(connect("grpc", url, "ensemble", tokenize, Wiring(transport="tritonclient")))
