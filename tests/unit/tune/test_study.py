"""A measurement from the report of a search for a rate, and a search that ends at its limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.bench_records import Row, made
from tests.support.factories import write_tokenizer
from trtpipe.pipeline.api.bench import measure
from trtpipe.pipeline.api.bench_options import choose
from trtpipe.pipeline.bench.mock_server.child import MockServerProcess
from trtpipe.pipeline.bench.mock_server.clock import Timing
from trtpipe.pipeline.bench.search import Found, Step, Trial
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.search import Winner
from trtpipe.pipeline.tune.study import Point, Run, Study

KNOWN: dict[str, Any] = {"candidate": AS_IT_IS, "round": 0, "repeat": 0, "seconds": 1.0}


def report(found: Found, *rates: float, inside: float = 3.5, longest_ms: float = 2000.0) -> Any:
    """Load points of 3 s; `inside`: requests/s that ended within the objectives in these."""

    def result(rate: float) -> Any:
        metrics = {
            "request_goodput": {"value": inside}, "output_token_throughput": {"value": 16 * rate},
            "time_to_first_token": {"p99": 90.0}, "time_per_output_token": {"p50": 11.0},
            "request_latency": {"p50": 420.0, "max": longest_ms},
        }  # fmt: skip
        return SimpleNamespace(
            load={"kind": "open", "rate": rate}, metrics=metrics, interrupted=False, window_s=3.0,
            slo={"attainment": 1.0}, requests={"measured": round(3 * rate)}, verdict={"valid": True},
        )  # fmt: skip

    results = [result(rate) for rate in rates]
    return SimpleNamespace(searches=[SimpleNamespace(found=found)], results=results, records=[made(Row())] * len(rates))


def step(rate: float, *, passed: bool) -> Step:
    return Step(rate=rate, runs=[Trial(passed=passed, excess=0.5 if passed else 2.0)])


def test_a_measurement_has_the_rate_of_its_search_and_every_load_point() -> None:
    found = Found(rate=4.0, interval=(4.0, 8.0), steps=[step(4.0, passed=True), step(8.0, passed=False)])
    run = Run.measured(report(found, 4.0, 8.0), **{**KNOWN, "candidate": Candidate.of({"build.max_batch_size": 2})})
    assert run.points == tuple(
        Point(rate=rate, tokens_per_s=16 * rate, ttft_p99=90.0, tpot_p50=11.0, met=met)
        for rate, met in ((4.0, True), (8.0, False))
    )
    assert run.request_s == pytest.approx(0.42)
    assert (run.rate, run.tokens_per_s, run.said("requests/s")) == (3.5, 64.0, "3.5 requests/s (4 to 8)")
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize(
    ("inside", "longest_ms", "rate"),
    [
        (3.5, 2000.0, 3.5),
        (0.0, 3000.0, 2.0),  # the machine stood still: all 12 were answered within 6 s
        (1.0, 1000.0, 3.0),
        (5.0, 500.0, 4.0),  # with those that were sent before; no more than the rate that was sent
    ],
)
def test_what_was_answered_after_a_short_load_point_counts_too(inside: float, longest_ms: float, rate: float) -> None:
    found = Found(rate=4.0, interval=(4.0, None), steps=[step(4.0, passed=True)])
    assert Run.measured(report(found, 4.0, inside=inside, longest_ms=longest_ms), **KNOWN).rate == rate


def test_a_load_point_whose_client_was_late_counts_for_nothing() -> None:
    found = Found(rate=4.0, interval=(4.0, None), steps=[step(4.0, passed=True)])
    twice = report(found, 4.0, 4.0)
    twice.results[0].verdict["valid"] = False
    twice.results[0].metrics["request_goodput"]["value"] = 0.5
    twice.results[0].slo["attainment"] = 0.2
    run = Run.measured(twice, **KNOWN)
    assert (run.rate, len(run.points)) == (3.5, 1)


def test_of_a_conversation_the_first_request_counts() -> None:
    """As in the rate that was sent."""
    found = Found(rate=4.0, interval=(4.0, None), steps=[step(4.0, passed=True)])
    talks = report(found, 4.0, inside=12.0)
    talks.records = [replace(made(*[Row()] * 4), turn=np.array([0, 1, 2, 3]))]
    assert Run.measured(talks, **KNOWN).rate == 3.0


@pytest.mark.parametrize(
    ("found", "rate"),
    [
        (Found(ended="no rate down to 1 requests/s passes", steps=[step(1.0, passed=False)]), 0.0),
        (Found(ended="one request at a time does not meet the objectives"), 0.0),
        (Found(ended="its 60 s were over", steps=[step(4.0, passed=False)]), None),
        (Found(ended="at 4 requests/s the client was the limit"), None),
    ],
)
def test_objectives_that_are_missed_count_and_a_client_that_was_the_limit_does_not(
    found: Found, rate: float | None
) -> None:
    assert Run.measured(report(found), **KNOWN).rate == rate


def test_a_search_that_ended_before_a_rate_was_too_high_decides_nothing(tmp_path: Path) -> None:
    over = Found(rate=4.0, interval=(4.0, None), ended="its 60 s were over", steps=[step(4.0, passed=True)])
    whole = Found(rate=4.0, interval=(4.0, 8.0), steps=[step(4.0, passed=True), step(8.0, passed=False)])
    runs = [Run.measured(report(found), **KNOWN) for found in (over, whole)]
    assert [run.score.at_least for run in runs] == [True, False]
    changed = replace(runs[0], candidate=Candidate.of({"build.max_batch_size": 8}))
    study = Study(target="t", question={}, folder=tmp_path, runs=[runs[1], changed], remedy="give --minutes 9 or more")
    study.winner = Winner(candidate=AS_IT_IS, gain=0.0, complete=True, proven=False)
    assert study.said() == (
        "not decided: time was over before the highest rate of each change was found; give --minutes 9 or more, "
        "or a quieter machine"
    )
    study.winner = Winner(candidate=changed.candidate, gain=0.2, complete=True, error=0.01, proven=False)
    assert study.said() == (
        "not decided: build.max_batch_size=8, +20% ± 1% over the target as it is, but time was over before the "
        "target's highest rate was found; give --minutes 9 or more, or a quieter machine"
    )


@pytest.mark.process
@pytest.mark.loopback
def test_a_search_ends_at_its_limit_with_the_load_point_that_runs(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    server = MockServerProcess.start(Timing(ttft_s=0.02, itl_s=0.01), tmp_path / "truth.jsonl")
    try:
        options, _ = choose(
            protocol="grpc", grpc_url=f"127.0.0.1:{server.grpc_port}", tokenizer=tmp_path / "tokenizer.json",
            output_tokens=4, slo="ttft:30s", find="max-rate", rate=5, duration=120,
        )  # fmt: skip
        assert options.search is not None
        measured = measure(replace(options, search=replace(options.search, limit_s=1.0)), None)
    finally:
        server.stop()
    assert measured.searches[0].found.ended == "its 1 s were over"
    assert not measured.interrupted
    assert Run.measured(measured, **KNOWN).rate is None
