"""OpenAI's request bodies, checked to the last field: what would change the answer and is not known is refused."""

from __future__ import annotations

import difflib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from pipeline.gateway.failure import Failure, wrong

# Fields of OpenAI's that would change the answer and that no engine behind this gateway can follow, with the values
# that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
# Parts of a message's content that are OpenAI's, but no text.
_NO_TEXT = {"image_url": "images are", "input_audio": "audio is", "file": "files are"}
# Fields about the caller's books, not about the answer.
_IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    # vLLM's and TensorRT-LLM's: the usage so far in every chunk.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Common(_Strict):
    """What both kinds of request have; the last block is not OpenAI's, but known from other servers."""

    model: str
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)

    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    repetition_penalty: float | None = Field(None, gt=0)
    ignore_eos: bool | None = None

    def stops(self) -> tuple[str, ...]:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(words) > 16 or any(len(word) > 256 for word in words):
            raise wrong("'stop' takes up to 16 strings of up to 256 characters", "stop")
        return tuple(word for word in words if word)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class ChatRequest(Common):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def wants_log_probs(self) -> tuple[bool, int]:
        """(whether, how many of the likeliest)."""
        if self.top_logprobs and not self.logprobs:
            raise wrong("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        return bool(self.logprobs), self.top_logprobs or 0

    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=5)

    def wants_log_probs(self) -> tuple[bool, int]:
        return self.logprobs is not None, self.logprobs or 0

    def limit(self) -> int | None:
        return self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """One or several, each as text or as token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and all(isinstance(item, int) for item in given):
            return [given]  # type: ignore[list-item]  # one prompt of ids
        if not given:
            raise wrong("'prompt' is empty", "prompt")
        return list(given)  # type: ignore[arg-type]  # texts, or lists of ids


def parse(body: bytes, kind: type[ChatRequest] | type[CompletionRequest]) -> ChatRequest | CompletionRequest:
    """The request in `body`. Raises Failure 400 naming the field."""
    try:
        text = body.decode("utf-8")
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise wrong("the body is not a JSON object", code="invalid_json")
    if "\\u" in text:  # only an escape can write half a character
        _check_characters(raw)
    for name in _IGNORED:
        raw.pop(name, None)
    for name in _UNSUPPORTED.keys() & raw.keys():
        value = raw.pop(name)
        if value is not None and value not in _UNSUPPORTED[name]:
            raise wrong(f"'{name}' is not supported by this server", name, "unsupported_parameter")
    try:
        request = kind.model_validate(raw)
    except ValidationError as error:
        raise _named(error, kind, raw) from None
    if request.stream_options is not None and not request.stream:
        raise wrong("'stream_options' needs 'stream': true", "stream_options")
    return request


def _check_characters(raw: dict[str, Any]) -> None:
    """Raises Failure for a lone surrogate: JSON can say it, but it is no text, for a tokenizer or in an answer."""
    left: list[tuple[str, Any]] = [("", raw)]
    while left:
        place, value = left.pop()
        inner = f"{place}." if place else ""
        if isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
            raise wrong(f"'{place}' holds half of a surrogate pair, which is no character", place, "invalid_value")
        if isinstance(value, dict):
            if any("\ud800" <= one <= "\udfff" for name in value for one in name):
                raise wrong("the name of a field holds half of a surrogate pair", place or None, "invalid_value")
            left += reversed([(f"{inner}{name}", one) for name, one in value.items()])
        elif isinstance(value, list):
            left += reversed([(f"{inner}{index}", one) for index, one in enumerate(value)])


def _place(error: ErrorDetails, raw: Any) -> str:
    """Where in the body it is: its `loc` without the names that pydantic gives to the types a field may have."""
    out, value = [], raw
    for part in error["loc"]:
        if isinstance(value, dict) and (part in value or error["type"] == "missing"):
            out.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            out.append(str(part))
            value = value[part]
    return ".".join(out)


def _named(error: ValidationError, kind: type[BaseModel], raw: dict[str, Any]) -> Failure:
    """The first complaint, with its field; an unknown field with the nearest known one."""
    every = [(_place(one, raw), one) for one in error.errors(include_url=False, include_context=False)]
    # Of a field that may have several types, what is deepest in it: it came nearest to being one of them.
    place, first = max((one for one in every if one[0].startswith(every[0][0])), key=lambda one: one[0].count("."))
    name = place.rpartition(".")[2]
    if first["type"] == "literal_error" and name == "type" and first["input"] in _NO_TEXT:
        return wrong(f"'{place}': {_NO_TEXT[first['input']]} not supported", place, "unsupported_parameter")
    if first["type"] == "extra_forbidden":
        known = [] if "." in place else list(kind.model_fields)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return wrong(f"unknown field '{place}'{hint}", place, "unknown_parameter")
    if first["type"] == "missing":
        return wrong(f"'{place}' is missing", place, "missing_parameter")
    wanted = dict.fromkeys(str(one["msg"]).removeprefix("Input should be ") for at, one in every if at == place)
    told = first["msg"] if len(wanted) == 1 else f"Input should be {' or '.join(wanted)}"
    return wrong(f"'{place}': {told}", place, "invalid_value")
