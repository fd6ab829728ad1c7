"""Time series and histograms of a load point, which the page draws."""

from __future__ import annotations

from typing import Any

from trtpipe.pipeline.bench.results.metrics import distributions
from trtpipe.pipeline.bench.results.records import NONE, Records

STEPS = 120
BINS = 60


def series(records: Records) -> dict[str, Any] | None:
    """Rates, requests in flight and latencies in up to STEPS equal steps from the first request to the last end; None
    where nothing was sent. Warm-up requests are included; failed requests count as in flight."""
    import numpy as np

    there = (records.sent != NONE) & (records.end != NONE)
    if not there.any():
        return None
    start, stop = int(records.sent[there].min()), int(records.end[there].max())
    # Whole nanoseconds, so that rounding does not put the last end beyond the last edge.
    step = _nice(max(1, -(-(stop - start) // STEPS)))
    edges = start + np.arange(max(1, -(-(stop - start) // step)) + 1) * step
    interval = step / 1e9
    counts = np.diff(records.offsets)
    owners = np.repeat(np.arange(len(records)), counts)
    tokens = np.where(records.tokens == NONE, (records.output_tokens / np.maximum(1, counts))[owners], records.tokens)
    per_s, _ = np.histogram(records.stamps, edges, weights=tokens)
    ended, _ = np.histogram(records.end[there], edges)
    begun = np.searchsorted(np.sort(records.sent[there]), edges[1:])
    over = np.searchsorted(np.sort(records.end[there]), edges[1:])
    good = np.flatnonzero((counts > 0) & ~records.failed)
    first, last = records.stamps[records.offsets[good]], records.stamps[records.offsets[good + 1] - 1]
    sent = records.sent[good]
    return {
        "interval_s": interval,
        "t_s": [(edge - start) / 1e9 for edge in edges[:-1].tolist()],
        "in_flight": (begun - over).tolist(),
        "tokens_per_s": (per_s / interval).tolist(),
        "requests_per_s": (ended / interval).tolist(),
        "ttft_p50_ms": _by_step(first, (first - sent) / 1e6, edges, 50),
        "latency_p50_ms": _by_step(last, (last - sent) / 1e6, edges, 50),
        "latency_p99_ms": _by_step(last, (last - sent) / 1e6, edges, 99),
    }


def histograms(records: Records) -> dict[str, Any]:
    """Counts in BINS bins between the smallest and the largest value; logarithmic bins where those are far apart."""
    import numpy as np

    out = {}
    for metric in distributions():
        if not metric.drawn or len(values := metric.values(records).values) == 0:
            continue
        low, high = float(values.min()), float(values.max())
        if low > 0 and high / low > 20:
            edges = np.geomspace(low, high, BINS + 1)
            edges[-1] = high  # rounding must not lose the largest value
        else:
            edges = np.linspace(low, high if high > low else low + 1e-3, BINS + 1)
        counts, _ = np.histogram(values, edges)
        out[metric.name] = {"edges": edges.tolist(), "counts": counts.tolist()}
    return out


def _by_step(moments: Any, values: Any, edges: Any, percent: float) -> list[float | None]:
    import numpy as np

    # As in np.histogram, the last step includes its end.
    step = np.minimum(np.searchsorted(edges, moments, side="right") - 1, len(edges) - 2)
    order = np.argsort(step, kind="stable")
    step, values = step[order], values[order]
    bounds = np.searchsorted(step, np.arange(len(edges)))
    return [
        float(np.percentile(values[a:b], percent)) if b > a else None
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


def _nice(nanoseconds: int) -> int:
    """The next 1, 2 or 5 times a power of ten."""
    power = 1
    while 10 * power <= nanoseconds:
        power *= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= nanoseconds)
