"""Chat templates are applied as transformers applies them, and cannot do more than write text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.chat_template import apply_template, read_template, require_template

HELLO = [{"role": "user", "content": "Hello"}]
RAW = "; pass --raw to send the text as it is"
# As published with SmolLM2-135M-Instruct.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, bos_token="<s>", eos_token={"content": "</s>", "lstrip": False})
    return tmp_path


def write(folder: Path, name: str = "tokenizer_config.json", **settings: Any) -> None:
    (folder / name).write_text(json.dumps(settings))


def test_a_real_template(folder: Path) -> None:
    assert apply_template(folder, SMOLLM2, HELLO) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hello</s>"),
        ("{{ pad_token is defined }} {{ add_generation_prompt }}", "False True"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ("{%- for m in messages %}\n  {%- if m.role %}\n{{ m.content }}\n  {%- endif %}\n{%- endfor %}", "Hello"),
        ("{% if true %}\n    {% set x = 1 %}\nkept\n{% endif %}\n", "kept\n"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("a {%- generation %} b {% endgeneration -%} c", "a b c"),
        ("{{ {'b': 'é<', 'a': 1} | tojson }}", '{"b": "é<", "a": 1}'),
        ("{{ ['é'] | tojson(ensure_ascii=True, indent=1) }}", '[\n "\\u00e9"\n]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ strftime_now('%%') }}", "%"),
    ],
)
def test_what_templates_may_use(folder: Path, template: str, text: str) -> None:
    assert apply_template(folder, template, HELLO) == text


def test_special_tokens_are_found_in_either_file(folder: Path) -> None:
    write(folder, "special_tokens_map.json", eos_token="<other>", unk_token={"content": "<unk>"}, pad_token=None)
    text = apply_template(folder, "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}", HELLO)
    assert text == "<s></s><unk>"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression, got 'end of statement block'"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ pad_token + 'x' }}", "'pad_token' is undefined"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe."),
        (
            "{% for x in range(1000000) %}{% endfor %}",
            "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
        ),
    ],
)
def test_a_template_that_fails_says_why_in_one_line(folder: Path, template: str, why: str) -> None:
    with pytest.raises(InputDataError) as caught:
        apply_template(folder, template, HELLO)
    assert str(caught.value) == f"the chat template of {folder} cannot be applied: {why}{RAW}"


def test_where_a_template_is_read_from(folder: Path) -> None:
    assert read_template(folder) is None
    write(folder, chat_template="one")
    assert read_template(folder) == "one"
    write(folder, chat_template=[{"name": "rag", "template": "other"}, {"name": "default", "template": "two"}])
    assert read_template(folder) == read_template(folder, tools=True) == "two"
    write(folder, chat_template=[{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}])
    assert (read_template(folder), read_template(folder, tools=True)) == ("two", "three")
    (folder / "chat_template.jinja").write_text("é", encoding="utf-8")
    assert read_template(folder) == read_template(folder, tools=True) == "é"  # the file of its own wins
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("four")
    assert (read_template(folder), read_template(folder, tools=True)) == ("é", "four")


def test_a_folder_without_settings_has_no_template(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    assert apply_template(tmp_path, "{{ bos_token }}x", HELLO) == "x"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ([{"name": "rag", "template": "x"}], "{} has several chat templates and no default one" + RAW),
        ([7, {}], "{} has several chat templates and no default one" + RAW),
        ({"default": "x"}, "the chat template of {} is a mapping" + RAW),
        (7, "the chat template of {} is a number" + RAW),
    ],
)
def test_a_template_that_is_none_is_refused(folder: Path, template: Any, message: str) -> None:
    write(folder, chat_template=template)
    with pytest.raises(InputDataError) as caught:
        read_template(folder)
    assert str(caught.value) == message.format(folder)


def test_damaged_files_are_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputDataError, match=r"tokenizer config .*tokenizer_config\.json is not JSON"):
        read_template(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputDataError, match=r"chat_template\.jinja is not UTF-8"):
        read_template(folder)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}\n{{ m.content }}", "line 2: Unexpected end of template"),
        ("{{ bos_token", "line 1: unexpected end of template"),
        ("{% nosuch %}", "line 1: Encountered unknown tag 'nosuch'"),
        ("{{ " + "(" * 5000, "maximum recursion depth exceeded"),
    ],
)
def test_a_template_that_cannot_be_parsed_is_told_before_anybody_chats(tmp_path: Path, template: str, why: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(InputDataError) as caught:
        require_template(tmp_path)
    assert str(caught.value).startswith(f"the chat template of {tmp_path} is not a Jinja template: {why}")
    assert caught.value.remedy == "correct it, or remove it: the model is then served without chats"


def test_a_template_for_tools_is_parsed_too(folder: Path) -> None:
    write(folder, chat_template=[{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{% if %}"}])
    with pytest.raises(InputDataError, match="line 1: Expected an expression"):
        require_template(folder)


def test_a_template_is_not_computed_before_a_chat(tmp_path: Path) -> None:
    """Its constants may be of any size."""
    (tmp_path / "chat_template.jinja").write_text("{{ 'a' * 10 ** 12 }}{% generation %}{% endgeneration %}")
    require_template(tmp_path)
