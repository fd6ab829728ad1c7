"""Objectives: how they are written, when they are met, and which requests are good under them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.bench_records import MS, Row, made
from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.report import load_point_result
from trtpipe.pipeline.bench.results.slo import Objective, Outcome, aliases, judge, parse_objective
from trtpipe.pipeline.bench.results.verdict import SelfCheck
from trtpipe.pipeline.bench.results.window import Window

SECOND = Window(start_ns=0, stop_ns=1000 * MS)


def judged(records: Records, *objectives: str, window: Window | None = SECOND) -> Outcome:
    return judge(records, window, [parse_objective(text) for text in objectives], {})


# How they are written


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("ttft:p99<200ms", Objective("time_to_first_token_from_due", "p99", 200)),
        ("itl:30ms", Objective("inter_token_latency", "p99", 30)),
        ("itl<30ms", Objective("inter_token_latency", "p99", 30)),
        ("e2e:mean<2s", Objective("request_latency_from_due", "mean", 2000)),
        ("latency:max:1.5s", Objective("request_latency_from_due", "max", 1500)),
        ("tpot:p99.9 < 12.5ms", Objective("time_per_output_token", "p99.9", 12.5)),
        (" icl:p5<7ms ", Objective("inter_chunk_latency", "p5", 7)),
        ("request_latency_from_due:p50<3s", Objective("request_latency_from_due", "p50", 3000)),
        ("dispatch_delay:1ms", Objective("dispatch_delay", "p99", 1)),
        ("acceptance>60%", Objective("draft_acceptance_rate", "value", 0.6)),
        ("tokens_per_step > 2.5", Objective("tokens_per_step", "value", 2.5)),
        ("error_rate:0.01", Objective("error_rate", "value", 0.01)),
        ("throughput>1000tok/s", Objective("output_token_throughput", "value", 1000)),
        ("output_token_throughput_per_user:20tok/s", Objective("output_token_throughput_per_user", "p1", 20)),
    ],
)
def test_the_grammar(text: str, objective: Objective) -> None:
    assert parse_objective(text) == objective
    assert parse_objective(str(objective)) == objective


def test_an_objective_is_written_as_it_is_given() -> None:
    assert str(parse_objective("ttft:0.2s")) == "ttft:p99<200ms"
    assert str(parse_objective("time_to_first_token:mean<12345.678s")) == "time_to_first_token:mean<12345678ms"


@pytest.mark.parametrize(
    "text",
    [
        "", "ttft", "ttft:p99", "ttft:p99<", "ttft<200%", "ttft<-1ms", "ttft<1e3ms", "ttft>200ms",
        "ttft:p100<1s", "ttft:median<1s", "ttft:p99<1s,itl:30ms", "TTFT<1s", "ttft p99 < 1s",
    ],
)  # fmt: skip
def test_what_is_no_objective(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_objective(text)
    assert str(error.value) == f"'{text}' is not an objective; give one such as ttft:p99<200ms or itl:30ms"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tftt:p99<1s", "'tftt' is not a metric of objectives; did you mean 'ttft'?"),
        ("request_latensy<1s", "'request_latensy' is not a metric of objectives; did you mean 'request_latency'?"),
        (
            "xyzzy<1s",
            "'xyzzy' is not a metric of objectives; known: acceptance, dispatch_delay, draft_acceptance_rate, e2e, "
            "error_rate, icl, inter_chunk_latency, inter_token_latency, itl, latency, output_token_throughput, "
            "output_token_throughput_per_user, request_latency, request_latency_from_due, request_throughput, "
            "throughput, time_per_output_token, time_to_first_token, time_to_first_token_from_due, tokens_per_step, "
            "total_token_throughput, tpot, ttft",
        ),
    ],
)
def test_a_metric_that_nobody_knows(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_objective(text)
    assert str(error.value) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("output_sequence_length<30", "'output_sequence_length' is not a metric of objectives"),
        ("goodput>3", "'goodput' is not a metric of objectives"),
        ("acceptance<60%", "'acceptance<60%' is not an objective; give one such as acceptance>50%"),
        ("acceptance:p99>60%", "'acceptance:p99>60%' is not an objective; give one such as acceptance>50%"),
        ("acceptance>3ms", "'acceptance>3ms' is not an objective; give one such as acceptance>50%"),
        ("acceptance>100%", "'acceptance>100%' is never met; give another limit"),
        ("error_rate<0", "'error_rate<0' is never met; give another limit"),
        ("throughput>3", "'throughput>3' is not an objective: its limit has no unit; give one such as throughput>2t"),
        ("ttft:500", "'ttft:500' is not an objective: its limit has no unit; give one such as ttft:p99<"),
        ("tokens_per_step>2ms", "'tokens_per_step>2ms' is not an objective; give one such as tokens_per_step>2"),
    ],
)
def test_what_a_metric_of_another_kind_cannot_be(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_objective(text)
    assert str(error.value).startswith(words)


@given(
    st.sampled_from(["e2e", "icl", "itl", "latency", "tpot", "ttft"]),
    st.sampled_from(["mean", "max", "p1", "p50", "p99.9"]),
    st.decimals("0.01", 10_000, places=2), st.sampled_from(["<", ":"]),
)  # fmt: skip
def test_seconds_are_a_thousand_milliseconds(metric: str, statistic: str, limit: object, sign: str) -> None:
    seconds = parse_objective(f"{metric}:{statistic}{sign}{limit}s")
    assert seconds.limit == parse_objective(f"{metric}:{statistic}{sign}{limit}ms").limit * 1000
    assert (seconds.metric, seconds.statistic) == (aliases()[metric], statistic)


# When they are met


def first(*moments: float) -> list[Row]:
    """Requests of one token each, with these times to it."""
    return [Row(stamps=(moment,), tokens=(1,)) for moment in moments]


@pytest.mark.parametrize(
    ("objective", "value", "met"),
    [
        ("ttft:mean<200ms", 200, False),  # at the limit is not below it
        ("ttft:mean<200.1ms", 200, True),
        ("ttft:max<300ms", 300, False),
        ("ttft:max<301ms", 300, True),
        ("ttft:p50<201ms", 200, True),
        ("ttft:p75<250ms", 250, False),
        ("ttft:p99<298ms", 298, False),
        ("ttft:p99<299ms", 298, True),
    ],
)
def test_an_objective_is_met_below_its_limit(objective: str, value: float, met: bool) -> None:
    found = judged(made(*first(100, 200, 300)), objective)
    (row,) = found.objectives
    assert row["value"] == pytest.approx(value)
    assert row["met"] is found.met is met


@pytest.mark.parametrize(
    ("objective", "failed", "met"),
    [("p90", 1, True), ("p90", 2, False), ("p99", 1, False), ("mean", 1, False)],
)
def test_as_many_requests_may_fail_as_the_percentile_leaves_out(objective: str, failed: int, met: bool) -> None:
    rows = [*first(*[100] * (10 - failed)), *[Row(failed="Timeout", end=9)] * failed]
    assert judged(made(*rows), f"ttft:{objective}<200ms").met is met


def test_an_outcome_as_the_report_has_it() -> None:
    found = judged(made(*first(100, 200, 300)), "ttft:p50<250ms", "e2e:max<0.25s")
    assert found.to_json() == {
        "objectives": [
            {
                "metric": "time_to_first_token_from_due",
                "statistic": "p50",
                "limit": 250,
                "unit": "ms",
                "value": 200,
                "met": True,
            },
            {
                "metric": "request_latency_from_due",
                "statistic": "max",
                "limit": 250,
                "unit": "ms",
                "value": 300,
                "met": False,
            },
        ],
        "met": False,
        "attainment": pytest.approx(2 / 3),
    }


def test_an_objective_without_a_value_is_not_met() -> None:
    for rows in ([], [Row(failed="Timeout", end=9)] * 3, first(100)):
        found = judged(made(*rows), "itl:mean<1s")
        assert found.objectives[0]["value"] is None
        assert not found.met


def test_warm_up_is_not_judged() -> None:
    slow = Row(stamps=(900,), tokens=(1,), warmup=True)
    found = judged(made(slow, *first(100)), "ttft:max<200ms")
    assert found.met
    assert found.attainment == 1


# Which requests are good


def test_attainment_is_of_all_measured_requests_and_a_failed_one_is_not_good() -> None:
    rows = [*first(100, 150, 250), Row(failed="Timeout", end=900), Row(failed="Timeout", warmup=True, end=900)]
    found = judged(made(*rows), "ttft:p50<200ms")
    assert found.attainment == pytest.approx(2 / 4)


def test_a_request_is_good_only_under_every_objective() -> None:
    rows = [
        Row(stamps=(100, 110), tokens=(1, 1)),  # good
        Row(stamps=(300, 310), tokens=(1, 1)),  # late
        Row(stamps=(100, 190), tokens=(1, 1)),  # slow
    ]
    assert judged(made(*rows), "ttft:p50<200ms").attainment == pytest.approx(2 / 3)
    assert judged(made(*rows), "ttft:p50<200ms", "itl:p50<50ms").attainment == pytest.approx(1 / 3)


def test_at_its_limit_a_request_is_not_good() -> None:
    assert judged(made(*first(200)), "ttft:200ms").attainment == 0
    assert judged(made(*first(200)), "ttft:200.001ms").attainment == 1


def paused(pause: float) -> Row:
    """A hundred gaps of 10 ms, and one of another length."""
    stamps = [10 * number for number in range(101)]
    return Row(stamps=[*stamps, stamps[-1] + pause], tokens=[1] * 102, end=500)


def test_a_request_whose_own_gaps_miss_the_limit_is_not_good_though_the_load_point_meets_it() -> None:
    # Three gaps of 100 ms among 33 are a p99 of their request's own, and nothing among 3300 others.
    stamps = [*range(0, 310, 10), 400, 500, 600]
    bad = Row(stamps=stamps, tokens=[1] * len(stamps))
    found = judged(made(*[paused(10)] * 33, bad), "itl:p99<50ms")
    assert found.met
    assert found.attainment == pytest.approx(33 / 34)


def test_the_statistic_of_the_objective_is_that_of_a_requests_own_gaps() -> None:
    # One gap of 200 ms in 101: the largest is above the limit, the p99 is a gap of 10 ms, and so is nearly the mean.
    records = made(paused(200))
    assert judged(records, "itl:max<100ms").attainment == 0
    assert judged(records, "itl:p99<100ms").attainment == 1
    assert judged(records, "itl:mean<11ms").attainment == 0  # (100 x 10 + 200) / 101 = 11.9
    assert judged(records, "itl:mean<12ms").attainment == 1


def test_a_request_without_a_value_does_not_break_the_objective() -> None:
    rows = [Row(stamps=(5,), tokens=(1,)), Row(stamps=(5, 15), tokens=(1, 1)), Row(stamps=(5, 95), tokens=(1, 1))]
    assert judged(made(*rows), "itl:p50<60ms").attainment == pytest.approx(2 / 3)


def told(*gaps: float) -> Row:
    """A request whose responses have one token each, with these gaps."""
    stamps = [sum(gaps[:number]) for number in range(len(gaps) + 1)]
    return Row(stamps=stamps, tokens=[1] * len(stamps))


def untold(gap: float, *, failed: str | None = None, warmup: bool = False) -> Row:
    """A request of which nobody tells how many tokens its two responses had."""
    return Row(stamps=(100, 100 + gap), output=9, failed=failed, warmup=warmup)


@pytest.mark.parametrize(
    ("objective", "unknown", "met", "attainment"),
    [
        ("itl:p90<30ms", 1, True, 0.9),
        ("itl:p90<30ms", 2, False, 0.8),
        ("itl:30ms", 1, False, 0.9),
        ("itl:mean<30ms", 1, False, 0.9),
        ("itl:30ms", 10, False, 0.0),
        ("icl:30ms", 10, True, 1.0),
        ("tpot:30ms", 10, True, 1.0),
    ],
)
def test_what_nobody_measured_is_neither_met_nor_good(
    objective: str, unknown: int, met: bool, attainment: float
) -> None:
    rows = [*[told(10, 10)] * (10 - unknown), *[untold(10)] * unknown]
    found = judged(made(*rows), objective)
    assert found.met is met
    assert found.attainment == pytest.approx(attainment)
    assert found.request_goodput == pytest.approx(10 * attainment)


def test_failed_requests_and_those_without_known_gaps_share_what_a_percentile_leaves_out() -> None:
    rows = [told(10)] * 8
    assert judged(made(*rows, told(10), untold(10)), "itl:p90<30ms").met
    assert judged(made(*rows, told(10), Row(failed="Timeout", end=9)), "itl:p90<30ms").met
    assert not judged(made(*rows, untold(10), Row(failed="Timeout", end=9)), "itl:p90<30ms").met


def test_a_single_token_and_the_warm_up_have_no_unknown_gaps() -> None:
    rows = [told(10), Row(stamps=(100,), output=1), untold(10, warmup=True)]
    found = judged(made(*rows), "itl:30ms")
    assert (found.met, found.attainment, found.request_goodput) == (True, 1.0, 2.0)
    result = load_point_result(
        made(*rows, *[untold(10)] * 3), SECOND, SelfCheck(figures={}, reasons=[]), protocol="chat", label="", load={}
    )
    assert result.unknown_requests == {"inter_token_latency": 3, "time_per_output_token": 0}


def whole(output: int, unstreamed: int = 0) -> Row:
    """A request whose answer came in one response."""
    return Row(stamps=(100,), output=output, unstreamed=unstreamed)


def test_an_answer_in_one_response_has_an_unknown_time_per_token() -> None:
    """It was 0 ms, which met every objective."""
    found = judged(made(*[told(10, 10)] * 8, *[whole(9)] * 2), "tpot:p90<30ms")
    assert (found.met, found.attainment) == (False, 0.8)
    assert judged(made(*[told(10, 10)] * 9, whole(9)), "tpot:p90<30ms").met
    # Its second token is one without a response, such as the end token.
    found = judged(made(told(10, 10), whole(1), whole(2, 1), whole(9, 8)), "tpot:30ms")
    assert (found.met, found.attainment) == (True, 1.0)


# Goodput


def test_goodput_is_of_good_requests_that_ended_within_the_window() -> None:
    rows = [
        Row(stamps=(100, 400), tokens=(1, 9)),
        Row(stamps=(100, 500), tokens=(1, 4)),  # ends at the window's end
        Row(stamps=(300, 400), tokens=(1, 7)),  # late
        Row(stamps=(100, 501), tokens=(1, 2)),  # ends after it
        Row(stamps=(20, 100), tokens=(1, 2)),  # ended as it began
        Row(end=400, failed="Timeout"),
        Row(stamps=(100, 400), tokens=(1, 5), warmup=True),  # warm-up is load too
        Row(stamps=(300, 400), tokens=(1, 5), warmup=True),  # and may be late
    ]
    window = Window(start_ns=100 * MS, stop_ns=500 * MS)
    found = judged(made(*rows), "ttft:p50<200ms", window=window)
    assert found.request_goodput == pytest.approx(3 / 0.4)
    assert found.token_goodput == pytest.approx(21 / 0.4)
    assert found.attainment == pytest.approx(4 / 6)


def test_objectives_of_the_load_point_say_nothing_about_a_request() -> None:
    engine = {"tokens_per_step": 2.5, "draft_acceptance": 0.5}
    asked = ("acceptance>40%", "acceptance>50%", "tokens_per_step>2", "error_rate<1%", "throughput>4tok/s")
    result = load_point_result(
        made(*first(100, 200), Row(stamps=(), tokens=(), end=300, failed="Timeout")), SECOND,
        SelfCheck(figures={}, reasons=[]), protocol="grpc", label="", load={}, server={"engines": [engine]},
        objectives=[parse_objective(text) for text in asked],
    )  # fmt: skip
    assert result.slo is not None
    assert result.slo["attainment"] == pytest.approx(2 / 3)
    assert [(row["value"], row["met"]) for row in result.slo["objectives"]] == [
        (0.5, True), (0.5, False), (2.5, True), (pytest.approx(1 / 3), False), (2.0, False),
    ]  # fmt: skip


def test_more_is_better_for_tokens_per_second_of_a_user() -> None:
    # 10, 5 and 2 tokens/s; a request that failed is within what the p1 leaves out of a hundred, not of three.
    rows = [Row(sent=0, stamps=(moment,), tokens=(1,)) for moment in (100, 200, 500)]
    found = judged(made(*rows), "output_token_throughput_per_user:p50>4tok/s")
    assert (found.objectives[0]["value"], found.met) == (5.0, True)
    assert found.attainment == pytest.approx(2 / 3)
    assert not judged(made(*rows), "output_token_throughput_per_user>4tok/s").met


def test_goodput_without_a_window_is_undefined() -> None:
    found = judged(made(*first(100)), "ttft:200ms", window=None)
    assert (found.request_goodput, found.token_goodput) == (None, None)
    assert found.attainment == 1


def test_attainment_of_nothing_is_undefined() -> None:
    assert judged(made(Row(stamps=(5,), tokens=(1,), warmup=True)), "ttft:200ms").attainment is None


def test_goodput_stands_among_the_metrics_only_where_there_is_an_objective() -> None:
    def metrics(*objectives: str) -> set[str]:
        result = load_point_result(
            made(*first(100)), SECOND, SelfCheck(figures={}, reasons=[]), protocol="grpc", label="", load={},
            objectives=[parse_objective(text) for text in objectives],
        )  # fmt: skip
        assert (result.slo is None) == (not objectives)
        return set(result.metrics)

    assert metrics("ttft:200ms") - metrics() == {"request_goodput", "token_goodput"}


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=30), st.integers(1, 100))
def test_attainment_counts(requests: list[tuple[int, bool]], limit: int) -> None:
    rows = [
        Row(
            stamps=() if failed else (moment,),
            tokens=() if failed else (1,),
            end=moment,
            failed="Timeout" if failed else None,
        )
        for moment, failed in requests
    ]
    found = judged(made(*rows), f"ttft:max<{limit}ms")
    good = sum(moment < limit and not failed for moment, failed in requests)
    assert found.attainment == (pytest.approx(good / len(requests)) if requests else None)
    assert found.request_goodput == pytest.approx(good / SECOND.seconds)


@pytest.mark.parametrize("text", ["ttft:p99<0ms", "ttft:p0<10ms", "itl:0s"])
def test_what_nothing_meets_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"'{text}' is never met; give a time, and p1 to p99.9, mean or max"):
        parse_objective(text)
