"""What makes a run INVALID: each reason alone, at its limit and just beyond it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.bench_records import MS, Row, made
from trtpipe.pipeline.bench.loop.driver import Client
from trtpipe.pipeline.bench.results.records import NONE
from trtpipe.pipeline.bench.results.verdict import Reason, SelfCheck, examine, held_back
from trtpipe.pipeline.bench.results.window import Window

LESS = "offer less load, or measure with more --workers, or from a machine with free cores"
WINDOW = Window(start_ns=0, stop_ns=10_000_000 * MS)
CLIENT = Client(lateness_ns=[0] * 100, cpu_ns=100 * MS, wall_ns=1000 * MS, peak=20)


def rows(*, delay: float = 0.0, count: int = 21) -> list[Row]:
    """A request every 100 ms, each sent `delay` late."""
    return [
        Row(due=100 * n, sent=100 * n + delay, stamps=(100 * n + 50,), tokens=(5,), max_tokens=5) for n in range(count)
    ]


def check(client: Client = CLIENT, requests: list[Row] | None = None, **changes: Any) -> SelfCheck:
    asked: dict[str, Any] = {"ttft_p50_ms": 50.0, "asked": 20, "window": WINDOW, **changes}
    return examine(made(*(rows() if requests is None else requests)), (client,), **asked)


def reasons(*arguments: Any, **changes: Any) -> list[Reason]:
    found = check(*arguments, **changes)
    assert found.valid == (not found.reasons)
    return found.reasons


def late(milliseconds: float) -> Client:
    return replace(CLIENT, lateness_ns=[round(milliseconds * MS)] * 100)


@pytest.mark.parametrize("asked", [20, None], ids=["closed", "open"])
def test_a_client_that_keeps_up_is_valid(asked: int | None) -> None:
    assert check(asked=asked).verdict() == {"valid": True, "reasons": []}


# Lateness of the event loop


@pytest.mark.parametrize(("ttft", "limit"), [(None, 5), (0.0, 5), (50.0, 5), (60.0, 6), (1000.0, 100)])
def test_the_loop_may_be_late_by_five_milliseconds_or_a_tenth_of_a_first_token(
    ttft: float | None, limit: float
) -> None:
    assert reasons(late(limit), ttft_p50_ms=ttft) == []
    found = reasons(late(limit + 0.1), ttft_p50_ms=ttft)
    assert found == [Reason("the event loop was late", f"by {limit + 0.1:.1f} ms at the 99th percentile", LESS)]


def test_lateness_that_is_rare_is_forgiven() -> None:
    # Rank 0.99 x 999 = 989.01: with eleven of a thousand it lies among the late ones.
    assert reasons(replace(CLIENT, lateness_ns=[0] * 990 + [900 * MS] * 10), ttft_p50_ms=1000.0) == []
    (reason,) = reasons(replace(CLIENT, lateness_ns=[0] * 989 + [900 * MS] * 11), ttft_p50_ms=1000.0)
    assert reason.what == "the event loop was late"


def test_a_load_point_too_short_for_a_beat_is_not_late() -> None:
    assert reasons(replace(CLIENT, lateness_ns=[])) == []


# Requests that left late


@pytest.mark.parametrize("asked", [20, None], ids=["closed", "open"])
@pytest.mark.parametrize(("ttft", "limit"), [(None, 5), (50.0, 5), (200.0, 20)])
def test_requests_may_leave_as_late(asked: int | None, ttft: float | None, limit: float) -> None:
    assert reasons(requests=rows(delay=limit), ttft_p50_ms=ttft, asked=asked) == []
    found = reasons(requests=rows(delay=limit + 0.1), ttft_p50_ms=ttft, asked=asked)
    closer = f"{LESS}; to a server that closes idle connections, from a machine near it"
    assert found == [Reason("requests left late", f"by {limit + 0.1:.1f} ms at the 99th percentile", closer)]


def test_requests_that_wait_for_a_place_by_design_are_not_late() -> None:
    assert reasons(requests=rows(delay=900), asked=None, bounded=True) == []


def test_delays_of_warm_up_and_of_what_was_never_sent_do_not_count() -> None:
    others = [
        Row(due=0, sent=900, end=950, stamps=(950,), warmup=True),
        Row(due=0, sent=None, end=1, failed="ConnectFailed"),
    ]
    assert reasons(requests=[*rows(), *others]) == []


def test_a_failed_request_that_left_late_did() -> None:
    (reason,) = reasons(requests=[Row(due=0, sent=900, end=950, failed="Timeout")])
    assert reason.what == "requests left late"


# The core


def test_nine_tenths_of_a_core_are_too_much_when_exceeded() -> None:
    assert reasons(replace(CLIENT, cpu_ns=900 * MS)) == []
    found = reasons(replace(CLIENT, cpu_ns=910 * MS))
    assert found == [Reason("the client's core was full", "91% of it", LESS)]


# The load that was asked for


@pytest.mark.parametrize(("asked", "enough"), [(1, 1), (16, 16), (20, 19), (256, 244)])
def test_nineteen_of_twenty_places_have_to_be_in_use(asked: int, enough: int) -> None:
    assert reasons(replace(CLIENT, peak=enough), asked=asked) == []
    found = reasons(replace(CLIENT, peak=enough - 1), asked=asked)
    why = f"{enough - 1} in flight of {asked}"
    assert found == [Reason("the load was not reached", why, "give more requests, or a longer duration")]


def slower(by: float) -> list[Row]:
    """Twenty-one requests, due over two seconds and sent over that and `by` more, no one more than 5 ms late."""
    return [Row(due=100 * n, sent=(100 + by / 20) * n, stamps=(9000,), tokens=(1,)) for n in range(21)]


def test_the_rate_may_be_missed_by_a_hundredth() -> None:
    # 2000 / 2020 is 0.990, 2000 / 2021 is less. At a first token of a second no request counts as late.
    assert reasons(requests=slower(20), asked=None, ttft_p50_ms=1000.0) == []
    found = reasons(requests=slower(21), asked=None, ttft_p50_ms=1000.0)
    assert found == [Reason("the rate was not reached", "9.9 requests/s of 10.0", LESS)]


def test_a_rate_is_for_open_loops_that_are_not_bounded() -> None:
    assert reasons(requests=slower(500), asked=None, bounded=True) == []
    assert reasons(requests=slower(21), asked=20, ttft_p50_ms=1000.0) == []


@pytest.mark.parametrize("count", [0, 1])
def test_a_rate_takes_two_requests(count: int) -> None:
    found = check(requests=rows(count=count), asked=None)
    assert found.valid
    assert found.figures["rate"] == {"scheduled": None, "offered": None}


def test_places_are_for_closed_loops() -> None:
    assert reasons(replace(CLIENT, peak=1), asked=None) == []


# All of it


def test_every_reason_is_told() -> None:
    client = Client(lateness_ns=[9 * MS], cpu_ns=99 * MS, wall_ns=100 * MS, peak=1)
    found = check(client, rows(delay=6))
    assert [reason.what for reason in found.reasons] == [
        "the event loop was late", "requests left late", "the client's core was full", "the load was not reached",
    ]  # fmt: skip
    assert found.verdict()["valid"] is False
    assert found.verdict()["reasons"][2] == {"what": "the client's core was full", "why": "99% of it", "remedy": LESS}


def test_figures_of_a_closed_loop() -> None:
    client = Client(
        lateness_ns=[1 * MS, 2 * MS, 3 * MS], cpu_ns=250 * MS, wall_ns=1000 * MS, peak=19, clock_step_ns=-3 * MS
    )
    warmup = Row(due=0, sent=70, stamps=(90,), tokens=(20,), warmup=True)
    found = check(client, [*rows(delay=2), warmup, Row(due=0, sent=2, end=5, failed="Timeout")]).figures
    assert found == {
        "loop_lateness_ms": pytest.approx({"p50": 2, "p99": 2.98, "p99.9": 2.998, "max": 3}),
        "dispatch_delay_ms": pytest.approx({"p50": 2, "p99": 2, "p99.9": 2, "max": 2}),
        "in_flight": {"asked": 20, "reached": 19},
        "cpu_share": 0.25,
        # 0.25 s for 21 x 5 and the 20 of the warm-up.
        "cpu_s_per_1000_tokens": pytest.approx(0.25 / 0.125),
        "processes": 1,
        "clock_step_ms": -3.0,
    }


def test_processes_that_share_a_load_are_judged_by_the_fullest_and_counted_together() -> None:
    calm = replace(CLIENT, cpu_ns=100 * MS, peak=8)
    full = replace(CLIENT, cpu_ns=950 * MS, peak=12, lateness_ns=[9 * MS] * 100)
    found = examine(made(*rows()), (calm, full), ttft_p50_ms=50.0, asked=20, window=WINDOW)
    assert [reason.what for reason in found.reasons] == ["the event loop was late", "the client's core was full"]
    assert found.figures["cpu_share"] == 0.95
    assert found.figures["in_flight"] == {"asked": 20, "reached": 20}
    assert found.figures["cpu_s_per_1000_tokens"] == pytest.approx(1.05 / 0.105)
    assert found.figures["processes"] == 2


def test_figures_of_an_open_loop_have_its_rate() -> None:
    found = check(requests=slower(100), asked=None).figures
    assert found["in_flight"] == {"asked": None, "reached": 20}
    assert found["rate"] == pytest.approx({"scheduled": 10, "offered": 20 / 2.1})


def test_figures_without_a_request_are_undefined_and_not_zero() -> None:
    found = check(requests=[Row(sent=None, end=1, failed="ConnectFailed")]).figures
    assert found["dispatch_delay_ms"] == dict.fromkeys(("p50", "p99", "p99.9", "max"))
    assert found["cpu_s_per_1000_tokens"] is None


def test_a_load_point_that_ended_early_need_not_reach_its_load() -> None:
    few = replace(CLIENT, peak=2)
    assert [reason.what for reason in reasons(few)] == ["the load was not reached"]
    assert reasons(few, whole=False) == []
    slow = [replace(row, sent=1.05 * row.due) for row in rows()]
    assert "the rate was not reached" in [reason.what for reason in reasons(requests=slow, asked=None)]
    assert "the rate was not reached" not in [reason.what for reason in reasons(requests=slow, asked=None, whole=False)]


def test_of_no_requests_nothing_is_wrong() -> None:
    assert reasons(late(500.0), requests=[]) == []


def test_conversations_need_no_request_in_flight_at_each_place() -> None:
    few = replace(CLIENT, peak=2)
    talking = made(*(replace(row, slot=number % 20) for number, row in enumerate(rows())))
    for session, what in ((NONE, ["the load was not reached"]), (0, [])):
        records = replace(talking, session=np.full(len(talking), session))
        found = examine(records, (few,), ttft_p50_ms=50.0, asked=20, window=WINDOW)
        assert [reason.what for reason in found.reasons] == what


def test_a_client_with_one_request_in_flight_cannot_offer_less() -> None:
    (found,) = reasons(replace(late(100), peak=1), asked=1)
    assert found.remedy == "measure from a machine with free cores"


# A load point without any time


def test_a_closed_loop_in_whose_window_no_token_arrived_was_too_short() -> None:
    assert reasons(window=Window(start_ns=0, stop_ns=50 * MS)) == []
    (found,) = reasons(window=Window(start_ns=50 * MS, stop_ns=149 * MS))
    assert (found.what, found.why) == ("the load point was too short", "no token arrived in its 0.099 s")
    assert reasons(window=Window(start_ns=50 * MS, stop_ns=149 * MS), whole=False) == []


def test_a_closed_loop_without_a_window_has_no_throughput() -> None:
    """A place that found no measured request left, for example."""
    (found,) = reasons(window=None)
    assert (found.what, found.why, found.remedy) == (
        "there is no throughput", "at no time had every slot a measured request",
        "give more --requests, or a longer --duration",
    )  # fmt: skip
    assert reasons(window=None, whole=False) == []
    assert reasons(window=None, asked=None) == []
    assert (
        reasons(requests=[Row(due=100 * n, sent=100 * n, end=9, failed="Timeout") for n in range(21)], window=None)
        == []
    )


@pytest.mark.parametrize(("offered", "most", "told"), [(9.9, 2, False), (9.8, 2, True), (9.8, None, False)])
def test_a_rate_that_the_user_s_own_limit_held_back_is_told(offered: float, most: int | None, told: bool) -> None:
    due: dict[str, float | None] = {"p50": 6090.0, "p99": 12000.0}
    point: dict[str, Any] = {
        "load": {"kind": "open", "rate": 10, "max_in_flight": most},
        "client": {"rate": {"scheduled": 10.0, "offered": offered}},
        "metrics": {"time_to_first_token_from_due": due},
    }
    sent = "9.8 requests/s of 10.0 were sent, since at most 2 were in flight"
    assert held_back(point) == (
        f"{sent}; TTFT from the moment a request was due: p50 6090.0 ms, p99 12000.0 ms" if told else None
    )
    for missing in due:
        point["metrics"]["time_to_first_token_from_due"] = {**due, missing: None}
        assert held_back(point) == (sent if told else None)
    assert held_back({**point, "load": {"kind": "closed"}, "client": None}) is None
