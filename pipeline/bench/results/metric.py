"""Kinds of metric: what an entry of `metrics.METRICS` says of itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.records import Records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

# Statistic of a metric that has one value.
VALUE = "value"
# Units in which a limit of a metric can be written, and their sizes in the metric's own unit.
UNITS = {
    "ms": {"ms": 1.0, "s": 1000.0, "us": 0.001},
    "tokens/s": {"tokens/s": 1.0, "tok/s": 1.0},
    "requests/s": {"requests/s": 1.0, "req/s": 1.0},
    "tokens": {"": 1.0, "tokens": 1.0},
    "requests": {"": 1.0, "requests": 1.0},
    "": {"": 1.0, "%": 0.01},
    "/1M tokens": {"": 1.0},
}


def rounded(value: float, digits: int = 1) -> str:
    """The value with that many digits after the point, or two significant ones where it is below 1."""
    if 0 < abs(value) < 1:
        digits = 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}"


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of one metric, and the request that each belongs to (its index in Records)."""

    values: Floats
    owners: Ints


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Meaning of a metric, and where it is shown. Tables, CSV, pages, comparisons, `--slo` and `--fail-if` use it.

    name        key in reports, name in the CSV
    unit        empty for a share, which tables show in percent
    formula     how it is computed
    undefined   when it has no value
    short       name in tables and on pages; a rate's includes its unit
    better      "lower", "higher", or "" where neither is better
    aliases     its other names in `--slo` and `--fail-if`
    tabled      whether tables have it; their columns have the order of METRICS
    instead_of  the metric that comparisons and pages show it for, where a report lacks that one
    """

    name: str
    unit: str
    formula: str
    undefined: str
    short: str = ""
    better: str = ""
    aliases: tuple[str, ...] = ()
    tabled: bool = False
    instead_of: str = ""

    def figures(self, points: tuple[str, ...]) -> tuple[str, ...]:
        """Statistics of it that a table shows: `points` of a distribution, the value of a rate."""
        return (VALUE,)

    def shown(self, value: float) -> float:
        """The value as tables show it: a share in percent."""
        return value if self.unit else 100 * value

    def heading(self, statistic: str = "") -> str:
        """Heading of a column or a row of figures: "TTFT p99 ms", "tokens/s"."""
        return self.short or self.name.replace("_", " ")


@dataclass(frozen=True, kw_only=True)
class Distribution(Metric):
    """A metric with any number of values per request.

    drawn   whether the page draws its histogram, and its p99 against throughput
    judged  the metric that an objective (`--slo`) means by an alias of this one
    unknown which good requests have values that nobody tells, n booleans; None where all values are known
    untold  why nobody tells them
    """

    values: Callable[[Records], Values]
    drawn: bool = False
    judged: str = ""
    unknown: Callable[[Records], NDArray[np.bool_]] | None = None
    untold: str = ""

    def figures(self, points: tuple[str, ...]) -> tuple[str, ...]:
        return points

    def heading(self, statistic: str = "") -> str:
        return " ".join(part for part in (super().heading(), statistic, self.unit) if part)


@dataclass(frozen=True, kw_only=True)
class Rate(Metric):
    """A metric with one value per load point.

    windowed  whether it has no value without a window; one that is not is a share of requests
    counted   what each request adds to the numerator, for the interval; None for a rate without one
    """

    value: Callable[[Records, Any], float | None]
    windowed: bool = True
    counted: Callable[[Records], Floats] | None = None
