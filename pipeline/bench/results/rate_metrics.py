"""Metrics with one value of each load point: throughputs, concurrency, the share of failed requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trtpipe.pipeline.bench.results.metric import Rate
from trtpipe.pipeline.bench.results.records import NONE, Records
from trtpipe.pipeline.bench.results.window import Window

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


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


RATE_METRICS = (
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
