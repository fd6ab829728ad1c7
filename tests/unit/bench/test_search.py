"""The search for the highest load that meets the objectives."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.loads import Open
from trtpipe.pipeline.bench.results.report import SearchResult
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.bench.search import Found, Search, Step, Trial, Unmeasurable, find

OPEN = Open(rate=1.0, duration_s=1.0)


def search(**changes: Any) -> Search:
    return Search(**{"goal": "max-rate", "load": OPEN, **changes})


def sharp(limit: float) -> Any:
    """A server that passes up to `limit`, by a value that grows with the rate."""

    async def measure(rate: float, run: int) -> Trial:
        return Trial(passed=rate <= limit, excess=rate / limit)

    return measure


def run(wanted: Search, start: float, measure: Any) -> Found:
    return asyncio.run(find(wanted, start, measure))


@given(limit=st.floats(0.02, 500), precision=st.floats(0.01, 0.5))
def test_it_ends_as_near_to_the_limit_as_asked(limit: float, precision: float) -> None:
    found = run(search(precision=precision), 3.0, sharp(limit))
    assert found.ended is None
    assert found.rate is not None
    low, high = found.interval
    assert low == found.rate <= limit < (high or 0) <= found.rate * (1 + precision) * 1.001
    # A server that does not waver is measured twice at most at each rate, once where it is clear.
    assert all(len(step.runs) <= 2 for step in found.steps)


def test_few_runs() -> None:
    found = run(search(), 4.0, sharp(10.0))
    # 4 passes clearly, 8 just, 16 fails clearly; then 11.31, 9.514, 10.37, 9.93: within 5%.
    assert [(step.rate, len(step.runs)) for step in found.steps] == [
        (4.0, 1), (8.0, 2), (9.512, 2), (9.932, 2), (10.37, 2), (11.31, 2), (16.0, 1)
    ]  # fmt: skip
    assert (found.rate, found.interval) == (9.932, (9.932, 10.37))


def test_a_wavering_server_widens_what_is_certain() -> None:
    """Between 8 and 12 it passes by chance, the more rarely the higher the rate."""
    chance = random.Random(5)

    async def measure(rate: float, run: int) -> Trial:
        share = min(1.0, max(0.0, (12 - rate) / 4))
        return Trial(passed=chance.random() < share, excess=1.0)

    found = run(search(repeats=5), 2.0, measure)
    low, high = found.interval
    assert low is not None
    assert high is not None
    assert found.rate is not None
    assert 8 * 0.95 <= found.rate <= 12
    assert low <= found.rate < high
    assert any(0 < sum(run.passed for run in step.runs) < len(step.runs) for step in found.steps)


def test_nothing_passes_and_nothing_fails() -> None:
    nothing = run(search(), 1.0, sharp(1e-9))
    assert (nothing.rate, nothing.interval[0]) == (None, None)
    assert nothing.ended == "no rate down to 0.0004883 requests/s passes"
    everything = run(search(), 1.0, sharp(1e9))
    assert (everything.rate, everything.interval) == (2048.0, (2048.0, None))
    assert everything.ended == "every rate up to 2048 requests/s passes"


def test_a_client_at_its_limit_ends_the_search_with_what_is_known() -> None:
    async def measure(rate: float, run: int) -> Trial:
        if rate > 10:
            raise Unmeasurable("the client was the limit")
        return Trial(passed=True, excess=0.1)

    found = run(search(), 4.0, measure)
    assert (found.rate, found.interval, found.ended) == (8.0, (8.0, None), "the client was the limit")


@pytest.mark.parametrize(("limit", "times"), [(10.0, 0), (3.0, 1)])
def test_one_request_alone_is_tried_before_lower_rates_are(limit: float, times: int) -> None:
    tried = []

    async def alone() -> None:
        tried.append(True)

    found = asyncio.run(find(search(), 4.0, sharp(limit), alone))
    assert found.rate == pytest.approx(limit, rel=0.05)
    assert len(tried) == times


def test_what_no_request_alone_meets_no_rate_does() -> None:
    async def alone() -> None:
        raise Unmeasurable("one request at a time does not meet the objectives")

    found = asyncio.run(find(search(), 4.0, sharp(1e-9), alone))
    assert (found.rate, found.runs, found.ended) == (None, 1, "one request at a time does not meet the objectives")


@pytest.mark.parametrize(
    ("runs", "repeats", "decided", "passed"),
    [
        ("", 3, False, False),
        ("p", 3, False, True),
        ("P", 3, True, True),
        ("f", 3, False, False),
        ("F", 3, True, False),
        ("pf", 3, False, False),
        ("pp", 3, True, True),
        ("pff", 3, True, False),
        ("pfp", 3, True, True),
        ("p", 1, True, True),
        ("pf", 2, True, False),
        ("pfp", 5, False, True),
        ("pfff", 5, True, False),
    ],
)
def test_when_a_rate_is_decided(runs: str, repeats: int, decided: bool, passed: bool) -> None:
    """Capitals are clear outcomes."""
    values = {"p": 0.9, "P": 0.5, "f": 1.1, "F": 2.0}
    step = Step(rate=1.0, runs=[Trial(passed=one in "pP", excess=values[one]) for one in runs])
    assert (step.decided(repeats), step.passed) == (decided, passed)


def slo(attainment: float | None, *values: float | None, met: bool = True) -> dict[str, Any]:
    asked = {"metric": "time_to_first_token", "statistic": "p99", "limit": 100.0}
    rows = [{**asked, "value": value, "met": value is not None and value < 100} for value in values]
    return {"attainment": attainment, "met": met, "objectives": rows}


def test_what_a_load_point_means_for_each_goal() -> None:
    assert search().trial(slo(0.5, 20.0, 90.0), False) == Trial(passed=True, excess=0.9)
    assert search().trial(slo(0.5, 20.0, None, met=False), False) == Trial(passed=False, excess=math.inf)
    good = search(goal="max-goodput", attainment=0.9)
    for attainment, passed, excess in ((0.95, True, 0.5), (0.7, False, 3.0)):
        found = good.trial(slo(attainment, 300.0, met=False), False)
        assert (found.passed, found.served) == (passed, None)
        assert found.excess == pytest.approx(excess)
    assert not good.trial(slo(None), False).passed
    # A metric of which no request has a value was not measured.
    assert good.trial(slo(1.0, 20.0, None, met=False), False) == Trial(passed=False, excess=math.inf)
    assert not search().trial(slo(1.0, 1.0), True).passed  # it ended before its time
    assert not search().trial(None, False).passed


@pytest.mark.parametrize(
    ("metric", "limit", "value", "attainment", "passed", "excess"),
    [
        ("output_token_throughput", 1000.0, 500.0, 1.0, False, 2.0),
        ("output_token_throughput", 1000.0, 1250.0, 0.98, True, 0.8),
        ("output_token_throughput", 1000.0, 1250.0, 0.7, False, 3.0),
        ("error_rate", 0.01, 0.02, 0.98, False, 2.0),
        ("error_rate", 0.01, 0.0, 0.95, True, 0.5),
        ("draft_acceptance_rate", 0.6, None, 1.0, False, math.inf),  # a server that does not speculate
    ],
)
def test_goodput_needs_the_objectives_of_the_whole_load_point_too(
    metric: str, limit: float, value: float | None, attainment: float, passed: bool, excess: float
) -> None:
    met = value is not None and not Objective(metric, "value", limit).missed_by(value)
    judged = slo(attainment, 300.0, met=False)
    judged["objectives"].append({"metric": metric, "statistic": "value", "limit": limit, "value": value, "met": met})
    found = search(goal="max-goodput", attainment=0.9).trial(judged, False)
    assert found.passed == passed
    assert found.excess == pytest.approx(excess)


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"goal": "max-rat"}, "max-rate"),
        ({"attainment": 1.0}, "between 0 and 1"),
        ({"precision": 0.0}, "0.001"),
        ({"repeats": 0}, "1 or more"),
    ],
)
def test_wrong_searches(changes: dict[str, Any], telling: str) -> None:
    with pytest.raises(UsageError) as caught:
        search(**changes)
    assert telling in f"{caught.value} {caught.value.remedy}"


def test_a_server_that_falls_behind_is_told() -> None:
    def found(*served: float | None) -> Found:
        runs = [Trial(passed=True, excess=0.5, served=one) for one in served]
        return Found(rate=20.0, interval=(20.0, 22.0), steps=[Step(rate=20.0, runs=runs)])

    assert found(20.1, 19.9).behind is None
    assert found(None).behind is None
    assert found(15.0, 17.0).behind == 16.0
    told = SearchResult(protocol="grpc", search=search(), found=found(15.0, 17.0)).said()
    assert told.endswith(
        ", 2 runs; the server answered 16 of them, so that its queue was growing: measure longer (--duration)"
    )
