"""Codec of an OpenAI-compatible server: /v1/completions or /v1/chat/completions, streamed.

The chunks with only the role, the finish reason or the usage carry no token. Other chunks may hold several tokens, so
the tokens of the whole answer are counted, by the server's usage or here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtpipe.engines.errors import HostError, UsageError, suggestion
from trtpipe.engines.json_input import parse_rows
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.http_setup import Site
from trtpipe.pipeline.bench.protocols.sse import events
from trtpipe.pipeline.bench.protocols.transport import MOST_TOKENS, Answer, BadAnswer, Messages, ReadIds
from trtpipe.pipeline.net.api_key import key_refused

# Keys under which servers put the text of a chat chunk.
_TEXTS = ("content", "reasoning_content", "reasoning")
_NO_JSON = (b"[DONE]", b"")
# Reasons of an end that the model chose, by an end token or after a call.
_ENDED = ("stop", "tool_calls")


class OpenAiHttp:
    """Codec of one model. Made by `find`."""

    def __init__(self, site: Site, model: str, chat: bool, *, own: bool = False) -> None:
        """`own`: the server is this project's gateway."""
        self.protocol = "chat" if chat else "completions"
        self._site = site
        self._model = model
        self._chat = chat
        self._path = "/chat/completions" if chat else "/completions"
        # Without the penalty that the model recommends, as over Triton. Other servers may not know the field.
        self._greedy = {"temperature": 0, **({"repetition_penalty": 1} if own else {})}

    @classmethod
    def find(cls, site: Site, model: str, *, chat: bool) -> OpenAiHttp:
        """Ask a server for its model; `site` is the API's base, http://host:9000/v1. Raises HostError, UsageError."""
        status, listing = site.ask("GET", "/models", "OpenAI-compatible server")
        given = "Authorization" in site.headers
        if status == 401 or (status == 403 and given):
            raise key_refused(site.url, given=given)
        try:
            owners = {entry["id"]: entry.get("owned_by") for entry in listing["data"] if isinstance(entry["id"], str)}
        except (KeyError, TypeError):
            raise HostError(
                f"what answers at {site.url} is not an OpenAI-compatible server",
                why=f"GET {site.path}/models gives status {status} and no list",
                remedy="give the URL of its API, such as http://localhost:9000/v1",
            ) from None
        if model not in owners:
            raise UsageError(f"model '{model}' is not served at {site.url}", remedy=suggestion(model, owners))
        return cls(site, model, chat, own=owners[model] == "trtpipe")

    def described(self) -> dict[str, Any]:
        return {"protocol": self.protocol, "url": self._site.url, "server": "OpenAI-compatible", "model": self._model}

    def encode(
        self, identity: str, prompt: str, max_tokens: int, options: Mapping[str, Any], messages: Messages | None = None
    ) -> bytes:
        said = messages or [{"role": "user", "content": prompt}]
        ask = {"messages": list(said)} if self._chat else {"prompt": prompt}
        body: dict[str, Any] = {"model": self._model, **ask, "max_tokens": max_tokens, "stream": True}
        sampled = {"temperature", "top_k", "top_p"} & set(options)
        body |= {"stream_options": {"include_usage": True}, **({} if sampled else self._greedy), **options}
        return self._site.post(self._path, identity, body)

    def decode(self, request: InFlightRequest) -> Answer:
        stamps: list[int] = []
        texts: list[str] = []
        usage: int | None = None
        prompt: int | None = None
        done = ended = False
        found = events(request)
        chunks = parse_rows([event for event, _ in found if event not in _NO_JSON], max_bytes=request.limit)
        for event, stamp in found:
            if event == b"[DONE]":
                done = True
            if event in _NO_JSON:
                continue
            try:
                chunk = next(chunks)
                error = chunk if chunk.get("object") == "error" else chunk.get("error")
                if error:
                    raise BadAnswer("ServerError", str(error["message"] if isinstance(error, dict) else error))
                told = chunk.get("usage")
                if told:
                    usage = _count(told, "completion_tokens", usage)
                    prompt = _count(told, "prompt_tokens", prompt)
                choices = chunk.get("choices") if told else chunk["choices"]
                text = self._text(choices[0]) if choices else ""
                ended = ended or bool(choices and choices[0].get("finish_reason") in _ENDED)
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise BadAnswer("MalformedResponse", f"{type(error).__name__}: {error}, in {event[:200]!r}") from None
            if text:
                stamps.append(stamp)
                texts.append(text)
        if not done:
            raise BadAnswer("TruncatedStream", f"it ended after {len(stamps)} chunks without [DONE]")
        return Answer(stamps, None, "".join(texts), usage, prompt, ended)

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        try:
            return self.decode(request).text
        except BadAnswer:
            return ""

    def _text(self, choice: dict[str, Any]) -> str:
        if self._chat:
            # Some chunks have no delta, such as a filter's result. Reasoning text counts as tokens too.
            delta = choice.get("delta") or {}
            text = next((delta[name] for name in _TEXTS if delta.get(name)), "")
        else:
            text = choice.get("text") or ""
        if not isinstance(text, str):
            raise TypeError(f"the text is {text!r}")
        return text


def _count(usage: dict[str, Any], name: str, before: int | None) -> int | None:
    """A count in a chunk's usage, or `before` where it has none. Raises ValueError for an invalid number."""
    value = usage.get(name)
    if value is None:
        return before
    if type(value) not in (int, float) or not 0 <= value <= MOST_TOKENS or value % 1:
        raise ValueError(f"{name} is {value!r}")
    return int(value)
