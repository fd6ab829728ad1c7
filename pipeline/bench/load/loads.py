"""Kinds of load: when requests are sent. Each object is one load point; lists in a load file have been expanded.

Closed  a fixed number of requests, or of sessions, in flight: the next one is sent when one has ended
Open    a fixed rate: requests are sent on schedule, whatever the server does
Staged  rates that change over time
Replay  arrival times of a trace

The measured part: for an open loop, `requests` or `duration_s` gives the measured part, and warm-up and cool-down are
added to it; stages and traces are given as a whole, and warm-up and cool-down are taken from their ends.
Later turns of a session are due `think_s` after the previous answer; the load determines when sessions start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import UsageError, suggestion

ARRIVALS = ("constant", "poisson", "gamma")
# Limits of a load: each request of a load point is made before it begins, and has a due time of its own.
MOST_REQUESTS = 10_000_000
MOST_PLACES = 100_000
MOST_WARMUPS = 1000
MOST_SECONDS = 30 * 86_400.0
MOST_RATE = 1_000_000.0
MOST_STAGES = 10_000
# Limits of burstiness, below which nearly all requests of a day would come together, and of a replay's speed.
BURSTINESS = (0.01, 10_000.0)
SPEEDUPS = (1e-6, 1e6)


@dataclass(frozen=True, kw_only=True)
class Closed:
    """A closed loop. Ends by at most one of `requests` and `duration_s`.

    concurrency  requests, or sessions, in flight
    requests     measured requests, over all slots; without a duration the larger of 20 and 4 x concurrency
    duration_s   seconds for which measured requests are sent, from the moment the last slot has warmed up
    warmup       full-length requests of every slot before its measured ones; 0 measures the start-up burst too
    cooldown     slots that find no measured request left send others until the last measured one has ended, so that the
                 last measured ones are answered under full load; without it the server has less to do for them
    ramp_s       seconds over which the slots start, one after the other
    """

    concurrency: int
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 1
    cooldown: bool = True
    ramp_s: float = 0.0

    def __post_init__(self) -> None:
        _check_end(self.requests, self.duration_s)
        _check_between("concurrency", self.concurrency, 1, MOST_PLACES, "each is an open stream or connection")
        _check_between("warmup", self.warmup, 0, MOST_WARMUPS)
        _check_between("ramp_s", self.ramp_s, 0, MOST_SECONDS)
        if self.requests is not None and self.concurrency > 1 and self.requests < 2 * self.concurrency:
            # With fewer requests there is no time in which all slots serve measured requests.
            raise UsageError(
                f"{self.requests} requests are too few for a throughput at concurrency {self.concurrency}",
                remedy=f"give at least {2 * self.concurrency}, twice the concurrency",
            )

    @property
    def measured_requests(self) -> int | None:
        """None when a duration ends the loop."""
        if self.requests is None and self.duration_s is None:
            return max(20, 4 * self.concurrency)
        return self.requests

    def warmup_lengths(self, slot: int, output_tokens: int) -> list[int]:
        """Output lengths of a slot's warm-up requests in order, for answers of `output_tokens`.

        The first one of slot k is cut to k/concurrency of the length: equal requests that start together would always
        end together, and this spreads the slots over one request's time before anything is measured.
        """
        if self.warmup == 0:
            return []
        shortened = math.ceil(output_tokens * slot / self.concurrency)
        return [shortened] * (shortened > 0) + [output_tokens] * self.warmup

    @property
    def label(self) -> str:
        return f"{self.concurrency} in flight"

    def entry(self) -> dict[str, Any]:
        """The load's entry in the report."""
        return {
            "kind": "closed", "concurrency": self.concurrency, "warmup": self.warmup, "cooldown": self.cooldown,
            "ramp_s": self.ramp_s,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _OnSchedule:
    """Fields of all loads whose requests are sent on schedule.

    max_in_flight      requests beyond this number wait, and their wait shows as dispatch delay; None: no limit
    warmup_s           seconds at the start that are not measured
    warmup_fraction    the same as a share of the measured part, or of the whole where the schedule is given as a whole
    cooldown_s         seconds at the end that are not measured
    cooldown_fraction  the same as a share, like warmup_fraction
    """

    max_in_flight: int | None = None
    warmup_s: float | None = None
    warmup_fraction: float | None = None
    cooldown_s: float | None = None
    cooldown_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.max_in_flight is not None:
            _check_between("max_in_flight", self.max_in_flight, 1, MOST_PLACES)
        for name in ("warmup", "cooldown"):
            seconds, fraction = getattr(self, f"{name}_s"), getattr(self, f"{name}_fraction")
            if seconds is not None and fraction is not None:
                raise UsageError(f"both {name}_s and {name}_fraction are given", remedy="give one of them")
            if seconds is not None:
                _check_between(f"{name}_s", seconds, 0, MOST_SECONDS)
            if fraction is not None and not 0 <= fraction < 1:
                raise UsageError(f"{name}_fraction is {_shown(fraction)}", remedy="give 0 to below 1")

    def edges_s(self, span_s: float, default_fraction: float) -> tuple[float, float]:
        """Seconds of warm-up and of cool-down for a part of `span_s` seconds."""

        def edge(seconds: float | None, fraction: float | None) -> float:
            if seconds is not None:
                return seconds
            return span_s * (default_fraction if fraction is None else fraction)

        return edge(self.warmup_s, self.warmup_fraction), edge(self.cooldown_s, self.cooldown_fraction)


@dataclass(frozen=True, kw_only=True)
class _Drawn(_OnSchedule):
    """Arrivals that are drawn, not replayed.

    arrivals    constant: even; poisson: independent; gamma: gaps from a gamma distribution
    burstiness  shape of that gamma, as vLLM defines it: 1 is Poisson, above is smoother, below comes in bursts; the
                gaps' standard deviation is 1/sqrt(burstiness) of their mean
    """

    arrivals: str = "poisson"
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arrivals not in ARRIVALS:
            raise UsageError(f"unknown arrivals '{self.arrivals}'", remedy=suggestion(self.arrivals, ARRIVALS))
        if not BURSTINESS[0] <= self.burstiness <= BURSTINESS[1]:
            remedy = f"give {BURSTINESS[0]:g} to {BURSTINESS[1]:g}"
            raise UsageError(f"burstiness is {_shown(self.burstiness)}", remedy=remedy)
        if self.burstiness != 1 and self.arrivals != "gamma":
            raise UsageError(
                f"burstiness does not apply to {self.arrivals} arrivals", remedy="give arrivals: gamma with it"
            )

    def _process(self) -> dict[str, Any]:
        return {"burstiness": self.burstiness} if self.arrivals == "gamma" else {}


# Default warm-up and cool-down as a share of an open loop's measured part: the first requests meet an idle server, the
# last ones a server that gets no new requests.
EDGE_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class Open(_Drawn):
    """An open loop. Ends by exactly one of `requests` and `duration_s`.

    rate        requests a second
    requests    measured requests
    duration_s  seconds that are measured
    """

    rate: float
    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rate <= MOST_RATE:
            remedy = f"give a positive number of requests a second, at most {MOST_RATE:,.0f}"
            raise UsageError(f"rate is {_shown(self.rate)}", remedy=remedy)
        if self.requests is None and self.duration_s is None:
            raise UsageError("an open loop has no end", remedy="give requests or duration_s")
        _check_end(self.requests, self.duration_s)
        _check_span(self.edges_s(self.span_s, EDGE_FRACTION), self.span_s, self.rate)

    @property
    def span_s(self) -> float:
        """Seconds of the measured part."""
        return self.duration_s if self.requests is None else self.requests / self.rate  # type: ignore[return-value]

    @property
    def label(self) -> str:
        return f"{self.rate:g} requests/s"

    def entry(self) -> dict[str, Any]:
        """The load's entry in the report."""
        return {
            "kind": "open",
            "arrivals": self.arrivals,
            "rate": self.rate,
            "max_in_flight": self.max_in_flight,
            **self._process(),
        }


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of time whose rate, in requests per second, changes linearly from `start` to `end`."""

    duration_s: float
    start: float
    end: float

    def __post_init__(self) -> None:
        if not 0 < self.duration_s <= MOST_SECONDS:
            remedy = f"give a positive duration_s, at most {MOST_SECONDS:,.0f}"
            raise UsageError(f"a stage lasts {_shown(self.duration_s)} s", remedy=remedy)
        if not (0 <= self.start <= MOST_RATE and 0 <= self.end <= MOST_RATE):
            remedy = f"give 0 to {MOST_RATE:,.0f} requests a second"
            raise UsageError("a stage's rate is negative or endless", remedy=remedy)

    @property
    def arrivals(self) -> Fraction:
        """Integral of the rate, exact: stages of whole numbers of requests make exactly that many."""
        return exact(self.duration_s) * (exact(self.start) + exact(self.end)) / 2


@dataclass(frozen=True, kw_only=True)
class Staged(_Drawn):
    """Stages one after the other; the load ends with the last."""

    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.stages) > MOST_STAGES:
            raise UsageError(f"there are {len(self.stages):,} stages", remedy=f"give at most {MOST_STAGES:,}")
        arrivals = sum(stage.arrivals for stage in self.stages)
        if not arrivals:
            raise UsageError("the stages make no request", remedy="give at least one with a rate above 0")
        if arrivals > MOST_REQUESTS:
            raise _too_many(float(arrivals))
        warmup, cooldown = self.edges_s(self.span_s, 0)
        _check_edges(warmup, cooldown, self.span_s)

    @property
    def span_s(self) -> float:
        return sum(stage.duration_s for stage in self.stages)

    @property
    def label(self) -> str:
        return f"{len(self.stages)} stages to {max(max(stage.start, stage.end) for stage in self.stages):g} requests/s"

    def entry(self) -> dict[str, Any]:
        """The load's entry in the report; `rate` is the mean over all stages."""
        return {
            "kind": "open",
            "arrivals": "stages",
            "process": self.arrivals,
            "rate": float(sum(stage.arrivals for stage in self.stages)) / self.span_s,
            "stages": [{"duration_s": stage.duration_s, "from": stage.start, "to": stage.end} for stage in self.stages],
            "max_in_flight": self.max_in_flight,
            **self._process(),
        }


@dataclass(frozen=True, kw_only=True)
class Replay(_OnSchedule):
    """A trace from its first request on. Ends with the trace, or earlier by one of `requests` and `duration_s`.

    trace             JSONL in Mooncake's format
    speedup           how many times faster than it was recorded
    duration_s        seconds of replay, not of the recording
    max_total_tokens  longer requests, prompt plus answer, are left out
    """

    trace: Path
    speedup: float = 1.0
    requests: int | None = None
    duration_s: float | None = None
    max_total_tokens: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not SPEEDUPS[0] <= self.speedup <= SPEEDUPS[1]:
            remedy = f"give {SPEEDUPS[0]:g} to {SPEEDUPS[1]:g}"
            raise UsageError(f"speedup is {_shown(self.speedup)}", remedy=remedy)
        _check_end(self.requests, self.duration_s)

    @property
    def label(self) -> str:
        return self.trace.name if self.speedup == 1 else f"{self.trace.name} at {self.speedup:g} times its speed"

    def entry(self) -> dict[str, Any]:
        """The load's entry in the report. Its rate follows from the trace and is taken from the schedule."""
        return {
            "kind": "open",
            "arrivals": "trace",
            "trace": str(self.trace),
            "speedup": self.speedup,
            "max_in_flight": self.max_in_flight,
        }


Load = Closed | Open | Staged | Replay


def exact(value: float) -> Fraction:
    """The decimal number that a user wrote: 1.1 is exactly 11/10, which no float is."""
    return Fraction(repr(float(value)))


def _check_end(requests: int | None, duration_s: float | None) -> None:
    if requests is not None and duration_s is not None:
        raise UsageError("both requests and duration_s are given", remedy="give one of them")
    if requests is not None:
        _check_between("requests", requests, 1, MOST_REQUESTS, "all are kept in memory, with their times")
    if duration_s is not None and not 0 < duration_s <= MOST_SECONDS:
        remedy = f"give a positive number of seconds, at most {MOST_SECONDS:,.0f}"
        raise UsageError(f"duration_s is {_shown(duration_s)}", remedy=remedy)


def _check_between(name: str, value: float, least: int, most: float, why: str = "") -> None:
    """`why` there is such a largest value."""
    if not value >= least:
        raise UsageError(f"{name} is {_shown(value)}", remedy=f"give {least} or more")
    if value > most:
        raise UsageError(f"{name} is {_shown(value)}", why=why, remedy=f"give at most {most:,.0f}")


def _check_span(edges_s: tuple[float, float], span_s: float, rate: float) -> None:
    """Check an open loop: its rate may be so low, or warm-up and cool-down so long, that it would not end in time."""
    whole_s = span_s + sum(edges_s)
    if whole_s > MOST_SECONDS * 2:
        raise UsageError(f"the load lasts {whole_s:g} s", remedy="give a higher rate, or fewer requests")
    if whole_s * rate > MOST_REQUESTS:
        raise _too_many(whole_s * rate)


def _too_many(requests: float) -> UsageError:
    return UsageError(f"the load has {requests:,.0f} requests", remedy=f"make it one of at most {MOST_REQUESTS:,}")


def _shown(value: float) -> str:
    try:
        return f"{value:,.0f}" if 1e6 <= abs(value) < 1e15 else f"{value:g}"
    except OverflowError:  # an integer beyond all floating-point numbers
        return "beyond all bounds"


def _check_edges(warmup_s: float, cooldown_s: float, span_s: float) -> None:
    if warmup_s + cooldown_s >= span_s:
        raise UsageError(
            f"nothing is left to measure: {warmup_s:g} s of warm-up and {cooldown_s:g} s of cool-down",
            why=f"the schedule takes {span_s:g} s",
            remedy="shorten them",
        )
