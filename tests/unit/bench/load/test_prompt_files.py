"""Prompt files and ShareGPT conversations: what is read from them, and mistakes named with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.pipeline.bench.load.prompt_files import Entry, check_options, read_conversations, read_prompts


def write(tmp_path: Path, text: str, name: str = "prompts.jsonl") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = write(tmp_path, 'Hello.\r\n\n  {"prompt": 1}\nTwo\u2028lines\n', "prompts.txt")
    assert [entry.prompt for entry in read_prompts(path)] == ["Hello.", '  {"prompt": 1}', "Two\u2028lines"]


def test_a_jsonl_file_has_a_request_a_line(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    path = write(
        tmp_path,
        '{"prompt": "Hello", "max_tokens": 5, "temperature": 0.5, "stop": ["."]}\n'
        + '{"text_input": "a\u2028b", "output_tokens": 7, "seed": 3}\n'
        + json.dumps({"messages": messages})
        + "\n",
    )
    assert read_prompts(path) == [
        Entry(prompt="Hello", output_tokens=5, options={"temperature": 0.5, "stop": ["."]}),
        Entry(prompt="a\u2028b", output_tokens=7, options={"seed": 3}),
        Entry(messages=tuple(messages)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "prompts.jsonl holds no prompt"),
        ('{"prompt": "a"}\nHello', "prompts.jsonl:2 is not JSON"),
        ('{"prompt": "a", "temperature": NaN}', "prompts.jsonl:1 is not JSON: it holds a number that is not finite"),
        ('"a"', "prompts.jsonl:1 holds a text, not an object"),
        ("{}", "prompts.jsonl:1: a request has one of prompt, text_input, messages: there is none"),
        ('{"prompt": "a", "messages": []}', "prompts.jsonl:1: a request has one of prompt, text_input, messages: "
         "there is prompt and messages"),
        ('{"prompt": ""}', "prompts.jsonl:1: prompt is '', not a text"),
        ('{"text_input": ["a"]}', "prompts.jsonl:1: text_input is ['a'], not a text"),
        ('{"prompt": "a", "max_tokens": 0}', "prompts.jsonl:1: max_tokens is 0, not a positive number"),
        ('{"prompt": "a", "output_tokens": 1.5}', "prompts.jsonl:1: output_tokens is 1.5, not a positive number"),
        ('{"prompt": "a", "output_tokens": 1, "max_tokens": 1}', "prompts.jsonl:1: both max_tokens and output_tokens"),
        ('{"prompt": "a", "temprature": 1}', "prompts.jsonl:1: unknown key 'temprature'; did you mean 'temperature'?"),
        ('{"prompt": "a", "top_k": 1.5}', "prompts.jsonl:1: top_k is 1.5, not a whole number"),
        ('{"prompt": "a", "temperature": true}', "prompts.jsonl:1: temperature is True, not a number"),
        ('{"prompt": "a", "stop": [1]}', "prompts.jsonl:1: stop is [1], not text or a list of texts"),
        ('{"messages": []}', "prompts.jsonl:1: messages is not a list of objects with role and content, both text"),
        ('{"messages": [{"role": "user"}]}', "prompts.jsonl:1: messages is not a list of objects"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "prompts.jsonl:1: messages is not a list of objects"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputDataError) as caught:
        read_prompts(write(tmp_path, text))
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=r"prompt file .*none\.txt cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputDataError, match=r"latin\.txt is not UTF-8"):
        read_prompts(tmp_path / "latin.txt")


def test_options_may_be_refused_as_the_command_s() -> None:
    check_options({"temperature": 2.5}, "options")  # which vLLM takes
    check_options({"temperature": 0, "top_p": 0.5, "ignore_eos": False, "stop": "x"}, "options")
    with pytest.raises(UsageError, match="options: unknown sampling option 'topk'; did you mean 'top_k'"):
        check_options({"topk": 1}, "options", UsageError)


def turns(*texts: str, first: str = "human", second: str = "gpt") -> dict[str, Any]:
    return {"conversations": [{"from": (first, second)[index % 2], "value": text} for index, text in enumerate(texts)]}


CONVERSATIONS = [
    {"id": "a", **turns("How are you?", "Fine.", "And now?", "Still fine.")},
    # Nothing to ask, or nothing to answer with.
    turns("Alone"),
    turns("", "An answer"),
    turns("A question", " "),
    turns("A", "B", second="human"),
    {"conversations": []},
    # An assistant may speak first.
    {"conversations": [{"from": "gpt", "value": "Welcome"}, *turns("Hi", "Hello")["conversations"]]},
    turns("Q", "A", first="user", second="assistant"),
]


@pytest.mark.parametrize("form", ["list", "lines"])
def test_the_first_question_and_answer_of_each_conversation(tmp_path: Path, form: str) -> None:
    lines = "\n".join(json.dumps(entry) for entry in CONVERSATIONS)
    path = write(tmp_path, json.dumps(CONVERSATIONS, indent=1) if form == "list" else lines, "sharegpt.json")
    assert [(entry.prompt, entry.answer) for entry in read_conversations(path)] == [
        ("How are you?", "Fine."),
        ("Hi", "Hello"),
        ("Q", "A"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "sharegpt.json is not JSON"),
        ('[{"a": 1}]', "sharegpt.json: entry 1 has no list of conversations; give a file in ShareGPT's form"),
        ('{"conversations": 1}', "sharegpt.json:1 has no list of conversations"),
        (json.dumps([turns("Alone")]), "sharegpt.json holds no question with an answer"),
    ],
)
def test_a_file_in_another_form_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputDataError) as caught:
        read_conversations(write(tmp_path, text, "sharegpt.json"))
    assert message in str(caught.value)
