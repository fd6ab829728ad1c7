"""Server-sent events of an answer, in Triton's format and in OpenAI's.

A form is made from the body of a request and gives all events of its answer. Each event is a chunk of the body of its
own.
"""

from __future__ import annotations

import json
import time
from typing import Any

from trtpipe.pipeline.bench.mock_server import triton
from trtpipe.pipeline.bench.mock_server.script import TOKEN_TEXT
from trtpipe.pipeline.bench.mock_server.triton import Refused
from trtpipe.pipeline.net.h2.status import Code

MODEL = "ensemble"  # model that OpenAI's endpoints serve
DONE = b"data: [DONE]\n\n"
GARBAGE = b'data: {"text": "cut\n\n'
DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


class Generate:
    """Events of Triton's generate_stream. Raises Refused."""

    protocol = "http"

    def __init__(self, model: str, body: dict[str, Any]) -> None:
        triton.model_of(model)
        if not isinstance(body.get("text_input"), str):
            raise Refused("a request without text_input")
        self.prompt: str = body["text_input"]
        self.max_tokens = _length(body, "max_tokens")
        _must_stream(body.get("stream", True))
        self._head = {"id": body["id"]} if "id" in body else {}
        self._head |= {"model_name": model, "model_version": triton.MODEL_VERSION}
        self._counted = body.get("return_num_output_tokens") is True

    def role(self) -> list[bytes]:
        return []

    def tokens(self, count: int) -> bytes:
        counted = {"num_output_tokens": count} if self._counted else {}
        return event({**self._head, **counted, "text_output": TOKEN_TEXT * count})

    def done(self, count: int) -> list[bytes]:
        return []

    def error(self, words: str) -> list[bytes]:
        return [event({"error": words})]


class OpenAi:
    """Events of OpenAI's completions and, with `chat`, of chat completions. Raises Refused."""

    protocol = "openai"

    def __init__(self, chat: bool, body: dict[str, Any]) -> None:
        if body.get("model") != MODEL:
            raise Refused(f"the model {body.get('model')!r} does not exist", Code.NOT_FOUND)
        self.prompt = _text(_last(body.get("messages")).get("content") if chat else body.get("prompt"))
        length = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        self.max_tokens = _length({"max_tokens": DEFAULT_MAX_TOKENS} | body, length)
        _must_stream(body.get("stream", False))
        self._chat = chat
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))
        kind = "chat.completion.chunk" if chat else "text_completion"
        created = time.time_ns()
        self._head = {"id": f"known-{created}", "object": kind, "created": created // 10**9, "model": MODEL}

    def role(self) -> list[bytes]:
        """Event without a token, sent when the request arrives: it exposes a client that counts it as a token."""
        return [self._event({"delta": {"role": "assistant", "content": ""}})] if self._chat else []

    def tokens(self, count: int) -> bytes:
        text = TOKEN_TEXT * count
        return self._event({"delta": {"content": text}} if self._chat else {"text": text})

    def done(self, count: int) -> list[bytes]:
        reason = "length" if count == self.max_tokens else "stop"
        out = [self._event({"delta": {}} if self._chat else {"text": ""}, reason)]
        if self._usage:
            asked = len(self.prompt.split())
            usage = {"prompt_tokens": asked, "completion_tokens": count, "total_tokens": asked + count}
            out.append(event({**self._head, "choices": [], "usage": usage}))
        return [*out, DONE]

    def error(self, words: str) -> list[bytes]:
        return [event({"error": {"message": words, "type": "server_error", "code": None}}), DONE]

    def _event(self, said: dict[str, Any], reason: str | None = None) -> bytes:
        usage = {"usage": None} if self._usage else {}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return event({**self._head, "choices": [choice], **usage})


def _length(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value <= 0:
        raise Refused(f"a request without {name} of one or more")
    return value


def _must_stream(value: Any) -> None:
    if value is not True:
        raise Refused("this server streams only: stream is not true")


def _last(messages: Any) -> dict[str, Any]:
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        raise Refused("a request without messages")
    return messages[-1]


def _text(prompt: Any) -> str:
    """The first text of a prompt: text, token ids, or a list of either or of parts with text. Empty without text."""
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(first, dict):
        first = first.get("text")
    return first if isinstance(first, str) else ""
