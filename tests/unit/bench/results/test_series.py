"""A load point over time and its histograms: nothing is lost at an edge."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_records import MS, Row, made
from trtpipe.pipeline.bench.results.metrics import distributions
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.series import BINS, STEPS, histograms, series

RATES = ("tokens_per_s", "requests_per_s")
LATENCIES = ("ttft_p50_ms", "latency_p50_ms", "latency_p99_ms")
# From 0 to 1200 ms: a hundred and twenty steps of 10 ms.
LEVEL = (
    Row(sent=0, stamps=(15, 25), tokens=(1, 2), end=33, warmup=True),
    Row(sent=5, end=42, failed="Timeout"),
    Row(sent=1000, stamps=(1085, 1195), tokens=(3, 4), end=1200),
)


def drawn(records: Records) -> dict[str, Any]:
    found = series(records)
    assert found is not None
    return found


def there(found: dict[str, Any], key: str) -> dict[float, float]:
    """Start of each step in ms -> what it has, where it has anything."""
    values = dict(zip((round(start * 1000, 3) for start in found["t_s"]), found[key], strict=True))
    return {start: value for start, value in values.items() if value}


def test_steps_of_a_load_point() -> None:
    found = drawn(made(*LEVEL))
    assert found["interval_s"] == 0.01
    assert found["t_s"] == pytest.approx([step / 100 for step in range(120)])
    assert all(len(found[key]) == 120 for key in ("in_flight", *RATES, *LATENCIES))


def test_in_flight_is_counted_at_the_end_of_each_step() -> None:
    busy = there(drawn(made(*LEVEL)), "in_flight")
    assert {start: count for start, count in busy.items() if start < 1000} == {0: 2, 10: 2, 20: 2, 30: 1}
    assert {start: count for start, count in busy.items() if start >= 1000} == {
        1000 + 10 * step: 1 for step in range(20)
    }


def test_rates_are_of_what_came_in_the_step() -> None:
    found = drawn(made(*LEVEL))
    # Warm-up is in it.
    assert there(found, "tokens_per_s") == pytest.approx({10: 100, 20: 200, 1080: 300, 1190: 400})
    # The failed one ended too, and the last end is in the last step.
    assert there(found, "requests_per_s") == pytest.approx({30: 100, 40: 100, 1190: 100})


def test_latencies_stand_where_their_response_came() -> None:
    found = drawn(made(*LEVEL))
    assert there(found, "ttft_p50_ms") == {10: 15, 1080: 85}
    assert there(found, "latency_p50_ms") == there(found, "latency_p99_ms") == {20: 25, 1190: 195}
    assert found["ttft_p50_ms"].count(None) == 118


def test_latencies_of_one_step_are_percentiles_of_them() -> None:
    rows = [Row(sent=0, stamps=(moment,), tokens=(1,)) for moment in (1, 2, 3, 4, 1150)]
    found = drawn(made(*rows, Row(sent=0, end=1200, failed="Timeout")))
    assert there(found, "latency_p50_ms") == {0: 2.5, 1150: 1150}
    assert there(found, "latency_p99_ms") == pytest.approx({0: 3.97, 1150: 1150})


def test_uncounted_tokens_are_spread_over_the_responses() -> None:
    found = drawn(made(Row(sent=0, stamps=(5, 15, 1195), output=6, end=1200)))
    assert there(found, "tokens_per_s") == pytest.approx({0: 200, 10: 200, 1190: 200})


def test_what_comes_at_the_very_end_is_in_the_last_step() -> None:
    found = drawn(made(Row(sent=0, stamps=(600, 1200), tokens=(1, 1), end=1200)))
    assert there(found, "tokens_per_s") == pytest.approx({600: 100, 1190: 100})
    assert there(found, "latency_p50_ms") == {1190: 1200}


def test_a_request_without_duration_makes_one_step() -> None:
    found = drawn(made(Row(sent=7, end=7, failed="ConnectFailed")))
    assert len(found["t_s"]) == 1
    assert found["requests_per_s"] == pytest.approx([1 / found["interval_s"]])


@pytest.mark.parametrize("rows", [(), (Row(sent=None, end=4, failed="ConnectFailed"),)])
def test_without_a_request_sent_there_is_no_series(rows: tuple[Row, ...]) -> None:
    assert series(made(*rows)) is None


@pytest.mark.parametrize(
    ("span_ms", "interval_s"),
    [(1, 1e-5), (1200, 0.01), (1201, 0.02), (2399, 0.02), (5000, 0.05), (60_000, 0.5), (61_000, 1)],
)
def test_steps_are_of_a_round_length_and_not_too_many(span_ms: int, interval_s: float) -> None:
    found = drawn(made(Row(sent=0, end=span_ms, failed="Timeout")))
    assert found["interval_s"] == pytest.approx(interval_s)
    assert len(found["t_s"]) <= STEPS


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Moments in whole nanoseconds."""
    sent = draw(st.integers(0, 10**9))
    stamps = [sent + gap for gap in sorted(draw(st.lists(st.integers(0, 10**9), max_size=4)))]
    end = (stamps[-1] if stamps else sent) + draw(st.integers(0, 10**9))
    if not stamps:
        return Row(sent=sent / MS, end=end / MS, failed="Timeout")
    tokens = draw(st.none() | st.lists(st.integers(1, 9), min_size=len(stamps), max_size=len(stamps)))
    output = 12 if tokens is None else None
    return Row(sent=sent / MS, stamps=[stamp / MS for stamp in stamps], tokens=tokens, output=output, end=end / MS)


@given(st.lists(rows(), min_size=1, max_size=12))
def test_a_series_counts_every_request(some: list[Row]) -> None:
    records = made(*some)
    found = drawn(records)
    interval = found["interval_s"]
    assert 1 <= len(found["t_s"]) <= STEPS
    assert sum(found["requests_per_s"]) * interval == pytest.approx(len(some))
    tokens = int(records.output_tokens[records.good()].sum())
    assert sum(found["tokens_per_s"]) * interval == pytest.approx(tokens)
    ends = int(records.sent.min()) + (np.array(found["t_s"]) + interval) * 1e9
    for busy, end in zip(found["in_flight"], ends.tolist(), strict=True):
        # To a microsecond: steps are told in seconds.
        least = int(((records.sent < end - 1000) & (records.end >= end + 1000)).sum())
        most = int(((records.sent < end + 1000) & (records.end >= end - 1000)).sum())
        assert least <= busy <= most
    for key in LATENCIES:
        assert sum(value is not None for value in found[key]) >= records.good().any()


@given(rows())
def test_a_single_request_shows_its_latencies(row: Row) -> None:
    records = made(row)
    found = drawn(records)
    if row.failed is None:
        times = {
            "ttft_p50_ms": records.stamps[0],
            "latency_p50_ms": records.stamps[-1],
            "latency_p99_ms": records.stamps[-1],
        }
        for key, moment in times.items():
            assert [value for value in found[key] if value is not None] == [(moment - records.sent[0]) / 1e6]


# Histograms


def counted(found: dict[str, Any], name: str) -> dict[float, int]:
    """Lower edge of each bin that has any -> how many."""
    bins = zip(found[name]["edges"], found[name]["counts"], strict=False)
    return {round(edge, 6): count for edge, count in bins if count}


def test_a_histogram_of_times_that_are_alike_has_even_bins() -> None:
    found = histograms(made(*(Row(stamps=(moment,), tokens=(1,)) for moment in (10, 10.5, 39, 70))))
    edges = found["time_to_first_token"]["edges"]
    assert edges == pytest.approx([10 + step for step in range(61)])
    assert counted(found, "time_to_first_token") == {10: 2, 39: 1, 69: 1}


def test_a_histogram_of_times_far_apart_has_bins_that_grow() -> None:
    found = histograms(made(*(Row(stamps=(moment,), tokens=(1,)) for moment in (1, 1000))))
    edges = found["time_to_first_token"]["edges"]
    ratios = [above / below for below, above in pairwise(edges)]
    assert ratios == pytest.approx([1000 ** (1 / BINS)] * BINS)
    assert (edges[0], edges[-1]) == (1, 1000)
    assert sum(found["time_to_first_token"]["counts"]) == 2


def test_equal_times_are_in_one_bin() -> None:
    found = histograms(made(*[Row(stamps=(10, 20), tokens=(1, 1))] * 5))
    assert counted(found, "inter_token_latency") == {10: 5}
    edges = found["inter_token_latency"]["edges"]
    assert all(below < above for below, above in pairwise(edges))


def test_what_has_no_values_has_no_histogram() -> None:
    assert histograms(made()) == {}
    assert set(histograms(made(Row(stamps=(5,), tokens=(1,))))) == {"time_to_first_token", "request_latency"}
    assert set(histograms(made(Row(stamps=(5, 6), output=9)))) == {
        "time_to_first_token",
        "inter_chunk_latency",
        "request_latency",
    }


@given(st.lists(rows(), min_size=1, max_size=12))
def test_counts_sum_to_n_and_the_extremes_are_inside(some: list[Row]) -> None:
    records = made(*some)
    found = histograms(records)
    for metric in distributions():
        values = metric.values(records).values
        assert (metric.name in found) == (metric.drawn and len(values) > 0)
        if metric.name in found:
            edges, counts = found[metric.name]["edges"], found[metric.name]["counts"]
            assert len(edges) == len(counts) + 1 == BINS + 1
            assert edges == sorted(edges)
            assert edges[0] <= values.min() <= values.max() <= edges[-1]
            assert sum(counts) == len(values)
