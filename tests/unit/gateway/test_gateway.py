"""The gateway against a Triton of the test's own: its gRPC service, with scripted tokens in place of an engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from tests.support.factories import write_tokenizer
from tests.support.gateways import (
    CHAT,
    END,
    INPUTS,
    TEXT,
    Asked,
    Triton,
    ask,
    chat,
    end_fork_servers,
    events,
    fork_server,
    response,
    saying,
    spoken,
    tokens_of,
    until,
    write_model,
)
from trtpipe import __version__
from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.pipeline.gateway import process, upstream
from trtpipe.pipeline.gateway.app import build
from trtpipe.pipeline.gateway.failure import Failure, of_status, of_text
from trtpipe.pipeline.gateway.model_names import require_free
from trtpipe.pipeline.gateway.options import GatewayOptions, ServedModel
from trtpipe.pipeline.gateway.requests import ChatRequest, CompletionRequest, parse
from trtpipe.pipeline.gateway.shared_counters import ROW_BYTES, SharedCounters
from trtpipe.pipeline.gateway.stops import Stops
from trtpipe.pipeline.gateway.supervisor import Gateway
from trtpipe.pipeline.net.h2.status import Code, Status

# A gateway makes prompts in processes of its own.
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_model(tmp_path_factory.mktemp("tokenizer"))
    end_fork_servers()


# Answers


@pytest.mark.loopback
def test_a_chat_answer_whole(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> tuple[Any, Asked]:
        return (await client.post(CHAT, json=chat(max_tokens=50))).json(), triton.asked[0]

    body, asked = ask(saying(folder, 'a "quoted" 😀 é\n'), folder, scenario)
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "llama"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": 'a "quoted" 😀 é\n', "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    prompt = tokens_of(folder, "<s>[user]Hello")
    made = len(tokens_of(folder, 'a "quoted" 😀 é\n')) + 1
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": made,
        "total_tokens": len(prompt) + made,
    }
    assert asked.prompt == prompt
    # Tritonserver 2.51 may crash after an error of a stream that asks for statuses.
    assert "triton_grpc_error" not in asked.metadata


@pytest.mark.loopback
def test_a_chat_answer_as_events(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> list[dict[str, Any]]:
        return await events(client, CHAT, chat("Hi", max_tokens=50, stream_options={"include_usage": True}))

    chunks = ask(saying(folder, "50% 😀!"), folder, scenario)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert spoken(chunks) == "50% 😀!"
    assert "😀" in [chunk["choices"][0]["delta"].get("content") for chunk in chunks[:-1]]
    *others, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(tokens_of(folder, "50% 😀!")) + 1
    assert all(chunk["usage"] is None for chunk in others)
    assert others[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert [chunk["choices"][0]["finish_reason"] for chunk in others[:-1]] == [None] * (len(others) - 1)


@pytest.mark.loopback
def test_the_usage_so_far_in_every_chunk(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> list[dict[str, Any]]:
        options = {"include_usage": True, "continuous_usage_stats": True}
        return await events(client, CHAT, chat("Hi", max_tokens=50, stream_options=options))

    counts = [chunk["usage"]["completion_tokens"] for chunk in ask(saying(folder, "50% 😀!"), folder, scenario)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(tokens_of(folder, "50% 😀!")) + 1


@pytest.mark.loopback
def test_text_completions_both_ways(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        whole = (await client.post(TEXT, json={"model": "llama", "prompt": "Once"})).json()
        assert whole["object"] == "text_completion"
        assert whole["choices"] == [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": "stop"}]
        assert triton.asked[0].number("request_output_len") == 16
        assert triton.asked[0].prompt == tokens_of(folder, "Once")
        chunks = await events(client, TEXT, {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 3})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " up"
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert "usage" not in chunks[-1]
        assert triton.asked[1].prompt == [5, 6, 7]

    ask(saying(folder, " upon"), folder, scenario)


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("tokens", "limit", "said", "reason"),
    [
        ([72, 73, END], 10, 2, "stop"),  # the end token is sent
        ([72, 73], 10, 2, "stop"),  # the engine keeps it to itself
        ([72, 73, 74], 3, 3, "length"),
        ([72, 73, END], 3, 2, "stop"),  # the last one allowed is the end token
        ([72, 73, 0], 10, 2, "stop"),  # the model's other end token
    ],
)
def test_why_an_answer_ended_is_what_happened(
    folder: Path, tokens: list[int], limit: int, said: int, reason: str
) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in tokens:
            yield response([token])
        yield response([], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(CHAT, json=chat(max_tokens=limit))).json()
        assert body["choices"][0]["finish_reason"] == reason
        assert len(body["choices"][0]["message"]["content"]) == said
        assert body["usage"]["completion_tokens"] == len(tokens)
        (asked,) = triton.asked
        assert asked.number("end_id") == END
        assert asked.shapes["stop_words_list"] == [1, 2, 1]
        assert struct.unpack("<2i", asked.raw["stop_words_list"]) == (0, 1)

    ask(script, folder, scenario)


@pytest.mark.loopback
def test_ends_that_are_to_be_ignored(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(CHAT, json=chat(max_tokens=3, ignore_eos=True, min_tokens=3))).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert triton.asked[0].number("end_id") == -1
        assert triton.asked[0].number("min_tokens") == 3
        assert "stop_words_list" not in triton.asked[0].raw

    ask(saying(folder, "ab"), folder, scenario)


@pytest.mark.loopback
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "said"),
    [
        (" three", "one two"),
        (["four", "o t"], "one tw"),
        ("five!", "one two three four"),
        (["e tw", " two"], "on"),
        (["nowhere", ""], "one two three four"),
    ],
)
def test_stop_strings_end_the_text_and_the_engine_s_work(
    folder: Path, stop: str | list[str], said: str, stream: bool
) -> None:
    text = "one two three four"

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = chat(stop=stop, max_tokens=100)
        if stream:
            chunks = await events(client, CHAT, body)
            found, reason = spoken(chunks), chunks[-1]["choices"][0]["finish_reason"]
        else:
            (choice,) = (await client.post(CHAT, json=body)).json()["choices"]
            found, reason = choice["message"]["content"], choice["finish_reason"]
        assert found == said
        assert reason == "stop"
        if said != text:
            await until(lambda: len(triton.stopped) == 1 and triton.running == 0)
        assert triton.cancelled == 0

    ask(saying(folder, text, pause=0.01), folder, scenario)


@pytest.mark.loopback
def test_several_answers_and_several_prompts(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in asked.prompt[-1:] * 3:
            yield response([token])
            await asyncio.sleep(0.001)
        yield response([END], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(TEXT, json={"model": "llama", "prompt": ["xa", "xb"], "n": 2, "seed": 7})).json()
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
            (0, "aaa"), (1, "aaa"), (2, "bbb"), (3, "bbb")
        ]  # fmt: skip
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 16, "total_tokens": 20}
        assert sorted(asked.number("seed") for asked in triton.asked) == [7, 8, 9, 10]
        chunks = await events(client, CHAT, chat("z", n=3))
        assert [spoken(chunks, index) for index in range(3)] == ["zzz"] * 3
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"] == "stop"]
        assert sorted(ends) == [0, 1, 2]
        refused = (await client.post(CHAT, json=chat(n=17))).json()
        assert refused["error"]["param"] == "n"

    ask(script, folder, scenario)


@pytest.mark.loopback
def test_log_probabilities_of_the_chosen_tokens(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(CHAT, json=chat(logprobs=True, temperature=0, top_logprobs=1))).json()
        content = body["choices"][0]["logprobs"]["content"]
        assert content[0] == {
            "token": "H", "logprob": -0.5, "bytes": [72],
            "top_logprobs": [{"token": "H", "logprob": -0.5, "bytes": [72]}],
        }  # fmt: skip
        assert [entry["logprob"] for entry in content] == [-0.5, -0.75, -1.0, -1.25]
        assert content[2]["bytes"] is None, "half of a character has no text"
        assert triton.asked[0].raw["return_log_probs"] == b"\1"
        assert triton.asked[0].wanted == ["output_ids", "sequence_length", "output_log_probs"]
        chunks = await events(client, CHAT, chat(logprobs=True))
        told = [entry for chunk in chunks[1:-1] for entry in chunk["choices"][0]["logprobs"]["content"]]
        assert [entry["logprob"] for entry in told] == [-0.5, -0.75, -1.0, -1.25]
        assert spoken(chunks) == "Hié"
        old = (await client.post(TEXT, json={"model": "llama", "prompt": "x", "logprobs": 0})).json()
        assert old["choices"][0]["logprobs"]["tokens"][:2] == ["H", "i"]
        assert old["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -0.75, -1.0, -1.25]
        assert old["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
        for body, param in (
            (chat(logprobs=True, top_logprobs=2, temperature=0), "top_logprobs"),
            (chat(logprobs=True, top_logprobs=1, temperature=1), "top_logprobs"),
            (chat(top_logprobs=1), "top_logprobs"),
        ):
            refused = await client.post(CHAT, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    ask(saying(folder, "Hié"), folder, scenario)


@pytest.mark.loopback
def test_a_model_that_gives_no_log_probabilities_and_an_older_one(folder: Path) -> None:
    older = {"inputs": ["input_ids"], "outputs": ["output_ids"], "decoupled": False}

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        refused = await client.post(CHAT, json=chat(logprobs=True))
        assert "no log-probabilities" in refused.json()["error"]["message"]
        body = (await client.post(CHAT, json=chat(min_tokens=1))).json()
        assert body["choices"][0]["message"]["content"] == "x"
        (asked,) = triton.asked
        assert {"random_seed", "min_length"} <= set(asked.raw)
        assert asked.raw["streaming"] == b"\0"
        assert "exclude_input_in_output" not in asked.raw

    ask(saying(folder, "x"), folder, scenario, triton=older)


@pytest.mark.loopback
def test_sampling_options_reach_the_engine_under_its_names(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({}, {"temperature": 1.0, "runtime_top_p": 1.0, "runtime_top_k": 0}),
            ({"temperature": 0}, {"runtime_top_k": 1}),
            ({"temperature": 1e-300}, {"runtime_top_k": 1}),  # 0 as a float of 32 bits
            ({"top_p": 1e-300}, {"runtime_top_k": 1}),
            ({"top_p": 0.5, "top_k": 9, "seed": 3}, {"runtime_top_p": 0.5, "runtime_top_k": 9, "seed": 3}),
            ({"top_k": -1, "seed": -1}, {"runtime_top_k": 0, "seed": 2**64 - 1}),
            (
                {"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25},
                {"presence_penalty": 0.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25},
            ),
            ({"max_completion_tokens": 3, "max_tokens": 9}, {"request_output_len": 3}),
        ]
        for fields, expected in cases:
            answer = await client.post(CHAT, json=chat(**fields))
            assert answer.status_code == 200, answer.text
            asked = triton.asked[-1]
            assert {name: asked.number(name) for name in expected} == expected
        assert {"temperature", "runtime_top_p"}.isdisjoint(triton.asked[1].raw)
        assert triton.asked[0].number("seed") != triton.asked[1].number("seed")
        assert triton.asked[0].number("request_output_len") == 1024

    ask(saying(folder, "x"), folder, scenario)


LLM_API = {
    "inputs": ["text_input", "input_ids", "sampling_param_max_tokens", "return_log_probs", "stop"],
    "outputs": ["text_output", "output_ids", "output_log_probs"],
}


@pytest.mark.loopback
def test_a_model_of_the_llm_api_gets_the_same_under_its_own_names(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in tokens_of(folder, "abc"):
            yield response([token])
        await asyncio.sleep(60 if asked.raw["sampling_param_seed"] == bytes(8) else 0)
        yield response([END], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = chat(max_tokens=50, temperature=0.5, top_k=3, min_tokens=2, seed=7)
        answer = (await client.post(CHAT, json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "abc"
        assert answer["usage"]["completion_tokens"] == 4
        asked = triton.asked[0]
        assert asked.prompt == tokens_of(folder, "<s>[user]Hello")
        assert asked.shapes == {
            "input_ids": [len(asked.prompt)], "streaming": [1], "sampling_param_max_tokens": [1],
            "sampling_param_end_id": [1], "sampling_param_stop_token_ids": [1], "sampling_param_seed": [1],
            "sampling_param_temperature": [1], "sampling_param_top_p": [1], "sampling_param_top_k": [1],
            "sampling_param_min_tokens": [1],
        }  # fmt: skip
        numbers = {
            name: struct.unpack("<f" if name.endswith("temperature") else "<i", asked.raw[f"sampling_param_{name}"])[0]
            for name in ("max_tokens", "end_id", "stop_token_ids", "temperature", "top_k", "min_tokens")
        }
        assert numbers == {
            "max_tokens": 50, "end_id": END, "stop_token_ids": 0, "temperature": 0.5, "top_k": 3, "min_tokens": 2,
        }  # fmt: skip
        assert asked.wanted == ["output_ids"]
        # A stop string is looked for here; the request that ends the engine's work has nothing but its id.
        stopped = (await client.post(CHAT, json=chat(stop="b", seed=0))).json()
        assert stopped["choices"][0]["message"]["content"] == "a"
        await until(lambda: len(triton.stopped) == 1)

    ask(script, folder, scenario, triton=LLM_API)


@pytest.mark.loopback
def test_a_model_that_takes_text_alone_is_refused_in_words(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported_model")
        assert "the model tensorrt_llm takes text alone" in answer.json()["error"]["message"]

    nvidia = {"inputs": ["text_input", "sampling_param_max_tokens"], "outputs": ["text_output"]}
    ask(saying(folder, "x"), folder, scenario, triton=nvidia)


@pytest.mark.loopback
def test_messages_in_parts_and_roles(folder: Path) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
        assert (await client.post(CHAT, json=chat() | {"messages": messages})).status_code == 200
        assert triton.asked[0].prompt == tokens_of(folder, "<s>[system]Be brief.[user]one two")
        refused = await client.post(CHAT, json=chat() | {"messages": messages[::-1]})
        assert refused.status_code == 400
        assert "the system speaks first" in refused.json()["error"]["message"]

    ask(saying(folder, "x"), folder, scenario)


# Refusals


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("body", "status", "param", "telling"),
    [
        (b"{", 400, None, "not JSON"),
        (b"[]", 400, None, "not a JSON object"),
        (b"[" * 200_000, 400, None, "not JSON"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (chat(temprature=1), 400, "temprature", "unknown field 'temprature'; did you mean 'temperature'?"),
        (chat(max_token=1), 400, "max_token", "did you mean 'max_tokens'?"),
        (chat(zzz=1), 400, "zzz", "unknown field 'zzz'"),
        (chat(functions=[{"name": "f"}]), 400, "functions", "'functions' is not supported"),
        (chat(temperature="hot"), 400, "temperature", "'temperature': "),
        (chat(temperature=3), 400, "temperature", "less than or equal to 2"),
        (chat(temperature=float("nan")), 400, "temperature", "finite"),
        (chat(n=True), 400, "n", "valid integer"),
        (chat(max_tokens=0), 400, "max_tokens", "greater than or equal to 1"),
        (chat(max_tokens=2**31), 400, "max_tokens", "less than 2147483648"),
        (chat(repetition_penalty=1e300), 400, "repetition_penalty", "less than or equal to 100"),
        (chat(repetition_penalty=1e-300), 400, "repetition_penalty", "greater than or equal to 0.01"),
        (chat(top_k=2**31), 400, "top_k", "less than 2147483648"),
        (chat(seed=2**64), 400, "seed", "less than 18446744073709551616"),
        (chat(seed=10**70), 400, None, "more than 64 digits"),
        (chat(n=2**31), 400, "n", "at most 16 answers a request, not 2147483648"),
        (chat(stop=["x" * 257]), 400, "stop", "up to 256 characters"),
        (chat(stop=["x"] * 5000), 400, "stop", "'stop' holds more than 4096 elements"),
        (chat() | {f"x{n}": 1 for n in range(50_000)}, 400, None, "the body holds more than 50000 elements"),
        (chat() | {"x" * 5000: 1}, 400, "x" * 200 + "...", "unknown field 'xxx"),
        (chat(model="x" * 5000), 404, "model", "xxx...' does not exist"),
        (chat(stop=["x"] * 17), 400, "stop", "up to 16"),
        (chat(stream_options={"include_usage": True}), 400, "stream_options", "needs 'stream': true"),
        ({"model": "llama"}, 400, "messages", "'messages' is missing"),
        (chat() | {"messages": []}, 400, "messages", "at least 1"),
        (chat() | {"messages": [{"role": "user"}]}, 400, "messages.0.content", "missing"),
        (chat() | {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "'system'"),
        (
            chat() | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
            "messages.0.content.0.type",
            "images are not supported",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            400,
            "messages.0.content.0.text",
            "'messages.0.content.0.text': Input should be a valid string",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": 5}]},
            400,
            "messages.0.content",
            "'messages.0.content': Input should be a valid string or a valid list",
        ),
        (
            chat() | {"messages": [{"role": "user", "content": {}}]},
            400,
            "messages.0.content",
            "'messages.0.content': Input should be a valid string or a valid list",
        ),
        (chat(stop=5), 400, "stop", "'stop': Input should be a valid string or a valid list"),
        (chat(stream_options=5), 400, "stream_options", "'stream_options': Input should be an object"),
        (chat(stop=["x", 5]), 400, "stop.1", "'stop.1': Input should be a valid string"),
        (chat("\ud800"), 400, None, "half of a surrogate pair"),
        (chat() | {"\ud800": 1}, 400, None, "half of a surrogate pair"),
        (b'{"model": "llama", "messages": "\xed\xa0\x80"}', 400, None, "not JSON"),
        (chat(model="gpt-4"), 404, "model", "model 'gpt-4' does not exist; served: llama"),
        (chat("x" * 60), 400, "messages", "the prompt has 67 tokens; this model takes 50"),
        (chat("x" * 40, max_tokens=60), 400, "messages", "has 47 tokens and max_tokens is 60; this model takes 100"),
        (chat("x" * 2_000_000), 413, None, "larger than 1000000 bytes"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_by_name(
    folder: Path, body: Any, status: int, param: str | None, telling: str
) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await client.post(CHAT, content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert telling in error["message"]
        if param is not None:
            assert error["param"] == param
        assert triton.asked == []
        assert f'{{endpoint="chat",status="{status}"}} 1' in (await client.get("/metrics")).text

    limits = {"max_input_len": 50, "max_seq_len": 100}
    ask(saying(folder, "x"), folder, scenario, model=limits, max_body_bytes=1_000_000)


@pytest.mark.loopback
def test_completions_refuse_what_they_cannot_do(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": 5}, "prompt"),
            ({"prompt": {}}, "prompt"),
            ({"prompt": ["x", 5]}, "prompt.1"),
            ({"prompt": [[5], "x"]}, "prompt.1"),
            ({"prompt": [5, True]}, "prompt.0"),
            ({"prompt": ["x"] * 17}, "prompt"),
            ({"prompt": ["x"] * 5, "n": 4}, "n"),
            ({"prompt": [5, 9999]}, "prompt"),
            ({"prompt": [-5]}, "prompt"),
            ({"prompt": "x", "suffix": "y"}, "suffix"),
            ({"prompt": "x", "echo": True, "logprobs": 1, "temperature": 0}, "echo"),
            ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
            ({"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x"),
            ({"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias.-1"),
            ({"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias.9999"),
            ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias.5"),
            ({"prompt": "x", "logit_bias": {"5": 1}, "logprobs": 1, "temperature": 0}, "logprobs"),
            ({"prompt": "x", "best_of": 2}, "best_of"),
            ({"prompt": "x", "logprobs": 2}, "logprobs"),
            ({"prompt": "x", "messages": []}, "messages"),
        ]
        for fields, param in cases:
            answer = await client.post(TEXT, content=json.dumps({"model": "llama", **fields}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), fields
        neutral: dict[str, Any] = {"suffix": None, "echo": False, "best_of": 1, "logit_bias": {}, "user": "me", "n": 1}
        assert (await client.post(TEXT, json={"model": "llama", "prompt": "x", **neutral})).status_code == 200
        pair = {"model": "llama", "prompt": "\U0001f600", "stop": "\U0001f600"}  # escaped, it is two surrogates
        assert (await client.post(TEXT, content=json.dumps(pair))).status_code == 200

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.loopback
def test_other_routes(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["llama"]
        assert (await client.get("/v1/models/llama")).json()["object"] == "model"
        assert (await client.get("/v1/models/x/y")).json()["error"]["code"] == "model_not_found"
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/version")).json() == {"version": __version__}
        nothing = await client.get("/v2/none")
        assert (nothing.status_code, nothing.json()["error"]["message"]) == (404, "GET /v2/none: Not Found")
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.get("/docs")).status_code == 404

    ask(saying(folder, "x"), folder, scenario)


@pytest.mark.loopback
def test_every_served_name_is_answered_under_the_first(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for name in ("llama", "gpt-4o", "other", "o2"):
            answer = (await client.post(CHAT, json={**chat(), "model": name})).json()
            assert answer["model"] == {"gpt-4o": "llama", "o2": "other"}.get(name, name)
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == [
            "llama", "gpt-4o", "other", "o2",
        ]  # fmt: skip
        assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
        told = (await client.post(CHAT, json={**chat(), "model": "gpt-5"})).json()["error"]["message"]
        assert told.endswith("served: llama, gpt-4o, other, o2")

    more = (ServedModel(name="other", tokenizer=folder, aliases=("o2",)),)
    ask(saying(folder, "x"), folder, scenario, model={"aliases": ("gpt-4o",)}, more=more)


@pytest.mark.loopback
def test_adapters_are_models_of_their_own_which_come_and_go(folder: Path, tmp_path: Path) -> None:
    """A request's adapter reaches Triton by its number; the worker and its prompt process look into the same folder."""
    adapters = tmp_path / "lora"

    def add(number: int, name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter.json").write_text(json.dumps({"name": name, "rank": 8}))
        (tmp_path / name).rename(adapters / str(number))

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        triton.inputs = [*INPUTS, "lora_task_id"]

        async def listed() -> list[tuple[str, str | None]]:
            models = (await client.get("/v1/models")).json()["data"]
            return [(model["id"], model.get("parent")) for model in models]

        async def asked(model: str) -> tuple[str, bytes | None]:
            answer = (await client.post(CHAT, json={**chat(), "model": model})).json()
            return answer["model"], triton.asked[-1].raw.get("lora_task_id")

        assert await listed() == [("llama", None), ("gpt-4o", None)]
        add(7, "fr")
        add(2**31 - 1, "de.2-x")
        assert await listed() == [
            ("llama", None), ("llama:de.2-x", "llama"), ("llama:fr", "llama"),
            ("gpt-4o", None), ("gpt-4o:de.2-x", "gpt-4o"), ("gpt-4o:fr", "gpt-4o"),
        ]  # fmt: skip
        assert await asked("llama:fr") == ("llama:fr", struct.pack("<Q", 7))
        assert await asked("gpt-4o:de.2-x") == ("llama:de.2-x", struct.pack("<Q", 2**31 - 1))
        assert await asked("llama") == ("llama", None)
        assert (await client.get("/v1/models/llama:fr")).json()["parent"] == "llama"
        (adapters / "7").rename(tmp_path / "gone")
        count = len(triton.asked)
        for name in ("llama:fr", "llama:", ":fr", "llama:fr:fr", "fr"):
            answer = await client.post(CHAT, json={**chat(), "model": name})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert len(triton.asked) == count
        triton.inputs = INPUTS

    adapters.mkdir()
    script = saying(folder, "x")
    ask(script, folder, scenario, model={"aliases": ("gpt-4o",), "adapters": adapters})


def test_an_adapter_may_not_have_the_name_of_a_model() -> None:
    names = ("llama", "llama:fr")
    require_free(names, ("llama",), "de")
    with pytest.raises(UsageError, match="the name llama:fr is that of a model, and of llama with the adapter fr"):
        require_free(names, ("llama",), "fr")


@pytest.mark.loopback
def test_tokens_of_a_text_or_of_messages_and_the_way_back(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async def tokenize(**body: Any) -> Any:
            return (await client.post("/tokenize", json=body)).json()

        ids = tokens_of(folder, "ab é")
        told = await tokenize(model="llama", prompt="ab é")
        assert told == {"count": len(ids), "max_model_len": 100, "tokens": ids}
        assert (await tokenize(prompt="ab", return_token_strs=True))["token_strs"] == ["a", "b"]
        assert (await tokenize(prompt=""))["tokens"] == []
        messages = chat("Hi")["messages"]
        whole = await tokenize(messages=messages)
        assert whole["tokens"] == tokens_of(folder, "<s>[user]Hi")
        usage = (await client.post(CHAT, json=chat("Hi"))).json()["usage"]
        assert usage["prompt_tokens"] == whole["count"]
        back = await client.post("/detokenize", json={"model": "llama", "tokens": [0, *ids]})
        assert back.json() == {"prompt": "<s>ab é"}
        for path, body, field in (
            ("/tokenize", {"prompt": "x", "messages": messages}, "prompt"),
            ("/tokenize", {"model": "llama"}, "prompt"),
            ("/tokenize", {"prompt": "x", "add_special": True}, "add_special"),
            ("/tokenize", {"prompt": "x", "model": "nix"}, "model"),
            ("/tokenize", {"prompt": "x" * 1000}, "prompt"),
            ("/detokenize", {"tokens": [1, 300]}, "tokens"),
            ("/detokenize", {"tokens": "x"}, "tokens"),
        ):
            refused = await client.post(path, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (404 if field == "model" else 400, field)
        many = await client.post("/detokenize", json={"tokens": tokens_of(folder, "a") * 10_000})
        assert many.json() == {"prompt": "a" * 10_000}

    ask(saying(folder, "x"), folder, scenario, model={"max_seq_len": 100})


@pytest.mark.loopback
def test_pages_of_an_origin_may_call_and_need_a_key_all_the_same(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key\n")
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = "access-control-allow-origin"

    def scenario(origin: str, answer: str | None) -> Any:
        async def asked(client: httpx.AsyncClient, triton: Triton) -> None:
            page = {"origin": origin}
            before = await client.options(CHAT, headers={**page, **preflight})
            assert (before.status_code, before.headers.get(allowed)) == (200 if answer else 400, answer)
            for key, body, status in (("key", chat(), 200), ("no", chat(), 401), ("key", {"model": 1}, 400)):
                headers = {**page, "authorization": f"Bearer {key}"}
                real = await client.post(CHAT, json=body, headers=headers)
                assert (real.status_code, real.headers.get(allowed)) == (status, answer)
            assert allowed not in (await client.get("/health")).headers

        return asked

    own: dict[str, Any] = {"api_keys_file": tmp_path / "keys", "cors_origins": ("https://a.example",)}
    ask(saying(folder, "x"), folder, scenario("https://a.example", "https://a.example"), **own)
    ask(saying(folder, "x"), folder, scenario("https://b.example", None), **own)
    every = {**own, "cors_origins": ("*",)}
    ask(saying(folder, "x"), folder, scenario("https://b.example", "*"), **every)


@pytest.mark.loopback
def test_api_keys(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfirst-key\n\n  second-key\n")
    monkeypatch.setenv("TRTPIPE_API_KEYS", "third,fourth")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for header, status in [
            (None, 401),
            ("Bearer wrong", 401),
            ("Bearer # ours", 401),
            ("Basic first-key", 401),
            ("Bearer first-key", 200),
            ("bearer second-key", 200),
            ("Bearer third", 200),
            ("Bearer fourth", 200),
        ]:
            headers = {"authorization": header} if header else {}
            for answer in (
                await client.get("/v1/models", headers=headers),
                await client.get("/metrics", headers=headers),
                await client.post(CHAT, json=chat(), headers=headers),
            ):
                assert answer.status_code == status, header
                if status == 401:
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.post(CHAT, content=b"{")).status_code == 401, "nothing is read of a stranger's body"
        for path in ("/health", "/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        assert (await client.get("/version")).status_code == 401
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 401

    ask(saying(folder, "x"), folder, scenario, api_keys_file=keys)
    (tmp_path / "none").write_text("# nothing\n")
    for file in (tmp_path / "none", tmp_path / "absent"):
        keyed = options(folder, api_keys_file=file)
        with pytest.raises(InputDataError):
            build(keyed, SharedCounters(), fork_server(keyed), most_connections=10)


@pytest.mark.loopback
@pytest.mark.parametrize(
    ("code", "words", "status", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Maximum queue size of 2 has been reached", 429, "rate_limit_error"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too much", 429, "rate_limit_error"),
        (grpc.StatusCode.UNAVAILABLE, "the engine process ended (signal 9)", 503, "server_error"),
        (grpc.StatusCode.INVALID_ARGUMENT, "max_input_len", 400, "invalid_request_error"),
        (grpc.StatusCode.INTERNAL, "it broke", 500, "server_error"),
        (grpc.StatusCode.INTERNAL, "Prompt length (9) exceeds maximum input length (5)", 400, "invalid_request_error"),
        (None, "takes 512 (max_input_len)", 400, "invalid_request_error"),
        (None, "Exceeds maximum queue size", 429, "rate_limit_error"),
        (None, "it broke", 500, "server_error"),
    ],
)
@pytest.mark.parametrize("when", ["before the first token", "after it"])
def test_what_the_engine_refuses_is_told_as_it_is(
    folder: Path, code: grpc.StatusCode | None, words: str, status: int, kind: str, when: str
) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        if when == "after it":
            yield response([72])
        if code is None:
            yield service_pb2.ModelStreamInferResponse(error_message=words)
        else:
            await context.abort(code, words)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        async with client.stream("POST", CHAT, json=chat(stream=True)) as answer:
            text = (await answer.aread()).decode()
        if when == "after it":
            assert answer.status_code == 200
            last, done, _ = text.split("\n\n")[-3:]
            error = json.loads(last.removeprefix("data: "))["error"]
            assert done == "data: [DONE]"
        else:
            error = json.loads(text)["error"]
            assert answer.status_code == status
            assert ("retry-after" in answer.headers) == (status in (429, 503))
        assert error["type"] == kind
        assert words in error["message"]
        whole = await client.post(CHAT, json=chat())
        assert whole.status_code == status

    ask(script, folder, scenario)


@pytest.mark.loopback
def test_a_stream_that_ends_without_a_final_response(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        yield response([72])

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat())
        assert answer.status_code == 500
        assert "without a final response" in answer.json()["error"]["message"]

    ask(script, folder, scenario)


@pytest.mark.loopback
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


@pytest.mark.loopback
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


@pytest.mark.loopback
def test_a_model_without_a_stop_input_is_left_by_a_reset(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = asyncio.ensure_future(client.post(CHAT, json=chat()))
        await until(lambda: triton.running == 1)
        asking.cancel()
        await until(lambda: triton.running == 0)
        assert (triton.stopped, triton.cancelled) == ([], 1)

    inputs = [name for name in INPUTS if name != "stop"]
    ask(saying(folder, "x" * 100_000, pause=0.005), folder, scenario, triton={"inputs": inputs})


@pytest.mark.loopback
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


@pytest.mark.loopback
def test_more_requests_than_the_gateway_may_answer(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        asking = [asyncio.ensure_future(client.post(CHAT, json=chat())) for _ in range(2)]
        await until(lambda: triton.running == 2)
        refused = await client.post(CHAT, json=chat())
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        for one in asking:
            assert (await one).status_code == 200

    ask(saying(folder, "x" * 50, pause=0.01), folder, scenario, max_requests=2)


@pytest.mark.loopback
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


@pytest.mark.loopback
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


@pytest.mark.loopback
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


# Parts


def options(folder: Path, **fields: Any) -> GatewayOptions:
    models = (ServedModel(name="llama", tokenizer=folder),)
    return GatewayOptions(**{"models": models, "grpc_url": "127.0.0.1:1", **fields})


def test_options_survive_the_way_to_a_worker_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("api_keys_file", "tls_cert", "tls_key")}
    models = (ServedModel(name="a", tokenizer=tmp_path, aliases=("b",)),)
    whole = options(tmp_path, models=models, cors_origins=("*",), port=1, **files)
    assert GatewayOptions.from_json(whole.to_json()) == whole
    assert whole.url == "https://127.0.0.1:1"
    for fields in (
        {"models": ()},
        {"models": (whole.models[0],) * 2},
        {"models": (ServedModel(name="a", tokenizer=tmp_path, aliases=("a",)),)},
        {"models": (ServedModel(name="", tokenizer=tmp_path),)},
        {"cors_origins": ("app.example",)},
        {"cors_origins": ("https://app.example/",)},
        {"grpc_url": "localhost"},
        {"grpc_url": "http://localhost:1/x"},
        {"tls_cert": None},
        {"workers": 0},
        {"port": 70_000},
    ):
        with pytest.raises(UsageError):
            GatewayOptions(**{**whole.__dict__, **fields})
    assert options(tmp_path, host="::1").url == "http://[::1]:9000"


def test_a_model_without_a_chat_template_and_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    from trtpipe.pipeline.gateway.text import Text

    with pytest.raises(InputDataError, match="holds no tokenizer"):
        Text(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "do_sample": true}')
    text = Text(tmp_path)
    assert text.defaults == {"temperature": 0.6, "top_p": 0.9}
    with pytest.raises(Failure, match="no chat template"):
        text.render([{"role": "user", "content": "x"}])


@given(
    text=st.text("abc", max_size=30),
    words=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_are_found_however_the_text_is_cut(text: str, words: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    stops = Stops(tuple(words))
    out = ""
    found = False
    for piece in pieces:
        more, found = stops.push(piece)
        out += more
        if found:
            break
    if not found:
        out += stops.flush()
    # The first to be complete ends the text; among those of one piece the one that begins first.
    ends = [text.find(word) for word in words if word in text]
    assert found == bool(ends)
    if not ends:
        assert out == text
    else:
        assert text.startswith(out)
        assert not any(word in out for word in words)
        assert len(out) >= min(ends)


def test_requests_are_what_they_say() -> None:
    asked = parse(json.dumps(chat(stop="x", logprobs=True)).encode(), ChatRequest)
    assert isinstance(asked, ChatRequest)
    assert (asked.stops(), asked.wants_log_probs(), asked.include_usage) == (("x",), (True, 0), False)
    completion = parse(b'{"model":"m","prompt":[[1],[2,3]]}', CompletionRequest)
    assert isinstance(completion, CompletionRequest)
    assert completion.prompts(2) == [[1], [2, 3]]


def test_every_status_has_an_answer() -> None:
    for code in Code:
        assert 400 <= of_status(Status(code, "words")).status < 600
        assert of_status(Status(code, "words", lost=True)).status in (503, 504)
    assert of_text("model is not ready").status == 503
    assert of_text("no adapter has the number 7").code == "model_not_found"


def test_boards_add_up(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(ROW_BYTES * 2))
    first, second = SharedCounters(path, 0, 2), SharedCounters(path, 1, 2)
    first.answered("chat", 200)
    second.answered("chat", 200)
    second.answered("completions", 418)
    second.observe("first_token", 0.03)
    second.observe("inter_token", 0.02, 3)
    first.observe("inter_token", 7.0)
    second.add("running")
    second.add("waiting")
    for board in (first, second):
        text = board.text()
        assert 'requests_total{endpoint="chat",status="200"} 2' in text
        assert 'requests_total{endpoint="completions",status="500"} 1' in text
        assert 'first_token_seconds_bucket{le="0.025"} 0' in text
        assert 'first_token_seconds_bucket{le="0.05"} 1' in text
        assert 'inter_token_seconds_bucket{le="0.015"} 0' in text
        assert 'inter_token_seconds_bucket{le="0.02"} 3' in text
        assert 'inter_token_seconds_bucket{le="2.5"} 3' in text
        assert 'inter_token_seconds_bucket{le="+Inf"} 4' in text
        assert "inter_token_seconds_count 4\n" in text
        assert "inter_token_seconds_sum 7.06\n" in text
        assert "trtpipe_gateway_running 1" in text
        assert "trtpipe_gateway_waiting 1" in text
    assert (first.own("running"), second.own("running")) == (0, 1)
    renewed = SharedCounters(path, 1, 2)
    # A worker that is replaced answers nothing any more.
    assert (renewed.total("running"), renewed.total("waiting")) == (0, 0)


# Processes


@pytest.mark.loopback
def test_workers_share_a_port_are_replaced_and_end(folder: Path, tmp_path: Path) -> None:
    import threading

    gateway = Gateway.start(options(folder, port=0, workers=2), tmp_path / "log")
    watching = threading.Thread(target=gateway.watch)
    watching.start()
    try:
        for _ in range(10):
            assert httpx.get(f"{gateway.url}/health/live", trust_env=False).status_code == 200
        assert httpx.get(f"{gateway.url}/health/ready", trust_env=False, timeout=20).status_code == 503
        with pytest.raises(HostError, match="cannot be taken"):
            Gateway.start(options(folder, port=gateway.options.port))
        killed = gateway.pids[0]
        os.kill(killed, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while gateway.pids[0] == killed:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        asked = json.dumps(chat("in confidence"))
        for _ in range(5):
            answer = httpx.post(f"{gateway.url}{CHAT}", content=asked, trust_env=False, timeout=20)
            assert answer.status_code == 503
    finally:
        gateway.stop()
        watching.join()
    assert "in confidence" not in (tmp_path / "log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.url}/health/live", trust_env=False)


@pytest.mark.loopback
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_a_gateway_with_a_certificate_serves_https(folder: Path, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    gateway = Gateway.start(options(folder, port=0, tls_cert=cert, tls_key=key))
    try:
        trusting = ssl.create_default_context(cafile=cert)
        assert gateway.url.startswith("https://")
        assert httpx.get(f"{gateway.url}/health/live", verify=trusting, trust_env=False).text == "live\n"
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{gateway.options.port}/health/live", trust_env=False)
    finally:
        gateway.stop()


@pytest.mark.loopback
def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"^.* holds no tokenizer that can be read") as caught:
        Gateway.start(options(tmp_path, port=0))
    with pytest.raises(InputDataError) as again:
        process.start(options(tmp_path, port=0), tmp_path / "log")
    assert str(again.value) == str(caught.value)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.loopback
def test_a_ctrl_c_while_a_gateway_starts_leaves_none(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    asleep = time.sleep

    def interrupted(seconds: float) -> None:
        started.extend(child.pid for child in psutil.Process().children() if process.alive(child.pid))
        monkeypatch.setattr(time, "sleep", asleep)
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        process.start(options(folder, port=0), tmp_path / "log")
    assert len(started) == 1
    assert not process.alive(started[0])


@pytest.mark.loopback
def test_a_gateway_whose_port_is_taken_says_so_in_its_own_words(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(HostError) as caught:
            process.start(options(folder, port=port), tmp_path / "log")
    assert str(caught.value) == (
        f"port {port} on 127.0.0.1 cannot be taken: Address already in use; stop what listens there, or choose "
        "another port"
    )


def test_what_the_command_needs_of_the_gateway_is_light() -> None:
    script = (
        "import sys, trtpipe.pipeline.gateway.supervisor;"
        "print([name for name in ('fastapi', 'uvicorn', 'pydantic', 'tokenizers', 'hpack', 'tritonclient') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
