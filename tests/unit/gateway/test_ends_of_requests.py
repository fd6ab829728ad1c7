"""Requests that end in another way, many requests at once, and the metrics of those under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateways import CHAT, END, INPUTS, Asked, Triton, ask, chat, events, response, saying, spoken, until
from trtpipe.pipeline.gateway import upstream
from trtpipe.pipeline.gateway.answers import Answer

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.loopback]


def test_a_stream_that_ends_without_a_final_response(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        yield response([72])

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 500
        assert "without a final response" in answer.json()["error"]["message"]

    ask(script, folder, scenario)


def test_an_answer_that_fails_while_its_first_event_is_sent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        yield response([72])
        await asyncio.sleep(0.1)
        yield service_pb2.ModelStreamInferResponse(error_message="it broke")

    stream = Answer._stream

    async def slowly(answer: Answer, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                await until(lambda: answer.choices[0].generation.done)
            await send(message)

        await stream(answer, sent)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        text = (await client.post(CHAT, json=chat(stream=True))).text
        assert "it broke" in text
        assert '"finish_reason":"stop"' not in text

    monkeypatch.setattr(Answer, "_stream", slowly)
    ask(script, folder, scenario)


def test_an_answer_that_takes_too_long(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        await until(lambda: len(triton.stopped) == 1)
        async with client.stream("POST", CHAT, json=chat(stream=True)) as streamed:
            text = (await streamed.aread()).decode()
        assert streamed.status_code == 200
        assert '"code": "timeout"' in text
        await until(lambda: len(triton.stopped) == 2)
        assert (await client.get("/health/live")).status_code == 200

    ask(saying(folder, "x" * 1000, pause=0.05), folder, scenario, timeout_s=1)


@pytest.mark.parametrize(("deaf", "resets"), [(1, 0), (100, 1)])
def test_a_stop_without_effect_is_sent_again_and_then_the_stream_reset(
    folder: Path, monkeypatch: pytest.MonkeyPatch, deaf: int, resets: int
) -> None:
    monkeypatch.setattr(upstream, "STOP_PAUSES_S", (0.1, 0.2))

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: triton.running == 1)
        asking.cancel()
        await until(lambda: triton.running == 0)
        assert (len(triton.stopped), triton.cancelled) == (1 - resets, resets)

    ask(saying(folder, "x" * 100_000, pause=0.005), folder, scenario, triton={"deaf": deaf})


def test_a_model_without_a_stop_input_is_left_by_a_reset(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: triton.running == 1)
        asking.cancel()
        await until(lambda: triton.running == 0)
        assert (triton.stopped, triton.cancelled) == ([], 1)

    inputs = [name for name in INPUTS if name != "stop"]
    ask(saying(folder, "x" * 100_000, pause=0.005), folder, scenario, triton={"inputs": inputs})


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_the_engine_s_work_at_once(folder: Path, stream: bool) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json=chat(n=3, stream=stream)))
        await until(lambda: triton.running == 3)
        await asyncio.sleep(0.05)
        asking.cancel()
        left = time.monotonic()
        await until(lambda: triton.running == 0)
        assert time.monotonic() - left < 0.5
        # Each by its own name, and none by a reset, which may end an older tritonserver.
        assert (len(set(triton.stopped)), triton.cancelled) == (3, 0)
        text = (await client.get("/metrics")).text
        assert 'trtpipe_gateway_requests_total{endpoint="chat",status="499"} 1' in text
        assert "trtpipe_gateway_running 0" in text

    ask(saying(folder, "x" * 100_000, pause=0.005), folder, scenario)


def test_more_requests_than_the_gateway_may_answer(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = [asyncio.ensure_future(client.post(CHAT, json=chat())) for _ in range(2)]
        await until(lambda: triton.running == 2)
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for one in asking:
            assert (await one).status_code == 200

    ask(saying(folder, "x" * 50, pause=0.01), folder, scenario, max_requests=2)


def test_a_server_that_is_gone_and_comes_back(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: triton.running == 1)
        await triton.server.stop(0)
        assert (await asking).status_code in (429, 503)
        gone = await client.post(CHAT, json=chat())
        assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
        assert (await client.get("/health/live")).status_code == 200
        ready = await client.get("/health/ready")
        assert (ready.status_code, ready.text) == (503, "not ready: tensorrt_llm\n")

    ask(saying(folder, "x" * 500, pause=0.01), folder, scenario)


def test_many_streams_at_once_are_each_their_own(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in asked.prompt[-20:]:
            yield response([token])
            await asyncio.sleep(0.001)
        yield response([END], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        texts = [f"stream number {number:06d}" for number in range(100)]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=client.base_url, limits=limits, timeout=60, trust_env=False) as many:
            chunks = await asyncio.gather(*(events(many, CHAT, chat(text)) for text in texts))
        assert [spoken(one) for one in chunks] == texts
        text = (await client.get("/metrics")).text
        assert "trtpipe_gateway_completion_tokens_total 2100\n" in text
        assert "trtpipe_gateway_first_token_seconds_count 100\n" in text
        assert "trtpipe_gateway_inter_token_seconds_count 2000\n" in text

    ask(script, folder, scenario)


def test_an_answer_under_way_is_seen_in_the_metrics(folder: Path) -> None:
    """It waits until its first token; then its tokens are counted while it goes on."""
    go_on = asyncio.Event()

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for tokens in ([3], [4, 5]):
            await go_on.wait()
            go_on.clear()
            yield response(tokens)
        await go_on.wait()
        yield response([END], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async def shows(*lines: str) -> None:
            deadline = time.monotonic() + 20
            while not set(lines) <= set((text := (await client.get("/metrics")).text).splitlines()):
                assert time.monotonic() < deadline, text
                await asyncio.sleep(0.01)

        asking = asyncio.ensure_future(client.post(CHAT, json=chat(max_tokens=9)))
        await shows("trtpipe_gateway_waiting 1", "trtpipe_gateway_running 1")
        go_on.set()
        await shows("trtpipe_gateway_waiting 0", "trtpipe_gateway_completion_tokens_total 1")
        go_on.set()
        await shows("trtpipe_gateway_completion_tokens_total 3", "trtpipe_gateway_inter_token_seconds_count 2")
        go_on.set()
        assert (await asking).status_code == 200
        await shows("trtpipe_gateway_running 0", "trtpipe_gateway_completion_tokens_total 4")

    ask(script, folder, scenario)
