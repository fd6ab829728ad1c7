"""Tool calls through the gateway, as OpenAI's own client sees them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.gateways import (
    CHAT,
    END,
    INPUTS,
    Asked,
    Triton,
    ask,
    chat,
    end_fork_servers,
    response,
    saying,
    tokens_of,
    write_model,
)
from tests.support.tool_models import TIME, WEATHER, call_text, write_tool_model
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.gateway.options import ServedModel
from trtpipe.pipeline.gateway.tools.formats import FORMATS

if TYPE_CHECKING:
    import openai

pytestmark = [pytest.mark.process, pytest.mark.loopback]

TOOLS: list[Any] = [WEATHER, TIME]
QUESTION: list[Any] = [{"role": "user", "content": "Weather?"}]
Scenario = Callable[["openai.AsyncOpenAI", Triton], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("tools")
    yield {form: write_tool_model(root / form, form) for form in FORMATS}
    end_fork_servers()


def run(script: Any, folder: Path, scenario: Scenario, **options: Any) -> None:
    import openai

    async def whole(client: httpx.AsyncClient, triton: Triton) -> None:
        async with openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
            await scenario(api, triton)

    ask(script, folder, whole, **options)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_tool_is_called_and_its_result_sent_back(folders: dict[str, Path], form: str) -> None:
    folder = folders[form]

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        said = (
            "It is sunny."
            if text(asked).endswith("sunny<|assistant|>")
            else call_text(form, "get_weather", city="Paris")
        )
        for token in [*tokens_of(folder, said), END]:
            yield response([token], final=token == END)

    def text(asked: Asked) -> str:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return str(tokenizer.decode(asked.prompt, skip_special_tokens=False))

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        answer = await api.chat.completions.create(model="llama", messages=QUESTION, tools=TOOLS)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
        assert len(call.id) == 9 if form == "mistral" else call.id.startswith("call_")
        assert '"name": "get_weather", "description": "The weather of a city."' in text(triton.asked[0])
        # The answer itself goes back, as the client has it.
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        messages: list[Any] = [*QUESTION, choice.message, result]
        last = await api.chat.completions.create(model="llama", messages=messages, tools=TOOLS)
        assert last.choices[0].message.content == "It is sunny."
        assert last.choices[0].message.tool_calls is None
        assert last.choices[0].finish_reason == "stop"
        again = text(triton.asked[1])
        assert again.endswith("<|tool|>sunny<|assistant|>")
        assert "Paris" in again.partition("Weather?")[2]

    run(script, folder, scenario)


IGNORANT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def write_templates(folder: Path, default: str, tool_use: str) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "default", "template": default}, {"name": "tool_use", "template": tool_use}]
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))


def test_a_model_with_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """As Hermes 3: its default template knows no tools."""
    folder = write_tool_model(tmp_path, "hermes")
    write_templates(folder, IGNORANT, (folder / "chat_template.jinja").read_text())

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        answer = await api.chat.completions.create(model="llama", messages=QUESTION, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_time"
        await api.chat.completions.create(model="llama", messages=QUESTION)
        with_tools, without = (asked.prompt for asked in triton.asked)
        assert without == tokens_of(folder, "<|user|>Weather?")
        assert len(with_tools) > len(without)

    run(saying(folder, call_text("hermes", "get_time")), folder, scenario)


def test_a_call_is_streamed_as_openai_streams_it(folders: dict[str, Path]) -> None:
    said = f"A moment.\n{call_text('hermes', 'get_weather', city='Paris')}\n{call_text('hermes', 'get_time')}"

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        stream = await api.chat.completions.create(model="llama", messages=QUESTION, tools=TOOLS, stream=True)
        chunks = [chunk.model_dump(exclude_unset=True)["choices"][0] async for chunk in stream]
        assert "".join(one["delta"].get("content") or "" for one in chunks) == "A moment."
        ids = [one["delta"]["tool_calls"][0].get("id") for one in chunks if "tool_calls" in one["delta"]]
        assert ids == [ids[0], None, ids[2], None]
        assert ids[0] != ids[2]
        assert [one["delta"]["tool_calls"] for one in chunks if "tool_calls" in one["delta"]] == [
            [{"index": 0, "id": ids[0], "type": "function", "function": {"name": "get_weather", "arguments": ""}}],
            [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}],
            [{"index": 1, "id": ids[2], "type": "function", "function": {"name": "get_time", "arguments": ""}}],
            [{"index": 1, "function": {"arguments": "{}"}}],
        ]
        assert [one["finish_reason"] for one in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
        one = await api.chat.completions.create(
            model="llama", messages=QUESTION, tools=TOOLS, stream=True, parallel_tool_calls=False
        )
        last = [chunk async for chunk in one][-1]
        assert last.choices[0].finish_reason == "tool_calls"
        assert triton.asked[1:]

    run(saying(folders["hermes"], said), folders["hermes"], scenario)


def test_a_required_call_is_held_to_its_schema(folders: dict[str, Path]) -> None:
    said = '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        stream = await api.chat.completions.create(
            model="llama", messages=QUESTION, tools=TOOLS, tool_choice="required", stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]
        pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or [] if call.function]
        assert pieces == ["", *'{"city": "Paris"}']
        (asked,) = triton.asked
        assert asked.raw["guided_decoding_guide_type"][4:] == b"json_schema"
        schema = json.loads(asked.raw["guided_decoding_guide"][4:])
        names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
        assert (names, schema["minItems"], "maxItems" in schema) == (["get_weather", "get_time"], 1, False)
        closed = {"additionalProperties": False}
        assert schema["$defs"]["get_weather"] == WEATHER["function"]["parameters"] | closed
        assert schema["$defs"]["get_time"] == {"type": "object"} | closed
        # The special token that begins calls is not text, so the prompt ends with it.
        assert asked.prompt[-1:] == tokens_of(folders["mistral"], "[TOOL_CALLS]")
        await api.chat.completions.create(
            model="llama",
            messages=QUESTION,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "get_weather"}},
        )
        schema = json.loads(triton.asked[1].raw["guided_decoding_guide"][4:])
        assert (schema["items"]["properties"]["name"], schema["maxItems"]) == ({"const": "get_weather"}, 1)
        # Cut off, it is what there is of it.
        cut = await api.chat.completions.create(
            model="llama", messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=50
        )
        (call,) = cut.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.arguments, cut.choices[0].finish_reason) == ('{"city": "Pa', "length")

    run(saying(folders["mistral"], said), folders["mistral"], scenario)


def test_what_a_client_has_parsed_comes_back_to_it(folders: dict[str, Path]) -> None:
    """OpenAI's clients send back what `parse` and `stream` made of an answer; the template sees what it was made of."""
    said = '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    strict: Any = {"type": "function", "function": {**WEATHER["function"], "strict": True}}

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        answer = await api.chat.completions.parse(
            model="llama", messages=QUESTION, tools=[strict], tool_choice="required"
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls or []
        assert call.function.parsed_arguments == {"city": "Paris"}
        plain: Any = call.model_dump(exclude={"function": {"parsed_arguments"}})
        read: Any = {"role": "assistant", "content": "sunny", "parsed": {"weather": "sunny"}}
        for sent, parsed in ((message, read), ({"role": "assistant", "tool_calls": [plain]}, {**read, "parsed": None})):
            result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
            messages: list[Any] = [*QUESTION, sent, result, parsed, *QUESTION]
            await api.chat.completions.create(model="llama", messages=messages)
        assert triton.asked[1].prompt == triton.asked[2].prompt

    run(saying(folders["hermes"], said), folders["hermes"], scenario)


def test_a_reference_in_a_schema_leads_to_the_same_place(folders: dict[str, Path]) -> None:
    tree = {"$ref": "#/$defs/Tree", "$defs": {"Tree": {"properties": {"left": {"$ref": "#/$defs/Tree"}}}}}
    tool: Any = {"type": "function", "function": {"name": "grow", "parameters": tree}}

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        await api.chat.completions.create(model="llama", messages=QUESTION, tools=[tool], tool_choice="required")
        schema = json.loads(triton.asked[0].raw["guided_decoding_guide"][4:])
        moved = "#/$defs/grow/$defs/Tree"
        assert schema["$defs"]["grow"]["$ref"] == moved
        assert schema["$defs"]["grow"]["$defs"]["Tree"]["properties"]["left"]["$ref"] == moved

    run(saying(folders["hermes"], "[]"), folders["hermes"], scenario)


def test_no_tool_is_called_where_none_is_offered(folders: dict[str, Path]) -> None:
    said = call_text("llama3_json", "get_time")

    async def scenario(api: openai.AsyncOpenAI, triton: Triton) -> None:
        for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}, {"tools": [WEATHER]}):
            answer = await api.chat.completions.create(model="llama", messages=QUESTION, **fields)
            assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (said, "stop")
        plain, none, offered = (asked.prompt for asked in triton.asked)
        assert plain == none != offered

    run(saying(folders["llama3_json"], said), folders["llama3_json"], scenario)


def called(arguments: str = "{}", call_id: str = "a") -> dict[str, Any]:
    function = {"name": "get_time", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def history(*messages: dict[str, Any]) -> dict[str, Any]:
    return chat() | {"messages": [*QUESTION, *messages]}


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": fields}


UNIQUE = function(name="f", parameters={"type": "object", "uniqueItems": True})


@pytest.mark.parametrize(
    ("body", "param", "telling"),
    [
        (chat(tools=[{"type": "function"}]), "tools.0.function", "missing"),
        (chat(tools=[function(description="x")]), "tools.0.function.name", "missing"),
        (chat(tools=[function(name="")]), "tools.0.function.name", "should match pattern"),
        (chat(tools=[function(name="a b")]), "tools.0.function.name", "should match pattern"),
        (chat(tools=[WEATHER, TIME, WEATHER]), "tools.2.function.name", "another tool has the name 'get_weather'"),
        (chat(tools=[{"type": "custom", "custom": {"name": "x"}}]), "tools.0.type", "'function'"),
        (chat(tools=[function(name="x", parameters=[])]), "tools.0.function.parameters", "an object"),
        (chat(tools=[function(name="x", parameters={"type": "array"})]), "tools.0.function.parameters", "an object"),
        (chat(tools=[function(name=f"x{n}") for n in range(129)]), "tools", "at most 128 items, not 129"),
        (chat(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice", "not in"),
        (chat(tools=[WEATHER], tool_choice={"type": "function"}), "tool_choice.function", "missing"),
        (chat(tools=[WEATHER], tool_choice="always"), "tool_choice", "'none', 'auto' or 'required'"),
        (chat(tool_choice="required"), "tool_choice", "there are no 'tools'"),
        (chat(tools=[WEATHER, UNIQUE], tool_choice="required"), "tools.1.function.parameters.uniqueItems", "keyword"),
        (chat(tools=[WEATHER], response_format={"type": "json_object"}), "response_format", "could not call a tool"),
        (chat(tools=[WEATHER], parallel_tool_calls="no"), "parallel_tool_calls", "boolean"),
        (history(called("{city}")), "messages.1.tool_calls.0.function.arguments", "not JSON"),
        (history(called("[]")), "messages.1.tool_calls.0.function.arguments", "not a JSON object"),
        (history({"role": "tool", "content": "x"}), "messages.1.tool_call_id", "missing"),
        (
            history(called(), {"role": "tool", "content": "x", "tool_call_id": "b"}),
            "messages.2.tool_call_id",
            "no call with that id",
        ),
        (
            history({"role": "user", "content": "x", "tool_call_id": "a"}),
            "messages.1.tool_call_id",
            "only a message of the role 'tool'",
        ),
        (history(called() | {"role": "user"}), "messages.1.tool_calls", "only the assistant"),
        (history({"role": "assistant", "tool_calls": []}), "messages.1.content", "missing"),
        (history(called(), {"role": "tool", "tool_call_id": "a"}), "messages.2.content", "missing"),
        (history({"role": "assistant", "content": "x", "refusal": "no"}), "messages.1.refusal", "None"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    folders: dict[str, Path], body: dict[str, Any], param: str, telling: str
) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert telling in error["message"]
        assert triton.asked == []

    ask(saying(folders["hermes"], "x"), folders["hermes"], scenario)


def test_a_model_that_would_not_see_the_tools_is_refused(tmp_path: Path) -> None:
    ignorant = write_model(tmp_path / "ignorant")
    unknown = write_model(tmp_path / "unknown", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    calls = [*QUESTION, called(), {"role": "tool", "tool_call_id": "a", "content": "noon"}]

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for body, param, telling in (
            (chat(tools=TOOLS), "tools", "chat template ignores tools"),
            (chat() | {"messages": calls}, "messages", "chat template ignores tools"),
            (chat(tools=TOOLS, model="unknown"), "tools", "--tool-format, one of hermes"),
        ):
            answer = await client.post(CHAT, json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, param, "unsupported_parameter")
            assert telling in error["message"]
        assert (await client.post(CHAT, json=chat(tools=TOOLS, tool_choice="none"))).status_code == 200

    ask(saying(ignorant, "x"), ignorant, scenario, others={"unknown": unknown})


CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}"
    "{% endfor %}"
)
TURNS = "<|user|>Weather?<|assistant|>get_time<|tool|>noon"
# Default template, template for tools, and the prompt of a chat with calls that offers no tools.
TEMPLATES = {
    # As Hermes 3 and Command R, whose templates for tools need a list.
    "list": (IGNORANT, "<tools>{% for one in tools %}{{ one }}{% endfor %}</tools>" + CALLS, "<tools></tools>" + TURNS),
    "turns": ("{{ raise_exception('a turn too much') if messages[2] }}", "{{ tools }}" + CALLS, "[]" + TURNS),
    "default": (CALLS, "{{ tools }}" + CALLS, TURNS),
    "required": (IGNORANT, "{{ raise_exception('no tools') if not tools }}" + CALLS, None),
    "ignorant": (IGNORANT, "{{ tools }}" + IGNORANT, None),
}


def test_a_chat_with_calls_goes_on_without_tools(tmp_path: Path) -> None:
    for name, (default, tool_use, _) in TEMPLATES.items():
        write_templates(write_model(tmp_path / name), default, tool_use)
    body = history(called(), {"role": "tool", "tool_call_id": "a", "content": "noon"})

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for name, (_, _, prompt) in TEMPLATES.items():
            for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
                answer = await client.post(CHAT, json=body | {"model": name} | fields)
                if prompt is None:
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (400, "messages")
                    assert "chat template ignores tools" in error["message"]
                else:
                    assert answer.status_code == 200, answer.text
                    assert triton.asked.pop().prompt == tokens_of(tmp_path / name, prompt)

    first, *others = TEMPLATES
    paths = {name: tmp_path / name for name in others}
    ask(saying(tmp_path / first, "x"), tmp_path / first, scenario, model={"aliases": (first,)}, others=paths)


def test_reasoning_follows_the_template_that_made_the_prompt(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "list")
    default, tool_use, _ = TEMPLATES["list"]
    write_templates(folder, default, tool_use + "<think>{{ '</think>' if thinking is false }}")
    body = history(called(), {"role": "tool", "tool_call_id": "a", "content": "noon"})

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("A city.", "Paris")

    ask(saying(folder, "A city.\n</think>\n\nParis"), folder, scenario)


def test_a_required_call_needs_a_runtime_that_can_be_held_to_it(folders: dict[str, Path]) -> None:
    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = await client.post(CHAT, json=chat(tools=TOOLS, tool_choice="required"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert (await client.post(CHAT, json=chat(tools=TOOLS))).status_code == 200

    bare = {"inputs": [name for name in INPUTS if "guided" not in name]}
    ask(saying(folders["hermes"], "x"), folders["hermes"], scenario, triton=bare)


def test_the_format_may_be_given_by_name(folders: dict[str, Path]) -> None:
    said = call_text("pythonic", "get_time")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = (await client.post(CHAT, json=chat(tools=TOOLS))).json()
        assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "get_time", "arguments": "{}"}
        told = await client.post("/tokenize", json={"messages": chat()["messages"], "tools": TOOLS})
        assert told.json()["tokens"] == triton.asked[0].prompt

    ask(saying(folders["hermes"], said), folders["hermes"], scenario, model={"tool_format": "pythonic"})
    with pytest.raises(UsageError, match="unknown format of tool calls 'herms'; did you mean 'hermes'"):
        ServedModel(name="x", tokenizer=folders["hermes"], tool_format="herms")
