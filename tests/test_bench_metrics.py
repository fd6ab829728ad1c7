"""Metrics from hand-written timestamps: what each number is, and when there is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.bench.metrics import definitions, level_metrics, measured_window, summarise
from pipeline.bench.record import Failure, RequestRecord, Response, settle

MS = 1_000_000


def record(
    *chunks: tuple[float, int | None, str],
    due: float = 0,
    sent: float | None = None,
    end: float | None = None,
    slot: int = 0,
    warmup: bool = False,
    failure: Failure | None = None,
    max_tokens: int = 6,
) -> RequestRecord:
    """A record whose stamps are given in milliseconds; `chunks` are (stamp, tokens, text)."""
    sent = due if sent is None else sent
    end = (chunks[-1][0] if chunks else sent) if end is None else end
    made = RequestRecord(
        request_id="id",
        slot=slot,
        warmup=warmup,
        input_tokens=4,
        max_tokens=max_tokens,
        due_ns=round(due * MS),
        sent_ns=round(sent * MS),
        responses=[Response(round(stamp * MS), tokens, text) for stamp, tokens, text in chunks],
        end_ns=round(end * MS),
        failure=failure,
    )
    settle(made, lambda text: len(text.split()))
    return made


def one(made: RequestRecord, name: str) -> float | None:
    """The only value (or the mean) of a distribution over one record."""
    return level_metrics([made], 1)[name]["mean"]


# Due at 8, sent at 10; six tokens in three responses at 60, 80 and 110 ms; the empty response at 115 is no token.
STREAM = ((60, 1, "a"), (80, 2, "b c"), (110, 3, "d e f"), (115, 0, ""))


def test_each_latency_of_one_request() -> None:
    made = record(*STREAM, due=8, sent=10, end=116)
    assert made.output_tokens == 6
    assert one(made, "time_to_first_token") == 50  # 60 - 10
    assert one(made, "time_to_first_token_from_due") == 52  # 60 - 8
    assert one(made, "request_latency") == 100  # 110 - 10: neither the empty response nor the end
    assert one(made, "request_latency_from_due") == 102
    assert one(made, "dispatch_delay") == 2
    assert one(made, "time_per_output_token") == 10  # (100 - 50) / 5
    assert one(made, "inter_chunk_latency") == 25  # (20 + 30) / 2
    assert one(made, "output_sequence_length") == 6


def test_token_gaps_are_chunk_gaps_shared_by_the_tokens_of_a_chunk() -> None:
    itl = level_metrics([record(*STREAM, sent=10)], 1)["inter_token_latency"]
    # 20 ms for two tokens, then 30 ms for three: five gaps of 10 ms, though no two responses were 10 ms apart.
    assert (itl["n"], itl["min"], itl["mean"], itl["max"]) == (5, 10, 10, 10)


def test_text_without_counts_is_counted_by_the_tokenizer_and_never_by_responses() -> None:
    made = record((60, None, "a b c"), (110, None, " d e f"), sent=10)
    assert made.output_tokens == 6
    assert one(made, "time_per_output_token") == 10  # 50 / 5, not 50 / 1
    # Which response brought how many tokens is unknown, so there is no token-exact gap.
    assert one(made, "inter_token_latency") is None
    assert one(made, "inter_chunk_latency") == 50


def test_a_token_without_visible_text_is_still_the_first_token() -> None:
    # Half of a character decodes to nothing; the server's count says that a token came.
    assert one(record((30, 1, ""), (40, 1, "é"), sent=10), "time_to_first_token") == 20


def test_a_response_that_counts_no_tokens_is_not_the_first_token() -> None:
    assert one(record((30, 0, ""), (40, 1, "a"), sent=10), "time_to_first_token") == 30


def test_undefined_is_none_and_never_zero() -> None:
    single = level_metrics([record((60, 1, "a"), sent=10)], 1)
    assert single["time_to_first_token"]["n"] == 1
    for name in ("time_per_output_token", "inter_token_latency", "inter_chunk_latency"):
        assert single[name] == dict.fromkeys(("mean", "std", "min", "max", "p50", "p90", "p99")) | {"n": 0}

    nothing = level_metrics([], 1)
    assert set(nothing) == set(definitions())
    assert all(summary.get("value", summary.get("mean")) is None for summary in nothing.values())


def test_failed_and_warm_up_requests_are_in_no_metric() -> None:
    good = record((60, 1, "a"), (70, 1, "b"), sent=10)
    failed = record((900, 1, "a"), sent=10, failure=Failure("Timeout", "late"))
    warmup = record((800, 1, "a"), (850, 1, "b"), sent=10, warmup=True)
    metrics = level_metrics([warmup, failed, good], 1)
    assert metrics["time_to_first_token"]["n"] == 1
    assert metrics["time_to_first_token"]["max"] == 50


@pytest.mark.parametrize("chunks", [(), ((60, 0, ""),), ((60, None, ""),)])
def test_a_stream_without_a_token_is_a_failure(chunks: tuple[tuple[float, int | None, str], ...]) -> None:
    made = record(*chunks)
    assert made.failure is not None
    assert made.failure.kind == "EmptyOutput"


def test_percentiles_interpolate_between_the_nearest_ranks() -> None:
    out = summarise([5.0, 1.0, 4.0, 2.0, 3.0])
    assert (out["n"], out["mean"], out["min"], out["max"], out["p50"]) == (5, 3, 1, 5, 3)
    assert out["std"] == pytest.approx(2**0.5)  # population: (4+1+0+1+4)/5 = 2
    assert out["p90"] == pytest.approx(4.6)  # rank 0.9 * 4 = 3.6
    assert out["p99"] == pytest.approx(4.96)  # rank 3.96


def level() -> list[RequestRecord]:
    """Two slots. Slot 0 is measured from 100 to 500 ms, slot 1 from 200 to 400: the window is 200 to 400."""
    return [
        record((50, 1, "w"), (100, 1, "w"), due=0, slot=0, warmup=True),
        record((50, 1, "w"), (200, 1, "w"), due=0, slot=1, warmup=True),
        record((150, 2, "a"), (250, 4, "b"), (300, 4, "c"), due=100, slot=0),
        record((250, 1, "a"), (400, 9, "b"), due=200, slot=1),
        record((400, 3, "a"), (450, 3, "b"), (500, 4, "c"), due=300, slot=0),
    ]


def test_window_is_where_every_slot_is_measured() -> None:
    window = measured_window(level(), 2)
    assert window is not None
    assert (window.start_ns, window.stop_ns, window.seconds) == (200 * MS, 400 * MS, 0.2)


def test_rates_count_what_arrived_within_the_window_over_its_seconds() -> None:
    metrics = level_metrics(level(), 2)
    # 4 + 4 of the first, 1 + 9 of the second, 3 of the third, in 0.2 s. The warm-up's token at 200 is outside.
    assert metrics["output_token_throughput"]["value"] == pytest.approx(21 / 0.2)
    # Ends at 300 and 400; the one at 500 is outside.
    assert metrics["request_throughput"]["value"] == pytest.approx(2 / 0.2)
    assert metrics["effective_concurrency"]["value"] == pytest.approx(2)


def test_tokens_of_a_failed_request_are_not_output() -> None:
    records = level()
    records[3].failure = Failure("ConnectionLost", "gone")
    metrics = level_metrics(records, 2)
    assert metrics["output_token_throughput"]["value"] == pytest.approx(11 / 0.2)
    # The slot was occupied all the same.
    assert metrics["effective_concurrency"]["value"] == pytest.approx(2)


def test_uncounted_tokens_are_spread_over_the_responses_with_text() -> None:
    records = [record((150, None, "a b c"), (250, None, " d"), due=100), record((300, None, "x"), due=250, slot=1)]
    records.append(record((260, None, "y"), due=0, end=270, slot=1, warmup=True))
    window = measured_window(records, 2)
    assert window is None  # slot 0 ended at 250, when slot 1 began: no common time
    records.append(record((350, None, "z z"), due=250, slot=0))
    # 250 to 300: "x" lies inside with its one token; "z z" arrives later; slot 0's first is before.
    assert level_metrics(records, 2)["output_token_throughput"]["value"] == pytest.approx(1 / 0.05)


def test_rates_are_undefined_while_a_slot_has_no_measured_request() -> None:
    assert measured_window([item for item in level() if item.slot == 0], 2) is None


chunk_lists = st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 8)), min_size=2, max_size=40)


@given(chunk_lists)
def test_token_gaps_add_up_to_the_time_from_first_to_last_token(gaps: list[tuple[int, int]]) -> None:
    stamp = 0
    chunks: list[tuple[float, int | None, str]] = []
    for gap, tokens in gaps:
        stamp += gap
        chunks.append((stamp / MS, tokens, "x"))
    made = record(*chunks)
    metrics = level_metrics([made], 1)
    itl, tpot = metrics["inter_token_latency"], metrics["time_per_output_token"]
    tokens = sum(count for _, count in gaps)
    span = (chunks[-1][0]) - (chunks[0][0])
    assert itl["n"] == tokens - gaps[0][1]
    assert (itl["mean"] or 0) * (itl["n"] or 0) == pytest.approx(span, rel=1e-6, abs=1e-5)
    assert (tpot["mean"] or 0) * (tokens - 1) == pytest.approx(span, rel=1e-6, abs=1e-5)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=100))
def test_percentiles_are_ordered_and_within_the_values(values: list[float]) -> None:
    out = summarise(values)
    points = [out[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert points == sorted(points, key=lambda value: value or 0)


def test_every_metric_says_its_unit_its_formula_and_when_it_is_undefined() -> None:
    for name, entry in definitions().items():
        assert all(entry[key] for key in ("unit", "formula", "undefined")), name
