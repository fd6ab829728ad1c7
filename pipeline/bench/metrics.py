"""RequestRecords -> metrics. Pure functions; every metric is an entry with its unit, formula and undefined case.

Names are aiperf's where it has the metric. What differs is said in the formula. Warm-up requests and failed
requests are in no metric. An undefined value is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeline.bench.record import RequestRecord

PERCENTILES = (50, 90, 99)
STATISTICS = (
    "Percentiles are taken from all raw values with linear interpolation between the two nearest ranks "
    "(Hyndman and Fan type 7); std is the population's (divided by n); n is the number of values."
)
WINDOW = (
    "From the moment the last slot ended its warm-up until the first slot found no further request to send: "
    "every slot is busy with measured requests throughout. Open at the start, closed at the end. None if there is "
    "no such time."
)


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A metric with any number of values a request. `values` takes a successful, settled record."""

    name: str
    unit: str
    formula: str
    undefined: str
    values: Callable[[RequestRecord], Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Window:
    """The time over which rates are taken; see WINDOW. Nanoseconds."""

    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9

    def holds(self, stamp_ns: int | None) -> bool:
        return stamp_ns is not None and self.start_ns < stamp_ns <= self.stop_ns


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A metric with one value a level, from all its records and its window."""

    name: str
    unit: str
    formula: str
    undefined: str
    value: Callable[[Sequence[RequestRecord], Window], float]


def _ms(start_ns: int | None, stop_ns: int) -> list[float]:
    return [] if start_ns is None else [(stop_ns - start_ns) / 1e6]


def _first(record: RequestRecord) -> int:
    return record.content[0].stamp_ns


def _last(record: RequestRecord) -> int:
    return record.content[-1].stamp_ns


def _chunk_gaps(record: RequestRecord) -> list[float]:
    return [(after.stamp_ns - before.stamp_ns) / 1e6 for before, after in pairwise(record.content)]


def _token_gaps(record: RequestRecord) -> list[float]:
    if not record.counted_by_server:
        return []
    gaps = zip(_chunk_gaps(record), record.content[1:], strict=True)
    return [gap / (response.tokens or 1) for gap, response in gaps for _ in range(response.tokens or 1)]


def _time_per_output_token(record: RequestRecord) -> list[float]:
    tokens = record.output_tokens or 0
    return [(_last(record) - _first(record)) / 1e6 / (tokens - 1)] if tokens > 1 else []


DISTRIBUTIONS = (
    Distribution(
        name="time_to_first_token",
        unit="ms",
        formula="first response with tokens - request sent",
        undefined="no successful request",
        values=lambda record: _ms(record.sent_ns, _first(record)),
    ),
    Distribution(
        name="time_to_first_token_from_due",
        unit="ms",
        formula="first response with tokens - slot free (what the client itself delayed is included)",
        undefined="no successful request",
        values=lambda record: _ms(record.due_ns, _first(record)),
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
        undefined="no successful request with two responses, or the server did not count the tokens of each",
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
        undefined="no successful request",
        values=lambda record: _ms(record.sent_ns, _last(record)),
    ),
    Distribution(
        name="request_latency_from_due",
        unit="ms",
        formula="last response with tokens - slot free (what the client itself delayed is included)",
        undefined="no successful request",
        values=lambda record: _ms(record.due_ns, _last(record)),
    ),
    Distribution(
        name="dispatch_delay",
        unit="ms",
        formula="request sent - slot free: the client's own lateness",
        undefined="no successful request",
        values=lambda record: [] if record.sent_ns is None else _ms(record.due_ns, record.sent_ns),
    ),
    Distribution(
        name="output_sequence_length",
        unit="tokens",
        formula="tokens of an answer; token_count_source says who counted",
        undefined="no successful request",
        values=lambda record: [float(record.output_tokens or 0)],
    ),
)


def _window_tokens(record: RequestRecord, window: Window) -> float:
    inside = [response for response in record.content if window.holds(response.stamp_ns)]
    if record.counted_by_server:
        return sum(response.tokens or 0 for response in inside)
    return (record.output_tokens or 0) * len(inside) / len(record.content)


def _output_token_throughput(records: Sequence[RequestRecord], window: Window) -> float:
    return sum(_window_tokens(record, window) for record in successful(records)) / window.seconds


def _request_throughput(records: Sequence[RequestRecord], window: Window) -> float:
    return sum(window.holds(record.end_ns) for record in successful(records)) / window.seconds


def _effective_concurrency(records: Sequence[RequestRecord], window: Window) -> float:
    busy = 0
    for record in records:
        if record.sent_ns is not None and record.end_ns is not None:
            busy += max(0, min(record.end_ns, window.stop_ns) - max(record.sent_ns, window.start_ns))
    return busy / (window.stop_ns - window.start_ns)


RATES = (
    Rate(
        name="output_token_throughput",
        unit="tokens/s",
        formula=(
            "tokens that arrived within the window, of successful requests / seconds of the window. Where the "
            "server does not count, an answer's tokens are spread evenly over its responses with text."
        ),
        undefined="no window",
        value=_output_token_throughput,
    ),
    Rate(
        name="request_throughput",
        unit="requests/s",
        formula="successful requests whose stream ended within the window / seconds of the window",
        undefined="no window",
        value=_request_throughput,
    ),
    Rate(
        name="effective_concurrency",
        unit="requests",
        formula="time between sent and end, within the window, summed over all requests / length of the window",
        undefined="no window",
        value=_effective_concurrency,
    ),
)


def successful(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Measured requests without a failure."""
    return [record for record in records if not record.warmup and record.failure is None]


def measured_window(records: Sequence[RequestRecord], concurrency: int) -> Window | None:
    """The window of a level; see WINDOW. `records` are those that ended, in any order."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for record in records:
        if not record.warmup and record.end_ns is not None:
            first[record.slot] = min(first.get(record.slot, record.due_ns), record.due_ns)
            last[record.slot] = max(last.get(record.slot, record.end_ns), record.end_ns)
    if len(first) < concurrency:
        return None
    window = Window(start_ns=max(first.values()), stop_ns=min(last.values()))
    return window if window.stop_ns > window.start_ns else None


def summarise(values: Sequence[float]) -> dict[str, float | int | None]:
    """n, mean, std, min, max and PERCENTILES of raw values; all but n are None when there are none."""
    import numpy as np

    names = ["mean", "std", "min", "max", *(f"p{percent}" for percent in PERCENTILES)]
    if len(values) == 0:
        return {"n": 0, **dict.fromkeys(names)}
    array = np.asarray(values, dtype=np.float64)
    numbers = [array.mean(), array.std(), array.min(), array.max(), *np.percentile(array, PERCENTILES)]
    return {"n": len(values), **{name: float(number) for name, number in zip(names, numbers, strict=True)}}


def level_metrics(records: Sequence[RequestRecord], concurrency: int) -> dict[str, dict[str, float | int | None]]:
    """All metrics of one level: a summary for each distribution, {"value": number or None} for each rate."""
    good = successful(records)
    window = measured_window(records, concurrency)
    out = {
        metric.name: summarise([value for record in good for value in metric.values(record)])
        for metric in DISTRIBUTIONS
    }
    for rate in RATES:
        out[rate.name] = {"value": None if window is None else rate.value(records, window)}
    return out


def definitions() -> dict[str, dict[str, Any]]:
    """Unit, formula and undefined case of each metric, for the report."""
    return {
        metric.name: {"unit": metric.unit, "formula": metric.formula, "undefined": metric.undefined}
        for metric in (*DISTRIBUTIONS, *RATES)
    }
