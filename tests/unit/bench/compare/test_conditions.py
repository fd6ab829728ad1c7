"""Conditions of `compare --fail-if`: how they are read, where they fire, and what cannot be judged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_reports import GOOD, LATE, failed, lines, load_point, report, save, saved
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.compare.comparison import compare
from trtpipe.pipeline.bench.compare.conditions import Kind, parse
from trtpipe.pipeline.bench.compare.rows import aliases

KNOWN = {
    "time_to_first_token": Kind(unit="ms", is_rate=False),
    "inter_token_latency": Kind(unit="ms", is_rate=False),
    "request_latency": Kind(unit="ms", is_rate=False),
    "output_sequence_length": Kind(unit="tokens", is_rate=False),
    "output_token_throughput": Kind(unit="tokens/s", is_rate=True),
    "request_throughput": Kind(unit="requests/s", is_rate=True),
    "error_rate": Kind(unit="", is_rate=True),
    "draft_acceptance_rate": Kind(unit="", is_rate=True),
    "tokens_per_step": Kind(unit="tokens", is_rate=True),
}


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "limit", "relative"),
    [
        ("p99_ttft > 1.1x", "time_to_first_token", "p99", 1.1, True),
        ("throughput<0.95x", "output_token_throughput", "value", 0.95, True),
        ("  p50_itl   >=  20 ms ", "inter_token_latency", "p50", 20.0, False),
        ("mean_e2e > 1.5s", "request_latency", "mean", 1500.0, False),
        ("max_latency > 500us", "request_latency", "max", 0.5, False),
        ("p99.9_request_latency > 3x", "request_latency", "p99.9", 3.0, True),
        ("error_rate > 1%", "error_rate", "value", 0.01, False),
        ("error_rate > 0.01", "error_rate", "value", 0.01, False),
        ("request_throughput <= 5req/s", "request_throughput", "value", 5.0, False),
        ("p50_output_sequence_length < 60tokens", "output_sequence_length", "p50", 60.0, False),
        ("acceptance < 50%", "draft_acceptance_rate", "value", 0.5, False),
        ("tokens_per_step < 0.9x", "tokens_per_step", "value", 0.9, True),
        ("tokens_per_step < 2", "tokens_per_step", "value", 2.0, False),
    ],
)
def test_conditions(text: str, metric: str, statistic: str, limit: float, relative: bool) -> None:
    found = parse(text, KNOWN)
    assert (found.metrics[0], found.statistic, found.relative) == (metric, statistic, relative)
    assert found.limit == pytest.approx(limit)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' is not a condition; write for example"),
        ("p99_ttft", "'p99_ttft' is not a condition"),
        ("p99_ttft > fast", "is not a condition"),
        ("p99_ttft > 1.1x and error_rate > 1%", "is not a condition"),
        ("p99_ttft == 3ms", "is not a condition"),
        ("p99_tttf > 1.1x", "is about tttf; did you mean 'ttft'?"),
        ("throughputs < 0.9x", "is about throughputs; did you mean 'throughput'?"),
        ("p98_ttft > 1x", "asks for p98: reports do not have it; did you mean"),
        ("ttft > 1.1x", "does not say which statistic of ttft; write for example p99_ttft"),
        ("p99_throughput < 0.9x", "asks for the p99 of a rate; write throughput"),
        ("p50_itl > 20", "has no unit; write 20x or 20ms or 20s or 20us"),
        ("p50_itl > 20tokens", "has a unit that does not fit: tokens; write 20x or 20ms"),
        ("error_rate > 5ms", "has a unit that does not fit: ms; write 5x or 5 or 5%"),
        ("p99_ttft > 0x", "compares a ratio with 0"),
        ("goodput < 0.9x", "is about goodput: no report has it"),
        ("p99 > 3ms", "is about nothing"),
    ],
)
def test_what_is_no_condition_gets_its_own_line(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text, KNOWN)
    assert says in str(caught.value)


@given(
    st.one_of(
        st.text(max_size=30),
        st.builds(
            "{}{}{}{}{}".format,
            st.sampled_from(["", "p99_", "p50", "mean_", "_", "p9999_"]),
            st.sampled_from([*aliases(), *KNOWN, "x", ""]),
            st.sampled_from([" > ", "<", "<=", "=", ""]),
            st.sampled_from(["1", "1.5", ".5", "-1", "nan", ""]),
            st.sampled_from(["", "x", "ms", "%", "tok/s", "parsec"]),
        ),
    )
)
def test_any_text_is_a_condition_or_refused(text: str) -> None:
    try:
        found = parse(text, KNOWN)
    except UsageError:
        return
    assert found.metrics[0] in KNOWN
    assert found.limit >= 0


def test_conditions_fire_load_point_by_load_point(tmp_path: Path) -> None:
    a = saved(tmp_path / "a", lines(50, seed=1), lines(50, seed=2))
    b = saved(tmp_path / "b", lines(50, seed=3), lines(50, seed=4, ttft_ms=100))
    wanted = ["p50_ttft > 1.5x", "p50_ttft > 70ms", "p95_ttft > 100x", "throughput < 0.1x"]
    found = compare([a, b], fail_if=wanted)
    fired = [(one.condition, one.place, one.fired) for one in found.judgements if one.fired]
    assert fired == [(text, "grpc, 2 in flight", True) for text in wanted[:2]]
    assert len(found.judgements) == 8
    told = str(found.refusal())
    assert told.startswith("the comparison fails: p50_ttft > 1.5x (B at grpc, 2 in flight has ")
    assert "; p50_ttft > 70ms (B at grpc, 2 in flight has " in told
    assert "\n" not in told
    assert "p95_ttft" not in told


def test_many_load_points_are_named_by_their_number(tmp_path: Path) -> None:
    a, b = (saved(tmp_path / str(ttft), *[lines(10, seed=1, ttft_ms=ttft)] * 5) for ttft in (50, 100))
    told = str(compare([a, b], fail_if=["p50_ttft > 1.5x"]).refusal())
    assert told.count("B at grpc") == 3
    assert told.endswith(", and 2 more)")


def test_what_cannot_be_judged_fails(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    silent = load_point(requests)
    silent["metrics"]["time_to_first_token"] = dict.fromkeys(silent["metrics"]["time_to_first_token"])
    a, b = save(tmp_path / "a", report([load_point(requests)])), save(tmp_path / "b", report([silent]))
    found = compare([a, b], fail_if=["p99_ttft > 2x", "p99_ttft > 1s", "p99_latency > 2x"])
    assert [one.fired for one in found.judgements] == [None, None, False]
    assert "cannot be judged: no p99 of time_to_first_token" in str(found.refusal())
    told = str(compare([a, b], fail_if=["error_rate > 1.5x"]).refusal())
    assert "cannot be judged: A has 0 error_rate, which nothing is a multiple of" in told


def test_a_repeat_without_a_value_is_not_passed_over(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    silent = load_point(requests, repeat=1)
    silent["metrics"]["time_to_first_token"] = dict.fromkeys(silent["metrics"]["time_to_first_token"])
    a = save(tmp_path / "a", report([load_point(requests)]))
    b = save(tmp_path / "b", report([load_point(requests), silent]))
    found = compare([a, b], fail_if=["p99_ttft > 2x", "p99_ttft > 1s", "p99_latency > 2x"])
    assert [one.fired for one in found.judgements] == [None, None, False]
    assert "cannot be judged: no p99 of time_to_first_token" in str(found.refusal())


def test_a_condition_on_itl_is_not_judged_by_the_few_requests_whose_itl_is_known(tmp_path: Path) -> None:
    """The gate passed where the server came to send several tokens a response: the rest was faster than before."""
    requests = lines(20, seed=1)
    whole, few = (
        load_point(requests, unknown_requests={"inter_token_latency": count}, token_count_source="usage")
        for count in (0, 16)
    )
    a, b = save(tmp_path / "a", report([whole])), save(tmp_path / "b", report([few]))
    found = compare([a, b], fail_if=["p99_itl > 1.1x", "p50_itl > 1s", "p99_tpot > 1.1x"])
    assert [one.fired for one in found.judgements] == [None, None, False]
    assert found.judgements[0].told == (
        "B at grpc, 1 in flight cannot be judged: the ITL of 16 requests of B is unknown"
    )
    assert found.warnings == ("grpc, 1 in flight: the ITL of 16 of 20 requests of B is unknown",)
    # Reports of 0.1 do not have the number.
    old = save(tmp_path / "old", report([load_point(requests)]))
    assert [one.fired for one in compare([old, a], fail_if=["p99_itl > 1.1x"]).judgements] == [False]
    turned = compare([b, a], fail_if=["p99_itl > 1.1x", "p50_itl > 1s"])
    assert [one.fired for one in turned.judgements] == [None, False]


def test_a_condition_is_not_judged_by_the_few_requests_that_succeeded(tmp_path: Path) -> None:
    """The gate passed where a server refused the half of the load: the rest was as fast as before."""
    requests = lines(20, seed=1)
    half = [line if number % 2 else failed(number, line["sent_ns"] / 1e6) for number, line in enumerate(requests)]
    a, b = save(tmp_path / "a", report([load_point(requests)])), save(tmp_path / "b", report([load_point(half)]))
    found = compare([a, b], fail_if=["p99_ttft > 9x", "p50_ttft > 9x", "mean_latency > 9s", "throughput < 0.01x"])
    assert [one.fired for one in found.judgements] == [None, False, None, False]
    assert found.judgements[0].told == "B at grpc, 1 in flight cannot be judged: 10 of 20 requests of B failed"
    assert [one.fired for one in compare([b, a], fail_if=["p99_ttft > 9x"]).judgements] == [None]
    both = load_point(half, unknown_requests={"inter_token_latency": 4}, token_count_source="usage")
    (told,) = compare([a, save(tmp_path / "c", report([both]))], fail_if=["p50_itl > 9x"]).judgements
    assert told.told.endswith(
        "cannot be judged: 10 of 20 requests of B failed and the ITL of 4 requests of B is unknown"
    )


def test_a_condition_on_itl_leaves_as_many_requests_unknown_as_an_objective_does(tmp_path: Path) -> None:
    requests = lines(20, seed=1)
    points = [
        load_point(requests, unknown_requests={"inter_token_latency": count}, repeat=repeat)
        for repeat, count in enumerate((2, 2, 4))
    ]
    a = save(tmp_path / "a", report([load_point(requests)]))
    conditions = ["p90_itl > 1s", "p90_itl > 1.1x", "p95_itl > 1s", "mean_itl > 1s"]
    few, more = (save(tmp_path / name, report(some)) for name, some in (("few", points[:2]), ("more", points[1:])))
    assert [one.fired for one in compare([a, few], fail_if=conditions).judgements] == [False, False, None, None]
    # Each repeat is judged, not their mean.
    assert [one.fired for one in compare([a, more], fail_if=conditions).judgements] == [None] * 4


@pytest.mark.parametrize("where", ["load point", "report"])
def test_figures_of_an_invalid_run_open_no_gate(tmp_path: Path, where: str) -> None:
    requests = lines(20, seed=1)
    bad = report([load_point(requests, verdict=LATE if where == "load point" else GOOD)], verdict=LATE)
    good = save(tmp_path / "good", report([load_point(requests)]))
    invalid = save(tmp_path / "invalid", bad)
    found = compare([good, invalid], fail_if=["p99_ttft > 2x"])
    assert "cannot be judged: B is INVALID" in str(found.refusal())
    # Against an INVALID base there is no ratio, but a limit of its own can be judged.
    again = compare([invalid, good], fail_if=["p99_ttft > 2x", "p99_ttft > 9s"])
    assert [one.fired for one in again.judgements] == [None, False]
