"""`echo`, log-probabilities of prompts, and `logit_bias`."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2

from tests.support.gateways import (
    CHAT,
    END,
    INPUTS,
    OWN_INPUTS,
    TEXT,
    Asked,
    Triton,
    ask,
    chat,
    events,
    response,
    saying,
    tokens_of,
    write_model,
)
from tests.support.small_tokenizers import make
from trtpipe.pipeline.gateway.choices import Choice

# A gateway makes prompts in processes of its own.
pytestmark = [pytest.mark.process, pytest.mark.loopback]
OWN = {"inputs": [*INPUTS, *OWN_INPUTS]}


async def scored(asked: Asked, context: Any) -> AsyncIterator[Any]:
    """An engine to which a prompt's second token is the likeliest, and its others are less likely than its first."""
    count = len(asked.prompt) - 1
    others = [-1.0] * (count - 1)
    values = [-0.5, *others, -0.5, *(half + 0.5 for half in others)]
    likeliest = [*asked.prompt[1:2], *asked.prompt[:1] * (count - 1)][:count]
    prompt = (values if count else [], likeliest)
    yield response([END], final=True, log_probs=[-0.125], prompt=prompt)


def test_log_probabilities_of_prompts_as_lm_eval_asks_for_them(folder: Path) -> None:
    prompts = [tokens_of(folder, "ab c"), tokens_of(folder, "ab"), [5]]
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        body = (await client.post(TEXT, json={"model": "llama", "prompt": prompts, **fields})).json()
        first, second, third = body["choices"]
        told = first["logprobs"]
        assert told["tokens"] == ["a", "b", " ", "c", "</s>"]
        assert told["token_logprobs"] == [None, -0.5, -1.0, -1.0, -0.125]
        assert told["top_logprobs"] == [
            None, {"b": -0.5}, {" ": -1.0, "a": -0.5}, {"c": -1.0, "a": -0.5}, {"</s>": -0.125}
        ]  # fmt: skip
        assert first["text"] == "ab c"
        assert told["text_offset"] == [0, 1, 2, 3, 4]
        assert second["logprobs"]["token_logprobs"] == [None, -0.5, -0.125]
        assert third["logprobs"]["token_logprobs"] == [None, -0.125]
        asked = triton.asked[0]
        assert asked.raw["return_prompt_log_probs"] == b"\1"
        # An end token must come with its log-probability: it is a stop word.
        assert asked.number("end_id") == -1
        assert asked.raw["stop_words_list"] == struct.pack("<4i", END, 0, 1, 2)

    ask(scored, folder, scenario, triton=OWN)


def test_a_recommended_penalty_does_not_keep_prompts_from_being_scored(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 0], "repetition_penalty": 1.1}))
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 1}

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"model": "llama", "prompt": "ab", "logprobs": 1, "echo": True, "seed": 1234, **greedy}
        body = (await client.post(TEXT, json=fields)).json()
        assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {"b": -0.5}, {"</s>": -0.125}]
        assert "repetition_penalty" not in triton.asked[-1].raw
        # An answer alone has the recommended penalty, unless the request has one.
        likeliest = chat(logprobs=True, top_logprobs=1, **greedy)
        refused = (await client.post(CHAT, json=likeliest)).json()["error"]
        assert refused["param"] == "top_logprobs"
        assert refused["message"].endswith(
            "; the model recommends a repetition_penalty of 1.1, so give 'repetition_penalty': 1"
        )
        assert (await client.post(CHAT, json=chat(**greedy))).status_code == 200
        assert triton.asked[-1].number("repetition_penalty") == pytest.approx(1.1)
        assert (await client.post(CHAT, json={**likeliest, "repetition_penalty": 1})).status_code == 200
        given = (await client.post(TEXT, json={**fields, "repetition_penalty": 1.1})).json()["error"]["message"]
        assert given.endswith("without penalties, biases, forms and min_tokens")

    ask(scored, folder, scenario, triton=OWN)


def list_slowly(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """Let the second prompt be listed slowly. Returns what is set as that begins, and once the first is listed."""
    begun, listed = asyncio.Event(), asyncio.Event()
    list_prompt = Choice.list_prompt

    async def slowly(choice: Choice) -> None:
        if choice.index == 1:
            begun.set()
            await asyncio.sleep(0.3)
        await list_prompt(choice)
        if choice.index == 0:
            listed.set()

    monkeypatch.setattr(Choice, "list_prompt", slowly)
    return begun, listed


def test_a_prompt_whose_answer_comes_while_another_is_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokens_of(folder, "ab c"), tokens_of(folder, "ab")]
    begun, _ = list_slowly(monkeypatch)

    async def engine(asked: Asked, context: Any) -> AsyncIterator[Any]:
        if list(asked.prompt) == prompts[0]:
            await begun.wait()
        async for one in scored(asked, context):
            yield one

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
        body = (await client.post(TEXT, json={"model": "llama", "prompt": prompts, **fields})).json()
        assert [one["logprobs"]["tokens"] for one in body["choices"]] == [
            ["a", "b", " ", "c", "</s>"],
            ["a", "b", "</s>"],
        ]

    ask(engine, folder, scenario, triton=OWN)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before its first token", "after it"])
def test_an_answer_that_fails_while_another_prompt_is_listed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str, stream: bool
) -> None:
    prompts = [tokens_of(folder, "ab c"), tokens_of(folder, "ab")]
    begun, listed = list_slowly(monkeypatch)

    async def engine(asked: Asked, context: Any) -> AsyncIterator[Any]:
        failing, late = list(asked.prompt) == prompts[0], when == "after it"
        if late and not failing:
            await listed.wait()
        async for one in scored(asked, context):
            if failing:
                if late:
                    one.infer_response.parameters["triton_final_response"].bool_param = False
                    one.infer_response.raw_output_contents[0] = struct.pack("<i", prompts[0][0])
                    yield one
                await begun.wait()
                one = service_pb2.ModelStreamInferResponse(error_message="Exceeds maximum queue size")
            yield one

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"temperature": 0, "max_tokens": 9, "logprobs": 1, "echo": True, "stream": stream}
        answer = await client.post(TEXT, json={"model": "llama", "prompt": prompts, **fields})
        if stream and when == "after it":
            assert '"code": "overloaded"' in answer.text
            assert '"index":0,"text":"","logprobs":null,"finish_reason"' not in answer.text
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")

    ask(engine, folder, scenario, triton=OWN)


def test_a_prompt_alone_and_one_in_a_stream(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"model": "llama", "prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
        body = (await client.post(TEXT, json=fields)).json()
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
        assert choice["logprobs"]["tokens"] == ["a", "b"]
        assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}
        assert triton.asked[0].number("request_output_len") == 1
        chunks = await events(client, TEXT, {**fields, "max_tokens": 1, "temperature": 0})
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "ab"
        listed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [one["tokens"] for one in listed if one] == [["a", "b", "</s>"]]

    ask(scored, folder, scenario, triton=OWN)


def test_tokens_of_a_sentencepiece_decoder_keep_their_spaces(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    make("unsplit", folder)
    said = tokens_of(folder, "an owl ant")[1:]

    async def engine(asked: Asked, context: Any) -> AsyncIterator[Any]:
        if "return_prompt_log_probs" in asked.raw:
            async for one in scored(asked, context):
                yield one
        else:
            yield response([*said, END], final=True, log_probs=[-0.5] * (len(said) + 1))

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        (choice,) = (await client.post(TEXT, json={"model": "llama", "prompt": "x", "logprobs": 0})).json()["choices"]
        # As from vLLM: the text continues the prompt, so its first word is not the first of a text.
        assert choice["text"] == " an owl ant"
        assert choice["logprobs"]["tokens"] == [" an", " owl", " ant"]
        assert choice["logprobs"]["text_offset"] == [0, 3, 7]
        for prompt in ([0], [0, 0]):  # begins a text: it is special tokens alone
            (choice,) = (await client.post(TEXT, json={"model": "llama", "prompt": prompt})).json()["choices"]
            assert choice["text"] == "an owl ant"
        (choice,) = (await client.post(TEXT, json={"model": "llama", "prompt": "x", "echo": True})).json()["choices"]
        assert choice["text"] == "x an owl ant"
        (choice,) = (await client.post(CHAT, json=chat(logprobs=True))).json()["choices"]
        listed = choice["logprobs"]["content"]
        assert [one["token"] for one in listed] == ["an", " owl", " ant"]
        assert bytes(value for one in listed for value in one["bytes"]) == b"an owl ant"
        fields = {"model": "llama", "temperature": 0, "max_tokens": 0, "echo": True, "logprobs": 1}
        (choice,) = (await client.post(TEXT, json={**fields, "prompt": said})).json()["choices"]
        assert choice["text"] == "an owl ant"
        assert choice["logprobs"]["tokens"] == ["an", " owl", " ant"]
        assert choice["logprobs"]["top_logprobs"] == [None, {" owl": -0.5}, {" ant": -1.0, " an": -0.5}]

    ask(engine, folder, scenario, triton=OWN)


def test_an_echo_without_log_probabilities_is_for_every_runtime(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"model": "llama", "prompt": ["Say ", "No"], "n": 2, "echo": True, "stop": "a"}
        body = (await client.post(TEXT, json=fields)).json()
        # A stop string in the prompt is not one in the answer.
        assert [choice["text"] for choice in body["choices"]] == ["Say yes", "Say yes", "Noyes", "Noyes"]
        assert "return_prompt_log_probs" not in triton.asked[0].raw
        chunks = await events(client, TEXT, {**fields, "n": 1})
        said = ["", ""]
        for chunk in chunks:
            said[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert said == ["Say yes", "Noyes"]

    ask(saying(folder, "yes"), folder, scenario)


def test_a_bias_reaches_the_engine_as_one_number_for_each_of_its_tokens(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        fields = {"model": "llama", "prompt": "x", "logit_bias": {"5": -100, "7": 2.5}}
        assert (await client.post(TEXT, json=fields)).status_code == 200
        asked = triton.asked[0]
        assert asked.shapes["embedding_bias"] == [1, 600]
        bias = struct.unpack("<600f", asked.raw["embedding_bias"])
        assert {token: value for token, value in enumerate(bias) if value} == {5: -100, 7: 2.5}

    ask(saying(folder, "x"), folder, scenario, model={"vocab_size": 600})


def test_a_runtime_without_biases_refuses_them(folder: Path) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(TEXT, json={"model": "llama", "prompt": "x", "logit_bias": {"5": 1}})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")

    ask(saying(folder, "x"), folder, scenario, triton={"inputs": ["input_ids"], "outputs": ["output_ids"]})
