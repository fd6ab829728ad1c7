"""Arrivals: exact where they are even, of the right rate and spread where they are random, and fixed by the seed."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.load.arrivals import due_times, schedule, slot_starts
from trtpipe.pipeline.bench.load.loads import Closed, Open, Replay, Stage, Staged

SECOND = 10**9
RAMP = (
    Stage(duration_s=10, start=0, end=100),
    Stage(duration_s=5, start=0, end=0),
    Stage(duration_s=10, start=100, end=50),
    Stage(duration_s=2.5, start=20, end=20),
)

rates = st.floats(0.01, 10_000).map(lambda rate: round(rate, 3)).filter(lambda rate: rate > 0)
processes = st.sampled_from(
    [{"arrivals": "constant"}, {"arrivals": "poisson"}]
    + [{"arrivals": "gamma", "burstiness": burstiness} for burstiness in (0.1, 0.5, 3.0)]
)
stage_lists = st.lists(
    st.builds(
        Stage,
        duration_s=st.floats(0.1, 20).map(lambda value: round(value, 2)),
        start=st.integers(0, 30),
        end=st.integers(0, 30),
    ),
    min_size=1,
    max_size=5,
).filter(lambda stages: sum(stage.arrivals for stage in stages) > 0)


def reached(stages: tuple[Stage, ...], moment_s: float) -> float:
    """The integral of the rate up to a moment, by its definition."""
    total = 0.0
    for stage in stages:
        part = min(max(moment_s, 0), stage.duration_s)
        total += stage.start * part + (stage.end - stage.start) / stage.duration_s * part * part / 2
        moment_s -= stage.duration_s
    return total


def gaps(load: Open, count: int, seed: int) -> npt.NDArray[np.float64]:
    return np.diff(due_times(load, seed, count=count), prepend=0) / SECOND


# Constant


def test_constant_arrivals_by_hand() -> None:
    assert due_times(Open(rate=3, requests=1, arrivals="constant"), 0, count=4).tolist() == [
        0, 333_333_333, 666_666_667, 1_000_000_000,
    ]  # fmt: skip
    assert due_times(Open(rate=0.5, requests=1, arrivals="constant"), 0, duration_s=6).tolist() == [
        0, 2 * SECOND, 4 * SECOND,
    ]  # fmt: skip


@given(rates, st.integers(1, 3000))
def test_constant_arrivals_add_up_no_error(rate: float, count: int) -> None:
    due = due_times(Open(rate=rate, requests=1, arrivals="constant"), 0, count=count)
    assert len(due) == count
    for index in {0, 1, count // 2, count - 1} & set(range(count)):
        exact = index * SECOND / Fraction(repr(rate))
        assert abs(int(due[index]) - exact) <= Fraction(1, 2) + exact / 2**50


@given(rates, st.floats(0.1, 20).map(lambda value: round(value, 1)))
def test_constant_arrivals_of_a_duration_are_as_many_as_begin_in_it(rate: float, duration_s: float) -> None:
    due = due_times(Open(rate=rate, duration_s=duration_s, arrivals="constant"), 0, duration_s=duration_s)
    assert len(due) == math.ceil(Fraction(repr(rate)) * Fraction(repr(duration_s)))


# Random


@pytest.mark.parametrize("seed", range(5))
def test_poisson_has_its_rate_and_its_spread(seed: int) -> None:
    n = 20_000
    found = gaps(Open(rate=200, requests=1), n, seed)
    assert 0.95 < found.std() / found.mean() < 1.05
    # The sum of n exponential gaps has a deviation of sqrt(n) means.
    assert abs(found.sum() * 200 - n) < 3 * math.sqrt(n)
    # Counts of a Poisson process have their mean as variance; what is even or bursty has not.
    counts = np.bincount((found.cumsum()).astype(int))[:90]
    assert 0.6 < counts.var() / counts.mean() < 1.5


@pytest.mark.parametrize("burstiness", [0.25, 0.5, 1.0, 4.0, 100.0])
def test_gamma_has_the_spread_that_vllm_gives_its_burstiness(burstiness: float) -> None:
    n = 20_000
    found = gaps(Open(rate=50, requests=1, arrivals="gamma", burstiness=burstiness), n, 7)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert abs(found.sum() * 50 - n) < 3 * math.sqrt(n / burstiness)


def test_a_burstiness_of_one_is_poisson() -> None:
    gamma, poisson = Open(rate=5, requests=1, arrivals="gamma", burstiness=1), Open(rate=5, requests=1)
    assert (due_times(gamma, 3, count=9000) == due_times(poisson, 3, count=9000)).all()


def test_the_seed_makes_the_times() -> None:
    load = Open(rate=5, requests=1)
    # Written down: a change of these makes every earlier report another run.
    assert due_times(load, 0, count=4).tolist() == [135_986_381, 339_905_801, 343_867_134, 344_320_999]
    assert (due_times(load, (1, 0), count=100) != due_times(load, (1, 1), count=100)).all()
    shared = np.random.default_rng(1)
    assert (due_times(load, shared, count=100) != due_times(load, shared, count=100)).all()


@given(rates, processes, st.integers(0, 2**32), st.integers(1, 9000), st.integers(0, 3000))
def test_times_never_go_back_and_more_of_a_load_are_the_same_and_then_some(
    rate: float, process: dict[str, object], seed: int, count: int, more: int
) -> None:
    load = Open(rate=rate, requests=1, **process)  # type: ignore[arg-type]
    due = due_times(load, seed, count=count + more)
    assert due.dtype == np.int64
    assert len(due) == count + more
    assert due[0] >= 0
    assert (np.diff(due) >= 0).all()
    assert (due[:count] == due_times(load, seed, count=count)).all()
    until = int(due[count - 1]) + 1
    in_time = due_times(load, seed, duration_s=until / SECOND)
    both = min(len(in_time), len(due))
    assert (in_time[:both] == due[:both]).all()
    # To the nanosecond that a time in seconds may be off.
    assert len(in_time) >= np.searchsorted(due, until - 1)
    assert in_time[-1:].max(initial=0) <= until


def test_an_open_loop_has_to_be_told_where_to_end() -> None:
    with pytest.raises(ValueError, match="goes on for ever"):
        due_times(Open(rate=1, requests=1), 0)


# Stages


def test_a_ramp_by_hand() -> None:
    # The integral is t^2, so request i is due at sqrt(i).
    load = Staged(stages=(Stage(duration_s=3, start=0, end=6),), arrivals="constant")
    assert due_times(load, 0).tolist() == [round(math.sqrt(index) * SECOND) for index in range(9)]


def test_a_pause_has_no_requests_and_the_next_stage_begins_with_one() -> None:
    load = Staged(
        stages=(
            Stage(duration_s=2, start=2, end=2),
            Stage(duration_s=7, start=0, end=0),
            Stage(duration_s=1, start=2, end=2),
        ),
        arrivals="constant",
    )
    assert (due_times(load, 0) / SECOND).tolist() == [0, 0.5, 1, 1.5, 9, 9.5]


@given(stage_lists)
def test_constant_arrivals_follow_the_integral_of_the_rate(stages: list[Stage]) -> None:
    load = Staged(stages=tuple(stages), arrivals="constant")
    due = due_times(load, 0)
    assert len(due) == math.ceil(sum(stage.arrivals for stage in stages))
    assert (np.diff(due) >= 0).all()
    assert due[-1] <= round(load.span_s * SECOND)
    for index, moment in enumerate(due.tolist()):
        # A nanosecond of rounding is at most that many requests.
        assert reached(load.stages, moment / SECOND) == pytest.approx(index, abs=30 * 2e-9 + 1e-9 * index)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("arrivals", "burstiness"), [("poisson", 1.0), ("gamma", 0.25)])
def test_random_arrivals_follow_it_on_average(arrivals: str, burstiness: float, seed: int) -> None:
    stages = tuple(Stage(duration_s=stage.duration_s, start=100 * stage.start, end=100 * stage.end) for stage in RAMP)
    load = Staged(stages=stages, arrivals=arrivals, burstiness=burstiness)
    due = due_times(load, seed) / SECOND
    for start, end in ((0, 5), (5, 10), (15, 20), (20, 25), (25, 27.5)):
        expected = reached(stages, end) - reached(stages, start)
        found = np.count_nonzero((due >= start) & (due < end))
        assert abs(found - expected) < 4 * math.sqrt(expected / burstiness)
    assert not ((due >= 10) & (due < 15)).any()


@given(stage_lists, processes, st.integers(0, 2**32))
def test_stages_keep_to_their_time(stages: list[Stage], process: dict[str, object], seed: int) -> None:
    load = Staged(stages=tuple(stages), **process)  # type: ignore[arg-type]
    due = due_times(load, seed)
    assert (np.diff(due) >= 0).all()
    assert (due == due_times(load, seed)).all()
    assert not len(due) or 0 <= due[0] <= due[-1] <= round(load.span_s * SECOND)


# Traces


def trace(tmp_path: Path, *stamps: float) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": stamp, "input_length": 9, "output_length": 9}) for stamp in stamps]
    path.write_text("\n".join(lines))
    return path


def test_a_trace_starts_with_its_first_request_and_runs_at_the_speed_asked_for(tmp_path: Path) -> None:
    path = trace(tmp_path, 3000, 3000, 4000, 5999.5)
    assert due_times(Replay(trace=path), 0).tolist() == [0, 0, SECOND, 2_999_500_000]
    assert due_times(Replay(trace=path, speedup=2), 0).tolist() == [0, 0, SECOND // 2, 1_499_750_000]
    assert due_times(Replay(trace=path), 0, count=3).tolist() == [0, 0, SECOND]
    assert due_times(Replay(trace=path, speedup=0.5), 0, duration_s=4).tolist() == [0, 0, 2 * SECOND]


# What is measured


def test_an_open_loop_of_a_number_of_requests_measures_that_many() -> None:
    found = schedule(Open(rate=10, requests=100, arrivals="constant", warmup_s=2, cooldown_fraction=0.05), 0)
    assert (len(found.due_ns), found.first, found.end) == (125, 20, 120)
    assert found.window == (2 * SECOND, 12 * SECOND)
    bare = schedule(Open(rate=10, requests=100, arrivals="constant", warmup_s=0, cooldown_s=0), 0)
    assert (len(bare.due_ns), bare.first, bare.end, bare.window) == (100, 0, 100, (0, 10 * SECOND))


def test_an_open_loop_of_a_duration_measures_that_long() -> None:
    found = schedule(Open(rate=10, duration_s=30, arrivals="constant", warmup_s=2, cooldown_s=1), 0)
    assert (len(found.due_ns), found.first, found.end) == (330, 20, 320)
    assert found.window == (2 * SECOND, 32 * SECOND)


def test_by_default_a_tenth_comes_before_and_after() -> None:
    for load in (Open(rate=10, duration_s=3, arrivals="constant"), Open(rate=10, requests=30, arrivals="constant")):
        found = schedule(load, 0)
        assert (len(found.due_ns), found.first, found.end) == (36, 3, 33)
        assert found.window == (300_000_000, 3_300_000_000)


@pytest.mark.parametrize("end", [{"duration_s": 30}, {"requests": 600}])
@pytest.mark.parametrize("process", [{}, {"arrivals": "gamma", "burstiness": 0.5}])
@pytest.mark.parametrize("seed", range(3))
def test_drawn_arrivals_have_the_rate_that_was_asked_for(
    end: dict[str, Any], process: dict[str, Any], seed: int
) -> None:
    found = schedule(Open(rate=20, warmup_s=2, cooldown_s=1, **end, **process), seed)
    assert (len(found.due_ns), found.first, found.end) == (660, 40, 640)
    assert found.window == (2 * SECOND, 32 * SECOND)
    assert found.due_ns[640] == 32 * SECOND
    assert (np.diff(found.due_ns) >= 0).all()
    # Stretched, not made even.
    within = np.diff(found.due_ns[40:641])
    drawn = np.diff(due_times(Open(rate=20, requests=1, **process), seed, count=641)[40:])
    assert within / within.mean() == pytest.approx(drawn / drawn.mean(), rel=1e-6, abs=1e-6)


def test_of_stages_and_traces_the_edges_are_taken(tmp_path: Path) -> None:
    stages = Staged(
        stages=(Stage(duration_s=10, start=2, end=2),), arrivals="constant", warmup_s=1, cooldown_fraction=0.2
    )
    found = schedule(stages, 0)
    assert (len(found.due_ns), found.first, found.end, found.window) == (20, 2, 16, (SECOND, 8 * SECOND))
    path = trace(tmp_path, 0, 1000, 2000, 3000)
    whole = schedule(Replay(trace=path), 0)
    assert (whole.first, whole.end, whole.window) == (0, 4, (0, 3 * SECOND + 1))
    part = schedule(Replay(trace=path, warmup_s=0.5, duration_s=2.5), 0)
    assert (len(part.due_ns), part.first, part.end) == (3, 1, 3)
    assert len(schedule(Replay(trace=path, requests=2), 0).due_ns) == 2


def test_a_trace_that_ends_before_the_duration_ends_the_window(tmp_path: Path) -> None:
    path = trace(tmp_path, 0, 1000, 2000, 3000)
    assert schedule(Replay(trace=path, duration_s=2.5), 0).window == (0, 2_500_000_000)
    assert schedule(Replay(trace=path, duration_s=3), 0).window == (0, 3 * SECOND)
    assert schedule(Replay(trace=path, duration_s=60), 0).window == (0, 3 * SECOND + 1)
    assert schedule(Replay(trace=path, duration_s=60, speedup=2), 0).window == (0, 1_500_000_001)
    assert schedule(Replay(trace=path, duration_s=60, cooldown_fraction=0.5), 0).window == (0, 1_500_000_000)


def test_a_schedule_that_measures_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no request is due in the measured part"):
        schedule(Replay(trace=trace(tmp_path, 0, 1000), warmup_s=5), 0)
    with pytest.raises(UsageError, match="no request is due in the measured part"):
        schedule(Open(rate=0.001, duration_s=1, warmup_s=0, cooldown_s=0), 0)


@given(rates, processes, st.integers(0, 2**32), st.integers(1, 500), st.floats(0, 0.9), st.floats(0, 0.9))
def test_the_measured_requests_are_due_in_the_window(
    rate: float, process: dict[str, object], seed: int, requests: int, warmup: float, cooldown: float
) -> None:
    load = Open(rate=rate, requests=requests, warmup_fraction=warmup, cooldown_fraction=cooldown, **process)  # type: ignore[arg-type]
    found = schedule(load, seed)
    assert found.end - found.first == requests
    start, end = found.window
    assert start == found.due_ns[found.first]
    assert found.due_ns[found.end - 1] <= end
    assert (found.due_ns[found.end :] >= end).all()


def test_the_slots_of_a_closed_loop_start_over_its_ramp() -> None:
    assert slot_starts(Closed(concurrency=4, ramp_s=2)).tolist() == [0, SECOND // 2, SECOND, 3 * SECOND // 2]
    assert slot_starts(Closed(concurrency=3)).tolist() == [0, 0, 0]
