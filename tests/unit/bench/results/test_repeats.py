"""Figures over repeated runs."""

from __future__ import annotations

from typing import Any

import pytest

from trtpipe.pipeline.bench.results.repeats import over_runs, repeats


def load_point(
    ttft: float | None, tokens: float, *, load: int = 4, valid: bool = True, repeat: int = 0
) -> dict[str, Any]:
    return {
        "protocol": "grpc",
        "label": f"{load} in flight",
        "load": {"kind": "closed", "concurrency": load},
        "repeat": repeat,
        "verdict": {"valid": valid, "reasons": []},
        "metrics": {
            "time_to_first_token": {"n": 5, "p50": ttft, "mean": ttft, "interval": None},
            "output_token_throughput": {"value": tokens, "interval": None},
        },
    }


def test_mean_and_interval_of_three_runs() -> None:
    (one,) = repeats([load_point(10.0, 100.0), load_point(12.0, 110.0, repeat=1), load_point(14.0, 90.0, repeat=2)])
    assert (one["protocol"], one["label"], one["runs"], one["valid"]) == ("grpc", "4 in flight", 3, 3)
    ttft = one["metrics"]["time_to_first_token"]
    assert ttft["p50"]["mean"] == 12.0
    assert ttft["p50"]["std"] == 2.0
    # 4.303 is Student's t for two degrees of freedom, 2/sqrt(3) the standard error.
    assert ttft["p50"]["interval"] == pytest.approx([12 - 4.9687, 12 + 4.9687], abs=1e-3)
    assert set(ttft) == {"mean", "p50"}
    assert one["metrics"]["output_token_throughput"]["value"]["mean"] == 100.0


def test_one_run_tells_nothing_and_loads_are_kept_apart() -> None:
    assert repeats([load_point(10.0, 100.0), load_point(10.0, 100.0, load=8)]) == []
    assert [one["label"] for one in repeats([load_point(1.0, 1.0, load=load) for load in (4, 8, 4, 8)])] == [
        "4 in flight", "8 in flight",
    ]  # fmt: skip


def test_an_invalid_run_and_an_unknown_figure() -> None:
    runs = [load_point(10.0, 100.0), load_point(1000.0, 1.0, valid=False), load_point(12.0, 100.0)]
    (one,) = repeats(runs)
    assert (one["runs"], one["valid"]) == (3, 2)
    assert one["metrics"]["time_to_first_token"]["p50"]["mean"] == 11.0
    (one,) = repeats([load_point(None, 100.0), load_point(12.0, 100.0)])
    assert one["metrics"]["time_to_first_token"]["p50"] is None
    (one,) = repeats([load_point(10.0, 1.0, valid=False), load_point(12.0, 1.0)])
    assert one["metrics"]["output_token_throughput"]["value"] is None


def test_many_runs_come_to_the_normal_quantile() -> None:
    half = {}
    for count in (31, 32, 1001):
        values: list[float | None] = [*[0.0, 1.0] * (count // 2), *[0.5] * (count % 2)]
        found = over_runs(values)
        assert found is not None
        half[count] = (found["interval"][1] - found["mean"]) / found["std"] * count**0.5
    assert half == {31: pytest.approx(2.042), 32: pytest.approx(1.96), 1001: pytest.approx(1.96)}
