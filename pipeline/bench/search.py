"""Search for the highest rate within the objectives: rates are doubled or halved until two bracket it, then bisected.

Near the limit one measurement depends on chance. A clear outcome decides a rate at once; any other is measured again,
with other arrivals, until two agree or a majority of `repeats` has formed. The result also states what is certain: the
highest rate below which every run passed, and the lowest rate above which every run failed.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.pipeline.bench.load.loads import Open
from trtpipe.pipeline.bench.results.metric import VALUE
from trtpipe.pipeline.bench.results.slo import Objective

GOALS = ("max-rate", "max-goodput")
# An outcome is clear where the worst value is this many times within or beyond its limit.
CLEAR = 1.5
# Share of the rate that a server must answer: with less, requests queue up, and more of them the longer it runs.
BEHIND = 0.95
# Most doublings or halvings before the search gives up.
MOST_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Search:
    """Parameters of a search. Raises UsageError.

    goal        max-rate: the statistics of all requests meet every objective
                max-goodput: at least `attainment` of the requests do, each by its own values (DistServe's goodput), and
                the load point meets the objectives of metrics with one value; an objective without a value is missed
    load        how requests arrive; its rate is where the search begins
    known       whether the user gave that rate; otherwise the server's own time for one request determines it
    precision   the search ends when the lowest failing rate exceeds the highest passing one by at most this share
    repeats     most runs of one rate
    unit        what the rate counts: requests/s, or conversations/s where the work has them
    limit_s     seconds after which the run ends with what it has found; None for no limit
    """

    goal: str
    load: Open
    known: bool = True
    attainment: float = 0.9
    precision: float = 0.05
    repeats: int = 3
    unit: str = "requests/s"
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise UsageError(f"unknown goal '{self.goal}'", remedy=suggestion(self.goal, GOALS))
        if not 0 < self.attainment < 1:
            raise UsageError(f"attainment is {self.attainment:g}", remedy="give a share of requests between 0 and 1")
        if not 0.001 <= self.precision < 1:
            raise UsageError(f"precision is {self.precision:g}", remedy="give 0.001 to below 1, such as 0.05")
        if self.repeats < 1:
            raise UsageError(f"repeat is {self.repeats}", remedy="give 1 or more")

    def trial(self, slo: dict[str, Any] | None, failed_early: bool, served: float | None = None) -> Trial:
        """Judge a run by the outcome of its load point (`slo.Outcome.to_json`)."""
        if slo is None or slo["attainment"] is None or failed_early:
            return Trial(passed=False, excess=math.inf)
        rows, passed, worst = slo["objectives"], slo["met"], 0.0
        if self.goal == "max-goodput":
            missed, spared = 1 - slo["attainment"], 1 - self.attainment
            # A request has no value of its own in these; a metric without any value was not measured.
            rows = [row for row in rows if row["statistic"] == VALUE or row["value"] is None]
            passed, worst = missed <= spared and all(row["met"] for row in rows), missed / spared
        for row in rows:
            worst = max(worst, Objective(row["metric"], row["statistic"], row["limit"]).excess(row["value"]))
        return Trial(passed=passed, excess=worst, served=served)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run at one rate. `excess` is its worst value as a multiple of the limit, `served` the requests/s that were
    answered; None where unknown."""

    passed: bool
    excess: float
    served: float | None = None

    @property
    def clear(self) -> bool:
        return self.excess < 1 / CLEAR if self.passed else self.excess > CLEAR


@dataclass(kw_only=True)
class Step:
    """All runs at one rate, and the decision that follows from them."""

    rate: float
    runs: list[Trial] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return 2 * sum(run.passed for run in self.runs) > len(self.runs)

    def decided(self, repeats: int) -> bool:
        if not self.runs:
            return False
        passed = sum(run.passed for run in self.runs)
        left = repeats - len(self.runs)
        unanimous = passed in (0, len(self.runs)) and (len(self.runs) > 1 or self.runs[0].clear)
        # No remaining run could change the decision.
        return unanimous or left <= 0 or 2 * passed > repeats or 2 * (passed + left) <= repeats


@dataclass(kw_only=True)
class Found:
    """Result of a search.

    rate      the highest that passed; None where none did
    interval  rates between which the limit lies for certain, as far as these runs show; None for an open side
    ended     why the result is less precise than asked for; None if it is not
    """

    rate: float | None = None
    interval: tuple[float | None, float | None] = (None, None)
    ended: str | None = None
    steps: list[Step] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return sum(len(step.runs) for step in self.steps)

    @property
    def behind(self) -> float | None:
        """Requests/s that were answered at `rate`, where they are so much fewer that a queue was growing."""
        trials = [run for step in self.steps if step.rate == self.rate for run in step.runs]
        served = [run.served for run in trials if run.served is not None]
        if self.rate is None or not served:
            return None
        mean = sum(served) / len(served)
        return mean if mean < BEHIND * self.rate else None

    def to_json(self) -> dict[str, Any]:
        steps = [
            {"rate": step.rate, "passed": step.passed, "runs": list(map(_plain, step.runs))} for step in self.steps
        ]
        return {"rate": self.rate, "interval": list(self.interval), "ended": self.ended, "steps": steps}


class Unmeasurable(Exception):
    """A run says nothing about the server: the client was the limit, or the run was interrupted."""


Measure = Callable[[float, int], Awaitable[Trial]]
Try = Callable[[], Awaitable[object]]


async def find(search: Search, start: float, measure: Measure, alone: Try | None = None) -> Found:
    """Search for the limit from `start` on.

    measure  measures one run, given a rate and the number of the run
    alone    sends one request at a time before lower rates are tried, which take ever longer; None: already done
    Both may raise Unmeasurable.
    """
    found = Found()
    try:
        found.ended = await _bracket_and_bisect(search, start, measure, alone, found)
    except Unmeasurable as why:
        found.ended = str(why)
    found.steps = sorted((step for step in found.steps if step.runs), key=lambda step: step.rate)
    passed = [step.rate for step in found.steps if step.passed]
    found.rate = max(passed, default=None)
    runs = [(step.rate, run.passed) for step in found.steps for run in step.runs]
    lowest_failure = min((rate for rate, good in runs if not good), default=math.inf)
    highest_pass = max((rate for rate, good in runs if good), default=0.0)
    found.interval = (
        max((rate for rate, good in runs if good and rate < lowest_failure), default=None),
        min((rate for rate, good in runs if not good and rate > highest_pass), default=None),
    )
    return found


async def _bracket_and_bisect(
    search: Search, start: float, measure: Measure, alone: Try | None, found: Found
) -> str | None:
    async def passes(rate: float) -> bool:
        step = Step(rate=rate)
        found.steps.append(step)
        while not step.decided(search.repeats):
            step.runs.append(await measure(rate, len(step.runs)))
        return step.passed

    low: float | None = None
    high: float | None = None
    rate = rounded(start)
    for _ in range(MOST_STEPS):
        if await passes(rate):
            low = rate
            if high is not None:
                break
            rate = rounded(rate * 2)
        else:
            if low is None and high is None and alone is not None:
                await alone()
            high = rate
            if low is not None:
                break
            rate = rounded(rate / 2)
    if low is None:
        return f"no rate down to {high:g} {search.unit} passes"
    if high is None:
        return f"every rate up to {low:g} {search.unit} passes"
    while high / low > 1 + search.precision:
        rate = rounded(math.sqrt(low * high))
        if rate in (low, high):
            break
        if await passes(rate):
            low = rate
        else:
            high = rate
    return None


def rounded(rate: float) -> float:
    """Rounded to four digits: the precision in which a rate is kept, and readable."""
    return float(f"{rate:.4g}")


def _plain(run: Trial) -> dict[str, Any]:
    return {**asdict(run), "excess": run.excess if math.isfinite(run.excess) else None}
