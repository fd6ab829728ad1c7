"""A streamed generation, from a client library of the test's own."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, deserialize_bytes_tensor, triton_to_np_dtype

from trtpipe.engines.errors import HostError, StageFailed, TrtpipeError, UsageError
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.serving.generate import _explain, stream
from trtpipe.triton_repo.llmapi import INPUTS


def config(*inputs: str, max_batch_size: int = 4, decoupled: bool = True) -> Any:
    """The configuration of a model; that of the ensemble, if no inputs are given."""
    out = model_config_pb2.ModelConfig(max_batch_size=max_batch_size)
    out.model_transaction_policy.decoupled = decoupled
    for name in inputs or ("text_input", "max_tokens", "stream", "temperature", "stop_words"):
        out.input.add(name=name)
    return out


class Client:
    """Answers "one", " two", and an empty last response; keeps what it was sent and how its stream was ended."""

    ended: list[bool]
    sent: dict[str, tuple[str, list[int], list[Any]]]  # type, shape, values
    config = config()

    def __init__(self, url: str, *, channel_args: list[tuple[str, int]]) -> None:
        Client.ended = []

    def get_model_config(self, model: str, *, client_timeout: float) -> Any:
        return SimpleNamespace(config=self.config)

    def start_stream(self, callback: Any) -> None:
        self._callback = callback

    def async_stream_infer(self, model: str, inputs: list[Any], **options: Any) -> None:
        Client.sent = {one.name(): (one.datatype(), one.shape(), values(one)) for one in inputs}
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


def values(sent: Any) -> list[Any]:
    data = sent._get_content()
    if sent.datatype() == "BYTES":
        return list(deserialize_bytes_tensor(data))
    return list(np.frombuffer(data, triton_to_np_dtype(sent.datatype())))


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


def test_an_ensemble_gets_a_batch_of_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingParams(temperature=0.5)
    list(stream("host:1", "Hello", sampling, model="ensemble", max_tokens=8, stop_words=["x", "", "yz"]))
    assert Client.sent == {
        "text_input": ("BYTES", [1, 1], [b"Hello"]),
        "stream": ("BOOL", [1, 1], [True]),
        "max_tokens": ("INT32", [1, 1], [8]),
        "temperature": ("FP32", [1, 1], [0.5]),
        "top_p": ("FP32", [1, 1], [1.0]),  # without it the engine takes the likeliest token
        "stop_words": ("BYTES", [1, 2], [b"x", b"yz"]),
    }
    # One that answers in a single response is not asked for several.
    monkeypatch.setattr(Client, "config", config(decoupled=False))
    list(stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8))
    assert Client.sent["stream"] == ("BOOL", [1, 1], [False])


def test_a_model_of_the_llm_api_gets_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [tensor.name for tensor in INPUTS]
    monkeypatch.setattr(Client, "config", config(*names, max_batch_size=0))
    sampling = SamplingParams(temperature=0.5, top_k=4, top_p=0.75, repetition_penalty=1.5, seed=7)
    list(stream("host:1", "Hello", sampling, model="tensorrt_llm", max_tokens=8, stop_words=["x", "yz"]))
    assert Client.sent == {
        "text_input": ("BYTES", [1], [b"Hello"]),
        "streaming": ("BOOL", [1], [True]),
        "sampling_param_max_tokens": ("INT32", [1], [8]),
        "sampling_param_temperature": ("FP32", [1], [0.5]),
        "sampling_param_top_k": ("INT32", [1], [4]),
        "sampling_param_top_p": ("FP32", [1], [0.75]),
        "sampling_param_repetition_penalty": ("FP32", [1], [1.5]),
        "sampling_param_seed": ("UINT64", [1], [7]),
        "sampling_param_stop": ("BYTES", [2], [b"x", b"yz"]),
    }
    assert set(Client.sent) <= set(names)
    # The release's sampler ignores what the model has no input for.
    left = [name for name in names if name not in ("sampling_param_seed", "sampling_param_repetition_penalty")]
    monkeypatch.setattr(Client, "config", config(*left, max_batch_size=0))
    for asked, flag in ((SamplingParams(seed=7, temperature=0.5), "--seed"), (sampling, "--repetition-penalty")):
        with pytest.raises(UsageError, match=f"the model has no input for {flag}"):
            list(stream("host:1", "Hello", asked, model="tensorrt_llm", max_tokens=8))
    for asked in (SamplingParams(repetition_penalty=1.0), SamplingParams(seed=7), SamplingParams(seed=7, top_k=1)):
        assert "".join(stream("host:1", "Hello", asked, model="tensorrt_llm", max_tokens=8)) == "one two"
    # A sampler that never draws.
    left = [name for name in names if not name.endswith(("temperature", "top_k", "top_p", "seed"))]
    monkeypatch.setattr(Client, "config", config(*left, max_batch_size=0))
    with pytest.raises(UsageError, match="the model has no input for --temperature"):
        list(stream("host:1", "Hello", SamplingParams(temperature=0.5), model="tensorrt_llm", max_tokens=8))
    for asked in (SamplingParams(temperature=0), SamplingParams(temperature=0.5, top_k=1)):
        assert "".join(stream("host:1", "Hello", asked, model="tensorrt_llm", max_tokens=8)) == "one two"


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 0.5, "top_k": 4}, {"temperature": 0.5, "top_k": 4}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
        ({"top_k": 4}, {"top_k": 4}),
        ({"seed": -1}, {"seed": 2**64 - 1}),
        ({"seed": -(2**63)}, {"seed": 2**63}),
    ],
)
def test_what_is_asked_is_sent_as_the_engine_takes_it(asked: Any, sent: Any) -> None:
    list(stream("host:1", "Hello", SamplingParams(**asked), model="ensemble", max_tokens=8))
    others = {"text_input", "stream", "max_tokens"}
    assert {name: kept[0] for name, (_, _, kept) in Client.sent.items() if name not in others} == sent


@pytest.mark.parametrize(
    ("stop", "pieces", "cancelled"),
    [
        (["e tw"], ["on"], True),  # of tokens that the engine does not make
        (["wo"], ["one", " t"], True),
        (["two!"], ["one", " ", "two"], False),  # only its beginning comes
    ],
)
def test_an_answer_ends_before_a_stop_text_wherever_its_tokens_end(
    monkeypatch: pytest.MonkeyPatch, stop: list[str], pieces: list[str], cancelled: bool
) -> None:
    """And is cancelled if the engine goes on."""
    goes_on = threading.Event()

    def stop_stream(self: Client, *, cancel_requests: bool) -> None:
        self.ended.append(cancel_requests)
        if cancel_requests:
            goes_on.set()
        elif cancelled:
            assert goes_on.wait(20)

    monkeypatch.setattr(Client, "stop_stream", stop_stream)
    asked = stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8, stop_words=stop)
    assert list(asked) == pieces
    assert Client.ended == ([False, True] if cancelled else [False])


def test_a_stream_that_ended_before_the_request_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Client, callback: Any) -> None:
        callback(None, InferenceServerException("Connection reset", status="StatusCode.UNAVAILABLE"))

    def ask(self: Client, model: str, inputs: list[Any], **options: Any) -> None:
        raise InferenceServerException("The stream is no longer in valid state")

    monkeypatch.setattr(Client, "start_stream", start)
    monkeypatch.setattr(Client, "async_stream_infer", ask)
    with pytest.raises(HostError, match="host:1 cannot be reached: Connection reset"):
        list(stream("host:1", "Hello", SamplingParams(), model="ensemble", max_tokens=8))


class Endless(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """A server that answers one word, and then no more."""

    def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ModelConfigResponse(config=config("text_input", "max_tokens", "stream"))

    def ModelStreamInfer(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        next(requests)
        out = service_pb2.ModelStreamInferResponse()
        out.infer_response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
        out.infer_response.raw_output_contents.append(struct.pack("<I", 2) + b"so")
        yield out
        ended = threading.Event()
        context.add_callback(ended.set)
        ended.wait()


@pytest.fixture(scope="module")
def endless() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Endless(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.process
@pytest.mark.loopback
@pytest.mark.parametrize(
    ("then", "status", "said"),
    [
        ("for piece in pieces: raise ValueError(piece)", 1, "ValueError: so\n"),
        ("next(pieces)", 0, ""),  # it is there yet when the program ends
        ("next(pieces); kept = sys._getframe(); sys.exit(3)", 3, ""),
        ("console.stream(pieces)", 1, "OSError: [Errno 28] No space left on device\n"),
    ],
)
def test_a_program_that_leaves_an_answer_ends(endless: str, then: str, status: int, said: str) -> None:
    program = f"""
import sys
from trtpipe.engines.sampling import SamplingParams
from trtpipe.pipeline.cli import console
from trtpipe.pipeline.serving.generate import stream
pieces = stream("{endless}", "x", SamplingParams(), model="ensemble", max_tokens=9)
{then}
"""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr.endswith(said)) == (status, True), done.stderr
