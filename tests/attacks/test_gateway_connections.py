"""Clients that send slowly, endlessly, too much or nonsense, hold connections, leave early, or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    Asked,
    Triton,
    ask,
    chat,
    end_fork_servers,
    response,
    saying,
    until,
    write_model,
)
from trtpipe.pipeline.gateway import connections

pytestmark = [pytest.mark.loopback, pytest.mark.process]

HELLO = json.dumps(chat()).encode()
JSON = "Content-Type: application/json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_model(tmp_path_factory.mktemp("tokenizer"))
    end_fork_servers()


@pytest.fixture(autouse=True)
def _short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SWEEP_SECONDS", 0.05)


@pytest.fixture(autouse=True)
def _no_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a client does is no reason to write a log."""
    yield
    assert [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING] == []


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("the-key\n")
    return path


def head(*lines: str, key: str = "the-key", method: str = "POST", path: str = CHAT) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", JSON, *lines, "", ""]
    ).encode()


class Wire:
    """One connection as bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        """As much of it as the gateway takes."""
        self.writer.write(data)
        with contextlib.suppress(ConnectionError):
            await self.writer.drain()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        start, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        return int(start.split()[1]), headers, await self.reader.readexactly(int(headers.get("content-length", "0")))

    async def refused(self, status: int, code: str) -> str:
        """Check that the gateway refuses in OpenAI's form and closes; the message."""
        found, headers, body = await self.answer()
        error = json.loads(body)["error"]
        assert (found, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert headers["connection"] == "close"
        assert await self.closed() == b""
        return str(error["message"])

    async def closed(self) -> bytes:
        """What comes until the gateway closes the connection."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def wire(client: httpx.AsyncClient) -> AsyncIterator[Wire]:
    made = Wire(*await asyncio.open_connection(client.base_url.host, client.base_url.port))
    try:
        yield made
    finally:
        made.writer.close()


async def counted(client: httpx.AsyncClient, status: int, count: int, key: str = "the-key") -> None:
    line = f'trtpipe_gateway_requests_total{{endpoint="chat",status="{status}"}} {count}\n'
    text = (await client.get("/metrics", headers={"authorization": f"Bearer {key}"})).text
    assert line in text, text


# Slow and endless


@pytest.mark.parametrize(
    ("part", "sent"), [("head", b"POST /v1/chat/completions HTTP/1.1\r\nX: "), ("body", head("Content-Length: 100000"))]
)
def test_a_request_that_drips_is_refused_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str, sent: bytes
) -> None:
    monkeypatch.setattr(connections, f"{part.upper()}_SECONDS", 0.3)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(sent)
            dripping = asyncio.ensure_future(drip(one))
            assert await one.refused(408, "request_timeout") == f"the request's {part} did not arrive within 0.3 s"
            dripping.cancel()
        await counted(client, 408, 1)

    async def drip(one: Wire) -> None:
        while True:
            await one.send(b"x")
            await asyncio.sleep(0.02)

    ask(saying(folder, "x"), folder, scenario)


def test_connections_that_ask_nothing_are_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as silent, wire(client) as blank:
            await blank.send(b"\r\n\r\n")
            assert await silent.closed() == b""
            assert await blank.closed() == b""

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.parametrize(
    ("sent", "piece", "message"),
    [
        (head(key="wrong")[:-2] + b"X: ", b"x" * 65536, "the head is larger than 32768 bytes"),
        (b"GET /" + b"x" * 9000, b"x" * 9000, "the head is larger than 32768 bytes"),
        (head(key="wrong")[:-2], b"a:b\r\n" * 1000, "the request has more than 100 headers"),
    ],
)
def test_a_head_without_an_end_is_refused_before_it_costs_memory(
    folder: Path, keys: Path, sent: bytes, piece: bytes, message: str
) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(sent)
            for _ in range(50):
                await one.send(piece)
            assert await one.refused(431, "headers_too_large") == message

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys)


CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("sent", "piece", "status", "code"),
    [
        (head("Content-Length: 3000000"), b"x" * 100_000, 413, "request_too_large"),
        (head(CHUNKED), b"10000\r\n" + b"x" * 65536 + b"\r\n", 413, "request_too_large"),
        (head(CHUNKED), b"1;" + b"x" * 65536 + b"\r\nx\r\n", 413, "request_too_large"),
        (head(CHUNKED), b"1\r\nx\r\n" * 10_000, 400, "invalid_request"),
        (head(CHUNKED) + b"1\r\nx\r\n0\r\n", b"a:b\r\n" * 1000, 431, "headers_too_large"),
        (head(CHUNKED) + b"1\r\nx\r\n0\r\nX: ", b"x" * 65536, 413, "request_too_large"),
    ],
)
def test_a_body_that_is_too_large_is_refused_while_it_comes(
    folder: Path, sent: bytes, piece: bytes, status: int, code: str
) -> None:
    """And the client, which goes on sending for a while, finds the answer when it reads."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(sent)
            for _ in range(40):
                await one.send(piece)
            await one.refused(status, code)
        await counted(client, status, 1)

    ask(saying(folder, "x"), folder, scenario, max_body_bytes=1_000_000)


# Strangers


def test_a_stranger_s_body_is_not_read(folder: Path, keys: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for lines in (["Content-Length: 4000000"], [CHUNKED], ["Content-Length: 4", "Expect: 100-continue"]):
            async with wire(client) as one:
                await one.send(head(*lines, key="wrong"))
                assert await one.refused(401, "invalid_api_key") == "the API key is not valid"
        for path in ("/health/live", "/health/ready"):
            async with wire(client) as one:
                await one.send(head("Content-Length: 1", key="wrong", path=path))
                await one.refused(413, "request_too_large")
        async with wire(client) as one:  # a second key in what follows the body is no key
            await one.send(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            await one.send(b"0\r\nAuthorization: Bearer the-key\r\n\r\n")
            await one.refused(401, "invalid_api_key")
        await counted(client, 401, 3)

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys)


def test_a_client_that_asks_before_it_sends_its_body(folder: Path, keys: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(head(f"Content-Length: {len(HELLO)}", "Expect: 100-continue"))
            assert await one.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await one.send(HELLO)
            assert (await one.answer())[0] == 200

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"NONSENSE\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        head("Content-Length: -1"),
        head("Content-Length: 99999999999999999999999"),
        head("Content-Length: 5", "Content-Length: 6"),
        head("Content-Length: 5", CHUNKED),
        head(CHUNKED) + b"zz\r\n",
    ],
)
def test_what_is_not_http_gets_an_answer_all_the_same(folder: Path, sent: bytes) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(sent)
            await one.refused(400, "invalid_request")
        assert (await client.get("/health/live")).status_code == 200

    ask(saying(folder, "x"), folder, scenario)


def test_a_host_that_is_no_host(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for host in ("[", "x:y", "\x7f", ""):
            async with wire(client) as one:
                await one.send(f"GET /v2/none HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert (await one.answer())[0] in (400, 404)

    ask(saying(folder, "x"), folder, scenario)


# Leaving


def test_a_client_that_leaves_during_its_body_is_counted_as_such(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for reset in (False, True):
            async with wire(client) as one:
                await one.send(head("Content-Length: 1000") + b"{")
                await asyncio.sleep(0.05)
                if reset:
                    one.writer.transport.abort()
        async with wire(client) as one:
            await one.send(head(f"Content-Length: {len(HELLO)}") + HELLO)
        await until(lambda: triton.running == 0)
        await asyncio.sleep(0.2)
        await counted(client, 499, 3)
        await counted(client, 500, 0)

    ask(saying(folder, "x" * 200, pause=0.05), folder, scenario)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_client_that_does_not_read_its_answer_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_SECONDS", 0.5)

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        while True:
            yield response([72] * 5000)
            await asyncio.sleep(0.001)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = json.dumps(chat(stream=True, logprobs=True)).encode()
        async with wire(client) as one:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await one.send(head(f"Content-Length: {len(body)}") + body)
            await until(lambda: triton.running == 1)
            await until(lambda: triton.running == 0)
        await counted(client, 499, 1)

    ask(script, folder, scenario)


# Many


def test_slow_bodies_cannot_take_all_memory_nor_anybody_s_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtpipe.pipeline.gateway.app.UNFINISHED_BYTES", 4_000_000)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with contextlib.AsyncExitStack() as stack:
            slow = [await stack.enter_async_context(wire(client)) for _ in range(10)]
            for number, one in enumerate(slow):
                await one.send(head("Content-Length: 900000") + b" " * (500_000 + 10_000 * number))
            # They are 5.5 MB together: the largest have to go, whenever 4 MB are reached, until a quarter is free.
            answers = [asyncio.ensure_future(one.answer()) for one in slow]
            assert (await client.post(CHAT, json=chat())).status_code == 200
            await until(lambda: sum(answer.done() for answer in answers) >= 2)
            assert {answer.result()[0] for answer in answers if answer.done()} == {429}
            left = next(place for place, answer in enumerate(answers) if not answer.done())
            for place, one in enumerate(slow):
                if place != left:
                    one.writer.transport.abort()
            await asyncio.sleep(0.2)
            await slow[left].send(b" " * (399_999 - 10_000 * left) + b"x")
            assert (await answers[left])[0] == 400
            await asyncio.gather(*answers, return_exceptions=True)

    ask(saying(folder, "x"), folder, scenario, max_body_bytes=1_000_000)


def test_more_connections_than_there_is_room_for(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with contextlib.AsyncExitStack() as stack:
            running = await stack.enter_async_context(wire(client))
            body = json.dumps(chat(stream=True)).encode()
            await running.send(head(f"Content-Length: {len(body)}") + body)
            await until(lambda: triton.running == 1)
            idle = [await stack.enter_async_context(wire(client)) for _ in range(50)]
            for _ in range(5):
                answer = await client.get("/health/live", headers={"connection": "close"})
                assert answer.status_code == 200
            assert await idle[0].closed() == b"", "the one that has waited longest"
            assert b"data: [DONE]" in await asyncio.wait_for(running.reader.readuntil(b"0\r\n\r\n"), 20)

    ask(saying(folder, "x" * 50, pause=0.02), folder, scenario, most_connections=20)


def test_every_connection_is_being_answered(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with contextlib.AsyncExitStack() as stack:
            running = [await stack.enter_async_context(wire(client)) for _ in range(3)]
            for one in running:
                await one.send(head(f"Content-Length: {len(HELLO)}") + HELLO)
            await until(lambda: triton.running == 3)
            more = await stack.enter_async_context(wire(client))
            assert await more.closed() == b""
            assert [(await one.answer())[0] for one in running] == [200] * 3

    ask(saying(folder, "x" * 20, pause=0.02), folder, scenario, most_connections=3)


def test_requests_sent_ahead_of_the_answer_end_the_connection(folder: Path) -> None:
    """They would wait in memory: a read of 256 KB holds five thousand."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            await one.send(head(f"Content-Length: {len(HELLO)}") + HELLO + head(method="GET", path="/v1/models") * 5000)
            status, _, body = await one.answer()
            assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "x")
            assert await one.closed() == b""
        async with wire(client) as one:  # what follows is not a request at all
            await one.send(head(f"Content-Length: {len(HELLO)}") + HELLO + b"nonsense\r\n\r\n")
            assert (await one.answer())[0] == 200
            assert await one.closed() == b""
        async with wire(client) as one:  # one after the other is what everybody does
            for _ in range(3):
                await one.send(head(f"Content-Length: {len(HELLO)}") + HELLO)
                assert (await one.answer())[0] == 200

    ask(saying(folder, "x"), folder, scenario)


# Offers of another protocol

OFFERS = {
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAB"),
    "websocket": ("Upgrade: websocket", "Connection: keep-alive, Upgrade", "Sec-WebSocket-Version: 13"),
}
SIZED = f"Content-Length: {len(HELLO)}"
CHUNKS = b"8\r\n" + HELLO[:8] + b"\r\n%x\r\n" % len(HELLO[8:]) + HELLO[8:] + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize(
    ("field", "body", "cuts"),
    [
        (SIZED, HELLO, []),
        (SIZED, HELLO, [-len(HELLO)]),
        (SIZED, HELLO, [30, -len(HELLO) - 1, -5]),
        (CHUNKED, CHUNKS, []),
        (CHUNKED, CHUNKS, [-len(CHUNKS), -8]),
    ],
    ids=["at-once", "body-later", "in-pieces", "chunked", "chunked-later"],
)
def test_an_offer_of_another_protocol_is_ignored(
    folder: Path, offer: str, field: str, body: bytes, cuts: list[int]
) -> None:
    """Java's HttpClient and `curl --http2` offer HTTP/2 in each request without TLS."""

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with wire(client) as one:
            for lines in (OFFERS[offer], OFFERS[offer], ()):
                request = head(*lines, field) + body
                places = [0, *(cut % len(request) for cut in cuts), len(request)]
                for start, end in itertools.pairwise(places):
                    await one.send(request[start:end])
                    await asyncio.sleep(0.05)
                status, headers, answer = await one.answer()
                assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "x")
                assert "connection" not in headers
            await one.send(head(*OFFERS[offer], method="GET", path="/health/live"))
            assert (await one.answer())[::2] == (200, b"live\n")
            await one.send(head("Connection: close, Upgrade", "Upgrade: h2c", field) + body)
            status, headers, _ = await one.answer()
            assert (status, headers["connection"]) == (200, "close")
            assert await one.closed() == b""
        assert triton.asked[0].prompt == triton.asked[-1].prompt

    ask(saying(folder, "x"), folder, scenario)


def test_a_request_with_an_offer_has_the_limits_of_any_other(
    folder: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.3)
    offer = OFFERS["h2c"]

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for sent, status, code in (
            (head(*offer, "Content-Length: 5", key="wrong"), 401, "invalid_api_key"),
            (head(*offer, "Content-Length: 1001"), 413, "request_too_large"),
            (head(*offer, CHUNKED) + b"3e9\r\n" + b"x" * 1001, 413, "request_too_large"),
            (head(*offer, *("a: b",) * 98), 431, "headers_too_large"),
            (head(*offer, "a: " + "b" * 41000), 431, "headers_too_large"),
            (head(*offer, "Content-Length: 5") + b"x", 408, "request_timeout"),
            (head("Connection: Upgrade", method="CONNECT", path="x:443"), 400, "invalid_request"),
        ):
            async with wire(client) as one:
                await one.send(sent)
                await one.refused(status, code)
        async with wire(client) as one:  # the client waits for the word to go on, and gets it once
            await one.send(head(*offer, SIZED, "Expect: 100-continue"))
            assert (await one.answer())[0] == 100
            await one.send(HELLO)
            assert (await one.answer())[0] == 200
            await one.send(head(*offer, SIZED) + HELLO + head(*offer, SIZED) + HELLO)
            assert (await one.answer())[0] == 200
            assert await one.closed() == b""

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys, max_body_bytes=1000)
