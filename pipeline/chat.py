"""A model's chat template, applied as transformers applies it: sandboxed Jinja2 over messages and special tokens."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from engines.errors import InputDataError
from engines.files import read_json


def read_template(tokenizer: Path) -> str | None:
    """The chat template of a tokenizer folder, from its own file or tokenizer_config.json; None if it has none."""
    file = tokenizer / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _settings(tokenizer).get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def apply_template(tokenizer: Path, template: str, messages: list[dict[str, str]]) -> str:
    """The prompt for `messages` ({role, content}), ready for the assistant's answer. Raises InputDataError."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    settings = _settings(tokenizer)
    special = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)
    except jinja2.TemplateError as error:
        raise InputDataError(
            f"the chat template of {tokenizer} cannot be applied",
            why=str(error),
            remedy="pass --raw to send the text as it is",
        ) from None


def _settings(tokenizer: Path) -> dict[str, Any]:
    path = tokenizer / "tokenizer_config.json"
    return read_json(path, "tokenizer config") if path.is_file() else {}


def _content(token: Any) -> str:
    """A token's text; tokenizer_config.json writes it plain or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
