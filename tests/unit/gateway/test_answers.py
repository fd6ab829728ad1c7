"""Answers of the gateway, and what it asks of a Triton of the test's own, whose tokens are scripted."""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    END,
    TEXT,
    Asked,
    Triton,
    ask,
    chat,
    events,
    response,
    saying,
    spoken,
    tokens_of,
    until,
)

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.loopback]


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


def test_the_usage_so_far_in_every_chunk(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> list[dict[str, Any]]:
        options = {"include_usage": True, "continuous_usage_stats": True}
        return await events(client, CHAT, chat("Hi", max_tokens=50, stream_options=options))

    counts = [chunk["usage"]["completion_tokens"] for chunk in ask(saying(folder, "50% 😀!"), folder, scenario)]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == len(tokens_of(folder, "50% 😀!")) + 1


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


@pytest.mark.parametrize(
    ("tokens", "limit", "said", "reason"),
    [
        ([72, 73, END], 10, 2, "stop"),  # the end token is sent
        ([72, 73], 10, 2, "stop"),  # the engine keeps it to itself
        ([72, 73, 74], 3, 3, "length"),
        ([72, 73, END], 3, 2, "stop"),  # the last one allowed is the end token
        ([72, 73, 0], 10, 2, "stop"),  # the model's other end token
        ([72, END, 73], 3, 2, "length"),  # the engine went on after an end token
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


def test_ends_that_are_to_be_ignored(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(CHAT, json=chat(max_tokens=3, ignore_eos=True, min_tokens=3))).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert triton.asked[0].number("end_id") == -1
        assert triton.asked[0].number("min_tokens") == 3
        assert "stop_words_list" not in triton.asked[0].raw

    ask(saying(folder, "ab"), folder, scenario)


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


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_stop_strings_do_not_end_the_first_min_tokens_tokens(folder: Path, cut: int) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        cases: list[tuple[int, str, str]] = [
            (0, "\n", "a"), (1, "\n", "a"), (2, "\n", "a\nb"), (3, "\n", "a\nb"), (4, "\n", "a\nb\nc"),
            (6, "\n", "a\nb\nc\nd"), (3, "b\n", "a\n"), (4, "b\n", "a\nb\nc\nd"), (8, "d", "a\nb\nc\nd"),
        ]  # fmt: skip
        for least, stop, said in cases:
            body = {"model": "llama", "prompt": "x", "stop": stop, "min_tokens": least, "max_tokens": 50}
            whole = (await client.post(TEXT, json=body)).json()["choices"][0]
            assert (whole["text"], whole["finish_reason"]) == (said, "stop"), (least, stop)
            chunks = await events(client, TEXT, body)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said

    ask(saying(folder, "a\nb\nc\nd", cut=cut), folder, scenario)


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
        refused = (await client.post(CHAT, json=chat(n=33))).json()
        assert refused["error"]["param"] == "n"

    ask(script, folder, scenario)


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
            (chat(logprobs=True, top_logprobs=1, temperature=0, min_tokens=1), "top_logprobs"),
            (chat(top_logprobs=1), "top_logprobs"),
        ):
            refused = await client.post(CHAT, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        # Without end tokens `min_tokens` keeps none from being drawn.
        fixed = chat(logprobs=True, top_logprobs=1, temperature=0, min_tokens=3, max_tokens=3, ignore_eos=True)
        assert (await client.post(CHAT, json=fixed)).status_code == 200

    ask(saying(folder, "Hié"), folder, scenario)


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
    "inputs": [
        "text_input", "input_ids", "streaming", "return_log_probs", "stop",
        *(f"sampling_param_{name}" for name in ("max_tokens", "end_id", "stop_token_ids", "temperature", "top_p")),
        *(f"sampling_param_{name}" for name in ("top_k", "min_tokens", "seed")),
    ],
    "outputs": ["text_output", "output_ids", "output_log_probs"],
}  # fmt: skip


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


def test_sampling_options_that_the_llm_api_ignores_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        log_probs = [-0.5] if "return_log_probs" in asked.raw else None
        yield response([*tokens_of(folder, "a")], log_probs=log_probs)
        yield response([END], final=True, log_probs=log_probs)

    ignored = ("seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for name, value in (*((name, 0.5) for name in ignored[1:4]), ("seed", 7), ("min_tokens", 1)):
            answer = await client.post(CHAT, json=chat("Hello", **{name: value}))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
            assert error["message"] == f"'{name}': the sampler of this model's runtime ignores it"
        assert triton.asked == []
        # Values without an effect are no wish: neutral ones, the seed of a greedy answer, a least length without ends.
        neutral = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}
        endless = {"min_tokens": 1, "ignore_eos": True, "max_tokens": 1}
        for fields in (neutral, {"seed": 7, "temperature": 0}, endless):
            answer = await client.post(CHAT, json=chat("Hello", **fields))
            assert answer.status_code == 200, answer.text
            assert not {f"sampling_param_{name}" for name in ignored} & triton.asked[-1].raw.keys()
        # The penalty that the model recommends is not there either: the likeliest token of a greedy answer is known.
        likeliest = chat(temperature=0, logprobs=True, top_logprobs=1)
        assert (await client.post(CHAT, json=likeliest)).status_code == 200

    shutil.copytree(folder, tmp_path / "model")
    recommended = {"eos_token_id": [END, 0], "repetition_penalty": 1.1}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(recommended))
    inputs = [name for name in LLM_API["inputs"] if name.removeprefix("sampling_param_") not in ignored]
    ask(script, tmp_path / "model", scenario, triton={**LLM_API, "inputs": inputs})


def test_answers_that_the_llm_api_cannot_draw_or_score_are_refused_by_name(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        log_probs = [-0.5] if "return_log_probs" in asked.raw else None
        yield response([*tokens_of(folder, "a")], log_probs=log_probs)
        yield response([END], final=True, log_probs=log_probs)

    async def refused(client: httpx.AsyncClient, **fields: Any) -> tuple[str, str]:
        answer = await client.post(CHAT, json=chat("Hello", **fields))
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        return error["param"], error["message"]

    async def greedy(client: httpx.AsyncClient, triton: Triton) -> None:
        told = "'temperature': the sampler of this model's runtime ignores it and takes the likeliest token: give 0"
        for fields in ({}, {"temperature": 0.5}, {"top_p": 0.5, "seed": 7}):
            assert await refused(client, **fields) == ("temperature", told)
        guided = await refused(client, temperature=0, response_format={"type": "json_object"})
        assert guided == (
            "response_format",
            "'response_format': this model's runtime has no guided decoding with drafts",
        )
        assert triton.asked == []
        for name, value in (("temperature", 0), ("top_k", 1)):
            answer = await client.post(CHAT, json=chat("Hello", logprobs=True, **{name: value}))
            assert answer.status_code == 200, answer.text
            assert not {f"sampling_param_{one}" for one in drawing} & triton.asked[-1].raw.keys()

    async def unscored(client: httpx.AsyncClient, triton: Triton) -> None:
        assert await refused(client, logprobs=True) == (
            "logprobs",
            "'logprobs': the sampler of this model's runtime gives none of a token that it draws: "
            "give 'temperature': 0, or serve a build without drafts and with another "
            "sampler (serving.llm_args)",
        )
        assert triton.asked == []
        for fields in ({}, {"logprobs": True, "temperature": 0}):
            assert (await client.post(CHAT, json=chat("Hello", **fields))).status_code == 200

    drawing = ("temperature", "top_k", "top_p", "seed")
    inputs = [name for name in LLM_API["inputs"] if name.removeprefix("sampling_param_") not in drawing]
    ask(script, folder, greedy, triton={**LLM_API, "inputs": inputs})
    ask(script, folder, unscored, triton={**LLM_API, "parameters": {"drawn_log_probs": "false"}})


def test_a_model_that_takes_text_alone_is_refused_in_words(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unsupported_model")
        assert "the model tensorrt_llm takes text alone" in answer.json()["error"]["message"]

    nvidia = {"inputs": ["text_input", "sampling_param_max_tokens"], "outputs": ["text_output"]}
    ask(saying(folder, "x"), folder, scenario, triton=nvidia)


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
