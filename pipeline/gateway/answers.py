"""Answer to one request: whole, or as server-sent events.

The bytes around a piece of text are made once a request; a piece costs one JSON escape. Nothing is sent before the
engine has answered, so that an early failure still has an HTTP status of its own. A client that leaves, and a
timeout, both end the engine's work by cancelling this request's task.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trtpipe.pipeline.gateway.engine_requests import EngineRequest
from trtpipe.pipeline.gateway.failure import Failure, of_guide
from trtpipe.pipeline.gateway.shared_counters import SharedCounters
from trtpipe.pipeline.gateway.text import Stops, Text
from trtpipe.pipeline.gateway.tools.formats import FORMATS
from trtpipe.pipeline.gateway.tools.parser import CallParser, ToolUse
from trtpipe.pipeline.gateway.traces import RequestSpan
from trtpipe.pipeline.gateway.upstream import Generation, Upstream

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
# Tokens of a prompt that are listed without letting other answers go on: about a millisecond.
_PART = 256
_DONE = b"data: [DONE]\n\n"
Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Description of the answer to a request.

    chat        form of the answer: chat, or text completion
    prompt_lengths   tokens of each prompt
    requests    the engine's request for each answer, prompt by prompt
    end_ids     tokens that end an answer and are not part of its text; empty when they are to be ignored
    likeliest   whether the chosen token is also listed as the likeliest, which holds when nothing is drawn
    tools       how the answer may call tools; None where it may not
    echoes      text of each prompt where its answers begin with it (`echo`); else empty
    guide_param field of the request that asks for a guide; "" for none
    prompts     token ids of each prompt where their log-probabilities are listed too; else empty
    """

    id: str
    chat: bool
    model: str
    created: int
    prompt_lengths: tuple[int, ...]
    requests: tuple[EngineRequest, ...]
    max_tokens: int
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    log_probs: bool
    likeliest: bool
    tools: ToolUse | None
    echoes: tuple[str, ...] = ()
    guide_param: str = ""
    prompts: tuple[array[int], ...] = ()

    @property
    def endpoint(self) -> str:
        return "chat" if self.chat else "completions"


class Choice:
    """One choice of the answer: its text so far, and why it ended."""

    __slots__ = (
        "_detokenizer",
        "_ended",
        "_order",
        "_stops",
        "_text",
        "attempts",
        "calls",
        "count",
        "echo",
        "entries",
        "finish",
        "generation",
        "index",
        "last",
        "listed",
        "offset",
        "prefix",
        "prompt",
        "shown",
        "whole",
    )

    def __init__(self, index: int, order: Order, text: Text, generation: Generation) -> None:
        self.index = index
        self.generation = generation
        self.count = 0
        self.attempts = 0
        self.last = 0.0  # when its last token came, by the monotonic clock
        self.finish: str | None = None
        self.shown = False  # whether the client knows that the choice has ended
        self.whole: list[str] = []
        self.entries: list[tuple[int, float]] = []  # tokens and log-probabilities not sent yet
        self.listed: list[Entry] = []  # entries of the prompt's tokens that have not been sent
        self.offset = 0  # position of the next token in the text, for logprobs of completions
        self.prefix = b""
        copies = len(order.requests) // len(order.prompt_lengths)
        self.echo = order.echoes[index // copies] if order.echoes else ""
        self.prompt = order.prompts[index // copies] if order.prompts else None
        self._order = order
        self._text = text
        self._detokenizer = text.detokenizer(FORMATS[order.tools.format].mark if order.tools else None)
        self.calls = CallParser(order.tools) if order.tools else None
        self._stops = Stops(order.stops) if order.stops else None
        self._ended = False

    def take(self) -> str:
        """The text that has become final since the last call; sets `finish` at the end."""
        generation = self.generation
        piece = ""
        tokens = generation.tokens
        if not self._order.max_tokens:
            tokens = []  # an engine makes at least one
        if tokens and self.finish is None:
            generation.tokens = []
            self.count += len(tokens)
            if self._order.log_probs:
                self._note(tokens)
            if tokens[-1] in self._order.end_ids:
                self._ended = True
                tokens = tokens[:-1]
            piece = self._detokenizer.push(tokens)
            if self._stops is not None and piece:
                piece, found = self._stops.push(piece)
                if found:
                    self._stop()
        if generation.done and self.finish is None:
            rest = self._detokenizer.flush()
            if self._stops is not None:
                rest, found = self._stops.push(rest)
                if found:
                    self._stop()
                else:
                    rest += self._stops.flush()
            piece += rest
            if self.finish is None:
                # An engine may leave out the end token: an answer that is shorter than allowed ended by it.
                self.finish = "stop" if self._ended or self.count < self._order.max_tokens else "length"
        if self.calls is not None:
            piece = self._text_of(piece, self.calls)
        if generation.begun and self.echo:
            piece, self.echo = self.echo + piece, ""
        return piece

    def _text_of(self, piece: str, calls: CallParser) -> str:
        """The part of a piece that is text of the answer; `calls` takes the tool calls in it."""
        piece = calls.push(piece, final=self.finish is not None)
        if calls.over and self.finish is None:
            self._stop()
        if calls.calls and self.finish == "stop":
            self.finish = "tool_calls"
        return piece

    def call_deltas(self) -> list[Entry]:
        """New parts of tool calls since the last call of this method, in the form of OpenAI's stream."""
        return self.calls.deltas() if self.calls is not None else []

    def message(self) -> Entry:
        """The complete message of a chat's answer."""
        content = "".join(self.whole)
        calls = [call.message() for call in self.calls.calls] if self.calls is not None else []
        told: Entry = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        return {**told, "tool_calls": calls} if calls else told

    def _stop(self) -> None:
        self.finish = "stop"
        self.generation.cancel()

    def _note(self, tokens: list[int]) -> None:
        values, self.generation.log_probs = self.generation.log_probs, []
        # After the tokens of a prompt an end token is listed too: lm-eval expects as many tokens as may be made.
        hidden = frozenset() if self._order.prompts else self._order.end_ids
        self.entries += [entry for entry in zip(tokens, values, strict=False) if entry[0] not in hidden]

    async def list_prompt(self) -> None:
        """List the prompt's tokens in parts, since a long prompt would keep other answers waiting. Raises Failure."""
        prompt, self.prompt = self.prompt, None
        values, likeliest = self.generation.prompt_log_probs, self.generation.prompt_likeliest
        if prompt is None:
            return
        count = len(prompt) - 1
        if (len(values), len(likeliest)) != (2 * count, count):
            raise Failure(500, "the inference server sent no log-probabilities of the prompt", code="upstream_error")
        self.listed.append(self._listed(prompt[0], None))
        for place in range(count):
            if place % _PART == 0:
                await asyncio.sleep(0)
            best = (likeliest[place], values[count + place])
            self.listed.append(self._listed(prompt[place + 1], values[place], best))

    @property
    def unsent(self) -> bool:
        """Whether there are log-probabilities that have not been sent."""
        return bool(self.entries or self.listed)

    def told(self) -> Any:
        """Log-probabilities not sent yet, in the form of the endpoint."""
        entries, self.entries = self.entries, []
        listed = [*self.listed, *(self._listed(token, value) for token, value in entries)]
        self.listed = []
        if self._order.chat:
            return {"content": listed, "refusal": None}
        offsets = []
        for entry in listed:
            offsets.append(self.offset)
            self.offset += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in listed],
            "token_logprobs": [entry["logprob"] for entry in listed],
            "top_logprobs": [_by_text(entry["top_logprobs"]) for entry in listed] if self._order.likeliest else None,
            "text_offset": offsets,
        }

    def _listed(self, token: int, value: float | None, likeliest: tuple[int, float] | None = None) -> Entry:
        """One token's entry in the form of chats. The first token of a prompt has no value.

        likeliest  the likeliest token and its log-probability, unless it is the token itself
        """
        entry = self._entry(token, value)
        top = [dict(entry)] if self._order.likeliest and value is not None else []
        if top and likeliest is not None and likeliest[0] != token:
            top.append(self._entry(*likeliest))
        return {**entry, "top_logprobs": top}

    def _entry(self, token: int, value: float | None) -> Entry:
        text = self._text.token(token)
        # A token that is part of a character has no text of its own.
        whole = "\ufffd" not in text
        return {"token": text, "logprob": value, "bytes": list(text.encode()) if whole else None}


def _by_text(top: list[Entry]) -> dict[str, float] | None:
    """Text -> log-probability, as completions list it. The likeliest comes last, and stays where texts are equal."""
    return {entry["token"]: entry["logprob"] for entry in top} or None


class Answer(Response):
    """The response to one request."""

    def __init__(
        self, order: Order, text: Text, upstream: Upstream, counters: SharedCounters, arrived: float, deadline: float,
        span: RequestSpan | None = None,
    ) -> None:  # fmt: skip
        """`arrived` and `deadline` are times on the loop's clock."""
        self.order = order
        self.choices = [Choice(n, order, text, Generation(upstream, self._wake)) for n in range(len(order.requests))]
        self.background = None
        self._counters = counters
        self._deadline = deadline
        self._arrived = arrived
        self._span = span
        self._dirty = False
        self._waiter: asyncio.Future[None] | None = None
        self._gone = False  # the client has left
        self._late = False
        self._sent = False  # whether the response has begun
        self._first = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        watcher = loop.create_task(self._watch(receive, task))
        timer = loop.call_at(self._deadline, self._expire, task)
        self._counters.add("running")
        self._counters.add("waiting")
        status = 200
        try:
            try:
                await self._begin()
                await (self._stream(send) if self.order.stream else self._complete(send))
            except asyncio.CancelledError:
                if not (self._gone or self._late):
                    raise  # the server is being stopped
                if hasattr(task, "uncancel"):
                    task.uncancel()
                if self._gone:
                    status = 499
                else:
                    late = Failure(504, "the answer was not complete in time", code="timeout")
                    status = await self._fail(send, late)
            except Failure as failure:
                status = await self._fail(send, failure)
        finally:
            timer.cancel()
            watcher.cancel()
            for choice in self.choices:
                choice.generation.cancel()
            self._counters.add("running", -1)
            if not self._first:
                self._counters.add("waiting", -1)
            self._counters.answered(self.order.endpoint, status)
            if self._span is not None:
                self._span.answered(self.choices, status)

    # Receiving tokens

    async def _begin(self) -> None:
        for choice, request in zip(self.choices, self.order.requests, strict=True):
            await choice.generation.begin(request)

    async def _news(self) -> None:
        """Return when a generation has something new. Raises Failure when one has failed."""
        while True:
            if not self._dirty:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._dirty = False
            refused = False
            for choice in self.choices:
                if choice.generation.failure is not None and choice.finish is None:
                    raise of_guide(choice.generation.failure, self.order.guide_param)
                if choice.generation.refused is not None:
                    refused = True
                    request = self.order.requests[choice.index]
                    await choice.generation.again(request, choice.attempts)
                    choice.attempts += 1
            if not refused:
                break
        for choice in self.choices:
            if choice.generation.begun and choice.prompt is not None:
                await choice.list_prompt()
        if not self._first:
            self._first = True
            self._counters.add("waiting", -1)
            self._counters.observe("first_token", asyncio.get_running_loop().time() - self._arrived)
            if self._span is not None:
                self._span.first_token()

    def _take(self, choice: Choice) -> str:
        """What `choice.take` gives. Its new tokens are counted, and share the time since the last one."""
        before = choice.count
        piece = choice.take()
        new = choice.count - before
        if new:
            now = time.monotonic()
            self._counters.add("completion_tokens", new)
            if before:
                self._counters.observe("inter_token", (now - choice.last) / new, new)
            choice.last = now
        return piece

    def _wake(self) -> None:
        self._dirty = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _watch(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        """Cancel `task` when the client leaves: the body has been read, so the next news is the disconnection."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        task.cancel()

    def _expire(self, task: asyncio.Task[Any]) -> None:
        self._late = True
        task.cancel()

    # Sending answers

    async def _stream(self, send: Send) -> None:
        order = self.order
        head = {"id": order.id, "object": _CHUNK[order.chat], "created": order.created, "model": order.model}

        def usage() -> str:
            if order.continuous_usage:
                return f',"usage":{json.dumps(self._usage())}'
            return ',"usage":null' if order.include_usage else ""

        def end() -> bytes:
            return f'{closing},"logprobs":null,"finish_reason":null}}]{usage()}}}\n\n'.encode()

        opening = "data: " + json.dumps(head, ensure_ascii=False)[:-1]
        content, closing = ('"delta":{"content":', "}") if order.chat else ('"text":', "")
        suffix = end()
        for choice in self.choices:
            choice.prefix = f'{opening},"choices":[{{"index":{choice.index},{content}'.encode()
        choices = self.choices
        plain = not order.log_probs
        left = len(choices)
        while left:
            await self._news()
            out: list[bytes] = []
            if not self._sent:
                await send({"type": "http.response.start", "status": 200, "headers": _SSE})
                self._sent = True
                if order.chat:
                    role = b'"","role":"assistant"' + suffix
                    out = [choice.prefix + role for choice in choices]
            for choice in choices:
                if choice.shown:
                    continue
                piece = self._take(choice)
                if piece or choice.unsent:
                    if plain:
                        out.append(
                            choice.prefix + quote(piece).encode() + (end() if order.continuous_usage else suffix)
                        )
                    else:
                        logprobs = json.dumps(choice.told(), ensure_ascii=False)
                        rest = f'{closing},"logprobs":{logprobs},"finish_reason":null}}]{usage()}}}\n\n'
                        out.append(choice.prefix + quote(piece).encode() + rest.encode())
                for call in choice.call_deltas():
                    delta = json.dumps({"tool_calls": [call]}, ensure_ascii=False)
                    told = f'"index":{choice.index},"delta":{delta},"logprobs":null,"finish_reason":null'
                    out.append(f'{opening},"choices":[{{{told}}}]{usage()}}}\n\n'.encode())
                if choice.finish is not None:
                    choice.shown = True
                    left -= 1
                    nothing = '"delta":{}' if order.chat else '"text":""'
                    last = f'"index":{choice.index},{nothing},"logprobs":null,"finish_reason":"{choice.finish}"'
                    out.append(f'{opening},"choices":[{{{last}}}]{usage()}}}\n\n'.encode())
            if not left:
                if order.include_usage:
                    out.append(f'{opening},"choices":[],"usage":{json.dumps(self._usage())}}}\n\n'.encode())
                out.append(_DONE)
            if out:
                body = b"".join(out) if len(out) > 1 else out[0]
                await send({"type": "http.response.body", "body": body, "more_body": left > 0})

    async def _complete(self, send: Send) -> None:
        order = self.order
        while any(choice.finish is None for choice in self.choices):
            await self._news()
            for choice in self.choices:
                choice.whole.append(self._take(choice))
        listed = []
        for choice in self.choices:
            content: Entry = {"message": choice.message()} if order.chat else {"text": "".join(choice.whole)}
            logprobs = choice.told() if order.log_probs else None
            listed.append({"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish})
        body = {
            "id": order.id,
            "object": "chat.completion" if order.chat else "text_completion",
            "created": order.created,
            "model": order.model,
            "choices": listed,
            "usage": self._usage(),
        }
        await self._send_json(send, 200, json.dumps(body, ensure_ascii=False).encode(), {})

    def _usage(self) -> dict[str, int]:
        asked = sum(self.order.prompt_lengths)
        made = sum(choice.count for choice in self.choices)
        return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}

    async def _fail(self, send: Send, failure: Failure) -> int:
        """Report a failure to the client by a status or, once events have gone out, by an event; returns the status."""
        if self._sent:
            event = b"data: " + failure.json() + b"\n\n" + _DONE
            await send({"type": "http.response.body", "body": event})
        else:
            await self._send_json(send, failure.status, failure.json(), failure.headers())
        return failure.status

    async def _send_json(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        lines += [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        self._sent = True
        await send({"type": "http.response.body", "body": body})


_CHUNK = {True: "chat.completion.chunk", False: "text_completion"}
