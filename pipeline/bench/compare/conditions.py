"""`--fail-if` expressions: results of a comparison that make it fail.

    [STATISTIC_]METRIC  <, <=, > or >=  NUMBER UNIT

    p99_ttft > 1.1x        relative to A, the base
    throughput < 0.95x
    p50_itl > 20ms         the value itself; ms, s or us
    error_rate > 1%
    acceptance < 50%

A metric with a distribution needs a statistic, a rate has none.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.pipeline.bench.compare.rows import aliases
from trtpipe.pipeline.bench.results.metric import UNITS, VALUE

STATISTICS = ("mean", "std", "min", "max", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_FORM = re.compile(r"(?P<name>[\w.]+)\s*(?P<operator>[<>]=?)\s*(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z%/]*)")
_EXAMPLES = 'write for example "p99_ttft > 1.1x", "throughput < 0.95x", "p50_itl > 20ms" or "error_rate > 1%"'


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Type of a metric."""

    unit: str
    is_rate: bool


@dataclass(frozen=True, kw_only=True)
class Condition:
    """Fires where the statistic of the first available metric of `metrics` compares this way with `limit`.

    relative  the statistic is divided by that of the base
    """

    text: str
    metrics: tuple[str, ...]
    statistic: str
    operator: str
    limit: float
    relative: bool

    def fires(self, number: float) -> bool:
        return _OPERATORS[self.operator](number, self.limit)


def parse(text: str, known: Mapping[str, Kind]) -> Condition:
    """Read one expression about the metrics in `known`. Raises UsageError."""
    found = _FORM.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' is not a condition", remedy=_EXAMPLES)
    statistic, metrics = _name(text, found["name"], known)
    kind = known[metrics[0]]
    if kind.is_rate and statistic is not None:
        raise UsageError(
            f"'{text}' asks for the {statistic} of a rate", remedy=f"write {found['name'][len(statistic) + 1 :]}"
        )
    if not kind.is_rate and statistic is None:
        raise UsageError(
            f"'{text}' does not say which statistic of {found['name']}", remedy=f"write for example p99_{found['name']}"
        )
    limit, unit = float(found["number"]), found["unit"]
    units = UNITS.get(kind.unit, {kind.unit: 1.0})
    if unit != "x" and unit not in units:
        spelled = " or ".join(f"{found['number']}{name}" for name in ("x", *units))
        raise UsageError(f"'{text}' has {_unit_fault(unit)}", remedy=f"write {spelled}")
    if unit == "x" and limit == 0:
        raise UsageError(f"'{text}' compares a ratio with 0", remedy="write for example 1.1x")
    return Condition(
        text=" ".join(text.split()),
        metrics=metrics,
        statistic=statistic or VALUE,
        operator=found["operator"],
        limit=limit if unit == "x" else limit * units[unit],
        relative=unit == "x",
    )


def _unit_fault(unit: str) -> str:
    return f"a unit that does not fit: {unit}" if unit else "no unit"


def _name(text: str, name: str, known: Mapping[str, Kind]) -> tuple[str | None, tuple[str, ...]]:
    """(statistic, metrics) of a name. A metric's own name may begin like a statistic."""
    head, _, rest = name.partition("_")
    statistic = None
    short = aliases()
    if name not in known and name not in short and (head in STATISTICS or re.fullmatch(r"p[\d.]+", head)):
        if head not in STATISTICS:
            raise UsageError(
                f"'{text}' asks for {head}", why="reports do not have it", remedy=suggestion(head, STATISTICS)
            )
        statistic, name = head, rest
    wanted = short.get(name, (name,))
    metrics = tuple(metric for metric in wanted if metric in known)
    if not metrics:
        choices = {alias for alias, stands_for in short.items() if set(stands_for) & set(known)} | set(known)
        why = "no report has it" if name in short else ""
        raise UsageError(f"'{text}' is about {name or 'nothing'}", why=why, remedy=suggestion(name, choices))
    return statistic, metrics
