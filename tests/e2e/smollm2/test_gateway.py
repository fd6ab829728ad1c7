"""The official OpenAI client against the gateway, in front of a real tritonserver with the real model."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import ACTIVE, USED, Served, until
from tests.e2e.smollm2.conftest import ALIAS, KEY, MODEL, TOKENS, TOOLS, UNLIMITED
from trtpipe.pipeline.gateway.supervisor import Gateway

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.real


def hello(text: str = "What is the capital of France?") -> list[Any]:
    return [{"role": "user", "content": text}]


def test_ready_and_models(gateway: Gateway, client: openai.OpenAI) -> None:
    assert httpx.get(f"{gateway.url}/health/ready").text == "ready\n"
    assert [model.id for model in client.models.list()] == [MODEL, ALIAS, UNLIMITED, TOOLS]
    answer = client.chat.completions.create(model=ALIAS, messages=hello(), max_tokens=1)
    assert answer.model == MODEL


def test_greedy_text_is_that_of_transformers(
    client: openai.OpenAI, texts: tuple[str, ...], expected_texts: list[str]
) -> None:
    """Whole and streamed, eight requests in flight together."""

    def whole(text: str) -> str:
        made = client.completions.create(model=MODEL, prompt=text, max_tokens=TOKENS, temperature=0)
        return str(made.choices[0].text)

    def streamed(text: str) -> str:
        chunks = client.completions.create(model=MODEL, prompt=text, max_tokens=TOKENS, temperature=0, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(len(texts)) as pool:
        assert list(pool.map(whole, texts)) == expected_texts
        assert list(pool.map(streamed, texts)) == expected_texts


def test_chat_whole_and_streamed_with_usage(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model=MODEL, messages=hello(), temperature=0, max_completion_tokens=40)
    assert made.choices[0].message.content == "The capital of France is Paris."
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens <= 10
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=hello(), temperature=0, max_completion_tokens=40, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == made.choices[0].message.content
    assert chunks[-1].usage == made.usage
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_finish_by_length_and_by_a_stop_string(served: Served, client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model=MODEL, messages=hello(), temperature=0, max_tokens=3)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 3
    stopped = client.chat.completions.create(
        model=MODEL, messages=hello(), temperature=0, max_tokens=900, stop=" France", extra_body={"ignore_eos": True}
    )
    assert stopped.choices[0].message.content == "The capital of"
    assert stopped.choices[0].finish_reason == "stop"
    assert until(lambda: served.gauges()[ACTIVE] == 0)


def test_characters_that_span_tokens(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model=MODEL, prompt="😀" * 10, max_tokens=12, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces) == "😀" * 4
    assert "" not in pieces[:-1]


def test_seeds_and_several_answers(client: openai.OpenAI) -> None:
    def ask(seed: int | None) -> list[str]:
        made = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=4, n=3, seed=seed)
        assert [choice.index for choice in made.choices] == [0, 1, 2]
        return [choice.text for choice in made.choices]

    first = ask(7)
    assert ask(7) == first
    assert len(set(first)) > 1
    assert ask(None) != ask(None)


def test_log_probabilities(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=hello(), temperature=0, max_tokens=5, logprobs=True, top_logprobs=1
    )
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == made.choices[0].message.content
    assert all(entry.logprob <= 0 for entry in logprobs.content)
    assert [entry.top_logprobs[0].token for entry in logprobs.content] == [entry.token for entry in logprobs.content]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_answers_in_a_form_whole_and_in_pieces(client: openai.OpenAI) -> None:
    import jsonschema
    import openai

    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    asked = hello("Who was Marie Curie?")
    made = client.chat.completions.create(model=MODEL, messages=asked, max_tokens=100, seed=3, response_format=wanted)
    assert made.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(made.choices[0].message.content or ""), PERSON)
    pieces = client.chat.completions.create(
        model=MODEL, messages=asked, max_tokens=100, seed=3, response_format=wanted, stream=True
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert said == made.choices[0].message.content
    chosen = client.completions.create(
        model=MODEL, prompt="The capital of France is", extra_body={"structured_outputs": {"choice": ["Oslo", "Paris"]}}
    )
    assert chosen.choices[0].text in ("Oslo", "Paris")
    with pytest.raises(openai.BadRequestError, match="parenthesis is not closed") as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": {"regex": "(a"}})
    assert refused.value.param == "structured_outputs.regex"


def test_log_probabilities_of_prompts_and_a_bias(client: openai.OpenAI) -> None:
    prompt = [504, 3575, 282, 4649, 314]  # The capital of France is
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    first, second = client.completions.create(prompt=[prompt, prompt[:2]], **fields).choices
    assert first.text.startswith("The capital of France is")
    told = first.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.tokens[:5] == ["The", " capital", " of", " France", " is"]
    assert len(told.tokens) == 6
    assert told.token_logprobs[0] is None
    assert all(
        value <= max(top.values()) for value, top in zip(told.token_logprobs[1:], told.top_logprobs[1:], strict=True)
    )
    assert second.logprobs is not None
    assert second.logprobs.token_logprobs is not None
    assert second.logprobs.token_logprobs[1] == pytest.approx(told.token_logprobs[1], abs=0.05)
    likeliest = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=1).choices[0].text
    banned = client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=1, logit_bias={"7042": -100}
    )
    assert likeliest == " Paris"
    assert banned.choices[0].text != " Paris"


def test_errors_are_the_client_s_own_classes(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match=f"does not exist; served: {MODEL}, {ALIAS}"):
        client.chat.completions.create(model="gpt-4", messages=hello())
    with pytest.raises(openai.BadRequestError, match="tokens; this model takes 512"):
        client.completions.create(model=MODEL, prompt="word " * 2000)
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as refused:
        client.chat.completions.create(model=MODEL, messages=hello(), extra_body={"temprature": 1})
    assert refused.value.param == "temprature"
    with pytest.raises(openai.BadRequestError, match="chat template ignores tools"):
        client.chat.completions.create(
            model=MODEL, messages=hello(), tools=[{"type": "function", "function": {"name": "f"}}]
        )
    # What only the engine knows, it says itself.
    with pytest.raises(openai.BadRequestError, match="max_input_len"):
        client.completions.create(model=UNLIMITED, prompt="word " * 2000)
    with pytest.raises(openai.BadRequestError, match="max_seq_len"):
        client.completions.create(model=UNLIMITED, prompt="word", max_tokens=5000)


def test_requests_that_the_engine_refuses_leave_the_server_well(served: Served, client: openai.OpenAI) -> None:
    """Asked for gRPC statuses (`triton_grpc_error`), tritonserver 2.51 says so at each, and crashes at some."""
    import openai

    log = served.cli.home / "logs" / f"serve-{served.name}.log"
    before = log.read_text(errors="replace").count("HandleCancellation")
    for _ in range(20):
        with pytest.raises(openai.BadRequestError, match="max_seq_len"):
            client.completions.create(model=UNLIMITED, prompt="word", max_tokens=5000)
    assert log.read_text(errors="replace").count("HandleCancellation") == before
    assert served.generate(text_input="The capital of France is", max_tokens=4)["text_output"]


def test_api_keys(gateway: Gateway, client: openai.OpenAI) -> None:
    import openai

    stranger = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="not-it", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model=MODEL, messages=hello())
    assert client.chat.completions.create(model=MODEL, messages=hello(), max_tokens=1).choices
    for pid in gateway.pids:
        assert KEY not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine(
    served: Served, gateway: Gateway, client: openai.OpenAI, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": "Count: one, two,", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    headers = {"authorization": f"Bearer {KEY}"}
    if stream:
        chunks = client.completions.create(
            model=MODEL, prompt="Count: one, two,", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(chunks)
        assert until(lambda: served.gauges()[ACTIVE] == 1)
        left = time.monotonic()
        chunks.close()
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=1.0)
        left = time.monotonic()
    assert until(lambda: served.gauges()[ACTIVE] == 0)
    assert time.monotonic() - left < 2
    assert served.gauges()[USED] == 0
