"""What NVIDIA's own Triton clients rely on, and others would not: flat texts, an empty answer to a stop request, every
perf metric, several sequences of one request.
"""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Served
from tests.support.kserve import infer_inputs

pytestmark = pytest.mark.real

FRONTS = ["ensemble", "tensorrt_llm_bls"]


def answers(served: Served, model: str, body: dict[str, Any], request_id: str = "") -> list[Any]:
    """Results of one request over a gRPC stream, to its final response."""
    from tritonclient.grpc import InferenceServerClient

    arrived: queue.Queue[Any] = queue.Queue()
    out = []
    with InferenceServerClient(served.grpc) as client:
        client.start_stream(callback=lambda result, error: arrived.put((result, error)))
        client.async_stream_infer(model, infer_inputs(body), request_id=request_id, enable_empty_final_response=True)
        while True:
            result, error = arrived.get(timeout=120)
            assert error is None, error
            out.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()
    return out


def texts(results: list[Any]) -> dict[int, str]:
    """The text of each sequence."""
    out: dict[int, str] = {}
    for result in results:
        piece = result.as_numpy("text_output")
        if piece is not None:
            index = result.as_numpy("sequence_index")
            sequence = 0 if index is None else int(index.reshape(-1)[0])
            out[sequence] = out.get(sequence, "") + piece[0].decode()
    return out


@pytest.mark.parametrize("model", FRONTS)
def test_texts_are_flat(served: Served, model: str) -> None:
    (first, *_) = answers(served, model, {"text_input": "Hello", "max_tokens": 2, "stream": False})
    assert first.as_numpy("text_output").shape == (1,)


def test_an_answer_to_a_stop_request_has_no_outputs(served: Served) -> None:
    ids: dict[str, Any] = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1, "stop": True}
    (only,) = answers(served, "tensorrt_llm", ids, request_id="nobody-s")
    assert len(only.get_response().outputs) == 0


@pytest.mark.parametrize("model", FRONTS)
def test_perf_metrics_are_complete(served: Served, model: str) -> None:
    body = {"text_input": "Hello", "max_tokens": 2, "stream": False, "return_perf_metrics": True}
    (first, *_) = answers(served, model, body)
    times = [first.as_numpy(f"{name}_time_ns").item() for name in ("arrival", "first_scheduled", "first_token")]
    assert times == sorted(times)
    for name in ("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"):
        assert first.as_numpy(name).item() == 0


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("model", FRONTS)
def test_sequences_of_a_request_keep_their_own_text(served: Served, model: str, streamed: bool) -> None:
    body = {"text_input": "Water boils at", "max_tokens": 4, "stream": streamed}
    (alone,) = texts(answers(served, model, body, request_id="alone")).values()
    found = texts(answers(served, model, {**body, "num_return_sequences": 2}, request_id="two"))
    assert found == {0: alone, 1: alone}


@pytest.mark.parametrize("streamed", [True, False])
def test_the_script_ends_a_text_with_a_stop_word_that_tokens_do_not_end_with(served: Served, streamed: bool) -> None:
    body = {"text_input": "The capital of France is", "max_tokens": 3, "stream": streamed}
    (whole,) = texts(answers(served, "tensorrt_llm_bls", body)).values()
    assert "Paris" in whole
    (cut,) = texts(answers(served, "tensorrt_llm_bls", {**body, "stop_words": ["Pari"]})).values()
    assert cut == whole[: whole.index("Pari") + len("Pari")]


def test_a_batch_index_comes_where_there_is_a_batch(served: Served) -> None:
    (first, *_) = answers(served, "tensorrt_llm", {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 1})
    assert first.as_numpy("batch_index") is None
    assert np.asarray(first.as_numpy("output_ids")).shape[:2] == (1, 1)
