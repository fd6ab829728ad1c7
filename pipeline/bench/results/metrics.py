"""Metrics computed from records. Every metric has a name, a unit, a formula and a case in which it is undefined.

Names are aiperf's where it has the metric; the formula states any difference. Latencies leave out warm-up requests and
failed requests. An undefined value is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.records import NONE, Records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

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
WINDOW = (
    "Closed loop: from the moment the last place ended its warm-up until its duration is over; where a number of "
    "requests ends it, until the last measured one ended, or, where a place rests that finds none left, until the "
    "first does: every place is busy throughout, or at a conversation. Open loop: the measured part of the schedule. "
    "Open at the start, closed at the end. None if there is no such time."
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """The time over which rates are taken; see WINDOW. Nanoseconds."""

    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of one metric, and the request that each belongs to (its index in Records)."""

    values: Floats
    owners: Ints


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A metric with any number of values per request."""

    name: str
    unit: str
    formula: str
    undefined: str
    values: Callable[[Records], Values]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A metric with one value per load point; one that is not `windowed` has a value without a window, too."""

    name: str
    unit: str
    formula: str
    undefined: str
    value: Callable[[Records, Any], float | None]
    windowed: bool = True


# Distributions


def _per_request(numbers: Callable[[Records, Ints], Any], *needed: str) -> Callable[[Records], Values]:
    """A metric from a function that gives a value for each of some good requests: those that have at least one response
    and known values in all columns `needed` (a file of another tool may lack some)."""
    import numpy as np

    def values(records: Records) -> Values:
        known = records.good()
        for name in needed:
            known &= getattr(records, name) != NONE
        owners = np.flatnonzero(known)
        return Values(values=np.asarray(numbers(records, owners), dtype=np.float64), owners=owners)

    return values


def _first(records: Records, owners: Ints) -> Ints:
    out: Ints = records.stamps[records.offsets[owners]]
    return out


def _last(records: Records, owners: Ints) -> Ints:
    out: Ints = records.stamps[records.offsets[owners + 1] - 1]
    return out


def _gaps(records: Records) -> tuple[Floats, Ints, Ints]:
    """(gap in ms, tokens of the later response, request) of each gap between two responses of a good request."""
    import numpy as np

    counts = np.diff(records.offsets)
    owners = np.repeat(np.arange(len(records)), counts)
    inner = owners[1:] == owners[:-1] if len(owners) else np.zeros(0, dtype=np.bool_)
    inner &= records.good()[owners[1:]] if len(owners) else inner
    gaps = np.diff(records.stamps)[inner] / 1e6 if len(records.stamps) else np.zeros(0)
    return gaps, records.tokens[1:][inner], owners[1:][inner]


def _chunk_gaps(records: Records) -> Values:
    gaps, _, owners = _gaps(records)
    return Values(values=gaps, owners=owners)


def _token_gaps(records: Records) -> Values:
    import numpy as np

    gaps, tokens, owners = _gaps(records)
    known = tokens > 0
    times = tokens[known]
    return Values(values=np.repeat(gaps[known] / times, times), owners=np.repeat(owners[known], times))


def _time_per_output_token(records: Records) -> Values:
    import numpy as np

    owners = np.flatnonzero(records.good() & (records.output_tokens > 1))
    spans = (_last(records, owners) - _first(records, owners)) / 1e6
    return Values(values=spans / (records.output_tokens[owners] - 1), owners=owners)


def _from(moment: str, until: Callable[[Records, Ints], Ints]) -> Callable[[Records], Values]:
    def milliseconds(records: Records, owners: Ints) -> Any:
        return (until(records, owners) - getattr(records, moment)[owners]) / 1e6

    return _per_request(milliseconds, moment)


def _per_user(records: Records) -> Values:
    import numpy as np

    owners = np.flatnonzero(records.good() & (records.sent != NONE) & (records.output_tokens != NONE))
    seconds = (_last(records, owners) - records.sent[owners]) / 1e9
    positive = seconds > 0
    return Values(values=records.output_tokens[owners][positive] / seconds[positive], owners=owners[positive])


_NOBODY = "no successful request"
DISTRIBUTIONS = (
    Distribution(
        name="time_to_first_token",
        unit="ms",
        formula="first response with tokens - request sent",
        undefined=_NOBODY,
        values=_from("sent", _first),
    ),
    Distribution(
        name="time_to_first_token_from_due",
        unit="ms",
        formula="first response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _first),
    ),
    Distribution(
        name="inter_chunk_latency",
        unit="ms",
        formula="gap between consecutive responses with tokens; one value a gap",
        undefined="no successful request with two such responses",
        values=_chunk_gaps,
    ),
    Distribution(
        name="inter_token_latency",
        unit="ms",
        formula=(
            "gap before a response / tokens in that response; one value a token, tokens of the first response left "
            "out. (NVIDIA's inter_token_latency, one mean a request, is time_per_output_token here.)"
        ),
        undefined="no successful request with two responses, or nobody says how many tokens each had",
        values=_token_gaps,
    ),
    Distribution(
        name="time_per_output_token",
        unit="ms",
        formula="(request_latency - time_to_first_token) / (output tokens - 1); one value a request",
        undefined="no successful request with two tokens",
        values=_time_per_output_token,
    ),
    Distribution(
        name="request_latency",
        unit="ms",
        formula="last response with tokens - request sent (an empty final response is not waited for)",
        undefined=_NOBODY,
        values=_from("sent", _last),
    ),
    Distribution(
        name="request_latency_from_due",
        unit="ms",
        formula="last response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _last),
    ),
    Distribution(
        name="dispatch_delay",
        unit="ms",
        formula="request sent - request due: the client's own lateness, waiting for a free place included",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: (records.sent - records.due)[owners] / 1e6, "due", "sent"),
    ),
    Distribution(
        name="output_token_throughput_per_user",
        unit="tokens/s",
        formula="output tokens / request_latency; one value a request",
        undefined=_NOBODY,
        values=_per_user,
    ),
    Distribution(
        name="input_sequence_length",
        unit="tokens",
        formula="tokens of a prompt, special ones included: the server's count where it says, else the tokenizer's",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: records.input_tokens[owners], "input_tokens"),
    ),
    Distribution(
        name="output_sequence_length",
        unit="tokens",
        formula="tokens of an answer; token_count_source says who counted",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: records.output_tokens[owners], "output_tokens"),
    ),
)


# Rates


def _output_tokens(records: Records, window: Window) -> float:
    """Tokens of successful requests that arrived in the window. Where the tokens of each response are unknown, those of
    an answer are spread evenly over its responses."""
    import numpy as np

    counts = np.diff(records.offsets)
    owners = np.repeat(np.arange(len(records)), counts)
    inside = ~records.failed[owners] & (records.stamps > window.start_ns) & (records.stamps <= window.stop_ns)
    spread = records.output_tokens[owners] / np.maximum(1, counts[owners])
    return float(np.where(records.tokens == NONE, spread, records.tokens)[inside].sum())


def _ended_inside(records: Records, window: Window) -> NDArray[np.bool_]:
    """Successful requests that ended in the window, warm-up requests included: in an open loop they end within the
    window just as its last ones end after it; without them a server would seem slower the longer its answers take."""
    return ~records.failed & (records.end > window.start_ns) & (records.end <= window.stop_ns)


def _total_tokens(records: Records, window: Window) -> float:
    return _output_tokens(records, window) + float(records.input_tokens[_ended_inside(records, window)].sum())


def _effective_concurrency(records: Records, window: Window) -> float:
    import numpy as np

    there = (records.sent != NONE) & (records.end != NONE)
    busy = np.minimum(records.end, window.stop_ns) - np.maximum(records.sent, window.start_ns)
    return float(np.maximum(0, busy)[there].sum()) / (window.stop_ns - window.start_ns)


def _error_rate(records: Records) -> float | None:
    measured = int(records.measured().sum())
    return None if measured == 0 else float((records.failed & records.measured()).sum()) / measured


RATES = (
    Rate(
        name="output_token_throughput",
        unit="tokens/s",
        formula=(
            "tokens that arrived within the window, of successful requests, those of warm-up too / seconds of the "
            "window. Where nobody counts the tokens of each response, an answer's are spread evenly over its responses."
        ),
        undefined="no window",
        value=lambda records, window: _output_tokens(records, window) / window.seconds,
    ),
    Rate(
        name="total_token_throughput",
        unit="tokens/s",
        formula="output tokens as above, and prompts of requests that ended within the window / seconds of the window",
        undefined="no window",
        value=lambda records, window: _total_tokens(records, window) / window.seconds,
    ),
    Rate(
        name="request_throughput",
        unit="requests/s",
        formula="successful requests, those of warm-up too, whose stream ended within the window / its seconds",
        undefined="no window",
        value=lambda records, window: float(_ended_inside(records, window).sum()) / window.seconds,
    ),
    Rate(
        name="effective_concurrency",
        unit="requests",
        formula="time between sent and end, within the window, summed over all requests / length of the window",
        undefined="no window",
        value=_effective_concurrency,
    ),
    Rate(
        name="error_rate",
        unit="",
        formula="failed measured requests / measured requests",
        undefined="no measured request",
        value=lambda records, window: _error_rate(records),
        windowed=False,
    ),
)


def closed_window(records: Records, concurrency: int, until_ns: int | None = None) -> Window | None:
    """The window of a closed loop; see WINDOW. `until_ns`: when its duration was over."""
    import numpy as np

    mine = records.measured() & (records.end != NONE)
    slots = np.unique(records.slot[mine])
    if len(slots) < concurrency:
        return None
    start = max(int(records.due[mine & (records.slot == slot)].min()) for slot in slots)
    rests = min(int(records.end[records.slot == slot].max()) for slot in slots)
    stop = min(rests, int(records.end[mine].max())) if until_ns is None else until_ns
    return Window(start_ns=start, stop_ns=stop) if stop > start else None


def rate_terms(name: str, records: Records, *, closed: bool) -> tuple[Floats, Floats] | None:
    """(numerator, denominator) of a rate per request: the rate scales with the quotient of their sums, so resampled
    requests show its uncertainty. The denominator is the requests' time in a closed loop, and their number where the
    schedule determines how many there are. None for a name that is no such rate."""
    import numpy as np

    failed = records.failed
    every = np.ones(len(records))
    if name == "error_rate":
        return failed.astype(np.float64), every
    output, prompts = (
        np.where(failed | (column == NONE), 0, column).astype(np.float64)
        for column in (records.output_tokens, records.input_tokens)
    )
    counted = {
        "output_token_throughput": output,
        "total_token_throughput": output + prompts,
        "request_throughput": np.where(failed, 0.0, 1.0),
    }.get(name)
    if counted is None:
        return None
    timed = (records.end != NONE) & (records.sent != NONE)
    return counted, np.where(timed, records.end - records.sent, 0.0) if closed else every


def rate_interval(name: str, records: Records, value: float) -> list[float] | None:
    """95% interval of a rate from resampled measured requests; None for fewer than two, and where all are alike."""
    import numpy as np

    terms = rate_terms(name, records, closed=bool((records.slot >= 0).any()))
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
    """How often each resample has drawn each request: shape [RESAMPLES, owners]."""
    import numpy as np

    drawn = np.random.default_rng(0).integers(0, owners, (RESAMPLES, owners))
    drawn += owners * np.arange(RESAMPLES)[:, None]
    return np.bincount(drawn.ravel(), minlength=RESAMPLES * owners).reshape(RESAMPLES, owners).astype(np.float64)


def level_metrics(records: Records, window: Window | None) -> dict[str, dict[str, Any]]:
    """All metrics of one load point: a summary for each distribution, {"value": number or None} for each rate."""
    import numpy as np

    out: dict[str, dict[str, Any]] = {}
    known: list[tuple[Values, dict[str, Any]]] = []
    for metric in DISTRIBUTIONS:
        found = metric.values(records)
        # Metrics with equal values share a summary: gaps where each response has one token, times where nothing waited.
        same = [told for one, told in known if np.array_equal(one.values, found.values)]
        out[metric.name] = same[0] if same else summarise(found)
        known.append((found, out[metric.name]))
    for rate in RATES:
        found_rate = None if window is None and rate.windowed else rate.value(records, window)
        interval = None if found_rate is None else rate_interval(rate.name, records, found_rate)
        out[rate.name] = {"value": found_rate, "interval": interval}
    return out


def definitions() -> dict[str, dict[str, Any]]:
    """Unit, formula and undefined case of each metric, for the report."""
    return {
        metric.name: {"unit": metric.unit, "formula": metric.formula, "undefined": metric.undefined}
        for metric in (*DISTRIBUTIONS, *RATES)
    }
