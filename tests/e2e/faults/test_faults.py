"""A real tritonserver and our models when clients go away, processes die, queues fill and requests are wrong."""

from __future__ import annotations

import collections
import queue
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.e2e.conftest import ACTIVE, USED, Served, until
from tests.support.kserve import infer_inputs

pytestmark = pytest.mark.real

LONG = 8000
MODELS = ("tensorrt_llm", "ensemble", "tensorrt_llm_bls")
# The poll period, one engine step, and what two busy cores add.
SOON = 3.0


def ask(model: str, tokens: int = LONG, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    if model == "tensorrt_llm":
        start = {"input_ids": [5, 6, 7], "input_lengths": 3, "request_output_len": tokens, "streaming": stream}
    else:
        start = {"text_input": "Hello", "max_tokens": tokens, "stream": stream}
    return {**start, "end_id": -1, **more}


def idle(served: Served) -> bool:
    gauges = served.gauges()
    return gauges[ACTIVE] == gauges[USED] == 0


def works(served: Served) -> bool:
    return all("error" not in served.generate(model, **ask(model, 2, stream=False)) for model in MODELS)


@pytest.mark.parametrize(
    ("model", "stream"),
    [(model, stream) for model in MODELS for stream in (True, False) if stream or model != "ensemble"],
)
def test_a_cancelled_grpc_call_ends_in_the_engine(tiny: Served, model: str, stream: bool) -> None:
    """Of an ensemble Triton tells only the next step of a stream: it needs a first token. Of one that answers whole it
    tells none, and the request runs to its end: serving.ensemble=script is for that."""
    from tritonclient.grpc import InferenceServerClient

    arrived: queue.Queue[Any] = queue.Queue()
    client = InferenceServerClient(tiny.grpc)
    client.start_stream(callback=lambda result, error: arrived.put((result, error)))
    client.async_stream_infer(model, infer_inputs(ask(model, stream=stream)))
    assert until(lambda: tiny.gauges()[ACTIVE] == 1)
    client.stop_stream(cancel_requests=True)
    client.close()
    assert until(lambda: idle(tiny), SOON)


@pytest.mark.parametrize("model", MODELS)
def test_a_closed_http_stream_ends_in_the_engine(tiny: Served, model: str) -> None:
    events = tiny.stream(model, **ask(model))
    next(events)
    assert until(lambda: tiny.gauges()[ACTIVE] == 1)
    events.close()  # type: ignore[attr-defined]
    assert until(lambda: idle(tiny), SOON)


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS[1:])])
def test_more_than_the_queue_holds_is_refused_at_once(tiny: Served, model: str) -> None:
    """Two run and two wait; the rest hears of it quickly, and those four get their whole answers.

    Of the script as many wait before it as before the engine, whose places the four that it serves at once fill.
    """
    taken = 6 if model == "tensorrt_llm_bls" else 4
    url = f"{tiny.http}/v2/models/{model}/generate"
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(10) as pool:

        def one(number: int) -> tuple[float, int, dict[str, Any]]:
            # One after another: of many in the same instant Triton refuses what its own queue cannot hold by then.
            time.sleep(number / 20)
            start = time.monotonic()
            reply = client.post(url, json=ask(model, 600, stream=False))
            return time.monotonic() - start, reply.status_code, reply.json()

        replies = list(pool.map(one, range(10)))
    refused = [(seconds, body["error"]) for seconds, status, body in replies if status != 200]
    # One more may have found a place when another had ended.
    assert 9 - taken <= len(refused) <= 10 - taken
    # Triton's own queue bound, or that of the model behind it.
    assert all("aximum queue size" in error for _, error in refused)
    assert max(seconds for seconds, _ in refused) < min(seconds for seconds, status, _ in replies if status == 200)
    assert until(lambda: idle(tiny), SOON)


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("ensemble", {"text_input": "x" * 65}, "max_input_len"),
    ("ensemble", {"text_input": ""}, "the prompt is empty"),
    ("ensemble", {"max_tokens": 0}, "max_tokens is 0"),
    ("ensemble", {"num_return_sequences": 0}, "num_return_sequences must be 1 to 1024"),
    ("ensemble", {"max_tokens": -3}, "max_tokens is -3"),
    ("ensemble", {"max_tokens": 9000}, "max_seq_len"),
    ("ensemble", {"max_tokens": "many"}, "integer"),
    ("ensemble", {"text_input": ["a", "b"]}, "text_input"),
    ("tensorrt_llm", {"input_ids": [5] * 65, "input_lengths": 65}, "max_input_len"),
    ("tensorrt_llm", {"input_lengths": 0}, "input_lengths is 0"),
    ("tensorrt_llm", {"input_lengths": 9}, "input_lengths is 9"),
    ("tensorrt_llm", {"input_ids": [5, 6, 900]}, "token id 900"),
    ("tensorrt_llm", {"request_output_len": 0}, "max_tokens is 0"),
    ("tensorrt_llm", {"request_output_len": 9000}, "max_seq_len"),
]
BAD += [("tensorrt_llm_bls", change, words) for model, change, words in BAD if model == "ensemble"]


@pytest.mark.parametrize(("model", "change", "telling"), BAD)
def test_a_wrong_request_gets_one_line_and_harms_nobody(
    tiny: Served, model: str, change: dict[str, Any], telling: str
) -> None:
    error = tiny.generate(model, **{**ask(model, 4, stream=False), **change})["error"]
    assert telling in error
    assert "\n" not in error.strip()
    assert works(tiny)


@pytest.mark.parametrize("model", MODELS)
def test_grpc_refuses_unknown_names_wrong_types_and_bad_text(tiny: Served, model: str) -> None:
    from tritonclient.grpc import InferInput

    def failure(inputs: list[Any]) -> str:
        from tritonclient.grpc import InferenceServerClient

        arrived: queue.Queue[Any] = queue.Queue()
        with InferenceServerClient(tiny.grpc) as client:
            client.start_stream(callback=lambda result, error: arrived.put(error))
            client.async_stream_infer(model, inputs)
            error = arrived.get(timeout=20)
            client.stop_stream()
        return str(error.message())

    good = infer_inputs(ask(model, 2))
    assert "unexpected inference input 'colour'" in failure([*good, *infer_inputs({"colour": 1})])
    (name,) = {"max_tokens", "request_output_len"} & set(ask(model))
    wrong = [item for item in good if item.name() != name]
    assert name in failure([*wrong, *infer_inputs({name: "2"})])
    assert name in failure([*wrong, *infer_inputs({name: [1, 2]})])
    if model != "tensorrt_llm":
        bytes_ = InferInput("text_input", [1, 1], "BYTES")
        bytes_.set_data_from_numpy(np.array([[b"\xff\xfe"]], dtype=np.object_))
        assert "not UTF-8" in failure([bytes_, *[item for item in good if item.name() != "text_input"]])
    assert works(tiny)


def processes(served: Served) -> dict[str, list[psutil.Process]]:
    """The engine, and the stubs of each model."""
    out = collections.defaultdict(list)
    for process in psutil.Process(served.pid).children(recursive=True):
        if process.status() == psutil.STATUS_ZOMBIE:
            continue
        words = process.cmdline()
        if "trtpipe.engines.engine_process.server" in words:
            out["engine"].append(process)
        for word in words:
            if instance := re.fullmatch(r"(\w+)_0_\d", word):
                out[instance[1]].append(process)
    return out
