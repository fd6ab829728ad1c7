"""The planner against NVIDIA's published figures that its efficiencies were not fitted to."""

from __future__ import annotations

import pytest

from tests.support.published import errors, served, serving, throughput, together, vllm
from trtpipe.pipeline.planner.efficiency import load_efficiency


def test_throughput_is_within_fifteen_percent_on_average() -> None:
    held_out = [point for point in throughput() if point.held_out]
    found = [error for _, error in errors(load_efficiency(), held_out)]
    assert len(found) == 128
    assert None not in found  # what ran there fits here
    sizes = [abs(error) for error in found if error is not None]
    assert sum(sizes) / len(sizes) < 0.10  # the promise is 15%
    assert sum(size > 0.25 for size in sizes) <= 5


@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize(("model", "tp"), [("llama3.1-8b", 1), ("llama3.1-70b", 4)])
def test_latency_at_a_rate_follows_triton_s(model: str, tp: int, gpu: str) -> None:
    """Another release, another precision, requests at a rate: prompts of 467 tokens, answers of 256."""
    rows = [
        point
        for point in serving()
        if (point.model, point.tp, point.gpu, point.input, point.output) == (model, tp, gpu, 467, 256)
        and point.requests_per_s in (2, 4, 8, 16)
    ]
    assert len(rows) == 4
    off: list[list[float]] = [[], [], []]
    for point in rows:
        true = (point.ttft_ms, point.itl_ms, point.tokens_per_s)
        for one, said, right in zip(off, served(point, load_efficiency()), true, strict=True):
            one.append(abs(said / right - 1))
    assert [max(sum(one) / len(one) - limit, 0) for one, limit in zip(off, (0.2, 0.2, 0.1), strict=True)] == [0, 0, 0]


def test_fp8_over_16_bits_is_what_was_seen() -> None:
    """H100, 8B: 1.7 times at 128/128 to 2.05 times at 2048/2048."""
    points = {
        (point.input, point.quantization.quant_algo is not None): point
        for point in throughput()
        if (point.model, point.gpu) == ("llama3.1-8b", "h100") and point.input == point.output
    }
    said = dict(errors(load_efficiency(), list(points.values())))
    ratio = {}
    for length in (128, 2048):
        both = [points[length, fp8] for fp8 in (True, False)]
        eight, sixteen = [((said[point] or 0) + 1) * point.tokens_per_s for point in both]
        ratio[length] = eight / sixteen
    assert 1.5 < ratio[128] < 2.0
    assert 1.8 < ratio[2048] < 2.3


def test_vllm_in_fp8_is_within_fifteen_percent_of_what_it_did() -> None:
    """Its overheads are fitted to 16 bits; FP8 is only judged."""
    how = load_efficiency().of("vllm")
    found = {point: together(point, how) / point.tokens_per_s - 1 for point in vllm()}
    assert len(found) == 8
    assert all(abs(error) < 0.15 for error in found.values()), found
