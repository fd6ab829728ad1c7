"""Metrics computed from records: each one's name, unit, formula, undefined case, and where it is shown.

Names are aiperf's where it has the metric; the formula states any difference. Latencies leave out warm-up requests and
failed requests. An undefined value is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtpipe.pipeline.bench.results.records import NONE, Records

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

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
        return ("value",)

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
    """

    values: Callable[[Records], Values]
    drawn: bool = False
    judged: str = ""

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
_DISTRIBUTIONS = (
    Distribution(
        name="time_to_first_token",
        unit="ms",
        short="TTFT",
        better="lower",
        aliases=("ttft",),
        tabled=True,
        drawn=True,
        judged="time_to_first_token_from_due",
        formula="first response with tokens - request sent",
        undefined=_NOBODY,
        values=_from("sent", _first),
    ),
    Distribution(
        name="time_to_first_token_from_due",
        unit="ms",
        better="lower",
        formula="first response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _first),
    ),
    Distribution(
        name="inter_chunk_latency",
        unit="ms",
        short="chunk gap",
        better="lower",
        aliases=("icl",),
        instead_of="inter_token_latency",
        drawn=True,
        formula="gap between consecutive responses with tokens; one value a gap",
        undefined="no successful request with two such responses",
        values=_chunk_gaps,
    ),
    Distribution(
        name="inter_token_latency",
        unit="ms",
        short="ITL",
        better="lower",
        aliases=("itl",),
        tabled=True,
        drawn=True,
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
        short="TPOT",
        better="lower",
        aliases=("tpot",),
        tabled=True,
        formula="(request_latency - time_to_first_token) / (output tokens - 1); one value a request",
        undefined="no successful request with two tokens",
        values=_time_per_output_token,
    ),
    Distribution(
        name="request_latency",
        unit="ms",
        short="latency",
        better="lower",
        aliases=("latency", "e2e"),
        tabled=True,
        drawn=True,
        judged="request_latency_from_due",
        formula="last response with tokens - request sent (an empty final response is not waited for)",
        undefined=_NOBODY,
        values=_from("sent", _last),
    ),
    Distribution(
        name="request_latency_from_due",
        unit="ms",
        better="lower",
        formula="last response with tokens - request due (what the client itself delayed is included)",
        undefined=_NOBODY,
        values=_from("due", _last),
    ),
    Distribution(
        name="dispatch_delay",
        unit="ms",
        better="lower",
        formula="request sent - request due: the client's own lateness, waiting for a free place included",
        undefined=_NOBODY,
        values=_per_request(lambda records, owners: (records.sent - records.due)[owners] / 1e6, "due", "sent"),
    ),
    Distribution(
        name="output_token_throughput_per_user",
        unit="tokens/s",
        better="higher",
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


def _own_tokens(records: Records, column: Ints) -> Floats:
    """Tokens of each request; 0 for a failed request, and where the number is unknown."""
    import numpy as np

    return np.where(records.failed | (column == NONE), 0, column).astype(np.float64)


def _own_output(records: Records) -> Floats:
    return _own_tokens(records, records.output_tokens)


_RATES = (
    Rate(
        name="output_token_throughput",
        unit="tokens/s",
        short="tokens/s",
        better="higher",
        aliases=("throughput",),
        tabled=True,
        formula=(
            "tokens that arrived within the window, of successful requests, those of warm-up too / seconds of the "
            "window. Where nobody counts the tokens of each response, an answer's are spread evenly over its responses."
        ),
        undefined="no window",
        value=lambda records, window: _output_tokens(records, window) / window.seconds,
        counted=_own_output,
    ),
    Rate(
        name="total_token_throughput",
        unit="tokens/s",
        better="higher",
        formula="output tokens as above, and prompts of requests that ended within the window / seconds of the window",
        undefined="no window",
        value=lambda records, window: _total_tokens(records, window) / window.seconds,
        counted=lambda records: _own_output(records) + _own_tokens(records, records.input_tokens),
    ),
    Rate(
        name="request_throughput",
        unit="requests/s",
        short="requests/s",
        better="higher",
        tabled=True,
        formula="successful requests, those of warm-up too, whose stream ended within the window / its seconds",
        undefined="no window",
        value=lambda records, window: float(_ended_inside(records, window).sum()) / window.seconds,
        counted=lambda records: (~records.failed).astype("float64"),
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
        short="errors %",
        better="lower",
        formula="failed measured requests / measured requests",
        undefined="no measured request",
        value=lambda records, window: _error_rate(records),
        windowed=False,
        counted=lambda records: records.failed.astype("float64"),
    ),
)


# Goodput needs objectives: `slo.judge` computes it.
_GOODPUT = (
    Metric(
        name="request_goodput",
        unit="requests/s",
        short="goodput/s",
        better="higher",
        aliases=("goodput",),
        tabled=True,
        formula="good requests whose stream ended within the window / seconds of the window",
        undefined="no window, or no objective",
    ),
    Metric(
        name="token_goodput",
        unit="tokens/s",
        better="higher",
        formula="output tokens of those requests / seconds of the window",
        undefined="no window, or no objective",
    ),
)
# Of the server's own counters, where it speculates: `report.load_point_result` takes them from its metrics.
SPECULATION = (
    Metric(
        name="tokens_per_step",
        unit="tokens",
        short="tokens/step",
        better="higher",
        tabled=True,
        formula="1 + accepted draft tokens / steps of each request after its first token, over the load point",
        undefined="the server does not speculate, has several engines that do, or its metrics were not read",
    ),
    Metric(
        name="draft_acceptance_rate",
        unit="",
        short="drafts accepted %",
        better="higher",
        aliases=("acceptance",),
        tabled=True,
        formula="accepted draft tokens / draft tokens, over the load point",
        undefined="no draft token within the load point, several engines, or the server's metrics were not read",
    ),
)
# Every metric, in the order of reports and tables. To add one, add it here.
METRICS: tuple[Metric, ...] = (*_DISTRIBUTIONS, *_RATES, *_GOODPUT, *SPECULATION)


# The one that tables of objectives have.
REQUEST_GOODPUT = _GOODPUT[0]


def distributions() -> list[Distribution]:
    return [metric for metric in METRICS if isinstance(metric, Distribution)]


def rates() -> list[Rate]:
    return [metric for metric in METRICS if isinstance(metric, Rate)]


def tabled() -> list[Metric]:
    return [metric for metric in METRICS if metric.tabled]


def find(name: str) -> Metric | None:
    return next((metric for metric in METRICS if metric.name == name), None)


def definitions() -> dict[str, dict[str, Any]]:
    """Unit, formula and undefined case of each metric, for the report."""
    return {
        metric.name: {"unit": metric.unit, "formula": metric.formula, "undefined": metric.undefined}
        for metric in METRICS
    }


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
