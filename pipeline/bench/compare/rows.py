"""Rows of a comparison: a metric of ours, and what another tool measures in its place."""

from __future__ import annotations

from collections.abc import Iterator

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.metric import Distribution, Metric

# Suffix of rates over the whole run; our own rates are taken over the time in which the load was complete.
WHOLE_RUN = "_whole_run"
# Statistics of a distribution in the printed table.
POINTS = ("p50", "p99")
# Metrics of other tools: (name, name in the table, the metric of ours that the row is for).
OTHERS = (
    ("time_to_first_chunk", "time to first chunk", "time_to_first_token"),
    ("inter_chunk_latency_with_role_chunk", "chunk gap with role", "inter_token_latency"),
    ("time_per_output_token_from_first_chunk", "TPOT from first chunk", "time_per_output_token"),
    ("request_latency_to_last_chunk", "latency to last chunk", "request_latency"),
)
# Those that need stamps only -> our metric with the same formula.
SAME_FORMULA = {
    "time_to_first_chunk": "time_to_first_token",
    "inter_chunk_latency_with_role_chunk": "inter_chunk_latency",
}
COST = Metric(
    name="cost_per_million_output_tokens",
    unit="/1M tokens",
    formula="price of an hour / output tokens of an hour, in millions",
    undefined="no price, or no throughput",
    short="cost /1M tokens",
    better="lower",
    aliases=("cost",),
)
# Directions of metrics that only other tools have, by their units.
_BETTER = {"ms": "lower", "tokens/s": "higher", "requests/s": "higher"}


def rows() -> Iterator[tuple[Metric, dict[str, str]]]:
    """(metric, alternatives) of each row: metrics of the same quantity, the best one first, and their names in the
    table. Failed requests have a row here, and a column of their own in other tables."""
    for metric in (*metrics.tabled(), metrics.find("error_rate"), COST):
        if metric is not None:
            yield metric, alternatives(metric)


def alternatives(metric: Metric) -> dict[str, str]:
    """Metrics of the same quantity, the best one first, and their names in tables."""
    names = {metric.name: metric.short}
    names |= {other.name: other.short for other in metrics.METRICS if other.instead_of == metric.name}
    names |= {name: short for name, short, ours in OTHERS if ours == metric.name}
    if not isinstance(metric, Distribution):
        names[metric.name + WHOLE_RUN] = f"{metric.short}, whole run"
    return names


def aliases() -> dict[str, tuple[str, ...]]:
    """Short names in conditions -> metrics in order of preference: the first that both reports have is used. A rate's
    own name stands for the rate over the whole run, too."""
    out: dict[str, tuple[str, ...]] = {}
    for metric in (*metrics.METRICS, COST):
        if isinstance(metric, Distribution) or metric is COST:
            out |= dict.fromkeys(metric.aliases, (metric.name,))
        else:
            out |= dict.fromkeys((*metric.aliases, metric.name), (metric.name, metric.name + WHOLE_RUN))
    return out


def better(name: str, unit: str) -> str:
    """Better direction of a report's metric: "lower", "higher", or "" where there is none."""
    metric = COST if name == COST.name else metrics.find(name.removesuffix(WHOLE_RUN))
    return _BETTER.get(unit, "") if metric is None else metric.better
