"""Random requests: each gets an answer in OpenAI's form, and none is a fault of the gateway's."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateways import CHAT, TEXT, Triton, ask, chat, end_fork_servers, saying
from tests.support.tool_models import TIME, WEATHER, call_text, write_tool_model

pytestmark = [pytest.mark.loopback, pytest.mark.process]

TOGETHER = 8
TOLD: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "refusal": None, "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}]},
    {"role": "tool", "tool_call_id": "a", "content": "sunny"},
]  # fmt: skip
SCHEMA: dict[str, Any] = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": []}},
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 3},
        "b": {"anyOf": [{"type": "string", "maxLength": 5}, {"$ref": "#/$defs/node"}]},
        "c": {"type": ["integer", "null"], "minimum": 0},
        "d": {"oneOf": [{"type": "string", "pattern": "^a$"}, {"type": "boolean"}]},
    },
    "required": ["a"],
    "additionalProperties": False,
}
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat(n=2, stop=["x", "y"], temperature=0.5, top_p=0.5, top_k=5, seed=1, max_tokens=3, min_tokens=1)),
    (CHAT, chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}, ignore_eos=True)),
    (CHAT, chat(logprobs=True, top_logprobs=1, temperature=0, repetition_penalty=1.1, presence_penalty=0.1)),
    (CHAT, chat() | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me"}]}),
    (CHAT, chat(tools=[], tool_choice="auto", logit_bias={}, response_format={"type": "text"}, metadata={"a": "b"})),
    (CHAT, chat(tools=[WEATHER, TIME], tool_choice="auto", parallel_tool_calls=False, n=2)),
    (CHAT, chat(tools=[WEATHER], tool_choice="required", stream=True)),
    (CHAT, chat(tools=[TIME, WEATHER], tool_choice={"type": "function", "function": {"name": "get_time"}})),
    (CHAT, chat(tools=[WEATHER]) | {"messages": TOLD}),
    (CHAT, chat(response_format={"type": "json_object"}, logit_bias={"5": -100, "6": 0.5})),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}),
    ),
    (TEXT, {"model": "llama", "prompt": "Once", "structured_outputs": {"json": SCHEMA}}),
    (TEXT, {"model": "llama", "prompt": "Once", "structured_outputs": {"choice": ["a", "b"]}}),
    (TEXT, {"model": "llama", "prompt": ["a", "b"], "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True}),
    (TEXT, {"model": "llama", "prompt": "Once", "logprobs": 0, "echo": False, "best_of": 1, "suffix": None}),
    (TEXT, {"model": "llama", "prompt": ["a", "b"], "n": 2, "max_tokens": 2, "frequency_penalty": -0.5}),
    (TEXT, {"model": "llama", "prompt": [5, 6, 7], "stream": True, "max_tokens": 2}),
    (TEXT, {"model": "llama", "prompt": [[5], [6, 7]], "seed": -1, "max_tokens": 2}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 0.0, -0.0, 0.5, 1e-300, 1e300, -1e300, 5e-324, 2**31 - 1, 2**31, -(2**31), 2**63,
    2**64, -(2**63) - 1, 10**40, float("nan"), float("inf"), float("-inf"), "", "x", "\0", "\ud800", "\U0001f600",
    "x" * 1000, "user", "system", "llama", "gpt-4", "0", "-1", "NaN", [], {}, [[]], [{}], [None], ["x", 1], [1, "x"],
    [1.5], [True], [-1], [2**40], [[], []], [[1], "x"], ["x"] * 17, {"role": "user"}, {"role": "user", "content": "x"},
    {"type": "text"}, {"type": [], "text": {}}, {"type": "image_url", "image_url": {"url": "x"}}, {"x" * 300: 1},
    "tool", "assistant", "required", "get_time", "{}", "[",
    {"": ""}, {"a.b": {"0": 1}}, "#", "#/$defs/node", {"$ref": "#"}, {"type": "object"}, {"type": "integer"}, "object",
]  # fmt: skip
NAMES = [
    "$ref",
    "anyOf",
    "type",
    "properties",
    "items",
    "const",
    "json_schema",
    "temperature",
    "messages",
    "prompt",
    "stop",
    "n",
    "content",
    "role",
    "logprobs",
    "zzz",
    "",
    "0",
    "tools",
    "tool_choice",
    "tool_calls",
    "tool_call_id",
    "function",
    "arguments",
    "parameters",
    "user",
]
PIECES = [
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\u",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"1e999",
    b"-",
    b"9" * 70,
]


def changed(value: Any, chance: random.Random) -> Any:
    """`value` with one part of it replaced, removed, renamed, doubled or nested."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        what = chance.randrange(6)
        if what == 0:
            return {one: inner for one, inner in value.items() if one != name}
        if what == 1:
            return {**value, chance.choice(NAMES): chance.choice(VALUES)}
        return {**value, name: changed(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        what = chance.randrange(6)
        if what == 0:
            return value * chance.choice([2, 20])
        if what == 1:
            return value[:place] + value[place + 1 :]
        return [*value[:place], changed(value[place], chance), *value[place + 1 :]]
    if chance.random() < 0.1:
        for _ in range(chance.choice([1, 10, 70])):
            value = [value] if chance.random() < 0.5 else {"x": value}
        return value
    return chance.choice(VALUES)


def request(chance: random.Random) -> tuple[str, bytes]:
    path, value = chance.choice(SEEDS)
    for _ in range(chance.choice([0, 1, 1, 2, 3])):
        value = changed(value, chance)
    body = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    for _ in range(chance.choice([0, 0, 0, 0, 1, 3])):
        place = chance.randrange(len(body) + 1)
        what = chance.randrange(4)
        if what == 0:
            body = body[:place]
        elif what == 1:
            body = body[:place] + bytes([chance.randrange(256)]) + body[place + 1 :]
        else:
            body = body[:place] + chance.choice(PIECES) * chance.choice([1, 1, 1, 100]) + body[place:]
    return chance.choice([path, path, path, CHAT, TEXT]), body


def check(path: str, body: bytes, answer: httpx.Response) -> None:
    about = (path, body, answer.status_code, answer.text[:500])
    assert answer.status_code in (200, 400, 404), about
    assert len(answer.content) < 200_000, about
    if answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), about
        assert '"error"' not in answer.text, about
    elif answer.status_code == 200:
        assert answer.json()["choices"], about
    else:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, about
        assert error["type"] == "invalid_request_error", about
        assert error["message"], about


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tool_model(tmp_path_factory.mktemp("tokenizer"), "hermes")
    end_fork_servers()


@pytest.mark.parametrize(
    ("seed", "count"), [(1, 500), pytest.param(2, 20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_random_requests_are_answered(folder: Path, capfd: pytest.CaptureFixture[str], seed: int, count: int) -> None:
    chance = random.Random(seed)
    statuses: dict[int, int] = {}

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        requests = iter([request(chance) for _ in range(count)])

        async def one_client() -> None:
            for path, body in requests:
                answer = await client.post(path, content=body, headers={"content-type": "application/json"})
                check(path, body, answer)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

        await asyncio.gather(*(one_client() for _ in range(TOGETHER)))
        assert 'status="500"} 0' in (await client.get("/metrics")).text

    limits = {"max_input_len": 1000, "max_seq_len": 2000}
    said = call_text("hermes", "get_time") + "<tool_call>{"
    ask(saying(folder, said), folder, scenario, model=limits, seconds=2900)
    assert sum(statuses.values()) == count
    assert min(statuses.get(200, 0), statuses.get(400, 0)) > count // 10, statuses
    assert "Traceback" not in "".join(capfd.readouterr())
