"""Tool calls by the real model, with a chat template of our own that contains the tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.conftest import Served
from tests.e2e.smollm2.test_gateway import MODEL, options
from tests.support.tool_models import TIME, WEATHER
from trtpipe.pipeline.gateway.supervisor import Gateway

if TYPE_CHECKING:
    import openai

pytestmark = pytest.mark.real

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
TOOLS: list[Any] = [WEATHER, TIME]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def client(served: Served, smollm2_hf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    import openai

    folder = tmp_path_factory.mktemp("tools") / "model"
    shutil.copytree(smollm2_hf, folder, ignore=shutil.ignore_patterns("*.safetensors*", "chat_template.jinja"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    gateway = Gateway.start(options(served, folder))
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=280) as made:
        yield made
    gateway.stop()


def test_a_required_call_is_one_whatever_the_model_would_say(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "max_tokens": 60}
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
    made = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=40)
    (choice,) = made.choices
    assert choice.message.content or choice.message.tool_calls
