"""Statistics of a load point's metrics: percentiles, and intervals from resampled requests."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.metric import Rate, Values
from trtpipe.pipeline.bench.results.metrics import distributions, rates
from trtpipe.pipeline.bench.results.records import NONE, Records
from trtpipe.pipeline.bench.results.window import Window

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
INTERVALS = ("mean", "p50", "p90", "p99")
RESAMPLES = 200
# Most cells of the table of requests by blocks of values.
BLOCK_CELLS = 1 << 22
STATISTICS = (
    "Percentiles are taken from all raw values with linear interpolation between the two nearest ranks "
    "(Hyndman and Fan type 7); std is the population's (divided by n); n is the number of values. Intervals are of "
    f"95%, by {RESAMPLES} bootstrap resamples of whole requests, since the values of one request are alike; that of a "
    "throughput by what the requests of a resample brought, in a closed loop in the time that they took."
)


def rate_terms(rate: Rate, records: Records, *, closed: bool) -> tuple[Floats, Floats] | None:
    """(numerator, denominator) of a rate per request: the rate scales with the quotient of their sums, so resampled
    requests show its uncertainty. The denominator is the requests' time in a closed loop, and their number where the
    schedule determines how many there are, and for a share of requests. None for a rate without an interval."""
    import numpy as np

    if rate.counted is None:
        return None
    counted = rate.counted(records)
    if not (rate.windowed and closed):
        return counted, np.ones(len(records))
    timed = (records.end != NONE) & (records.sent != NONE)
    return counted, np.where(timed, records.end - records.sent, 0.0)


def rate_interval(rate: Rate, records: Records, value: float) -> list[float] | None:
    """95% interval of a rate from resampled measured requests; None for fewer than two, and where all are alike."""
    import numpy as np

    terms = rate_terms(rate, records, closed=bool((records.slot >= 0).any()))
    mine = records.measured()
    if terms is None or mine.sum() < 2:
        return None
    weights = _weights(int(mine.sum()))
    (counted, against), (drawn, over) = (
        [weigh(term[mine]) for term in terms] for weigh in (np.sum, lambda term: weights @ term)
    )
    if not (counted > 0 and over.min() > 0):
        return None
    low, high = np.percentile(value * (drawn / over) / (counted / against), (2.5, 97.5))
    return [float(low), float(high)] if high > low else None


def percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def summarise(found: Values, *, intervals: bool = True) -> dict[str, Any]:
    """n, mean, std, min, max, PERCENTILES and bootstrap intervals; all but n are None when there are no values."""
    import numpy as np

    names = ["mean", "std", "min", "max", *(percentile_name(percent) for percent in PERCENTILES)]
    array = found.values
    if len(array) == 0:
        return {"n": 0, **dict.fromkeys(names), "interval": None}
    numbers = [array.mean(), array.std(), array.min(), array.max(), *np.percentile(array, PERCENTILES)]
    out: dict[str, Any] = {"n": len(array)}
    out |= {name: float(number) for name, number in zip(names, numbers, strict=True)}
    return {**out, "interval": bootstrap(found) if intervals else None}


def is_bounded(share: float, values: int) -> bool:
    """Whether this many values bound the percentile at `share` with 95% confidence.

    The percentile lies above all values with probability share ** values, and below all with (1 - share) ** values.
    Where one of these is more than 2.5%, as for p99 below 368 values, an interval that ends among them is too short.
    """
    return max(share, 1 - share) ** values <= 0.025


def bootstrap(found: Values) -> dict[str, list[float] | None] | None:
    """95% intervals of INTERVALS, from resampled requests; None for fewer than two requests, and for a percentile that
    so few values do not bound."""
    import numpy as np

    known = np.bincount(found.owners) > 0
    owners = int(known.sum())
    if owners < 2:
        return None
    position = (np.cumsum(known) - 1)[found.owners]
    weights = _weights(owners)
    # Each resample draws as many requests as there are. A request drawn k times weighs its values k times, so a
    # weighted rank over values sorted once stands for sorting every resample: first among blocks of values, whose
    # weights in all resamples are one product of matrices, then within the one block.
    order = np.argsort(found.values, kind="stable")
    ranked = found.values[order]
    # This many blocks make the tables (requests x blocks, resamples x values of a block) about equal in size.
    blocks = max(1, min(math.isqrt(RESAMPLES * len(ranked) // owners), len(ranked), BLOCK_CELLS // owners))
    size = -(-len(ranked) // blocks)
    sorted_position = position[order]
    cells = np.bincount(sorted_position * blocks + np.arange(len(ranked)) // size, minlength=owners * blocks)
    below = np.cumsum(weights @ cells.reshape(owners, blocks).astype(np.float64), axis=1)
    totals = below[:, -1]
    draws = np.empty((RESAMPLES, len(INTERVALS)))
    draws[:, 0] = weights @ np.bincount(position, weights=found.values, minlength=owners) / totals
    rows = np.arange(RESAMPLES)
    for column, name in enumerate(INTERVALS[1:], 1):
        targets = float(name[1:]) / 100 * totals
        block = (below < targets[:, None]).sum(axis=1)
        before = np.where(block > 0, below[rows, block - 1], 0.0)
        # The last block may be shorter: ranks beyond it are set to its last value's.
        ranks = np.minimum(block[:, None] * size + np.arange(size), len(ranked) - 1)
        inside = before[:, None] + np.cumsum(weights[rows[:, None], sorted_position[ranks]], axis=1)
        draws[:, column] = ranked[ranks[rows, (inside < targets[:, None]).sum(axis=1)]]
    low, high = np.percentile(draws, (2.5, 97.5), axis=0)
    return {
        name: None
        if name != "mean" and not is_bounded(float(name[1:]) / 100, len(ranked))
        else [float(low[i]), float(high[i])]
        for i, name in enumerate(INTERVALS)
    }


@lru_cache(maxsize=1)  # most metrics have values of the same requests
def _weights(owners: int) -> Floats:
    """Number of times that each resample has drawn each request; shape [RESAMPLES, owners]."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, owners, (RESAMPLES, owners))
    drawn += owners * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * owners).reshape(RESAMPLES, owners).astype(np.float64)


def load_point_metrics(records: Records, window: Window | None) -> dict[str, dict[str, Any]]:
    """All metrics of one load point: a summary for each distribution, {"value": number or None} for each rate."""
    import numpy as np

    out: dict[str, dict[str, Any]] = {}
    known: list[tuple[Values, dict[str, Any]]] = []
    for metric in distributions():
        found = metric.values(records)
        # Metrics with equal values share a summary: gaps where each response has one token, times where nothing waited.
        same = [told for one, told in known if np.array_equal(one.values, found.values)]
        out[metric.name] = same[0] if same else summarise(found)
        known.append((found, out[metric.name]))
    for rate in rates():
        found_rate = None if window is None and rate.windowed else rate.value(records, window)
        interval = None if found_rate is None else rate_interval(rate, records, found_rate)
        out[rate.name] = {"value": found_rate, "interval": interval}
    return out
