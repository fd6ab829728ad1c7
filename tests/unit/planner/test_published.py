"""The planner against published runs of TensorRT-LLM. What it says of runs that no fit has seen is in
docs/measurements/planner.md; here the shipped efficiencies are held to them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.published import Waves, figures, vllm, waves
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, PredictedRun, errors, predict_run

# Of each length one run, so that the test takes seconds: all of them are in `make bench-plan`.
LENGTHS = {(128, 2048), (1000, 1000), (2048, 2048), (5000, 500)}


def predicted(runtime: str, releases: set[str]) -> list[tuple[MeasuredRun, PredictedRun]]:
    how = load_efficiency()
    return [
        (one, predict_run(one, how))
        for one in figures()
        if (one.runtime, one.release in releases, (one.input_tokens, one.output_tokens) in LENGTHS)
        == (runtime, True, True)
        and one.concurrency is None
    ]


def test_figures_are_of_many_releases_cards_and_models() -> None:
    known = figures()
    assert len(known) > 1100
    assert {one.release for one in known} == {"0.9", "0.14", "0.15", "0.17", "0.20", "0.21", "1.0", "1.2"}
    assert len({one.group for one in known}) > 35


@pytest.mark.parametrize(
    ("runtime", "releases", "number", "error", "bias"),
    [("trtllm_pytorch", {"1.0"}, 32, 0.08, 0.03), ("tensorrt_llm", {"0.17"}, 99, 0.08, 0.04)],
)
def test_throughput_of_a_release(runtime: str, releases: set[str], number: int, error: float, bias: float) -> None:
    found = errors(predicted(runtime, releases), "output_tokens_per_s")
    assert len(found.values) == number
    assert found.mean < error
    assert abs(found.bias) < bias


def test_latency_at_a_rate() -> None:
    """BF16 through Triton, prompts of 467 tokens and answers of 256, up to 8 requests a second."""
    how = load_efficiency()
    rows = [
        (one, predict_run(one, how))
        for one in figures()
        if one.requests_per_s in (2, 4, 8) and (one.input_tokens, one.output_tokens) == (467, 256)
    ]
    assert len(rows) == 12
    assert errors(rows, "ttft_ms").mean < 0.15
    assert errors(rows, "tpot_ms").mean < 0.2
    assert errors(rows, "output_tokens_per_s").mean < 0.1


def test_vllm_is_within_a_tenth_of_what_it_did() -> None:
    """Its overheads are fitted to 16 bits on an H200; FP8 and an H100 are only judged."""
    how = load_efficiency().of("vllm")
    predicted = [(point, waves(point, how)) for point in vllm()]
    assert len(predicted) == 16
    found = {point: one.tokens_per_s / point.tokens_per_s - 1 for point, one in predicted}
    assert all(abs(error) < 0.1 for error in found.values()), found
    # Prompts that start together take several steps, and those of the clients answered first wait for the others'.
    timed = [(point.ttft_ms, one) for point, one in predicted if point.ttft_ms is not None]
    first = [float(np.median(one.ttft)) / measured - 1 for measured, one in timed]
    assert len(first) == 8
    assert all(abs(error) < 0.4 for error in first), first


def test_vllm_with_int4_weights() -> None:
    """The term of INT4's kernel is of the run with one request; the others are only judged (docs/measurements/h100.md,
    "Kernels and other precisions")."""
    how = load_efficiency().of("vllm")
    for clients, (tokens_per_s, within) in {1: (236, 0.02), 64: (8068, 0.12), 256: (14235, 0.05)}.items():
        found = waves(Waves("h100", "int4-awq", clients, tokens_per_s, None), how)
        assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=within), (clients, found.tokens_per_s)


def test_first_tokens_of_clients_in_step() -> None:
    """NIM under clients that start together, prompts of 500 and 5,000 tokens, where none waits for a place."""
    how = load_efficiency()
    rows = [(one, predict_run(one, how)) for one in figures() if one.clients == "in_step" and (one.ttft_ms or 0) < 1000]
    assert len(rows) == 18
    assert errors(rows, "ttft_ms").mean < 0.1
    assert errors(rows, "output_tokens_per_s").mean < 0.08
    assert errors(rows, "tpot_ms").mean < 0.08


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "ep", "measured"),
    [
        ("llama3-70b", "fp8", 2, 1, {1: (65, 0.1), 64: (2815, 0.1), 256: (5275, 0.1)}),
        ("llama3-70b", "fp8", 4, 1, {1: (101, 0.1), 64: (4184, 0.1), 256: (7907, 0.12)}),
        ("mixtral-8x7b", "fp8", 1, 1, {1: (153, 0.1), 64: (3149, 0.1), 256: (6738, 0.2)}),
        ("mixtral-8x7b", "bf16", 2, 1, {1: (151, 0.1), 64: (3175, 0.1), 256: (7503, 0.1)}),
        # The weights are random: their router prefers some experts more than a trained one.
        ("mixtral-8x7b", "fp8", 4, 4, {1: (187, 0.1), 64: (6912, 0.15), 256: (12705, 0.4)}),
    ],
)
def test_vllm_on_several_gpus(
    model: str, dtype: str, tp: int, ep: int, measured: dict[int, tuple[float, float]]
) -> None:
    """Our own four H100s (docs/measurements/h100-x4.md): nothing is fitted to these runs."""
    how = load_efficiency().of("vllm")
    for clients, (tokens_per_s, within) in measured.items():
        found = waves(Waves("h100", dtype, clients, tokens_per_s, None, model, tp, ep), how)
        assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=within), (clients, found.tokens_per_s)
