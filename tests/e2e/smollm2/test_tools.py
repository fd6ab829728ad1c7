"""Tool calls by the real model, with a chat template of our own that contains the tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.smollm2.conftest import TOOLS
from tests.support.tool_models import TIME, WEATHER

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.real

FUNCTIONS: list[Any] = [WEATHER, TIME]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


def test_a_required_call_is_one_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": TOOLS, "tools": FUNCTIONS, "max_tokens": 60}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(messages=QUESTION, tool_choice=named, temperature=0, **fields)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, call.type) == ("tool_calls", "function")
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("get_weather", ["city"])
    stream = client.chat.completions.create(messages=QUESTION, tool_choice=named, temperature=0, stream=True, **fields)
    pieces = [piece for chunk in stream for piece in chunk.choices[0].delta.tool_calls or []]
    assert len(pieces) > 2
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == call.function.arguments
    drawn = client.chat.completions.create(messages=QUESTION, tool_choice="required", temperature=1, seed=0, **fields)
    (choice,) = drawn.choices
    assert choice.message.content is None
    for one in choice.message.tool_calls or []:
        assert one.type == "function"
        if choice.finish_reason == "tool_calls":
            assert set(json.loads(one.function.arguments)) == (
                {"city"} if one.function.name == "get_weather" else set()
            )


def test_a_result_goes_back_and_a_model_that_may_call_may_also_answer(client: openai.OpenAI) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "The weather in Paris is sunny."},
    ]
    made = client.chat.completions.create(model=TOOLS, messages=messages, tools=FUNCTIONS, temperature=0, max_tokens=40)
    (choice,) = made.choices
    assert choice.message.content or choice.message.tool_calls
