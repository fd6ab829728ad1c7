"""Uncertainty of a statistic of one load point: its values over bootstrap resamples of the load point's requests.

Whole requests are drawn, since the gaps of one request are alike. Requests that were in flight together are not
independent either: what stalls one stalls all, which a resample does not show. Several repeats of a load point are the
remedy; `repeats` draws among them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from trtpipe.pipeline.bench.compare.request_files import values
from trtpipe.pipeline.bench.compare.rows import WHOLE_RUN
from trtpipe.pipeline.bench.results.metric import Rate, Values
from trtpipe.pipeline.bench.results.metrics import find
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.statistics import is_bounded, rate_terms

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Floats32 = NDArray[np.float32]
    Ints = NDArray[np.int64]

RESAMPLES = 1000
COVERAGE = (2.5, 97.5)
# A metric with many values per request is drawn by rank in at most this many groups, half of them for the top tenth.
GROUPS = 400
_TOP = 0.9
# Sums over resamples are computed to six digits: quotients that differ by less are equal.
_ALIKE = 1e-5
# Most numbers held at a time: rows of counts, and requests by groups.
_AT_ONCE = 4_000_000
_TABLE = 16_000_000


class Resampler:
    """Resamples of one load point. The same seed gives the same draws."""

    def __init__(self, found: Records, *, closed: bool, seed: Sequence[int]) -> None:
        import numpy as np

        self._found = found
        self._closed = closed
        self._seed = list(seed)
        self._rng = np.random.default_rng([*seed, 1])
        self._times: Floats32 | None = None
        self._tables: dict[str, tuple[Floats, Floats]] = {}

    def draws(self, metric: str, statistic: str, value: float) -> Floats | None:
        """RESAMPLES values of `mean`, of a percentile (`p99`), or of a rate (`value`); None where they cannot be
        computed from the requests, or the requests are too few.

        `value` is the figure that the load point reports.
        """
        if len(self._found) < 2:
            return None
        if statistic == "value":
            return self._rate(metric, value)
        found = values(self._found, metric)
        if found is None or len(found.values) < 2:
            return None
        if statistic == "mean":
            return self._mean(found)
        if not statistic.startswith("p"):
            return None
        share = float(statistic[1:]) / 100
        if not is_bounded(share, len(found.values)):
            return None
        once = bool((found.owners[1:] > found.owners[:-1]).all())
        return self._order_statistic(found, share) if once else self._grouped(metric, found, share)

    def _mean(self, found: Values) -> Floats | None:
        import numpy as np

        size = len(self._found)
        sums: Floats = np.bincount(found.owners, weights=found.values, minlength=size).astype(np.float64)
        counts = np.bincount(found.owners, minlength=size)
        return self._ratio(sums, counts.astype(np.float64))

    def _ratio(self, above: Floats, below: Floats) -> Floats | None:
        """Sum of `above` / sum of `below` over resamples; None where a resample's sum of `below` is not positive."""
        import numpy as np

        totals = self._totals(np.stack([above, below], axis=1))
        if not (totals[:, 1] > 0).all():
            return None
        ratios: Floats = totals[:, 0] / totals[:, 1]
        return ratios

    def _totals(self, table: Floats | Ints) -> Floats:
        """Column sums of `table` (one row per request) over resamples of its rows, to six digits."""
        import numpy as np

        single = table.astype(np.float32)
        return np.concatenate([(times @ single).astype(np.float64) for times in self._blocks()])

    def _blocks(self) -> Iterator[Floats32]:
        """How often each resample has drawn each request: always the same resamples, in blocks if they are large."""
        import numpy as np

        if self._times is not None:
            yield self._times
            return
        size = len(self._found)
        rng = np.random.default_rng(self._seed)
        rows = max(1, min(RESAMPLES, _AT_ONCE // size))
        for at in range(0, RESAMPLES, rows):
            count = min(rows, RESAMPLES - at)
            drawn = rng.integers(0, size, (count, size)) + size * np.arange(count)[:, None]
            times = np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size).astype(np.float32)
            if count == RESAMPLES:
                self._times = times
            yield times

    def _order_statistic(self, found: Values, share: float) -> Floats:
        """Percentiles of a metric with one value per request.

        The rank among all n values of a resample's k-th smallest value is distributed as the k-th smallest of n uniform
        numbers, which has a Beta distribution: so no resample is made.
        """
        import numpy as np

        ranked = np.sort(found.values)
        size = len(ranked)
        place = share * (size - 1)
        below = int(place)
        low = self._rng.beta(below + 1, size - below, RESAMPLES)
        at_low: Floats = ranked[np.minimum((low * size).astype(np.int64), size - 1)]
        if below + 1 == size:
            return at_low  # the largest value
        # The next larger one is the smallest of the remaining numbers, spread evenly above it.
        high = 1 - (1 - low) * self._rng.random(RESAMPLES) ** (1 / (size - below - 1))
        at_high = ranked[np.minimum((high * size).astype(np.int64), size - 1)]
        drawn: Floats = at_low + (place - below) * (at_high - at_low)
        return drawn

    def _grouped(self, metric: str, found: Values, share: float) -> Floats | None:
        """Percentiles of a metric with many values per request, to the nearest group of ranks."""
        import numpy as np

        if metric not in self._tables:
            size, total = len(self._found), len(found.values)
            order = np.argsort(found.values, kind="stable")
            limit = max(100, min(GROUPS, _TABLE // size))
            edges = np.concatenate([np.linspace(0, _TOP, limit // 2), np.linspace(_TOP, 1, limit // 2)])
            starts = np.unique((edges * total).astype(np.int64))
            starts = starts[starts < total]
            group = np.searchsorted(starts, np.arange(total), side="right") - 1
            table = np.bincount(found.owners[order] * len(starts) + group, minlength=size * len(starts))
            running = np.cumsum(self._totals(table.reshape(size, len(starts))), axis=1)
            middles = np.append(starts[1:], total) + starts
            self._tables[metric] = (running, found.values[order][middles // 2])
        running, middle_values = self._tables[metric]
        if not (running[:, -1] > 0).all():
            return None
        reached = (running < share * running[:, -1:]).sum(axis=1)
        drawn: Floats = middle_values[np.minimum(reached, len(middle_values) - 1)]
        return drawn

    def _rate(self, metric: str, value: float) -> Floats | None:
        """A rate scales with the quotient of the sums of its `rate_terms`; None without such terms, and in an open loop
        where every resample has the same quotient."""
        rate = find(metric.removesuffix(WHOLE_RUN))
        if not isinstance(rate, Rate) or (terms := rate_terms(rate, self._found, closed=self._closed)) is None:
            return None
        counted, against = terms
        if not rate.windowed:
            return self._ratio(counted, against)
        if not counted.sum() > 0 or not against.sum() > 0:
            return None
        ratios = self._ratio(counted, against)
        if ratios is None:
            return None
        # The schedule of an open loop tells how many requests there are: those of one length show nothing of chance.
        if not self._closed and ratios.max() - ratios.min() <= _ALIKE * ratios.max():
            return None
        drawn: Floats = value * ratios / (counted.sum() / against.sum())
        return drawn


def repeats(draws: Sequence[Floats], seed: Sequence[int]) -> Floats:
    """Resamples of the mean over repeats of a load point; the repeats themselves are drawn, too."""
    import numpy as np

    if len(draws) == 1:
        return draws[0]
    rng = np.random.default_rng(list(seed))
    shape = (RESAMPLES, len(draws))
    picked = np.stack(draws)[rng.integers(0, len(draws), shape), rng.integers(0, RESAMPLES, shape)]
    mean: Floats = picked.mean(axis=1)
    return mean
