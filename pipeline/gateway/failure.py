"""Errors in the form that OpenAI's clients expect, and the translation of Triton's refusals to them."""

from __future__ import annotations

import json
from typing import Any

from trtpipe.pipeline.net.h2.status import Code, Status

# Parts of messages of an overloaded server, and of one that has no engine right now; both say UNAVAILABLE.
_FULL = ("queue", "too many", "try again later")
_ABSENT = ("not ready", "unknown model", "engine process", "unloading", "server is stopping")
# Parts of messages about a Python process of Triton that has died; they come with INTERNAL.
_DEAD = ("is not healthy", "health mutex")
# Beginning of an engine's refusal of a guide.
_GUIDE = "guided_decoding_guide"
# Beginnings of an engine's refusals whose rest may quote the client: of a guide, and vLLM's of any request.
_REFUSED = (_GUIDE, "vllm refuses it")
# Beginning of an engine's refusal of an adapter that has been removed since the gateway looked it up.
_NO_ADAPTER = "no adapter has the number"
# The C++ backend calls every refusal of its executor INTERNAL; these refusals are the client's fault.
_LIMITS = (
    "max_input_len",
    "max_seq_len",
    "maximum input length",
    "maximum sequence length",
    "max_num_tokens",
    "top_k is",
)


class Failure(Exception):
    """An error for the client. `retry_after` in seconds goes into the header of that name."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: int = 0
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        super().__init__(message)

    @property
    def kind(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def json(self) -> bytes:
        return json.dumps(self.body(), ensure_ascii=False).encode()

    def headers(self) -> dict[str, str]:
        headers = {"retry-after": str(self.retry_after)} if self.retry_after else {}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def wrong(message: str, param: str | None = None, code: str | None = None) -> Failure:
    """A Failure with status 400."""
    return Failure(400, message, param=param, code=code)


def invalid(place: str, why: str, code: str = "invalid_value") -> Failure:
    """A Failure with status 400 about the field at the path `place`, such as `tools.0.function.name`.

    A path of more than 300 characters is cut: it may go through a schema whose names are long.
    """
    place = place if len(place) <= 300 else f"{place[:300]}..."
    return wrong(f"'{place}': {why}", place, code)


def gone(why: str) -> Failure:
    """A Failure with status 503: the server behind the gateway cannot be reached."""
    return Failure(503, f"the inference server is not available: {why}", code="upstream_unavailable", retry_after=1)


def of_status(status: Status) -> Failure:
    """The Failure for the status at the end of an upstream call."""
    words = status.message.lower()
    if status.lost and status.code is not Code.DEADLINE_EXCEEDED:
        return gone(status.message)
    if status.code is Code.RESOURCE_EXHAUSTED or (status.code is Code.UNAVAILABLE and not _says(words, _ABSENT)):
        return Failure(429, status.message or "the server is full", code="overloaded", retry_after=1)
    if status.code is Code.UNAVAILABLE or _says(words, _DEAD):
        return gone(status.message)
    if status.code in (Code.INVALID_ARGUMENT, Code.OUT_OF_RANGE, Code.FAILED_PRECONDITION) or _says(words, _LIMITS):
        return wrong(status.message, code="refused_by_engine")
    if status.code is Code.DEADLINE_EXCEEDED:
        return Failure(504, status.message, code="timeout")
    return Failure(500, f"the inference server failed: {status}", code="upstream_error")


def of_text(message: str) -> Failure:
    """The Failure for the message of an error in a stream of responses.

    If asked, Triton would send a status instead (`triton_grpc_error`), but tritonserver 2.51 may crash after it.
    """
    words = message.lower()
    if words.startswith(_REFUSED):
        return wrong(message, code="refused_by_engine")
    if _says(words, _ABSENT + _DEAD):
        return gone(message)
    if _says(words, _FULL):
        return Failure(429, message, code="overloaded", retry_after=1)
    if _says(words, (_NO_ADAPTER,)):
        return Failure(404, "the model's adapter has just been removed", param="model", code="model_not_found")
    if _says(words, (*_LIMITS, *_REFUSED)):
        return wrong(message, code="refused_by_engine")
    return Failure(500, f"the inference server failed: {message}", code="upstream_error")


def of_guide(failure: Failure, param: str) -> Failure:
    """A failure whose message names the request's field `param` where the engine has refused the guide of that field;
    any other failure as it is."""
    before, _, why = failure.message.partition(f"{_GUIDE}: ")
    if failure.code != "refused_by_engine" or not why or before:
        return failure
    return invalid(param, why, "invalid_schema")


def _says(words: str, marks: tuple[str, ...]) -> bool:
    return any(mark in words for mark in marks)
