"""A streamed generation, from a client library of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.serving.generate import _explain, stream


class Client:
    """Answers "one", " two", and an empty last response; keeps how its stream was ended."""

    ended: list[bool]

    def __init__(self, url: str, *, channel_args: list[tuple[str, int]]) -> None:
        Client.ended = []

    def start_stream(self, callback: Any) -> None:
        self._callback = callback

    def async_stream_infer(self, model: str, inputs: list[Any], **options: Any) -> None:
        for text, final in ((b"one", False), (b" two", False), (None, True)):
            array = None if text is None else np.array([text], dtype=object)
            parameters = {"triton_final_response": SimpleNamespace(bool_param=final)}
            response = SimpleNamespace(parameters=parameters)
            result = SimpleNamespace(as_numpy=lambda name, array=array: array, get_response=lambda it=response: it)
            self._callback(result, None)

    def stop_stream(self, *, cancel_requests: bool) -> None:
        self.ended.append(cancel_requests)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonclient.grpc, "InferenceServerClient", Client)


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ("5 prompt tokens and max_tokens 99999 exceed max_seq_len 2048", None, UsageError),
        ("top_k is 2000, it must be within 0 and 1024", None, UsageError),
        ("the engine process has ended", None, StageFailed),
        ("something broke", None, StageFailed),
        ("connection refused", "StatusCode.UNAVAILABLE", HostError),
    ],
)
def test_a_request_that_is_refused_was_wrong(message: str, status: str | None, kind: type[TrtpipeError]) -> None:
    assert type(_explain("host:1", InferenceServerException(message, status=status))) is kind


def test_a_stream_that_has_ended_is_not_cancelled() -> None:
    assert list(stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8)) == ["one", " two"]
    assert Client.ended == [False]


def test_a_stream_that_is_left_is_cancelled() -> None:
    pieces = stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8)
    assert next(pieces) == "one"
    pieces.close()  # type: ignore[attr-defined]  # it is a generator
    assert Client.ended == [True]


def test_a_stream_that_ended_before_the_request_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Client, callback: Any) -> None:
        callback(None, InferenceServerException("Connection reset", status="StatusCode.UNAVAILABLE"))

    def ask(self: Client, model: str, inputs: list[Any], **options: Any) -> None:
        raise InferenceServerException("The stream is no longer in valid state")

    monkeypatch.setattr(Client, "start_stream", start)
    monkeypatch.setattr(Client, "async_stream_infer", ask)
    with pytest.raises(HostError, match="host:1 cannot be reached: Connection reset"):
        list(stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8))
