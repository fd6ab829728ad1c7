"""Triton's and OpenAI's HTTP endpoints of the mock server: HTTP/1.1 with keep-alive, one request at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools

from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.bench.mock_server import triton
from trtpipe.pipeline.bench.mock_server.events import GARBAGE, MODEL, Generate, OpenAi
from trtpipe.pipeline.bench.mock_server.link import Answer, Hub, Link
from trtpipe.pipeline.bench.mock_server.script import Script, Then, Truth, script_of
from trtpipe.pipeline.bench.mock_server.triton import Refused
from trtpipe.pipeline.net.h2.status import Code

Form = Generate | OpenAi

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"
_OPENAI = {"/v1/completions": False, "/v1/chat/completions": True}


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class HttpAnswer(Answer):
    """A streamed answer."""

    __slots__ = ("_chunk", "_closing", "_last", "_link", "_opening")

    def __init__(self, link: HttpLink, form: Form, truth: Truth, script: Script) -> None:
        super().__init__(truth, script)
        self._link = link
        self._chunk = _chunk(form.tokens(truth.tokens_per_response))
        self._last = b""
        if script.then is Then.ERROR:
            events = form.error(script.words)
        elif script.then is Then.GARBAGE:
            events = [GARBAGE]
        else:
            events = form.done(script.tokens)
            if script.tokens:
                self._last = _chunk(form.tokens(truth.rest))
        self._closing = b"".join(map(_chunk, events)) + _END
        role = form.role()
        self._opening = _HEAD + b"".join(map(_chunk, role))
        if role:
            self.open()

    def open(self) -> None:
        if self._opening:
            self._link.put(self._opening)
            self._opening = b""

    def tick(self) -> None:
        self._link.put(self._chunk, self.tell)

    def end(self) -> None:
        if self.script.then is Then.CUT:
            self._link.leave()
        elif self.script.then is not Then.STALL:
            if self._last:
                self._link.put(self._last, self.tell)
            self._link.put(self._closing, self.truth.ended)
            self._link.done()


class HttpLink(Link):
    """One connection; httptools calls the methods that begin with `on_`."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        self._parser = httptools.HttpRequestParser(self)
        self._stamp = 0
        self._answer: HttpAnswer | None = None
        self._url = self._id = b""
        self._body: list[bytes] = []
        self._keep = True

    def feed(self, data: bytes, stamp: int) -> None:
        self._stamp = stamp
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._give_up(f"not a request of HTTP/1.1: {error}")
        self.hub.schedule.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._answer is not None:
            self._answer.stop()

    def on_message_begin(self) -> None:
        self._url = self._id = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._id = value

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._answer is not None:
            self._give_up("a request before the last one was answered")
            return
        self._keep = self._parser.should_keep_alive()
        method = self._parser.get_method().decode()
        path = self._url.partition(b"?")[0].decode("latin-1")
        try:
            self._serve(method, path)
        except Refused as refused:
            self._refuse(path, 404 if refused.code is Code.NOT_FOUND else 400, str(refused))

    def _give_up(self, words: str) -> None:
        """Give up on input that cannot be answered, and cut off an answer that is under way."""
        if self._answer is not None:
            self.leave()
        else:
            self._keep = False
            self._reply(400, {"error": words})

    def done(self) -> None:
        """Called when an answer has been put."""
        self._answer = None
        if not self._keep:
            self.leave()

    def _serve(self, method: str, path: str) -> None:
        if method == "POST" and path in _OPENAI:
            body = self._json()
            self._begin(path, OpenAi(_OPENAI[path], body), self._id.decode("latin-1"))
        elif method == "POST" and path.startswith("/v2/models/") and path.endswith("/generate_stream"):
            body = self._json()
            request_id = str(body.get("id") or self._id.decode("latin-1"))
            self._begin(path, Generate(path.split("/")[3], body), request_id)
        elif method == "GET" and path == "/metrics":
            self._reply(200, self._metrics().encode(), "text/plain; charset=utf-8")
        else:
            self._reply(200, _describe(method, path))

    def _begin(self, path: str, form: Form, request_id: str) -> None:
        asked = script_of(form.prompt, form.max_tokens)
        truth = self.hub.remember(request_id, form.protocol, self._stamp, asked)
        if asked.then is Then.STATUS:
            self.told.append(truth.ended)
            self._refuse(path, int(asked.words), f"the prompt asked for status {asked.words}")
            return
        self._answer = HttpAnswer(self, form, truth, asked)
        self.hub.schedule.add(self._answer, self._stamp)

    def _json(self) -> dict[str, Any]:
        try:
            body = parse_json(b"".join(self._body))
        except ValueError as error:
            raise Refused(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused("the body is not a JSON object")
        return body

    def _refuse(self, path: str, status: int, words: str) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        openai = {"error": {"message": words, "type": kind, "code": None}}
        self._reply(status, openai if path.startswith("/v1/") else {"error": words})

    def _reply(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = "Asked For"
        head = f"HTTP/1.1 {status} {phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
        self.put(head.encode() + data)
        self.done()

    def _metrics(self) -> str:
        ended = sum(truth.then == "finish" and truth.end_ns is not None for truth in self.hub.truth)
        name = "nv_inference_request_success"
        return f'# TYPE {name} counter\n{name}{{model="{MODEL}",version="{triton.MODEL_VERSION}"}} {ended}\n'


def _describe(method: str, path: str) -> Any:
    """The JSON of a resource. Raises Refused."""
    parts = path.split("/")
    if method == "GET" and path.startswith("/v2/models/") and (len(parts) == 4 or parts[4:] == ["ready"]):
        return triton.metadata(parts[3])
    if (method, path) not in _RESOURCES:
        raise Refused(f"no {method} {path} here", Code.NOT_FOUND)
    return _RESOURCES[method, path]()


_RESOURCES: dict[tuple[str, str], Callable[[], Any]] = {
    ("GET", "/v2"): lambda: {"name": triton.NAME, "version": triton.VERSION, "extensions": triton.EXTENSIONS},
    ("GET", "/v2/health/live"): dict,
    ("GET", "/v2/health/ready"): dict,
    ("POST", "/v2/repository/index"): triton.index,
    ("GET", "/v1/models"): lambda: {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]},
}
