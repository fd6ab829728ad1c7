"""Chat template of a model, rendered as in transformers: sandboxed Jinja2 over messages and special tokens."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trtpipe.engines.errors import InputDataError, kind_of
from trtpipe.engines.json_input import read_bounded, read_json

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Message = dict[str, Any]
TEMPLATE = "chat_template.jinja"
# The one for chats with tools, as transformers 5 saves it.
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
# The longest template on the hub has 20 kB.
MAX_TEMPLATE_BYTES = 1 << 20
RAW = "pass --raw to send the text as it is"
# The `generation` tag marks the assistant's text for training; transformers renders its body, like `if true`.
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def read_template(tokenizer: Path, *, tools: bool = False) -> str | None:
    """Read a tokenizer folder's chat template, from a file of its own or tokenizer_config.json; None if it has none.

    tools  whether for a chat with tools: of several templates it has the one called `tool_use`, as in transformers
    """
    names = (TOOL_TEMPLATE, TEMPLATE) if tools else (TEMPLATE,)
    file = next((tokenizer / name for name in names if (tokenizer / name).is_file()), None)
    if file is not None:
        try:
            return read_bounded(file, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputDataError(f"{file} is not UTF-8", why=str(error), remedy=RAW) from None
        except ValueError as error:
            raise InputDataError(f"{file} is not a chat template", why=str(error), remedy=RAW) from None
    template = _settings(tokenizer, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several templates, each with a name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
        if template is None:
            raise InputDataError(f"{tokenizer} has several chat templates and no default one", remedy=RAW)
        if tools:
            template = named.get("tool_use") or template
    if template is not None and not isinstance(template, str):
        raise InputDataError(f"the chat template of {tokenizer} is {kind_of(template)}", remedy=RAW)
    return template


def require_template(tokenizer: Path) -> None:
    """Raise InputDataError for a chat template that cannot be read. Each is only parsed: compiling it, which computes
    its constants, may take any time and memory."""
    remedy = "correct it, or remove it: the model is then served without chats"
    try:
        templates = {read_template(tokenizer, tools=tools) for tools in (False, True)}
    except InputDataError as error:
        raise InputDataError(error.what, why=error.why, remedy=remedy) from None
    try:
        for template in templates:
            if template is not None:
                compile_template(tokenizer, template).parse()
    except Exception as error:  # of a lexer, a parser, or the depth of its recursion
        line = f"line {error.lineno}: " if hasattr(error, "lineno") else ""
        raise InputDataError(
            f"the chat template of {tokenizer} is not a Jinja template",
            why=f"{line}{str(error) or type(error).__name__}",
            remedy=remedy,
        ) from None


def apply_template(tokenizer: Path, template: str, messages: list[Message]) -> str:
    """Render the prompt for `messages` ({role, content}), up to the assistant's answer. Raises InputDataError."""
    return compile_template(tokenizer, template)(messages)


def compile_template(tokenizer: Path, template: str) -> ChatTemplate:
    """Make a ChatTemplate for many prompts, since compiling takes longer than rendering. Applying it raises errors."""
    return ChatTemplate(template, special_tokens(tokenizer), str(tokenizer))


class ChatTemplate:
    """A template and its special tokens, compiled at the first use. Its pickle holds the text and tokens only."""

    def __init__(self, source: str, special: dict[str, str], owner: str) -> None:
        self._source = source
        self._special = special
        self._owner = owner

    def __reduce__(self) -> Any:
        return ChatTemplate, (self._source, self._special, self._owner)

    def compile(self) -> None:
        """Compile the template now. Raises jinja2.TemplateError."""
        self._compiled  # noqa: B018

    def parse(self) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._environment.parse(self._text)

    def __call__(
        self,
        messages: list[Message],
        settings: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Render the prompt; without `prompt` a conversation that is over. `settings` are variables of the model's own
        template, such as Qwen 3's enable_thinking; `tools` are functions that the answer may call, in OpenAI's form."""
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return str(self._compiled.render({**(settings or {}), **given, **self._special}))
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, and may fail in any way
            raise InputDataError(
                f"the chat template of {self._owner} cannot be applied",
                why=str(error) or type(error).__name__,
                remedy=RAW,
            ) from None

    @property
    def _text(self) -> str:
        return _GENERATION.sub(_always, self._source)

    @functools.cached_property
    def _compiled(self) -> Any:
        return self._environment.from_string(self._text)

    @functools.cached_property
    def _environment(self) -> Any:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str) -> NoReturn:
            raise jinja2.TemplateError(message)

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment


def _always(found: re.Match[str]) -> str:
    before, end, after = found.groups()
    return f"{{%{before} {'endif' if end else 'if true'} {after}%}}"


def special_tokens(tokenizer: Path) -> dict[str, str]:
    """Special tokens that the folder's two files name; each file may store a token as a string or as an object."""
    settings = {
        **_settings(tokenizer, "special_tokens_map.json"),
        **_settings(tokenizer, "tokenizer_config.json"),
    }
    tokens = ((name, settings.get(name)) for name in SPECIAL)
    named = ((name, token.get("content") if isinstance(token, dict) else token) for name, token in tokens)
    return {name: text for name, text in named if isinstance(text, str)}


def _settings(tokenizer: Path, name: str) -> dict[str, Any]:
    path = tokenizer / name
    return read_json(path, "tokenizer config") if path.is_file() else {}
