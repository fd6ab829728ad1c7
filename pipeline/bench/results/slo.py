"""Service level objectives such as `ttft:p99<200ms`: whether a load point meets them, and its goodput under them.

An objective is met when the statistic over all measured requests is on the better side of the limit, and the share of
requests that failed, or whose values nobody tells, is no larger than what the percentile leaves out (1% for a p99, none
for a mean). A request is good when its own value is on that side: its time to first token, its latency, its time per
output token, or the same statistic of its token or chunk gaps. A failed request is not good, nor is one whose values
nobody tells. Objectives of a metric with one value, such as `acceptance>60%`, are about the load point as a whole, and
say nothing about a request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.pipeline.bench.results.metric import UNITS, VALUE, Distribution, Metric
from trtpipe.pipeline.bench.results.metrics import judged
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.window import Window

_STATISTIC = re.compile(r"mean|max|p\d{1,2}(?:\.\d+)?")
_FORM = re.compile(
    rf"(?P<metric>[a-z0-9_]+)(?::(?P<statistic>{_STATISTIC.pattern}))?\s*(?P<sign>[<>:])\s*"
    r"(?P<limit>\d+(?:\.\d+)?)(?P<unit>[a-z/%]*)"
)


@dataclass(frozen=True)
class Objective:
    """`statistic` of `metric` on the better side of `limit`, which is in the metric's unit. VALUE for a metric with one
    value."""

    metric: str
    statistic: str
    limit: float

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if self.metric not in judged():
            raise _unknown(self.metric)
        if not isinstance(self.kind, Distribution):
            if self.statistic != VALUE:
                raise UsageError(f"{self.metric} has no {self.statistic[:60]}", why="it has one value")
        elif _STATISTIC.fullmatch(self.statistic) is None:
            raise UsageError(f"'{self.statistic[:60]}' is not a statistic", remedy="give mean, max, or one such as p99")
        if not 0 <= self.limit < math.inf:
            raise UsageError(f"the limit of {self.metric} is {self.limit:g}", remedy="give a positive number")

    def __str__(self) -> str:
        """As `--slo` takes it."""
        alias = next((alias for alias, metric in aliases().items() if metric == self.metric), self.metric)
        statistic = "" if self.statistic == VALUE else f":{self.statistic}"
        return f"{alias}{statistic}{self.sign}{self.kind.shown(self.limit):.10g}{self.kind.unit or '%'}"

    @property
    def kind(self) -> Metric:
        return judged()[self.metric]

    @property
    def sign(self) -> str:
        return _sign(self.kind)

    def missed_by(self, values: Any) -> Any:
        """Whether the limit is missed: a bool for a number, an array of bools for an array."""
        return values >= self.limit if self.sign == "<" else values <= self.limit

    def excess(self, value: float | None) -> float:
        """The value as a multiple of the limit, or the limit as one of the value: above 1 where it is missed."""
        above, below = (value, self.limit) if self.sign == "<" else (self.limit, value)
        return math.inf if above is None or not below else above / below

    @property
    def percent(self) -> float | None:
        return _percent(self.statistic)

    @property
    def spares(self) -> float:
        """Share of requests that the objective does not constrain."""
        return spared(self.statistic, self.kind)


def spared(statistic: str, metric: Metric) -> float:
    """Share of requests that a limit of the metric's statistic does not constrain: 0.01 for the p99 of a time."""
    if statistic == VALUE:
        return 1.0
    percent = _percent(statistic)
    if percent is None:
        return 0.0
    # Rounded, since 1 - 0.9 is less than a tenth.
    return round(1 - percent / 100 if _sign(metric) == "<" else percent / 100, 9)


def _percent(statistic: str) -> float | None:
    return float(statistic[1:]) if statistic.startswith("p") else None


def parse_objective(text: str) -> Objective:
    """`ttft:p99<200ms`, or `ttft:200ms` for the p99; `acceptance>60%`. Raises UsageError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not an objective", remedy="give one such as ttft:p99<200ms or itl:30ms")
    metric = judged().get(aliases().get(found["metric"], found["metric"]))
    if metric is None:
        raise _unknown(found["metric"])
    units, spread = UNITS[metric.unit], isinstance(metric, Distribution)
    if found["unit"] not in units or found["sign"] not in (_sign(metric), ":") or (found["statistic"] and not spread):
        why = "its limit has no unit" if not found["unit"] and "" not in units else ""
        raise UsageError(
            f"'{text}' is not an objective", why=why, remedy=f"give one such as {_example(found['metric'], metric)}"
        )
    usual = "p99" if metric.better == "lower" else "p1"
    limit = float(found["limit"]) * units[found["unit"]]
    objective = Objective(metric.name, found["statistic"] or (usual if spread else VALUE), limit)
    never = limit == 0 if metric.better == "lower" else not metric.unit and limit >= 1
    if never or objective.percent == 0:
        times = "give a time, and p1 to p99.9, mean or max"
        raise UsageError(f"'{text}' is never met", remedy=times if spread else "give another limit")
    return objective


def _sign(metric: Metric) -> str:
    return "<" if metric.better == "lower" else ">"


def _example(name: str, metric: Metric) -> str:
    if metric.unit == "ms":
        return "ttft:p99<200ms or itl:30ms"
    return f"{name}{_sign(metric)}{'50%' if not metric.unit else '2' + next(iter(UNITS[metric.unit]))}"


def _unknown(metric: str) -> UsageError:
    return UsageError(
        f"'{metric[:60]}' is not a metric of objectives", remedy=suggestion(metric, [*aliases(), *judged()])
    )


def aliases() -> dict[str, str]:
    """Short names of objectives -> metrics. Times count from the moment a request was due where that is known, since a
    request that waits for a slot is not served faster."""
    return {
        alias: (isinstance(metric, Distribution) and metric.judged) or metric.name
        for metric in judged().values()
        for alias in metric.aliases
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a load point's objectives. `attainment` is the share of measured requests that are good."""

    objectives: list[dict[str, Any]]
    met: bool
    attainment: float | None
    request_goodput: float | None
    token_goodput: float | None

    def to_json(self) -> dict[str, Any]:
        return {"objectives": self.objectives, "met": self.met, "attainment": self.attainment}


def judge(
    records: Records, window: Window | None, objectives: list[Objective], figures: Mapping[str, Mapping[str, Any]]
) -> Outcome:
    """Judge a load point. `figures` has the metrics with one value, by name."""
    import numpy as np

    # Warm-up requests are in no statistic, but those that end within the window count as throughput.
    everything = replace(records, warmup=np.zeros(len(records), dtype=np.bool_))
    good = everything.good()
    measured, failed = records.measured(), records.failed
    rows = []
    for objective in objectives:
        kind, missing = objective.kind, failed
        if isinstance(kind, Distribution):
            found = kind.values(everything)
            value = _statistic(found.values[measured[found.owners]], objective)
            # A request that has no value, such as the gaps of a single token, does not violate the objective.
            good &= ~objective.missed_by(_own(found.values, found.owners, objective, len(records)))
            if kind.unknown is not None:
                missing = missing | kind.unknown(everything)
                good &= ~missing
        else:
            value = figures.get(kind.name, {}).get(VALUE)
        share = float(missing[measured].mean()) if measured.any() else 0.0
        rows.append(
            {
                "metric": objective.metric,
                "statistic": objective.statistic,
                "limit": objective.limit,
                "unit": kind.unit,
                "value": value,
                "met": value is not None and not objective.missed_by(value) and share <= objective.spares,
            }
        )
    rates: dict[str, float | None] = {"request_goodput": None, "token_goodput": None}
    if window is not None:
        inside = good & (records.end > window.start_ns) & (records.end <= window.stop_ns)
        rates["request_goodput"] = float(inside.sum()) / window.seconds
        rates["token_goodput"] = float(np.where(inside, records.output_tokens, 0).sum()) / window.seconds
    return Outcome(
        objectives=rows,
        met=all(row["met"] for row in rows),
        attainment=float((good & measured).sum()) / int(measured.sum()) if measured.any() else None,
        request_goodput=rates["request_goodput"],
        token_goodput=rates["token_goodput"],
    )


def _statistic(values: Any, objective: Objective) -> float | None:
    import numpy as np

    if len(values) == 0:
        return None
    if objective.percent is not None:
        return float(np.percentile(values, objective.percent))
    return float(values.mean() if objective.statistic == "mean" else values.max())


def _own(values: Any, owners: Any, objective: Objective, requests: int) -> Any:
    """The statistic of each request's own values; NaN where it has none."""
    import numpy as np

    out = np.full(requests, np.nan)
    if len(values) == len(np.unique(owners)):  # one value per request: itself, whatever the statistic
        out[owners] = values
        return out
    order = np.argsort(owners, kind="stable")
    groups, starts = np.unique(owners[order], return_index=True)
    for group, mine in zip(groups, np.split(values[order], starts[1:]), strict=True):
        out[group] = _statistic(mine, objective)
    return out
