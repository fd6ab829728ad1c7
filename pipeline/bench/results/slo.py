"""Service level objectives such as `ttft:p99<200ms`: whether a load point meets them, and its goodput under them.

An objective is met when the statistic over all measured requests is below the limit, and the share of failed requests
is no larger than what the percentile leaves out (1% for a p99, none for a mean). A request is good when its own value
is below the limit: its time to first token, its latency, its time per output token, or the same statistic of its token
or chunk gaps. A failed request is not good.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.pipeline.bench.results.metrics import Distribution, Window, distributions
from trtpipe.pipeline.bench.results.records import Records

_STATISTIC = re.compile(r"mean|max|p\d{1,2}(?:\.\d+)?")
_FORM = re.compile(
    rf"(?P<metric>[a-z0-9_]+)(?::(?P<statistic>{_STATISTIC.pattern}))?\s*[<:]\s*(?P<limit>\d+(?:\.\d+)?)(?P<unit>ms|s)"
)


@dataclass(frozen=True)
class Objective:
    """`statistic` of `metric` below `limit_ms`."""

    metric: str
    statistic: str
    limit_ms: float

    def __post_init__(self) -> None:
        """Raises UsageError."""
        if self.metric not in _times():
            raise _unknown(self.metric)
        if _STATISTIC.fullmatch(self.statistic) is None:
            raise UsageError(f"'{self.statistic[:60]}' is not a statistic", remedy="give mean, max, or one such as p99")
        if not 0 <= self.limit_ms < math.inf:
            raise UsageError(f"the limit of {self.metric} is {self.limit_ms:g}", remedy="give a positive number")

    def __str__(self) -> str:
        """As `--slo` takes it."""
        alias = next((alias for alias, metric in aliases().items() if metric == self.metric), self.metric)
        return f"{alias}:{self.statistic}<{self.limit_ms:.10g}ms"

    @property
    def percent(self) -> float | None:
        return float(self.statistic[1:]) if self.statistic.startswith("p") else None

    @property
    def spares(self) -> float:
        """Share of requests that the objective does not constrain."""
        return 0.0 if self.percent is None else 1 - self.percent / 100


def parse_objective(text: str) -> Objective:
    """`ttft:p99<200ms`, or `ttft:200ms` for the p99. Raises UsageError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not an objective", remedy="give one such as ttft:p99<200ms or itl:30ms")
    metric = aliases().get(found["metric"], found["metric"])
    if metric not in _times():
        raise _unknown(found["metric"])
    limit = float(found["limit"]) * (1000 if found["unit"] == "s" else 1)
    objective = Objective(metric, found["statistic"] or "p99", limit)
    if limit == 0 or objective.percent == 0:
        raise UsageError(f"'{text}' is never met", remedy="give a time, and p1 to p99.9, mean or max")
    return objective


def _times() -> dict[str, Distribution]:
    """Times that an objective can name, by their names."""
    return {metric.name: metric for metric in distributions() if metric.unit == "ms"}


def _unknown(metric: str) -> UsageError:
    return UsageError(f"'{metric[:60]}' is not a time", remedy=suggestion(metric, [*aliases(), *_times()]))


def aliases() -> dict[str, str]:
    """Short names of objectives -> metrics. Times count from the moment a request was due where that is known, since a
    request that waits for a slot is not served faster."""
    return {alias: metric.judged or metric.name for metric in _times().values() for alias in metric.aliases}


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


def judge(records: Records, window: Window | None, objectives: list[Objective]) -> Outcome:
    import numpy as np

    # Warm-up requests are in no statistic, but those that end within the window count as throughput.
    everything = replace(records, warmup=np.zeros(len(records), dtype=np.bool_))
    good = everything.good()
    failing = float(records.failed[records.measured()].mean()) if records.measured().any() else 0.0
    rows = []
    for objective in objectives:
        found = _times()[objective.metric].values(everything)
        value = _statistic(found.values[records.measured()[found.owners]], objective)
        met = value is not None and value < objective.limit_ms and failing <= objective.spares
        rows.append(
            {
                "metric": objective.metric,
                "statistic": objective.statistic,
                "limit": objective.limit_ms,
                "unit": "ms",
                "value": value,
                "met": met,
            }
        )
        own = _own(found.values, found.owners, objective, len(records))
        # A request without a value, such as the gaps of a single token, does not violate the objective.
        good &= ~(own >= objective.limit_ms)
    measured = int(records.measured().sum())
    rates: dict[str, float | None] = {"request_goodput": None, "token_goodput": None}
    if window is not None:
        inside = good & (records.end > window.start_ns) & (records.end <= window.stop_ns)
        rates["request_goodput"] = float(inside.sum()) / window.seconds
        rates["token_goodput"] = float(np.where(inside, records.output_tokens, 0).sum()) / window.seconds
    return Outcome(
        objectives=rows,
        met=all(row["met"] for row in rows),
        attainment=float((good & records.measured()).sum()) / measured if measured else None,
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
