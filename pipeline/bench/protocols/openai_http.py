"""Codec of an OpenAI-compatible server: /v1/completions or /v1/chat/completions, streamed.

The chunks with only the role, the finish reason or the usage carry no token. Other chunks may hold several tokens, so
the tokens of the whole answer are counted, by the server's usage or here. A chunk with an empty text holds a token too:
special tokens and parts of a character have no text.
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

# Keys under which servers put the text of a chat chunk; the reasoning has two names.
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
            near = suggestion(model, owners)
            remedy = near if near.startswith("did you mean") else f"name one by --openai-model, {near}"
            raise UsageError(f"model '{model}' is not served at {site.url}", remedy=remedy)
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
        return self._read(request)[0]

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        try:
            return self._read(request)[0].text
        except BadAnswer:
            return ""

    def content(self, request: InFlightRequest) -> str:
        try:
            return self._read(request)[1]
        except BadAnswer:
            return ""

    def _read(self, request: InFlightRequest) -> tuple[Answer, str]:
        """(answer, its text without reasoning and tool calls). Raises BadAnswer."""
        stamps: list[int] = []
        texts: list[str] = []
        contents: list[str] = []
        usage: int | None = None
        prompt: int | None = None
        hidden: int | None = None
        last: int | None = None  # stamp of a final chunk that may hold a token without a text
        done = ended = thought = False
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
                    hidden = _count(told.get("completion_tokens_details") or {}, "reasoning_tokens", hidden)
                choices = chunk.get("choices") if told else chunk["choices"]
                if not choices:
                    continue
                finish = choices[0].get("finish_reason")
                content, reasoning, calls = self._texts(choices[0])
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise BadAnswer("MalformedResponse", f"{type(error).__name__}: {error}, in {event[:200]!r}") from None
            ended = ended or finish in _ENDED
            text = (reasoning or "") + (content or "") + (calls or "")
            if text or (stamps and not finish and (content, reasoning, calls) != (None, None, None)):
                stamps.append(stamp)
                texts.append(text)
                contents.append(content or "")
                thought = thought or bool(reasoning)
            # Over /v1/completions such a chunk need not be a token: our gateway ends every answer with it, and where a
            # response before had two tokens, `usage` is one more than the responses as well.
            elif self._chat and stamps and finish == "length" and content == "":
                last = stamp
        if not done:
            raise BadAnswer("TruncatedStream", f"it ended after {len(stamps)} chunks without [DONE]")
        if last is not None and usage == len(stamps) + 1:  # vLLM ends an answer with its last token's chunk
            stamps.append(last)
        unstreamed = 0 if thought else min(hidden or 0, usage or 0)
        return Answer(stamps, None, "".join(texts), usage, prompt, ended, unstreamed), "".join(contents)

    def _texts(self, choice: dict[str, Any]) -> tuple[str | None, str | None, str | None]:
        """(content, reasoning, tool calls) of a chunk; None for what it does not have."""
        reasoning = calls = None
        if self._chat:
            # Some chunks have no delta, such as a filter's result.
            delta = choice.get("delta") or {}
            content, one, other = texts = [delta.get(name) for name in _TEXTS]
            reasoning = one if other is None else one or other
            if delta.get("tool_calls"):
                parts = [call.get("function") or {} for call in delta["tool_calls"]]
                calls = "".join(str(part[name]) for part in parts for name in ("name", "arguments") if part.get(name))
        else:
            content = choice.get("text")
            texts = [content]
        for text in texts:
            if text is not None and not isinstance(text, str):
                raise TypeError(f"the text is {text!r}")
        return content, reasoning, calls


def _count(usage: dict[str, Any], name: str, before: int | None) -> int | None:
    """A count in a chunk's usage, or `before` where it has none. Raises ValueError for an invalid number."""
    value = usage.get(name)
    if value is None:
        return before
    if type(value) not in (int, float) or not 0 <= value <= MOST_TOKENS or value % 1:
        raise ValueError(f"{name} is {value!r}")
    return int(value)
