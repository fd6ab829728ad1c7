"""Answer to one request: whole, or as server-sent events.

The bytes around a piece of text are made once a request; a piece costs one JSON escape. Nothing is sent before the
engine has answered, so that an early failure still has an HTTP status of its own. A client that leaves, and a
timeout, both end the engine's work by cancelling this request's task.
"""

from __future__ import annotations

import asyncio
import json
import time
from json.encoder import encode_basestring as quote
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trtpipe.pipeline.gateway.choices import Choice, Entry, Order
from trtpipe.pipeline.gateway.failure import Failure, of_guide
from trtpipe.pipeline.gateway.shared_counters import SharedCounters
from trtpipe.pipeline.gateway.text import Text
from trtpipe.pipeline.gateway.traces import RequestSpan
from trtpipe.pipeline.gateway.upstream import Generation, Upstream

_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


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
                if hasattr(task, "uncancel"):
                    task.uncancel()
                if self._gone:
                    status = 499
                elif self._late:
                    late = Failure(504, "the answer was not complete in time", code="timeout")
                    status = await self._fail(send, late)
                else:
                    why = "the gateway was told to end, and its time to drain is over"
                    status = await self._fail(send, Failure(503, why, code="gateway_stopped", retry_after=1))
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
            if refused:
                continue
            for choice in [one for one in self.choices if one.generation.begun and one.prompt is not None]:
                await choice.list_prompt()
            # Another choice may begin, end or fail while the prompt of one is listed.
            if not self._dirty:
                break
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

        def other(choice: Choice, delta: Entry) -> str:
            """The event of a delta that is not text."""
            told = f'"index":{choice.index},"delta":{json.dumps(delta, ensure_ascii=False)},"logprobs":null'
            return f'{opening},"choices":[{{{told},"finish_reason":null}}]{usage()}}}\n\n'

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
                if thought := choice.take_reasoning():
                    out.append(other(choice, thought).encode())
                if piece or choice.unsent:
                    if plain:
                        out.append(
                            choice.prefix + quote(piece).encode() + (end() if order.continuous_usage else suffix)
                        )
                    else:
                        logprobs = json.dumps(choice.take_log_probs(), ensure_ascii=False)
                        rest = f'{closing},"logprobs":{logprobs},"finish_reason":null}}]{usage()}}}\n\n'
                        out.append(choice.prefix + quote(piece).encode() + rest.encode())
                out += [other(choice, {"tool_calls": [call]}).encode() for call in choice.call_deltas()]
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
            logprobs = choice.take_log_probs() if order.log_probs else None
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
