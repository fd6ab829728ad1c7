"""Models whose chat templates know tools: one of our own for each format of calls, in the form that the format has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.gateways import write_model

_TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TOOLS = "{% if tools %}<|system|>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"

TEMPLATES = {
    "hermes": _TOOLS
    + 'Call one by <tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}'
    + _TURNS
    + "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    + _END,
    "llama3_json": _TOOLS
    + 'Answer as {"name": function name, "parameters": its arguments}{% endif %}'
    + _TURNS
    + "{% for call in m.tool_calls or [] %}"
    + '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    + _END,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    + _TURNS
    + "{% if m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}"
    + "{% if call.id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}"
    + '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    + "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
    + _END,
    "pythonic": _TOOLS
    + "Answer as [func_name1(name=value), func_name2(name=value)]{% endif %}"
    + _TURNS
    + "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    + _END,
}
# Marks that the real tokenizers have as special tokens.
_SPECIAL = {"llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "pythonic": "<|python_start|>"}

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}


def write_tool_model(path: Path, form: str) -> Path:
    """What a gateway reads of a model that writes calls in that format."""
    from tokenizers import Tokenizer

    write_model(path, TEMPLATES[form])
    if form in _SPECIAL:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_special_tokens([_SPECIAL[form]])
        tokenizer.save(str(path / "tokenizer.json"))
    return path


def call_text(form: str, name: str, **arguments: Any) -> str:
    """A call as a model of that format writes it."""
    given = json.dumps(arguments)
    return {
        "hermes": f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>',
        "llama3_json": f'{{"name": "{name}", "parameters": {given}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "{name}", "arguments": {given}}}]',
        "pythonic": f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]",
    }[form]
