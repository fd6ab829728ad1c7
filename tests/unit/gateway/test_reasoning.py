"""A model's reasoning is apart from the text of its answers, whole and streamed, with and without tool calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gateways import CHAT, TEXT, Triton, ask, chat, end_fork_servers, events, saying, spoken, write_model
from tests.support.tool_models import TEMPLATES, WEATHER, call_text
from trtpipe.pipeline.gateway.reasoning import Reasoning, ReasoningParser, find_reasoning

SAID = "<think>\nA city.\n\nIn France.\n</think>\n\nIt is "
# As that of DeepSeek's distilled models, it begins the reasoning where the request does not switch it off.
BEGINNING = (
    "{% for m in messages %}[{{ m.role }}]{{ (m.reasoning_content or '') ~ m.content }}{% endfor %}"
    "{% if thinking is defined and not thinking %}<think>\n\n</think>{% else %}<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    ("begins", "said", "reasoning", "text"),
    [
        ("answer", "\n<think>\na b\n</think>\n\nc\n", "a b", "c\n"),
        ("answer", "<think></think>c <think>d</think>", "", "c <think>d</think>"),
        ("answer", " a <think>b</think>", "", " a <think>b</think>"),
        ("answer", "<thin", "", "<thin"),
        ("answer", "<think> a </thi", "a </thi", ""),
        ("prompt", "a\n</think>\n\nb", "a", "b"),
        ("prompt", "a < b\n\n", "a < b", ""),
    ],
)
def test_reasoning_ends_at_its_mark(begins: Reasoning, said: str, reasoning: str, text: str) -> None:
    assert ReasoningParser(begins).push(said, final=True) == (reasoning, text)


@given(
    st.sampled_from(["answer", "prompt"]),
    st.lists(st.sampled_from(["<think>", "</think>", "<", "think>", "\n", " ", "a"]), max_size=9).map("".join),
    st.data(),
)
def test_it_does_not_matter_how_an_answer_is_cut(begins: Reasoning, said: str, data: st.DataObject) -> None:
    parser, parts = ReasoningParser(begins), []
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(said))))), len(said)]
    for start, end in itertools.pairwise(cuts):
        parts.append(parser.push(said[start:end]))
    parts.append(parser.push("", final=True))
    assert tuple(map("".join, zip(*parts, strict=True))) == ReasoningParser(begins).push(said, final=True)


def test_prompts_tell_whether_reasoning_follows() -> None:
    assert find_reasoning("... </think> ...", "Hello") == "answer"
    assert find_reasoning("... </think> ...", "Hello<think>\n") == "prompt"
    assert find_reasoning("... </think> ...", "Hello<think>\n\n</think>\n\n") is None
    assert find_reasoning("...", "Hello<think>\n") is None


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    template = TEMPLATES["hermes"].replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    yield write_model(tmp_path_factory.mktemp("qwen"), template)
    end_fork_servers()


@pytest.mark.process
@pytest.mark.loopback
def test_an_answer_has_reasoning_text_and_calls(qwen: Path) -> None:
    call = call_text("hermes", "get_weather", city="Paris")

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        (choice,) = (await client.post(CHAT, json=chat(tools=[WEATHER], logprobs=True))).json()["choices"]
        message = choice["message"]
        assert (message["reasoning"], message["content"]) == ("A city.\n\nIn France.", "It is")
        assert message["reasoning_content"] == message["reasoning"]
        assert [one["function"]["arguments"] for one in message["tool_calls"]] == ['{"city": "Paris"}']
        # Log-probabilities are those of all tokens.
        assert "".join(one["token"] for one in choice["logprobs"]["content"]).startswith("<think>")
        deltas = [chunk["choices"][0]["delta"] for chunk in await events(client, CHAT, chat(tools=[WEATHER]))]
        pieces = [delta["reasoning"] for delta in deltas if "reasoning" in delta]
        assert "".join(pieces) == message["reasoning"]
        assert len(pieces) > 2
        assert "".join(delta.get("content", "") for delta in deltas) == "It is"
        kinds = [next(iter(delta), "end") for delta in deltas[1:]]
        assert list(dict.fromkeys(kinds)) == ["reasoning", "content", "tool_calls", "end"]
        cut = (await client.post(CHAT, json=chat(max_tokens=12))).json()["choices"][0]
        assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")
        assert "A city.\n\nIn France.".startswith(cut["message"]["reasoning"])
        # An answer that must have a form has no reasoning, and text completions are as the model writes them.
        held = (await client.post(CHAT, json=chat(response_format={"type": "json_object"}))).json()
        assert held["choices"][0]["message"]["content"].startswith("<think>")
        plain = (await client.post(TEXT, json={"model": "llama", "prompt": "x", "max_tokens": 99})).json()
        assert plain["choices"][0]["text"].startswith("<think>")
        # The whole message goes back.
        messages: list[Any] = [*chat()["messages"], message, {"role": "tool", "tool_call_id": "x", "content": "sunny"}]
        messages[-1]["tool_call_id"] = message["tool_calls"][0]["id"]
        assert (await client.post(CHAT, json=chat(tools=[WEATHER]) | {"messages": messages})).status_code == 200

    ask(saying(qwen, SAID + call), qwen, scenario)


@pytest.mark.process
@pytest.mark.loopback
def test_reasoning_that_the_prompt_begins_and_a_server_that_leaves_it_in_the_text(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "r1", BEGINNING)

    async def apart(client: httpx.AsyncClient, triton: Triton) -> None:
        message = (await client.post(CHAT, json=chat())).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("A city.", "Paris")
        assert spoken(await events(client, CHAT, chat())) == "Paris"
        off = await client.post(CHAT, json=chat(chat_template_kwargs={"thinking": False}))
        assert "reasoning" not in off.json()["choices"][0]["message"]

    async def together(client: httpx.AsyncClient, triton: Triton) -> None:
        assert spoken(await events(client, CHAT, chat())) == "A city.\n</think>\n\nParis"

    script = saying(folder, "A city.\n</think>\n\nParis")
    ask(script, folder, apart)
    ask(script, folder, together, model={"reasoning": False})
    end_fork_servers()
