"""A report in words, and what its command ends with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.bench_records import Row, made
from tests.support.bench_reports import LATE, lines, load_point
from tests.support.bench_reports import report as reported
from trtpipe.engines.errors import HostError
from trtpipe.pipeline.bench.load.loads import Open
from trtpipe.pipeline.bench.results.page import head
from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult, SearchResult
from trtpipe.pipeline.bench.results.summary import notes, refusal, unknown_objective
from trtpipe.pipeline.bench.run import served
from trtpipe.pipeline.bench.search import Found, Search

PATH = Path("report.json")
STEADY = {"clock_step_ms": 0.0}


def result(**changes: Any) -> LoadPointResult:
    return LoadPointResult(**{**load_point(lines(4, seed=1)), "client": STEADY, **changes})


def report(*results: LoadPointResult, **changes: Any) -> BenchReport:
    made = {"command": [], "options": {}, "tokenizer_sha256": None, "started": "", **changes}
    return BenchReport(results=list(results), **made)


def test_of_a_quiet_run_there_is_nothing_to_say() -> None:
    assert list(notes(report(result()))) == []
    assert refusal(report(result()), PATH) is None


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"stopped": "5 requests in a row failed"}, "it ended early: 5 requests in a row failed"),
        ({"client": {"clock_step_ms": -3600e3}}, "the time of day was set by -3600000 ms meanwhile"),
        (
            {
                "load": {"kind": "open", "max_in_flight": 2},
                "client": {"rate": {"scheduled": 10.0, "offered": 3.0}},
                "metrics": {"output_sequence_length": {"mean": 8.0}},
            },
            "3.0 requests/s of 10.0 were sent, since at most 2 were in flight",
        ),
        (
            {"server": {"output_tokens": {"server": 90, "client": 100, "agree": False}}},
            "the server counted 90 tokens, the client 100",
        ),
        (
            {"slo": {"objectives": [{"metric": "inter_token_latency", "value": None}]}},
            "inter_token_latency could not be measured: its objective is missed, and goodput leaves it out",
        ),
    ],
)
def test_what_a_load_point_has_to_say(changes: dict[str, Any], line: str) -> None:
    assert list(notes(report(result(**changes)))) == [f"grpc, 1 in flight: {line}"]


def test_itl_of_some_requests_is_told_as_such() -> None:
    """Over an OpenAI API a response may carry several tokens, as speculation makes them, and none says how many."""
    assert list(notes(report(result(unknown_requests={"inter_token_latency": 0})))) == []
    unknown = {"unknown_requests": {"inter_token_latency": 3}}
    told = "the ITL of 3 of 4 requests is unknown: the server does not tell how many tokens each response had"
    assert list(notes(report(result(**unknown)))) == [f"grpc, 1 in flight: {told}"]
    objectives = [{"metric": "time_to_first_token", "value": 5.0}, {"metric": "inter_token_latency", "value": None}]
    missed = report(result(**unknown, slo={"objectives": objectives}), options={"objectives": objectives})
    told += "; they count as missing its objective, and tpot needs only their sum"
    assert list(notes(missed)) == [f"grpc, 1 in flight: {told}"]
    assert unknown_objective(missed) == told
    assert unknown_objective(report(result(**unknown), options={"objectives": objectives[:1]})) is None


def test_tpot_of_answers_in_one_response_is_told_as_unknown() -> None:
    """The note on ITL then does not send its reader to it."""
    unknown = {"unknown_requests": {"inter_token_latency": 1, "time_per_output_token": 3}}
    objectives = [{"metric": name, "value": None} for name in ("inter_token_latency", "time_per_output_token")]
    itl, tpot = notes(report(result(**unknown, slo={"objectives": objectives})))
    assert itl.endswith("many tokens each response had; they count as missing its objective")
    assert tpot == (
        "grpc, 1 in flight: the TPOT of 3 of 4 requests is unknown: all tokens came in one response, or nobody tells "
        "how many came after it; they count as missing its objective"
    )


@pytest.mark.parametrize(("source", "exact", "told"), [
    ("tokenizer", True, True), ("mixed", True, True), ("usage", True, False), ("tokenizer", False, False),
])  # fmt: skip
def test_answers_of_another_length_than_asked_are_told(source: str, exact: bool, told: bool) -> None:
    """A server that knows neither ignore_eos nor min_tokens, and sends no usage, fails no request by its answers."""
    found = result(wrong_length=3, token_count_source=source)
    line = (
        "grpc, 1 in flight: 3 of 4 answers have another length than asked for; by the tokenizer's count, answers have "
        "8.0 tokens on average"
    )
    assert list(notes(report(found, options={"work": {"ignore_eos": exact}}))) == [line] * told
    page = {**reported([vars(found)]), "options": {"work": {"ignore_eos": exact}}}
    assert [one.text for one in head.findings(page)].count(f"{line}.") == told


@pytest.mark.parametrize(("gap_ms", "ttft_ms", "told"), [(0.1, 50, True), (0.1, 5, False), (1, 50, False)])
def test_responses_that_were_held_back_are_told(gap_ms: float, ttft_ms: float, told: bool) -> None:
    found = result(metrics=load_point(lines(4, seed=1, gap_ms=gap_ms, ttft_ms=ttft_ms))["metrics"])
    line = (
        "grpc, 1 in flight: most answers came whole, after their TTFT: a proxy or the server holds responses back, and "
        "times between them are not those of tokens"
    )
    assert list(notes(report(found))) == [line] * told


def test_notes_of_a_run_name_what_limits_its_figures() -> None:
    off = {"streams": 4, "ttft_p50_ms": 1.25, "ttft_p99_ms": 3.5}
    whole = report(
        result(verdict=LATE),
        interrupted=True,
        unread_metrics={"http://h:8002/metrics": "Connection refused"},
        endpoints=[{"protocol": "http", "transport": "tritonclient", "measured_error": off}],
    )
    assert list(notes(whole)) == [
        "what is not in the table was not measured",
        "no metrics could be read from http://h:8002/metrics: Connection refused",
        "INVALID: grpc, 1 in flight: the event loop was late: by 31.0 ms at the 99th percentile; offer less",
        "http through tritonclient: here, with 4 in flight, TTFT comes out 1.2 ms (p50) and 3.5 ms (p99) too long",
    ]
    assert str(refusal(whole, PATH)) == (
        "the run is INVALID: grpc, 1 in flight: the event loop was late; report.json has every reason"
    )


def test_a_load_point_that_was_measured_again_counts_as_it_came_out() -> None:
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=1))
    found = SearchResult(protocol="grpc", search=search, found=Found(rate=1.0))
    again = report(result(verdict=LATE), result(), searches=[found])
    assert again.valid
    assert refusal(again, PATH) is None
    assert not report(result(verdict=LATE), result()).valid
    found.found.rate = None
    assert str(refusal(again, PATH)) == "no max-rate was found; loosen --slo, or see the load points in the report"


@pytest.mark.parametrize("rate", [None, 1.0])
def test_a_search_that_the_client_ended_is_invalid(rate: float | None) -> None:
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=1))
    ended = Found(rate=rate, ended="at 2 requests/s the client was the limit")
    found = SearchResult(protocol="grpc", search=search, found=ended)
    counts = {"measured": 4, "succeeded": 3, "failed": 1}  # beyond the limit requests fail
    whole = report(result(), result(label="2 requests/s", verdict=LATE, requests=counts), searches=[found])
    assert str(refusal(whole, PATH)).startswith("the run is INVALID: grpc, 2 requests/s: the event loop was late")


def test_failures_are_told_by_their_class(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"measured": 8, "succeeded": 3, "failed": 5}
    monkeypatch.setattr(BenchReport, "failures", lambda self: {"http 429": 4, "Stalled": 1})
    failing = report(result(requests=counts))
    assert (
        str(refusal(failing, PATH)) == "5 of 8 requests failed: 4 http 429, 1 Stalled; report.json has their messages"
    )
    failing.broken = HostError("the server died")
    assert refusal(failing, PATH) is failing.broken


def test_a_server_that_dies_outside_the_measured_part_fails_the_command() -> None:
    """No measured request has failed; that the load point ended early is all that tells it."""
    counts = {"measured": 0, "succeeded": 0, "failed": 0}
    early = report(result(requests=counts, stopped="5 requests in a row failed, the last by ConnectFailed: refused"))
    assert str(refusal(early, PATH)) == (
        "grpc, 1 in flight ended early: 5 requests in a row failed, the last by ConnectFailed: refused; "
        "report.json has what was measured"
    )
    search = Search(goal="max-rate", load=Open(rate=1, duration_s=1))
    early.searches = [SearchResult(protocol="grpc", search=search, found=Found(rate=1.0))]
    assert refusal(early, PATH) is None


def test_a_short_load_point_does_not_tell_what_the_server_keeps_up_with() -> None:
    """Much of what is asked in it ends after it, whatever the server does."""
    requests = lines(4, seed=1)  # of 120 ms
    metrics = load_point(requests)["metrics"]
    usual = metrics["request_latency"]["p10"] / 1e3
    records = made(Row(), Row(warmup=True))
    assert served(result(metrics=metrics, window_s=19.9 * usual), records) is None
    assert served(result(metrics=metrics, window_s=20.1 * usual), records) == metrics["request_throughput"]["value"]
    assert served(result(metrics=metrics, window_s=None), records) is None
    # Of conversations the rate is that of their first requests.
    talks = replace(made(*[Row()] * 5), turn=np.array([0, 1, 2, 3, 0]))
    found = served(result(metrics=metrics, window_s=20.1 * usual), talks)
    assert found == pytest.approx(metrics["request_throughput"]["value"] * 0.4)
