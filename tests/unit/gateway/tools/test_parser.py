"""Parser of tool calls: valid calls, and what stays text of the answer; whole answers and pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tool_models import TEMPLATES
from trtpipe.configs import facts
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.gateway.tools.call_format import HELD_CHARACTERS
from trtpipe.pipeline.gateway.tools.formats import FORMATS, recognise
from trtpipe.pipeline.gateway.tools.parser import CallParser, ToolUse

Read = tuple[str, list[tuple[str, str]]]
PARIS = '{"city": "Paris"}'
LONG = json.dumps({"city": 'a{"[\\' * HELD_CHARACTERS})
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
ONE_LONG = [("get_weather", LONG)]
ONE, TWO = [("get_weather", PARIS)], [("get_weather", PARIS), ("get_time", "{}")]


def use(form: str, *, required: bool = False, parallel: bool = True) -> ToolUse:
    return ToolUse(format=form, names=("get_weather", "get_time"), required=required, parallel=parallel)


def read(pieces: list[str], use: ToolUse) -> Read:
    parser = CallParser(use)
    text = "".join([*map(parser.push, pieces), parser.push("", final=True)])
    # The pieces of the stream are those of the whole.
    told: dict[int, list[str]] = {}
    for delta in parser.deltas():
        if "id" in delta:
            assert delta["function"]["arguments"] == ""
            assert delta["index"] == len(told)
            told[delta["index"]] = [delta["function"]["name"], ""]
        else:
            told[delta["index"]][1] += delta["function"]["arguments"]
    calls = [(call.name, "".join(call.arguments)) for call in parser.calls]
    assert [tuple(one) for one in told.values()] == calls
    return text, calls


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        ("hermes", HERMES, "", ONE),
        ("hermes", f"Let me see.\n{HERMES}\n", "Let me see.", ONE),
        ("hermes", f'{HERMES}\n<tool_call>{{"name":"get_time","arguments":{{}}}}</tool_call>', "", TWO),
        ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "get_weather"}', "", ONE),  # no end
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', "", [("get_time", "{}")]),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", ONE),
        ("hermes", HERMES.replace(PARIS, LONG), "", ONE_LONG),
        ("hermes", f'<tool_call>{{"arguments": {LONG}, "name": "get_weather"}}</tool_call>', "", ONE_LONG),
        ("hermes", f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(LONG)}}}', "", ONE_LONG),
        ("llama3_json", f'{{"type": "function", "name": "get_weather", "parameters": {LONG}}}', "", ONE_LONG),
        ("llama3_json", LLAMA, "", ONE),
        ("llama3_json", f'{LLAMA}; {{"name": "get_time", "parameters": {{}}}}', "", TWO),
        ("llama3_json", f"I call <|python_tag|>{LLAMA}", "I call", ONE),
        ("mistral", f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]', "", ONE),
        ("mistral", f'[TOOL_CALLS][{LLAMA}, {{"name":"get_time","arguments":{{}}}}]', "", TWO),
        ("pythonic", '[get_weather(city="Paris"), get_time()]', "", TWO),
        ("pythonic", "<|python_start|>[get_weather(city='Paris')]<|python_end|>", "", ONE),
        ("pythonic", "[get_weather(city=['a]', {'b': true}], n=None)]", "",
         [("get_weather", '{"city": ["a]", {"b": true}], "n": null}')]),
    ],
)  # fmt: skip
def test_calls(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read([text], use(form)) == (content, calls)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "<tool_call> is how a call begins"),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {city}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_wether", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get_weather", "arguments": {"city": "Pa'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", f'<tool_call>{{"name": "get_wether", "arguments": {LONG}}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {LONG}, "name": "get_wether"}}</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments": {{"city": "{"x" * 8200}"}}, "name": "get_weather"}}</tool_call>'),
        ("hermes", " a < b, <tool"),
        ("hermes", " \n"),
        ("hermes", LLAMA),
        ("llama3_json", '{"answer": 42}'),
        ("llama3_json", f"The call is {LLAMA}"),
        ("llama3_json", '{"name": "get_weather", "parameters": {"city": "\\ud800"}}'),
        ("mistral", "[TOOL_CALLS]get_weather"),
        ("mistral", "[TOOL_CALLS][]"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[get_weather('Paris')]"),
        ("pythonic", "[get_weather(city=Paris)]"),
        ("pythonic", "[get_weather(**x)]"),
        ("pythonic", "[get_weather(city=1e999)]"),
        ("pythonic", "[get_weather(city={1, 2})]"),
        ("pythonic", "[get_weather(city='\\ud800')]"),
        ("pythonic", f"[get_weather(city={'(' * 3000}1{')' * 3000})]"),
        ("pythonic", f"[get_weather(city={'-' * 8000}1)]"),
        ("pythonic", f"[get_weather(city='{'x' * 9000}')]"),
    ],
)
def test_a_wrong_call_is_text(form: str, text: str) -> None:
    assert read([text], use(form)) == (text, [])


def test_what_follows_a_wrong_call_or_a_call() -> None:
    assert read([f"<tool_call>no</tool_call> {HERMES} Done."], use("hermes")) == (
        "<tool_call>no</tool_call> Done.",
        ONE,
    )
    assert read([f"{LLAMA}; or not"], use("llama3_json")) == ("; or not", ONE)


def test_without_parallel_calls_the_answer_ends_with_the_first() -> None:
    text = f'{HERMES}\n<tool_call>{{"name":"get_time","arguments":{{}}}}</tool_call>'
    assert read([text], use("hermes", parallel=False)) == ("", ONE)
    assert read(["[get_weather(city='Paris'), get_time()]"], use("pythonic", parallel=False)) == ("", ONE)


def test_a_long_call_is_sent_while_it_is_made_and_a_required_one_at_once() -> None:
    parser = CallParser(use("hermes"))
    parser.push('<tool_call>{"name": "get_weather", "arguments": {"city": "' + "x" * 300)
    assert parser.deltas() == []
    parser.push("x" * 300)
    (begun, piece) = parser.deltas()
    assert begun["function"] == {"name": "get_weather", "arguments": ""}
    assert piece["function"]["arguments"] == '{"city": "' + "x" * 600
    required = CallParser(use("hermes", required=True))
    required.push('[{"name": "get_weather", "arguments": {"ci')
    assert [delta["function"]["arguments"] for delta in required.deltas()] == ["", '{"ci']
    # What is cut off before its name is known is no call, and no text.
    for cut in ('[{"name": "get_', f"[{LLAMA}", f"[{LLAMA}, {{", "["):
        assert read([cut], use("hermes", required=True)) == ("", ONE if LLAMA in cut else [])
    # A white space more or less is the engine's choice.
    assert read([f'[ {{ "name" :"get_weather", "arguments": {PARIS} }} ]'], use("mistral", required=True)) == ("", ONE)


def test_json_that_is_no_call_is_not_held_back_longer() -> None:
    for begin in ('{"name": "Paris", "text": "', '{"title": "'):
        parser = CallParser(use("llama3_json"))
        assert parser.push(begin + "x" * 400) == ""
        assert parser.push("x" * 400) == begin + "x" * 800


PARTS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<|python_start|>", "[", "]", "{", "}", ";", ",",
    " ", "\n", '"', "\\", "é", "text", HERMES, LLAMA, f"[{LLAMA}]", f'{{"name": "get_weather", "arguments": {LONG}}}',
    f'{{"arguments": {LONG}, "name": "get_weather"}}', '{"name": "get_time"}', '"name"', '"arguments":', "get_time()",
    "[get_weather(city='x')]",
]  # fmt: skip


@given(
    form=st.sampled_from(sorted(FORMATS)),
    parts=st.lists(st.sampled_from(PARTS), max_size=8),
    required=st.booleans(),
    parallel=st.booleans(),
    cuts=st.lists(st.integers(0, 3000), max_size=12),
)
def test_any_cutting_gives_the_same(
    form: str, parts: list[str], required: bool, parallel: bool, cuts: list[int]
) -> None:
    text, how = "".join(parts), use(form, required=required, parallel=parallel)
    whole = read([text], how)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read([text[start:end] for start, end in itertools.pairwise(places)], how) == whole
    assert read(list(text), how) == whole
    for name, arguments in whole[1]:
        assert name in how.names
        if len(arguments) < HELD_CHARACTERS and not required:
            assert isinstance(parse_json(arguments), dict)
    if required:
        assert whole[0] == ""
    elif not whole[1]:
        assert whole[0] == text


def test_formats_are_those_of_model_files_and_templates() -> None:
    assert {model.tool_format for model in facts.load_models().values()} <= {None, *FORMATS}
    found = {name: recognise(template) for name, template in TEMPLATES.items()}
    assert {name: form.name for name, form in found.items() if form} == {name: name for name in FORMATS}
    assert recognise("{{ messages }}") is None
    # Qwen3-Coder's calls are no JSON, though they stand between the same marks.
    assert recognise("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>") is None
    assert facts.find_tool_format("Qwen/Qwen2.5-7B-Instruct") == "hermes"
    assert facts.find_tool_format("llama-3.2-1b-instruct") == "llama3_json"
    assert facts.find_tool_format("smollm2") is None
