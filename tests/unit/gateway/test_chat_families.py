"""Prompts of each family of models: its special tokens, every token that ends an answer, and what its template asks."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.factories import write_tokenizer
from tests.support.gateways import CHAT, Asked, Triton, ask, chat, end_fork_servers, events, response, spoken
from trtpipe.engines.hf.chat_template import apply_template

pytestmark = [pytest.mark.process, pytest.mark.loopback]

SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A template of a family's form; names of the tokens as published.

    begins  token that the tokenizer puts before a text, which the template states too, or ""
    ends    tokens that end an answer, as generation_config.json lists them
    prompt  of a question, and of TALK
    """

    special: tuple[str, ...]
    begins: str
    ends: tuple[str, ...]
    template: str
    prompts: tuple[str, str]


TALK = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Yo"},
    {"role": "user", "content": "Bye"},
]
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
KINDS = {
    "llama3": Kind(
        special=LLAMA3,
        begins="<|begin_of_text|>",
        ends=("<|end_of_text|>", "<|eot_id|>"),
        template=(
            "{{- bos_token }}{%- for m in messages %}"
            "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
            "{%- endfor %}{%- if add_generation_prompt %}"
            "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
        ),
        prompts=(
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nShort.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    "mistral": Kind(
        special=("<s>", "</s>", "[INST]", "[/INST]"),
        begins="<s>",
        ends=("</s>",),
        # The system's text goes into the last question, and nobody speaks twice in a row.
        template=(
            "{%- set told = messages[0].content if messages[0].role == 'system' else '' %}"
            "{%- set turns = messages[1:] if told else messages %}{{- bos_token }}{%- for m in turns %}"
            "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{- raise_exception('user and assistant must take turns') }}{%- endif %}"
            "{%- if m.role == 'user' %}"
            "{{- '[INST] ' + (told + '\n\n' if told and loop.last else '') + m.content + '[/INST]' }}"
            "{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"
        ),
        prompts=("<s>[INST] Hello[/INST]", "<s>[INST] Hi[/INST] Yo</s>[INST] Short.\n\nBye[/INST]"),
    ),
    "qwen3": Kind(
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        begins="",
        ends=("<|im_end|>", "<|endoftext|>"),
        # What an earlier answer thought is left out.
        template=(
            "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
            "{{- (m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content) }}"
            "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
            "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
            "{%- endif %}{%- endif %}"
        ),
        prompts=(
            "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
            "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        ),
    ),
    "phi3": Kind(
        special=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
        begins="",
        # A model that goes on asks a question or answers for itself.
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        template=(
            "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
        ),
        prompts=(
            "<|user|>\nHello<|end|>\n<|assistant|>\n",
            "<|system|>\nShort.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYo<|end|>\n<|user|>\nBye<|end|>\n"
            "<|assistant|>\n",
        ),
    ),
}


def load(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def tokens_of(folder: Path, text: str) -> list[int]:
    """Without the token that begins a text: a template states it itself."""
    ids: list[int] = load(folder).encode(text, add_special_tokens=False).ids
    return ids


@dataclass(frozen=True)
class Model:
    kind: Kind
    folder: Path

    def ids(self, names: tuple[str, ...]) -> list[int]:
        return [load(self.folder).token_to_id(name) for name in names]


def write(kind: Kind, folder: Path) -> Model:
    from tokenizers import AddedToken, processors

    write_tokenizer(folder)
    tokenizer = load(folder)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in kind.special])
    if kind.begins:
        begin = (kind.begins, tokenizer.token_to_id(kind.begins))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    model = Model(kind, folder)
    settings = {"bos_token": kind.begins or None, "eos_token": kind.ends[0], "chat_template": kind.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    generation = {"eos_token_id": model.ids(kind.ends), "pad_token_id": model.ids(kind.ends)[-1], **SAMPLING}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield write(KINDS[request.param], tmp_path_factory.mktemp(request.param))
    end_fork_servers()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield write(KINDS["qwen3"], tmp_path_factory.mktemp("thinking"))
    end_fork_servers()


def test_an_answer_is_streamed_up_to_each_of_its_ends(model: Model) -> None:
    kind, folder = model.kind, model.folder
    last = iter(kind.ends)

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in tokens_of(folder, f"Hé 你{next(last)}"):
            yield response([token])
        yield response([], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        for _ in kind.ends:
            chunks = await events(client, CHAT, chat())
            assert spoken(chunks) == "Hé 你"
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        asked = triton.asked[0]
        assert asked.prompt == tokens_of(folder, kind.prompts[0])
        first, *others = model.ids(kind.ends)
        assert (asked.number("end_id"), asked.number("pad_id")) == (first, model.ids(kind.ends)[-1])
        # Each a word of one token: the tokens, and where each word ends.
        words = struct.pack(f"<{2 * len(others)}i", *others, *range(1, len(others) + 1))
        assert asked.raw.get("stop_words_list", b"") == words
        assert (asked.number("runtime_top_k"), round(asked.number("temperature"), 6)) == (20, 0.7)

    ask(script, folder, scenario)


def test_a_conversation_is_the_familys_prompt(model: Model) -> None:
    kind, folder = model.kind, model.folder

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        yield response(tokens_of(folder, f"ok{kind.ends[0]}"), final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        answer = (await client.post(CHAT, json={**chat(), "messages": TALK})).json()
        assert answer["choices"][0]["message"]["content"] == "ok"
        (asked,) = triton.asked
        assert asked.prompt == tokens_of(folder, kind.prompts[1])
        # One token for each name, and where one begins a text it is there once.
        names = [asked.prompt.count(token) for token in model.ids(kind.special)]
        assert names == [kind.prompts[1].count(name) for name in kind.special]
        if kind is KINDS["mistral"]:
            refused = await client.post(CHAT, json={**chat(), "messages": [TALK[1], TALK[3]]})
            assert refused.status_code == 400
            assert "user and assistant must take turns" in refused.json()["error"]["message"]

    ask(script, folder, scenario)
    for messages, prompt in zip(([{"role": "user", "content": "Hello"}], TALK), kind.prompts, strict=True):
        assert apply_template(folder, kind.template, messages) == prompt


def test_what_a_model_thinks_is_apart_and_not_told_again(qwen: Model) -> None:
    folder, thought = qwen.folder, "<think>\nA greeting.\n</think>\n\n"
    silent, loud = ({"chat_template_kwargs": {"enable_thinking": on}} for on in (False, True))
    prompt = qwen.kind.prompts[0]

    async def script(asked: Asked, context: Any) -> AsyncIterator[Any]:
        for token in tokens_of(folder, f"{thought}Yo<|im_end|>"):
            yield response([token])
        yield response([], final=True)

    async def scenario(client: httpx.AsyncClient, triton: Triton) -> None:
        assert spoken(await events(client, CHAT, chat())) == "Yo"
        triton.asked.clear()
        asked: dict[str, Any]
        for asked, wanted in (({}, prompt), (loud, prompt), (silent, f"{prompt}<think>\n\n</think>\n\n")):
            await client.post(CHAT, json={**chat(), **asked})
            assert triton.asked.pop().prompt == tokens_of(folder, wanted)
        again = [{**m, "reasoning": "A greeting."} if m["role"] == "assistant" else m for m in TALK]
        await client.post(CHAT, json={**chat(), "messages": again})
        assert triton.asked.pop().prompt == tokens_of(folder, qwen.kind.prompts[1])
        # A setting is no way to other messages.
        unlike = {"chat_template_kwargs": {"messages": "x", "add_generation_prompt": False}}
        for asked, wanted in ((silent, f"{prompt}<think>\n\n</think>\n\n"), (unlike, prompt)):
            told = await client.post("/tokenize", json={"messages": chat()["messages"], **asked})
            assert told.json()["tokens"] == tokens_of(folder, wanted)
        refused = await client.post(CHAT, json=chat(chat_template_kwargs={"x": [1]}))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs.x")

    ask(script, folder, scenario)
