"""Faults that a prompt asks the mock server for, as independent clients see them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest

from tests.support.h2 import run
from tests.support.mock_server import SILENCE_S, grpc_client, http_client, infer, serving
from trtpipe.pipeline.bench.mock_server.script import FAULTS, Script, Then, Truth, script_of
from trtpipe.pipeline.bench.mock_server.server import MockServer
from trtpipe.pipeline.net.h2 import triton


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hello", Script(8)),
        ("!", Script(8)),
        ("!unknown 3", Script(8)),
        ("say !stall 3", Script(8)),
        ("!stall 3", Script(3, Then.STALL)),
        ("!cut", Script(0, Then.CUT)),
        ("!short 3", Script(3)),
        ("!short 30", Script(8)),
        ("!empty", Script(0)),
        ("!garbage 2 x", Script(2, Then.GARBAGE)),
        ("!error 3 out of memory", Script(3, Then.ERROR, words="out of memory")),
        ("!status 429", Script(0, Then.STATUS, words="429")),
        ("!status", Script(0, Then.STATUS, words="503")),
        ("!burst", Script(8, burst=True)),
    ],
)
def test_what_a_prompt_asks_for(prompt: str, expected: Script) -> None:
    assert script_of(prompt, 8) == expected


# Fault, number of tokens that come, and how the answer ends: over gRPC, generate_stream and OpenAI's completions.
ENDS = [
    ("!short 3", 3, "ok", "ok", "ok"),
    ("!burst", 8, "ok", "ok", "ok"),
    ("!empty", 0, "ok", "ok", "ok"),
    ("!error 3 out of memory", 3, "out of memory", "out of memory", "out of memory"),
    ("!garbage 3", 3, "malformed", "malformed", "malformed"),
    ("!cut 3", 3, "UNAVAILABLE", "lost", "lost"),
    ("!status 429", 0, "UNAVAILABLE", "429", "429"),
    ("!stall 3", 3, "silence", "silence", "silence"),
]


def tokens_of(response: Any) -> list[bytes]:
    return list(response.infer_response.raw_output_contents)


async def through_grpc(server: MockServer, prompt: str) -> tuple[int, str]:
    """Number of tokens, and how it ended."""
    tokens = 0
    async with grpc_client(server) as channel:
        method = channel.stream_stream(triton.STREAM_INFER)  # bytes, so that what is malformed is seen here
        stream = method()
        await stream.write(infer(prompt, 8, "g", stream=True))
        await stream.done_writing()
        while True:
            try:
                message = await asyncio.wait_for(stream.read(), SILENCE_S if tokens == 3 and "stall" in prompt else 30)
            except asyncio.TimeoutError:
                return tokens, "silence"
            except grpc.aio.AioRpcError as error:
                return tokens, error.code().name
            if message is grpc.aio.EOF:
                assert await stream.code() is grpc.StatusCode.OK
                return tokens, "ok"
            try:
                reply = triton.parse(message)
            except triton.MalformedMessage:
                return tokens, "malformed"
            if reply.error:
                return tokens, reply.error
            assert reply.final == (not reply.outputs)
            tokens += bool(reply.outputs)


async def through_http(server: MockServer, prompt: str, openai_way: bool) -> tuple[int, str]:
    body: dict[str, Any] = {"max_tokens": 8, "stream": True}
    body |= {"model": "ensemble", "prompt": prompt} if openai_way else {"id": "h", "text_input": prompt}
    path = "/v1/completions" if openai_way else "/v2/models/ensemble/generate_stream"
    tokens = 0
    async with http_client(server) as client:
        try:
            async with client.stream("POST", path, json=body, headers={"X-Request-Id": "h"}) as response:
                if response.status_code != 200:
                    await response.aread()
                    assert "error" in response.json()
                    return tokens, str(response.status_code)
                lines = response.aiter_lines()
                while True:
                    stalled = tokens == 3 and "stall" in prompt
                    line = await asyncio.wait_for(anext_or_none(lines), SILENCE_S if stalled else 30)
                    if line is None:
                        return tokens, "ok"
                    if line in ("", "data: [DONE]"):
                        continue
                    try:
                        event = json.loads(line.removeprefix("data: "))
                    except ValueError:
                        return tokens, "malformed"
                    if "error" in event:
                        return tokens, event["error"]["message"] if openai_way else event["error"]
                    tokens += bool(event["choices"][0]["text"] if openai_way else event["text_output"])
        except asyncio.TimeoutError:
            return tokens, "silence"
        except httpx.RemoteProtocolError:
            return tokens, "lost"


async def anext_or_none(lines: AsyncIterator[str]) -> str | None:
    async for line in lines:
        return line
    return None


@pytest.mark.loopback
@pytest.mark.parametrize(("prompt", "tokens", "over_grpc", "over_http", "over_openai"), ENDS)
def test_faults_as_independent_clients_see_them(
    prompt: str, tokens: int, over_grpc: str, over_http: str, over_openai: str
) -> None:
    async def scenario() -> list[Truth]:
        async with serving() as server:
            seen, end = await through_grpc(server, prompt)
            assert end == over_grpc
            # What came right before the cut may be lost within grpc.
            assert seen == tokens or ("cut" in prompt and seen < tokens)
            assert await through_http(server, prompt, openai_way=False) == (tokens, over_http)
            assert await through_http(server, prompt, openai_way=True) == (tokens, over_openai)
            return server.truth

    truth = run(scenario())
    assert [(one.id, one.protocol, one.tokens) for one in truth] == [
        ("g", "grpc", tokens), ("h", "http", tokens), ("h", "openai", tokens)
    ]  # fmt: skip
    ended = not {over_grpc, over_http} & {"lost", "silence"}
    assert [one.end_ns is not None for one in truth] == [ended] * 3
    if prompt == "!burst":
        assert [len(set(one.stamps_ns)) for one in truth] == [1, 1, 1]


def test_no_fault_goes_untested() -> None:
    assert {row[0].split()[0].removeprefix("!") for row in ENDS} == set(FAULTS)
