"""Arrival times of a load's requests: nanoseconds from its start, all computed before the first request is sent.

Drawn arrivals are made in operational time, in which one request comes per unit on average (constant: 0, 1, 2...;
Poisson and gamma: sums of gaps with mean 1), and mapped to the clock by the inverse of the integral of the rate.
So one formula serves rates, stages and ramps: constant arrivals follow the integral exactly without adding up errors,
and Poisson arrivals are the inhomogeneous process of that rate (time rescaling).

The seed determines the times, and a longer schedule of the same load begins with the same arrivals. Drawn times of an
open loop are then scaled so that its measured part has exactly the requested rate (`schedule`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.loads import EDGE_FRACTION, MOST_SECONDS, Closed, Open, Replay, Stage, Staged, exact
from trtpipe.pipeline.bench.load.seeds import Seed, generator
from trtpipe.pipeline.bench.load.trace import read_trace

Times = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Random gaps are drawn in chunks of this size until there are enough.
CHUNK = 4096


@dataclass(frozen=True)
class Schedule:
    """Due times of all requests of a load.

    due_ns  due time of each request, from the start of the load
    first   index of the first measured request; those before it are warm-up
    end     index after the last measured request; those from there on are cool-down
    window  (start, end) of the measured part in nanoseconds, without warm-up and cool-down
    """

    due_ns: Times
    first: int
    end: int
    window: tuple[int, int]


def due_times(
    load: Open | Staged | Replay, seed: Seed, *, count: int | None = None, duration_s: float | None = None
) -> Times:
    """The first `count` arrivals of a load, or those before `duration_s`, or all where neither is given.

    All are: of stages those up to the end of the last, of a trace its requests. An open loop needs one of the two.
    """
    if isinstance(load, Replay):
        stamps = np.array([row.timestamp_ms for row in read_trace(load.trace, load.max_total_tokens)], dtype=np.float64)
        span_s = (stamps[-1] - stamps[0]) / 1e3 / load.speedup
        if span_s > MOST_SECONDS:
            raise UsageError(f"trace {load.trace} lasts {span_s:,.0f} s", remedy=f"replay at most {MOST_SECONDS:,.0f}")
        due = _whole((stamps - stamps[0]) * (1e6 / load.speedup))
        return _cut(due, count, duration_s)
    if isinstance(load, Staged):
        stages = load.stages
        total: Fraction | None = sum((stage.arrivals for stage in stages), Fraction(0))
    elif duration_s is not None:
        stages = (Stage(duration_s=duration_s, start=load.rate, end=load.rate),)
        total = stages[0].arrivals
    elif count is not None:
        stages, total = (Stage(duration_s=1.0, start=load.rate, end=load.rate),), None
    else:
        raise ValueError("an open loop goes on for ever: give a count or a duration")
    moments = _moments(load, generator(seed), count, total)
    return _cut(_clock(stages, moments), count, duration_s)


def schedule(load: Open | Staged | Replay, seed: Seed) -> Schedule:
    """Every request of a load, and which of them are measured. Raises UsageError when none would be measured."""
    if isinstance(load, Open):
        return _open(load, seed)
    if isinstance(load, Staged):
        due, span_s = due_times(load, seed), load.span_s
    else:
        every = due_times(load, seed, count=load.requests)
        due = _cut(every, None, load.duration_s)
        # Where the trace ends it, its last request still counts: the span ends just after it.
        span_s = (int(due[-1]) + 1) / 1e9
        if load.duration_s is not None and len(due) < len(every):
            span_s = load.duration_s
    warmup, cooldown = load.edges_s(span_s, 0)
    return _within(due, round(warmup * 1e9), round((span_s - cooldown) * 1e9))


def slot_starts(load: Closed) -> Times:
    """When each slot of a closed loop sends its first request: evenly over the ramp, the first slot at once."""
    return _whole(np.arange(load.concurrency) * (load.ramp_s * 1e9) / load.concurrency)


def _open(load: Open, seed: Seed) -> Schedule:
    constant = load.arrivals == "constant"
    if constant and load.duration_s is not None:
        warmup, cooldown = load.edges_s(load.duration_s, EDGE_FRACTION)
        start, end = exact(warmup), exact(warmup) + exact(load.duration_s)
        due = due_times(load, seed, duration_s=float(end + exact(cooldown)))
        return _within(due, round(start * 10**9), round(end * 10**9))
    if load.requests is not None:
        measured, span_s = load.requests, load.requests / load.rate
    else:
        assert load.duration_s is not None
        measured, span_s = round(load.rate * load.duration_s), load.duration_s
    if measured == 0:
        raise _nothing()
    warmup, cooldown = load.edges_s(span_s, EDGE_FRACTION)
    # Converted to numbers of requests, so that the number of measured ones does not depend on warm-up and cool-down.
    before, after = math.ceil(round(warmup * load.rate, 6)), math.ceil(round(cooldown * load.rate, 6))
    due = due_times(load, seed, count=before + measured + max(after, 1))
    if not constant:
        start_s = before / load.rate if load.duration_s is None else warmup
        due = _fitted(due, before, before + measured, round(start_s * 1e9), round((start_s + span_s) * 1e9))
    window = int(due[before]), int(due[before + measured])
    return Schedule(due[: before + measured + after], before, before + measured, window)


def _fitted(due: Times, first: int, end: int, start_ns: int, end_ns: int) -> Times:
    """Drawn times, scaled so that request `first` is due at `start_ns` and request `end` at `end_ns`: the measured part
    then has the requested rate, instead of one that is off by the square root of its number of requests. Gaps of a
    Poisson process that are scaled to a given sum are those of a Poisson process with that many arrivals."""
    start, stop = int(due[first]), int(due[end])
    before = due[:first] * (start_ns / max(1, start))
    within = start_ns + (due[first:end] - start) * ((end_ns - start_ns) / max(1, stop - start))
    return _whole(np.concatenate([before, within, end_ns + due[end:] - stop]))


def _nothing() -> UsageError:
    return UsageError(
        "no request is due in the measured part", remedy="raise the rate or the duration, or shorten the warm-up"
    )


def _within(due: Times, start_ns: int, end_ns: int) -> Schedule:
    first, end = (int(index) for index in np.searchsorted(due, (start_ns, end_ns)))
    if first >= end:
        raise _nothing()
    return Schedule(due, first, end, (start_ns, end_ns))


def _moments(load: Open | Staged, rng: np.random.Generator, count: int | None, total: Fraction | None) -> Floats:
    """Arrivals in operational time: those before `total`, and no more than `count`; one of the two is given."""
    limit = math.inf if total is None else float(total)
    if load.arrivals == "constant":
        most = [bound for bound in (count, None if total is None else math.ceil(total)) if bound is not None]
        return np.arange(min(most), dtype=np.float64)
    shape = load.burstiness if load.arrivals == "gamma" else 1.0
    pieces: list[Floats] = []
    drawn, last = 0, 0.0
    while last < limit and (count is None or drawn < count):
        gaps = rng.standard_gamma(shape, CHUNK) / shape
        # Summed in one order whatever the chunks are, so that no time depends on how many arrivals are asked for.
        gaps[0] += last
        pieces.append(np.cumsum(gaps))
        drawn, last = drawn + CHUNK, float(pieces[-1][-1])
    moments = np.concatenate(pieces)[:count]
    return moments[moments < limit]


def _clock(stages: Sequence[Stage], moments: Floats) -> Times:
    """Nanoseconds at which the integral of the rate reaches each moment; the last stage goes on past its end."""
    reached, started = [Fraction(0)], [Fraction(0)]
    for stage in stages:
        reached.append(reached[-1] + stage.arrivals)
        started.append(started[-1] + exact(stage.duration_s))
    # side="right" skips stages without arrivals, whose sums are equal, to the stage in which the next request comes.
    index = np.searchsorted(np.array([float(value) for value in reached[:-1]]), moments, side="right") - 1
    before = np.array([float(value) for value in reached])[index]
    offset = np.array([float(value * 10**9) for value in started])[index]
    start = np.array([stage.start for stage in stages])[index]
    slope = np.array([(stage.end - stage.start) / stage.duration_s for stage in stages])[index]
    left = moments - before
    # Root of start*t + slope*t^2/2 = left, in the form that keeps its digits when the slope is small or 0.
    root = start + np.sqrt(np.maximum(start * start + 2 * slope * left, 0))
    since = np.divide(2e9 * left, root, out=np.zeros_like(left), where=root > 0)
    return _whole(offset + since)


def _whole(nanoseconds: Floats) -> Times:
    whole: Times = np.rint(nanoseconds).astype(np.int64)
    return whole


def _cut(due: Times, count: int | None, duration_s: float | None) -> Times:
    if duration_s is not None:
        due = due[: np.searchsorted(due, duration_s * 1e9)]
    return due[:count]
