"""Counters of all workers in one small file that each worker maps: any worker can answer /metrics for all.

Every worker adds to a row of its own, so no two ever write the same number; reading sums the rows.
"""

from __future__ import annotations

import mmap
from pathlib import Path

ENDPOINTS = ("chat", "completions")
STATUSES = (200, 400, 401, 404, 408, 413, 429, 431, 499, 500, 503, 504)
# Upper bounds in seconds of a cumulative histogram of the time to the first token.
BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_NAMES = (
    *((endpoint, status) for endpoint in ENDPOINTS for status in STATUSES),
    "running",
    "prompt_tokens",
    "completion_tokens",
    "first_token_us",
    "first_tokens",
    *(("first_token_le", bound) for bound in BOUNDS),
)
_PLACES = {name: place for place, name in enumerate(_NAMES)}
ROW_BYTES = 8 * len(_NAMES)


class SharedCounters:
    """One worker's row, and the sum of all rows. Without a file: a single worker's own memory."""

    def __init__(self, path: Path | None = None, index: int = 0, rows: int = 1) -> None:
        size = ROW_BYTES * rows
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), size)
        self._rows = rows
        self._all = memoryview(self._memory).cast("q")
        self._own = self._all[index * len(_NAMES) : (index + 1) * len(_NAMES)]
        self._own[_PLACES["running"]] = 0  # may be left from a worker that this one replaces

    def add(self, name: str, amount: int = 1) -> None:
        self._own[_PLACES[name]] += amount

    def own(self, name: str) -> int:
        return self._own[_PLACES[name]]

    def answered(self, endpoint: str, status: int) -> None:
        self._own[_PLACES[endpoint, status if status in STATUSES else 500]] += 1

    def first_token(self, seconds: float) -> None:
        self.add("first_tokens")
        self.add("first_token_us", int(seconds * 1e6))
        for bound in BOUNDS:
            if seconds <= bound:
                self._own[_PLACES["first_token_le", bound]] += 1

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
        for name, kind, words in (
            ("running", "gauge", "Requests being answered"),
            ("prompt_tokens", "counter", "Tokens of the prompts taken"),
            ("completion_tokens", "counter", "Tokens generated, as counted from the engine's ids"),
        ):
            full = f"trtpipe_gateway_{name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {full} {words}", f"# TYPE {full} {kind}", f"{full} {self.total(name)}"]
        full = "trtpipe_gateway_first_token_seconds"
        lines += [f"# HELP {full} From a request's arrival to its first token", f"# TYPE {full} histogram"]
        lines += [f'{full}_bucket{{le="{bound}"}} {self.total(("first_token_le", bound))}' for bound in BOUNDS]
        count = self.total("first_tokens")
        lines += [f'{full}_bucket{{le="+Inf"}} {count}', f"{full}_count {count}"]
        lines.append(f"{full}_sum {self.total('first_token_us') / 1e6}")
        return "\n".join(lines) + "\n"
