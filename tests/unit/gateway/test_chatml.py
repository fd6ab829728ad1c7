"""A model with Qwen's prompts: ChatML, two tokens that end an answer, and a template with a setting."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.factories import write_tokenizer
from tests.support.gateways import CHAT, Asked, Triton, ask, chat, end_fork_servers, events, response, spoken, tokens_of
from trtpipe.engines.hf.chat_template import apply_template

pytestmark = [pytest.mark.process, pytest.mark.loopback]

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
SILENT = PROMPT + "<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    from tokenizers import Tokenizer

    path = tmp_path_factory.mktemp("qwen")
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(path / "tokenizer.json"))
    # No token begins a text, as in Qwen's.
    settings = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    end, start, over = (tokenizer.token_to_id(token) for token in SPECIAL)
    assert start + 1 == over == end + 2
    generation = {"eos_token_id": [over, end], "pad_token_id": end, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    (path / "generation_config.json").write_text(json.dumps(generation))
    yield path
    end_fork_servers()


@pytest.mark.parametrize("last", ["<|im_end|>", "<|endoftext|>"])
def test_an_answer_is_streamed_up_to_either_end(folder: Path, last: str) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in tokens_of(folder, f"Hé 你{last}"):
            yield response([token])
        yield response([], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        chunks = await events(client, CHAT, chat())
        assert spoken(chunks) == "Hé 你"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        (asked,) = triton.asked
        assert asked.prompt == tokens_of(folder, PROMPT)
        # Three special tokens, and not their letters.
        assert len(asked.prompt) == len(PROMPT) - len("<|im_start|><|im_end|><|im_start|>") + 3
        end, over = (tokens_of(folder, token)[0] for token in ("<|endoftext|>", "<|im_end|>"))
        assert asked.number("end_id") == over
        assert struct.unpack("<2i", asked.raw["stop_words_list"]) == (end, 1)
        assert asked.number("pad_id") == end
        assert (asked.number("runtime_top_k"), round(asked.number("temperature"), 6)) == (20, 0.7)

    ask(script, folder, scenario)


def test_thinking_is_turned_off_by_a_setting_of_the_template(folder: Path) -> None:
    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        yield response(tokens_of(folder, "ok<|im_end|>"), final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        silent = {"chat_template_kwargs": {"enable_thinking": False}}
        loud = {"chat_template_kwargs": {"enable_thinking": True}}
        for settings, prompt in (({}, PROMPT), (loud, PROMPT), (silent, SILENT)):
            answer = (await client.post(CHAT, json={**chat(), **settings})).json()
            assert answer["choices"][0]["message"]["content"] == "ok"
            assert triton.asked.pop().prompt == tokens_of(folder, prompt)
        messages = chat()["messages"]
        # A setting is no way to other messages.
        told = await client.post("/tokenize", json={"messages": messages, **silent})
        assert told.json()["tokens"] == tokens_of(folder, SILENT)
        unlike = {"chat_template_kwargs": {"messages": "x", "add_generation_prompt": False}}
        told = await client.post("/tokenize", json={"messages": messages, **unlike})
        assert told.json()["tokens"] == tokens_of(folder, PROMPT)
        refused = await client.post(CHAT, json=chat(chat_template_kwargs={"x": [1]}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs.x")

    ask(script, folder, scenario)


def test_the_command_line_writes_the_same_prompt(folder: Path) -> None:
    assert apply_template(folder, TEMPLATE, [{"role": "user", "content": "Hello"}]) == PROMPT
