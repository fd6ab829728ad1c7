"""Counters of all workers in one small piece of memory that each worker maps: any worker can answer /metrics for all.

Every worker adds to a row of its own, so no two ever write the same number; reading sums the rows.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from itertools import accumulate

ENDPOINTS = ("chat", "completions")
STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 499, 500, 501, 503, 504)
# Upper bounds in seconds of the buckets of each histogram.
HISTOGRAMS = {
    "first_token": (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    "inter_token": (0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
}
MEANINGS = {
    "running": ("gauge", "Requests being answered"),
    "waiting": ("gauge", "Requests being answered that have no token yet"),
    "prompt_tokens": ("counter", "Tokens of the prompts taken"),
    "completion_tokens": ("counter", "Tokens generated, counted as they arrive"),
    "first_token": ("histogram", "From a request's arrival to its first token"),
    "inter_token": ("histogram", "Between two tokens of an answer"),
}
GAUGES = [name for name, (kind, _) in MEANINGS.items() if kind == "gauge"]

_NAMES = (
    *((endpoint, status) for endpoint in ENDPOINTS for status in STATUSES),
    *(name for name, (kind, _) in MEANINGS.items() if kind != "histogram"),
    *((name, "us") for name in HISTOGRAMS),
    # One more than there are bounds: what is above the last.
    *((name, place) for name, bounds in HISTOGRAMS.items() for place in range(len(bounds) + 1)),
)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
ROW_BYTES = 8 * len(_NAMES)


class SharedCounters:
    """One worker's row, and the sum of all rows."""

    def __init__(self, file: int = -1, index: int = 0, rows: int = 1) -> None:
        """`file` is a descriptor of the rows, which may be closed afterwards; -1 for a single worker's own memory."""
        self._memory = mmap.mmap(file, ROW_BYTES * rows)
        self._rows = rows
        self._all = memoryview(self._memory).cast("q")
        self._own = self._all[index * len(_NAMES) : (index + 1) * len(_NAMES)]
        for name in GAUGES:
            self._own[_PLACES[name]] = 0  # may be left from a worker that this one replaces

    def add(self, name: str, amount: int = 1) -> None:
        self._own[_PLACES[name]] += amount

    def own(self, name: str) -> int:
        return self._own[_PLACES[name]]

    def answered(self, endpoint: str, status: int) -> None:
        self._own[_PLACES[endpoint, status if status in STATUSES else 500]] += 1

    def observe(self, histogram: str, seconds: float, times: int = 1) -> None:
        """Count an observation, or several equal ones, in a histogram."""
        self._own[_PLACES[histogram, bisect_left(HISTOGRAMS[histogram], seconds)]] += times
        self._own[_PLACES[histogram, "us"]] += int(seconds * times * 1e6)

    def total(self, name: object) -> int:
        place = _PLACES[name]  # type: ignore[index]
        return sum(self._all[row * len(_NAMES) + place] for row in range(self._rows))

    def text(self) -> str:
        """The counters in Prometheus' text format."""
        lines = [
            "# HELP trtpipe_gateway_requests_total Requests answered, by endpoint and HTTP status (499: client left)",
            "# TYPE trtpipe_gateway_requests_total counter",
        ]
        for endpoint in ENDPOINTS:
            for status in STATUSES:
                count = self.total((endpoint, status))
                labels = f'endpoint="{endpoint}",status="{status}"'
                lines.append(f"trtpipe_gateway_requests_total{{{labels}}} {count}")
        for name, (kind, words) in MEANINGS.items():
            full = f"trtpipe_gateway_{name}" + {"counter": "_total", "histogram": "_seconds", "gauge": ""}[kind]
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}"]
            lines += self._histogram(name, full) if kind == "histogram" else [f"{full} {self.total(name)}"]
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, full: str) -> list[str]:
        counts = accumulate(self.total((name, place)) for place in range(len(HISTOGRAMS[name]) + 1))
        bounds = [*map(str, HISTOGRAMS[name]), "+Inf"]
        lines = [f'{full}_bucket{{le="{bound}"}} {count}' for bound, count in zip(bounds, counts, strict=True)]
        whole = lines[-1].rpartition(" ")[2]
        return [*lines, f"{full}_count {whole}", f"{full}_sum {self.total((name, 'us')) / 1e6}"]
