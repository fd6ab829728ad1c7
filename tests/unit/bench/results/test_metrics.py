"""Metrics of records written by hand: what each number is, and when there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_records import MS, Row, made
from trtpipe.pipeline.bench.results.metric import Values
from trtpipe.pipeline.bench.results.metrics import definitions, distributions, rates
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.statistics import (
    INTERVALS,
    PERCENTILES,
    bootstrap,
    load_point_metrics,
    percentile_name,
    summarise,
)
from trtpipe.pipeline.bench.results.window import Window, closed_window

# Due at 8, sent at 10; six tokens in three responses at 60, 80 and 110 ms; the stream ends at 116.
STREAM = Row(stamps=(60, 80, 110), tokens=(1, 2, 3), due=8, sent=10, end=116)
POINTS = [percentile_name(percent) for percent in PERCENTILES]


def values(records: Records, name: str) -> list[float]:
    (metric,) = (metric for metric in distributions() if metric.name == name)
    found: list[float] = metric.values(records).values.tolist()
    return found


def owners(records: Records, name: str) -> list[int]:
    (metric,) = (metric for metric in distributions() if metric.name == name)
    found: list[int] = metric.values(records).owners.tolist()
    return found


def unknown(records: Records, name: str) -> list[bool]:
    (metric,) = (metric for metric in distributions() if metric.name == name)
    assert metric.unknown is not None
    found: list[bool] = metric.unknown(records).tolist()
    return found


def of(numbers: Sequence[float]) -> Values:
    """Numbers of as many requests."""
    return Values(values=np.array(numbers, dtype=np.float64), owners=np.arange(len(numbers)))


# One request


NUMBERS: list[tuple[str, list[float]]] = [
    ("time_to_first_token", [50]),  # 60 - 10
    ("time_to_first_token_from_due", [52]),  # 60 - 8
    ("request_latency", [100]),  # 110 - 10: the stream's end at 116 is not waited for
    ("request_latency_from_due", [102]),
    ("dispatch_delay", [2]),
    ("time_per_output_token", [10]),  # (100 - 50) / 5: the first response had one token
    ("inter_chunk_latency", [20, 30]),
    # 20 ms for two tokens, then 30 ms for three: five gaps of 10 ms, though no two responses were 10 ms apart.
    ("inter_token_latency", [10, 10, 10, 10, 10]),
    ("output_token_throughput_per_user", [60]),  # 6 / 0.1 s
    ("input_sequence_length", [4]),
    ("output_sequence_length", [6]),
]


@pytest.mark.parametrize(("name", "value"), NUMBERS)
def test_each_number_of_one_request(name: str, value: list[float]) -> None:
    assert values(made(STREAM), name) == pytest.approx(value)


def test_every_distribution_is_in_the_test_above() -> None:
    assert {name for name, _ in NUMBERS} == {metric.name for metric in distributions()}


def test_unequal_chunks_weigh_by_their_tokens() -> None:
    records = made(Row(stamps=(10, 20, 60), tokens=(5, 1, 4)))
    assert values(records, "inter_chunk_latency") == [10, 40]
    assert values(records, "inter_token_latency") == [10, 10, 10, 10, 10]
    # The five tokens of the first response have no gap before them.
    assert values(records, "time_per_output_token") == [10]


def test_without_counts_of_each_response_there_is_no_token_gap() -> None:
    records = made(Row(stamps=(60, 110), output=6, sent=10))
    assert values(records, "inter_token_latency") == []
    assert values(records, "inter_chunk_latency") == [50]
    assert values(records, "time_per_output_token") == [10]  # 50 / 5, not 50 / 1


def test_one_response_has_no_gap_and_no_time_per_token() -> None:
    """Of several tokens in one response nobody knows the times between them."""
    found = made(Row(stamps=(60,), tokens=(1,)), Row(stamps=(60,), tokens=(8,)), Row(stamps=(60,), output=8))
    for name in ("time_per_output_token", "inter_token_latency", "inter_chunk_latency"):
        assert values(found, name) == []
    assert unknown(found, "time_per_output_token") == [False, True, True]


def test_tokens_without_a_response_are_not_divided_by() -> None:
    """Hidden reasoning comes before the first response, and an end token has none."""
    records = made(
        Row(stamps=(60, 80, 100), tokens=(102, 1, 1), unstreamed=101),
        Row(stamps=(60, 100), output=105, unstreamed=100),  # 40 / 4
        Row(stamps=(60, 100), output=100, unstreamed=100),
        Row(stamps=(60, 100), output=1),
    )
    assert values(records, "time_per_output_token") == [20, 10]
    assert unknown(records, "time_per_output_token") == [False, False, True, True]


def test_a_throughput_per_user_needs_time_to_pass() -> None:
    records = made(Row(stamps=(10,), tokens=(3,), sent=10), Row(stamps=(10, 60), tokens=(3, 3), sent=10))
    assert values(records, "output_token_throughput_per_user") == [120]
    assert owners(records, "output_token_throughput_per_user") == [1]


# Several


def test_gaps_are_within_a_request_and_never_between_two() -> None:
    records = made(
        Row(stamps=(10, 20), tokens=(1, 2)),
        Row(stamps=(500,), tokens=(1,)),
        Row(),
        Row(stamps=(700, 730), tokens=(1, 1)),
    )
    assert values(records, "inter_chunk_latency") == [10, 30]
    assert owners(records, "inter_chunk_latency") == [0, 3]
    assert values(records, "inter_token_latency") == [5, 5, 30]
    assert owners(records, "inter_token_latency") == [0, 0, 3]


@pytest.mark.parametrize("metric", distributions(), ids=lambda metric: metric.name)
def test_warm_up_and_failed_requests_are_in_no_distribution(metric: Any) -> None:
    stream: dict[str, Any] = {"stamps": (800, 850, 900), "tokens": (1, 1, 1)}
    records = made(
        Row(**stream, warmup=True), STREAM, Row(**stream, failed="Timeout"), Row(failed="ConnectFailed", sent=None)
    )
    found = metric.values(records)
    assert set(found.owners.tolist()) == {1}
    assert found.values.tolist() == metric.values(made(STREAM)).values.tolist()


# Windows


LEVEL = (
    # Two places. Place 0 is measured from 100 to 500 ms, place 1 from 200 to 400: the window is 200 to 400.
    Row(stamps=(50, 100), tokens=(1, 1), slot=0, warmup=True),
    Row(stamps=(50, 200), tokens=(1, 1), slot=1, warmup=True),
    Row(stamps=(150, 250, 300), tokens=(2, 4, 4), due=100, sent=100, slot=0, input_tokens=7),
    Row(stamps=(250, 400), tokens=(1, 9), due=200, sent=200, slot=1, input_tokens=11),
    Row(stamps=(400, 450, 500), tokens=(3, 3, 4), due=300, sent=300, slot=0),
)


def rate_values(*rows: Row, places: int = 2) -> dict[str, float | None]:
    records = made(*rows)
    found = load_point_metrics(records, closed_window(records, places))
    return {rate.name: found[rate.name]["value"] for rate in rates()}


def test_the_window_of_a_closed_loop_is_where_every_place_is_measured() -> None:
    window = closed_window(made(*LEVEL), 2)
    assert window == Window(start_ns=200 * MS, stop_ns=400 * MS)
    assert window.seconds == 0.2


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row for row in LEVEL if row.slot == 0],  # one place has measured nothing
        [row for row in LEVEL if row.warmup],
        [Row(stamps=(100,), due=0, slot=0), Row(stamps=(200,), due=100, slot=1)],  # one ended as the other began
    ],
    ids=["nothing", "one place", "warm-up alone", "no common time"],
)
def test_a_closed_loop_without_a_common_time_has_no_window(rows: list[Row]) -> None:
    assert closed_window(made(*rows), 2) is None


def test_where_places_go_on_the_window_ends_with_the_last_measured_request() -> None:
    going_on = Row(stamps=(450, 600), tokens=(1, 1), due=400, sent=400, slot=1, warmup=True)
    assert closed_window(made(*LEVEL, going_on), 2) == Window(start_ns=200 * MS, stop_ns=500 * MS)
    short = Row(stamps=(430,), tokens=(1,), due=400, sent=400, slot=1, warmup=True)
    assert closed_window(made(*LEVEL, short), 2) == Window(start_ns=200 * MS, stop_ns=430 * MS)


def test_a_failed_request_occupies_its_place_like_any_other() -> None:
    rows = list(LEVEL)
    rows[3] = Row(due=200, sent=200, end=400, slot=1, failed="Timeout")
    assert closed_window(made(*rows), 2) == Window(start_ns=200 * MS, stop_ns=400 * MS)


# Rates


def test_rates_count_what_arrived_within_the_window_over_its_seconds() -> None:
    found = rate_values(*LEVEL)
    # 4 + 4 of the first, 1 + 9 of the second, 3 of the third, in 0.2 s. The warm-up's token at 200 is outside.
    assert found["output_token_throughput"] == pytest.approx(21 / 0.2)
    # And the prompts of the two that ended within it, of 7 and 11 tokens.
    assert found["total_token_throughput"] == pytest.approx((21 + 18) / 0.2)
    # They ended at 300 and 400; the one at 500 is outside.
    assert found["request_throughput"] == pytest.approx(2 / 0.2)
    assert found["effective_concurrency"] == pytest.approx(2)
    assert found["error_rate"] == 0


def test_a_window_is_open_at_its_start_and_closed_at_its_end() -> None:
    # The window is 100 to 200; a token at 100 belongs to the time before it, one at 200 to it.
    rows = (
        Row(stamps=(100, 200), tokens=(1, 2), due=100, sent=50, slot=0),
        Row(stamps=(100,), tokens=(4,), due=0, slot=1),
    )
    found = load_point_metrics(made(*rows), Window(start_ns=100 * MS, stop_ns=200 * MS))
    assert found["output_token_throughput"]["value"] == pytest.approx(2 / 0.1)
    assert found["request_throughput"]["value"] == pytest.approx(1 / 0.1)


def test_a_failed_request_brings_no_tokens_but_occupies_its_place() -> None:
    rows = list(LEVEL)
    rows[3] = Row(due=200, sent=200, end=400, slot=1, failed="ConnectionLost")
    found = rate_values(*rows)
    assert found["output_token_throughput"] == pytest.approx(11 / 0.2)
    assert found["request_throughput"] == pytest.approx(1 / 0.2)
    assert found["effective_concurrency"] == pytest.approx(2)
    assert found["error_rate"] == pytest.approx(1 / 3)


def test_the_error_rate_is_of_all_measured_requests_and_of_no_warm_up() -> None:
    good = Row(stamps=(20,), tokens=(1,), due=10)
    failed = Row(due=0, end=30, failed="Timeout")
    records = made(good, failed, failed, good, good, Row(end=1, failed="Timeout", warmup=True))
    assert load_point_metrics(records, Window(start_ns=0, stop_ns=30 * MS))["error_rate"]["value"] == pytest.approx(
        2 / 5
    )


def test_what_warm_up_brings_within_the_window_is_throughput_too() -> None:
    # Ten requests a second for four seconds, each of one token after a second; the first and the last ten are not
    # measured. The server brings ten tokens a second in the window as ever, those of warm-up among them.
    rows = [
        Row(due=due, sent=due, stamps=(due + 1000,), tokens=(1,), warmup=not 1000 <= due < 3000)
        for due in range(0, 4000, 100)
    ]
    records = made(*rows)
    found = load_point_metrics(records, Window(start_ns=1000 * MS, stop_ns=3000 * MS))
    assert found["request_throughput"]["value"] == pytest.approx(10)
    assert found["output_token_throughput"]["value"] == pytest.approx(10)
    assert found["total_token_throughput"]["value"] == pytest.approx(50)
    assert found["effective_concurrency"]["value"] == pytest.approx(10)


def test_concurrency_is_the_time_in_flight_within_the_window() -> None:
    window = Window(start_ns=100 * MS, stop_ns=200 * MS)
    rows = (
        Row(sent=0, end=300, stamps=(250,)),  # all of it
        Row(sent=150, end=180, stamps=(180,)),  # 0.3
        Row(sent=50, end=120, stamps=(110,), warmup=True),  # 0.2
        Row(sent=190, end=400, failed="Timeout"),  # 0.1
        Row(sent=0, end=90, stamps=(90,)),  # before
        Row(sent=210, end=290, stamps=(290,)),  # after
        Row(sent=None, end=150, failed="ConnectFailed"),  # never in flight
    )
    assert load_point_metrics(made(*rows), window)["effective_concurrency"]["value"] == pytest.approx(1.6)


def test_uncounted_tokens_are_spread_over_the_responses() -> None:
    window = Window(start_ns=200 * MS, stop_ns=400 * MS)
    # Two of three responses of the first, one of two of the second lie inside: 2/3 of 9 and half of 5.
    rows = (Row(stamps=(100, 300, 350), output=9), Row(stamps=(400, 500), output=5))
    assert load_point_metrics(made(*rows), window)["output_token_throughput"]["value"] == pytest.approx(8.5 / 0.2)


@pytest.mark.parametrize("slot", [0, -1], ids=["closed", "open"])
def test_a_throughput_may_be_off_by_what_its_requests_brought(slot: int) -> None:
    # Of resamples of two requests with 1 and 3 tokens a quarter has twice the first, and a quarter twice the second.
    rows = [Row(stamps=(100,), tokens=(count,), slot=slot, sent=0, end=100) for count in (1, 3)]
    found = load_point_metrics(made(*rows), Window(start_ns=0, stop_ns=200 * MS))
    assert found["output_token_throughput"] == {"value": 20.0, "interval": pytest.approx([10.0, 30.0])}
    # In a closed loop they took as long, on a schedule as many come as it says: nothing tells how far this is off.
    assert found["request_throughput"] == {"value": 10.0, "interval": None}
    assert found["effective_concurrency"]["interval"] is None


# What is undefined


def test_undefined_is_none_and_never_zero_or_nan() -> None:
    nothing = load_point_metrics(made(), None)
    empty = dict.fromkeys(("mean", "std", "min", "max", *POINTS, "interval"))
    for metric in distributions():
        assert nothing[metric.name] == {"n": 0, **empty}
    for rate in rates():
        assert nothing[rate.name] == {"value": None, "interval": None}


@pytest.mark.parametrize(
    "rows",
    [
        (Row(stamps=(60,), tokens=(1,)),),
        (Row(failed="Timeout", end=9),) * 3,
        (Row(stamps=(60, 70), tokens=(1, 1), warmup=True),),
        LEVEL,
    ],
    ids=["one token", "all failed", "warm-up alone", "a load point"],
)
def test_no_number_is_nan_or_endless(rows: tuple[Row, ...]) -> None:
    records = made(*rows)
    for window in (None, Window(start_ns=0, stop_ns=10 * MS), closed_window(records, 2)):
        for name, summary in load_point_metrics(records, window).items():
            numbers = [value for key, value in summary.items() if key != "interval" and value is not None]
            assert all(math.isfinite(number) for number in numbers), name


def test_an_error_rate_of_no_requests_is_undefined() -> None:
    window = Window(start_ns=0, stop_ns=10 * MS)
    assert load_point_metrics(made(Row(stamps=(5,), warmup=True)), window)["error_rate"]["value"] is None


def test_where_all_have_failed_there_is_no_window_and_an_error_rate() -> None:
    found = load_point_metrics(made(Row(end=5, failed="Timeout"), Row(end=7, failed="Timeout")), None)
    assert found["error_rate"]["value"] == 1
    assert found["request_throughput"]["value"] is None


# Statistics


def test_percentiles_interpolate_between_the_nearest_ranks() -> None:
    out = summarise(of([5, 1, 4, 2, 3]))
    assert (out["n"], out["mean"], out["min"], out["max"]) == (5, 3, 1, 5)
    assert out["std"] == pytest.approx(2**0.5)  # the population's: (4+1+0+1+4)/5 = 2
    # Rank p * 4: 0.04, 0.2, 0.4, 1, 2, 3, 3.6, 3.8, 3.96, 3.996.
    expected = [1.04, 1.2, 1.4, 2, 3, 4, 4.6, 4.8, 4.96, 4.996]
    assert [out[name] for name in POINTS] == pytest.approx(expected)
    assert POINTS == ["p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9"]


def test_one_value_is_all_its_percentiles_and_has_no_interval() -> None:
    out = summarise(of([7]))
    assert {out[name] for name in ("mean", "min", "max", *POINTS)} == {7}
    assert out["std"] == 0
    assert out["interval"] is None


def test_intervals_are_of_requests_and_not_of_their_values() -> None:
    few = of(np.random.default_rng(5).lognormal(size=400).tolist())
    many = Values(values=np.repeat(few.values, 50), owners=np.repeat(few.owners, 50))
    one, other = bootstrap(few), bootstrap(many)
    assert one is not None
    assert other is not None
    # Fifty equal values a request tell nothing that one did not.
    for name in INTERVALS:
        assert other[name] == pytest.approx(one[name])


def test_intervals_of_one_request_do_not_exist_however_many_values_it_has() -> None:
    assert bootstrap(Values(values=np.arange(100.0), owners=np.zeros(100, dtype=np.int64))) is None


def test_intervals_are_the_same_each_time() -> None:
    drawn = of(np.random.default_rng(3).lognormal(size=300).tolist())
    assert bootstrap(drawn) == bootstrap(drawn)


def lognormal(rng: np.random.Generator, requests: int) -> Values:
    return of(rng.lognormal(sigma=0.5, size=requests).tolist())


def alike(rng: np.random.Generator, requests: int) -> Values:
    """Twenty values a request that differ little from each other, and much from those of the next request."""
    own = rng.lognormal(sigma=0.5, size=requests)
    return Values(
        values=np.repeat(own, 20) * rng.uniform(0.9, 1.1, 20 * requests), owners=np.repeat(np.arange(requests), 20)
    )


@pytest.mark.parametrize("draw", [lognormal, alike])
def test_intervals_of_the_mean_cover_the_true_one_about_as_often_as_they_say(
    draw: Callable[[np.random.Generator, int], Values],
) -> None:
    true = math.exp(0.5**2 / 2)
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(150):
        interval = bootstrap(draw(rng, 60))
        assert interval is not None
        mean = interval["mean"]
        assert mean is not None
        low, high = mean
        covered += low <= true <= high
    # 95% of 150, by three standard deviations and what the method lacks at 60 skewed values. Resampling values
    # instead of requests covers the second kind in less than half of the cases.
    assert 0.87 <= covered / 150 <= 0.97


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=60))
def test_intervals_contain_their_statistic(numbers: list[int]) -> None:
    out = summarise(of(numbers))
    for name in INTERVALS:
        bounds = out["interval"][name]
        assert bounds is None or bounds[0] - 1e-6 <= out[name] <= bounds[1] + 1e-6, name


@pytest.mark.parametrize(("name", "least"), [("p50", 6), ("p90", 36), ("p99", 368)])
def test_few_values_do_not_bound_a_percentile(name: str, least: int) -> None:
    for count in (least - 1, least):
        interval = bootstrap(of([float(number) for number in range(count)]))
        assert interval is not None
        assert (interval[name] is not None) == (count == least)
        assert interval["mean"] is not None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_percentiles_are_ordered_and_within_the_values(numbers: list[float]) -> None:
    out = summarise(of(numbers))
    points = [out[name] for name in ("min", *POINTS, "max")]
    assert points == sorted(points)
    assert (points[0], points[-1]) == (min(numbers), max(numbers))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 8)), min_size=2, max_size=40))
def test_token_gaps_add_up_to_the_time_from_first_to_last_token(gaps: list[tuple[int, int]]) -> None:
    stamps = np.cumsum([gap for gap, _ in gaps]).tolist()
    tokens = [count for _, count in gaps]
    records = made(Row(stamps=(3, 5), tokens=(1, 1)), Row(stamps=stamps, tokens=tokens, sent=0))
    found = [
        gap
        for gap, owner in zip(
            values(records, "inter_token_latency"), owners(records, "inter_token_latency"), strict=True
        )
        if owner == 1
    ]
    span = stamps[-1] - stamps[0]
    assert len(found) == sum(tokens) - tokens[0]
    assert sum(found) == pytest.approx(span)
    assert sum(values(records, "inter_chunk_latency")[1:]) == pytest.approx(span)
    assert values(records, "time_per_output_token")[1] * (sum(tokens) - tokens[0]) == pytest.approx(span)


SPECULATION = ("tokens_per_step", "draft_acceptance_rate")


def test_every_metric_says_its_unit_its_formula_and_when_it_is_undefined() -> None:
    said = definitions()
    assert set(said) == {*load_point_metrics(made(), None), "request_goodput", "token_goodput", *SPECULATION}
    for name, entry in said.items():
        assert set(entry) == {"unit", "formula", "undefined"}
        assert entry["formula"], name
        assert entry["undefined"], name
        assert entry["unit"] in (
            {""}
            if name in ("error_rate", "draft_acceptance_rate")
            else {"ms", "tokens", "tokens/s", "requests/s", "requests"}
        )
