"""The search alone: on surfaces whose best point is known, within its bound, and within its time."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.schedule import LEAST_POINT_S, POINTS, Schedule
from trtpipe.pipeline.tune.search import (
    KEPT,
    ONCE_MORE,
    REPEATS,
    OutOfTime,
    Score,
    Winner,
    most_measurements,
    round_sizes,
    search,
)

# Settings -> what each of their values multiplies the rate by; a target as it is has a rate of 10.
Surface = dict[str, dict[int, float]]
A, B = Candidate.of({"a": 1}), Candidate.of({"b": 1})
factor = st.sampled_from([0.5, 0.8, 0.95, 1.1, 1.25, 1.6])
surfaces = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(1, 3), factor, min_size=1), min_size=1)


class Machine:
    """Measures candidates on a surface, and counts; `best` of them together break it, as memory would."""

    def __init__(self, surface: Surface, *, broken: Candidate | None = None, most: float = math.inf) -> None:
        self.surface, self.broken, self.most = surface, broken, most
        self.measured: list[tuple[Candidate, int, int]] = []

    def __call__(self, candidate: Candidate, number: int, repeat: int) -> Score:
        if len(self.measured) >= self.most:
            raise OutOfTime
        assert (candidate, number, repeat) not in self.measured
        self.measured.append((candidate, number, repeat))
        return Score(None if candidate == self.broken else self.rate(candidate))

    def rate(self, candidate: Candidate) -> float:
        return 10 * math.prod(self.surface[name][value] for name, value in candidate.changes)

    def changes(self) -> list[Candidate]:
        return [Candidate(((name, value),)) for name, values in self.surface.items() for value in values]

    def best(self) -> float:
        """The highest rate of all combinations."""
        axes = [[None, *((name, value) for value in values)] for name, values in self.surface.items()]
        every = itertools.product(*axes)
        return max(self.rate(Candidate.of(dict(one for one in chosen if one is not None))) for chosen in every)


@given(surfaces)
def test_the_best_combination_of_independent_settings_is_found_within_the_bound(surface: Surface) -> None:
    machine = Machine(surface)
    found = search(machine.changes(), machine)
    assert found.complete
    assert machine.rate(found.candidate) == pytest.approx(machine.best())
    assert found.gain == pytest.approx(machine.best() / 10 - 1)
    assert len(machine.measured) <= most_measurements(len(machine.changes()))


def test_what_breaks_together_leaves_the_best_that_holds() -> None:
    surface = {"a": {1: 1.2}, "b": {1: 1.5}, "c": {1: 1.1}, "d": {1: 0.7}}
    machine = Machine(surface, broken=Candidate.of({"a": 1, "b": 1, "c": 1}))
    # The second round's best two together: a and b.
    found = search(machine.changes(), machine)
    assert (found.candidate, found.complete) == (Candidate.of({"a": 1, "b": 1}), True)
    assert found.gain == pytest.approx(0.8)


def test_rounds_halve_and_the_best_is_repeated_beside_the_target_as_it_is() -> None:
    machine = Machine({"a": {1: 1.2, 2: 1.18}, "b": {1: 0.9}, "c": {1: 0.8}})
    search(machine.changes(), machine)
    rounds = [[one for one in machine.measured if one[1] == number and not one[2]] for number in range(4)]
    assert [len(one) for one in rounds] == [5, 3, 2, 0]
    again = [(one.name, repeat) for one, _, repeat in machine.measured if repeat]
    assert again == [("as it is", 1), ("a=1", 1), ("as it is", 2), ("a=1", 2)]
    near = Machine({"a": {1: 1.01}})
    assert search(near.changes(), near) == Winner(candidate=AS_IT_IS, gain=0.0, complete=True)
    assert sorted(repeat for _, _, repeat in near.measured) == [0, 0, 1, 1, 2, 2]
    worse = Machine({"a": {1: 0.5}})
    search(worse.changes(), worse)
    assert all(repeat == 0 for _, _, repeat in worse.measured)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        # means 11 and 22, standard errors of 5.2% each
        ([20.0, 24.0, 22.0], Winner(candidate=A, gain=1.0, complete=True, error=0.148)),
        # a mean of 12, with a standard error of 14.4%
        ([12.0, 9.0, 15.0], Winner(candidate=A, gain=0.091, complete=True, error=0.168, proven=False)),
        ([12.0, 10.0, 12.0], Winner(candidate=AS_IT_IS, gain=0.0, complete=True)),
    ],
)
def test_a_gain_has_the_error_of_its_repeats_and_is_proven_beyond_twice_that(
    changed: list[float], expected: Winner
) -> None:
    rates = {AS_IT_IS: [10.0, 12.0, 11.0], A: changed}
    found = search([A], lambda one, number, repeat: Score(rates[one][repeat]))
    assert replace(found, gain=round(found.gain or 0.0, 3), error=found.error and round(found.error, 3)) == expected


def test_a_gain_without_an_error_is_not_proven_unless_the_target_as_it_is_meets_nothing() -> None:
    once = Clock(Machine({"a": {1: 1.8}}), most=2).search()
    assert (once.candidate, once.error, once.proven) == (A, None, False)
    nothing = search([A], lambda one, number, repeat: Score(10.0 if one == A else 0.0))
    assert (nothing.candidate, nothing.gain, nothing.proven) == (A, None, True)
    # The repeats of the change have no result.
    late = search([A], lambda one, number, repeat: Score(None if one == A and repeat else 10.0 + 8 * (one == A)))
    assert (late.candidate, late.error, late.proven) == (A, None, False)


@pytest.mark.parametrize(
    ("rates", "open_", "expected"),
    [
        ({AS_IT_IS: 10.0, A: 8.0}, (), Winner(candidate=AS_IT_IS, gain=0.0, complete=True)),
        ({AS_IT_IS: 10.0, A: 8.0}, (AS_IT_IS,), Winner(candidate=AS_IT_IS, gain=0.0, complete=True)),
        ({AS_IT_IS: 10.0, A: 8.0}, (A,), Winner(candidate=AS_IT_IS, gain=0.0, complete=True, proven=False)),
        ({AS_IT_IS: 10.0, A: 20.0}, (A,), Winner(candidate=A, gain=1.0, complete=True, error=0.0)),
        ({AS_IT_IS: 10.0, A: 20.0}, (AS_IT_IS,), Winner(candidate=A, gain=1.0, complete=True, error=0.0, proven=False)),
    ],
)
def test_a_rate_that_was_only_reached_proves_no_more_than_it_says(
    rates: dict[Candidate, float], open_: tuple[Candidate, ...], expected: Winner
) -> None:
    assert search([A], lambda one, number, repeat: Score(rates[one], at_least=one in open_)) == expected


def test_a_change_whose_rate_was_only_reached_is_measured_longer() -> None:
    machine = Machine({"a": {1: 0.5}, "b": {1: 0.9}, "c": {1: 0.8}, "d": {1: 0.7}})
    found = search(
        machine.changes(),
        lambda one, number, repeat: replace(machine(one, number, repeat), at_least=one == A and number == 0),
    )
    assert (A, 1, 0) in machine.measured
    assert found == Winner(candidate=AS_IT_IS, gain=0.0, complete=True)


@pytest.mark.parametrize(("most", "expected", "gain"), [(5, A, 0.25), (8, B, 0.3)])
def test_a_best_that_was_lucky_once_gives_way_to_one_that_was_measured_again(
    most: int, expected: Candidate, gain: float
) -> None:
    rates = {AS_IT_IS: [10.0] * 3, A: [14.0, 11.0, 11.0], B: [13.0] * 3}
    left = iter(range(most))

    def measure(one: Candidate, number: int, repeat: int) -> Score:
        if number or next(left, None) is None:
            raise OutOfTime
        return Score(rates[one][repeat])

    found = search([A, B], measure, lambda measurements, one, number, repeat: number == 0)
    assert found.candidate == expected
    assert found.gain == pytest.approx(gain)
    assert found.error is not None


def test_a_candidate_whose_time_was_over_is_measured_longer_and_a_broken_one_is_not() -> None:
    surface = {"a": {1: 1.5}, "b": {1: 0.9}, "c": {1: 0.8}, "d": {1: 0.7}}
    machine, rounds = Machine(surface), []

    def measure(candidate: Candidate, number: int, repeat: int) -> Score:
        found = machine(candidate, number, repeat)
        rounds.append((candidate.name, number))
        undecided, broken = candidate == A and number == 0, "b" in candidate.name
        return Score(None if undecided or broken else found.rate, broken=broken)

    found = search(machine.changes(), measure)
    assert found.candidate == A
    assert found.gain == pytest.approx(0.5)
    assert ("b=1", 1) not in rounds


@pytest.mark.parametrize(("most", "expected"), [(0, {}), (1, {}), (2, {"a": 1}), (3, {"a": 2}), (4, {"a": 2})])
def test_out_of_time_the_best_of_what_was_measured_counts(most: int, expected: dict[str, Any]) -> None:
    machine = Machine({"a": {1: 1.2, 2: 1.4}, "b": {1: 1.1}}, most=most)
    found = search(machine.changes(), machine)
    assert not found.complete
    assert dict(found.candidate.changes) == expected


class Clock:
    """Time for `most` measurements; none of `undecided` has a result at once, of these `never` has none at all."""

    def __init__(self, machine: Machine, most: int, undecided: str = "", never: str = "") -> None:
        self.machine, self.most, self.undecided, self.never = machine, most, undecided, never
        self.known: dict[tuple[Candidate, int, int], Score] = {}

    def measure(self, candidate: Candidate, number: int, repeat: int) -> Score:
        key = (candidate, number, repeat)
        if not self.time_for(1, *key):
            raise OutOfTime
        if key not in self.known:
            found = self.machine(*key)
            late = candidate.name in self.never or (candidate.name in self.undecided and repeat != ONCE_MORE)
            self.known[key] = Score(None) if late else found
        return self.known[key]

    def time_for(self, measurements: int, *key: Any) -> bool:
        return key in self.known or len(self.known) + measurements <= self.most

    def search(self) -> Winner:
        return search(self.machine.changes(), self.measure, self.time_for)

    def order(self) -> list[str]:
        return [f"{one.name} {number} {repeat}" for one, number, repeat in self.known]


def test_where_time_is_short_changes_come_before_rounds_and_what_gained_is_measured_again() -> None:
    clock = Clock(Machine({"a": {1: 0.9, 2: 1.2}, "b": {1: 0.8, 2: 0.7, 3: 0.7}}), most=6)
    found = clock.search()
    # One change of five has no time: that is kept for the one that gained.
    assert clock.order() == ["as it is 0 0", "a=1 0 0", "a=2 0 0", "b=1 0 0", "as it is 0 1", "a=2 0 1"]
    assert (found.candidate, found.complete, found.error) == (Candidate.of({"a": 2}), True, 0.0)
    assert found.gain == pytest.approx(0.2)
    assert clock.search() == found  # the same again measures nothing, and finds the same
    assert len(clock.known) == 6
    # Where none gained, all are measured.
    worse = Clock(Machine({"a": {1: 0.9, 2: 0.8}, "b": {1: 0.8, 2: 0.7, 3: 0.7}}), most=6)
    assert worse.search().candidate == AS_IT_IS
    assert len(worse.known) == 6
    assert {one for one, _, _ in worse.known} == {AS_IT_IS, *worse.machine.changes()}


@pytest.mark.parametrize(("most", "measured"), [(2, 2), (3, 3), (30, 7)])
def test_a_change_whose_time_was_over_is_measured_once_more_with_what_is_left(most: int, measured: int) -> None:
    clock = Clock(Machine({"a": {1: 1.5}}), most=most, undecided="a=1")
    found = clock.search()
    assert len(clock.known) == measured
    assert found.candidate == (AS_IT_IS if most == 2 else A)
    assert clock.search() == found
    never = Clock(Machine({"a": {1: 1.5}}), most=30, never="a=1")
    assert never.search().candidate == AS_IT_IS
    assert never.order() == ["as it is 0 0", "a=1 0 0", f"a=1 0 {ONCE_MORE}"]


@given(surfaces, st.integers(1, 15), st.integers(1, 30))
def test_after_ctrl_c_the_search_goes_on_to_the_same_end(surface: Surface, stop: int, most: int) -> None:
    whole, stopped = Clock(Machine(surface), most), Clock(Machine(surface), most)
    found = whole.search()

    def measure(*key: Any) -> Score:
        if key not in stopped.known and len(stopped.known) == stop:
            raise KeyboardInterrupt
        return stopped.measure(*key)

    with contextlib.suppress(KeyboardInterrupt):
        search(stopped.machine.changes(), measure, stopped.time_for)
    assert stopped.search() == found
    assert stopped.order() == whole.order()


@given(st.floats(10, 1e5), st.integers(0, 20), st.floats(0, 120), st.floats(0, 20), st.floats(0, 30), st.floats(0, 1e5))
def test_a_schedule_spends_no_more_than_its_time_and_leaves_each_measurement_the_least(
    seconds: float, candidates: int, around_s: float, request_s: float, tail_s: float, left_s: float
) -> None:
    schedule = Schedule(
        seconds=seconds, candidates=candidates, around_s=around_s, request_s=request_s, tail_s=tail_s
    )  # fmt: skip
    sizes = round_sizes(candidates)
    limits = [schedule.limit_s(number) for number in range(len(sizes))]
    repeated = (REPEATS - 1) * sizes[-1] * limits[-1]
    assert sum(size * limit for size, limit in zip(sizes, limits, strict=True)) + repeated <= seconds * 1.001
    assert limits == sorted(limits)  # later rounds measure longer
    search_s = schedule.search_s(limits[0], left_s)
    assert 0 <= search_s <= left_s
    # A round that has the time for all of it still has that of the repeats after it.
    shared_s = schedule.search_s(limits[0], left_s, candidates)
    if left_s >= (candidates + 1 + KEPT) * schedule.least_s:
        assert left_s - around_s - shared_s >= (candidates + KEPT) * schedule.least_s * 0.999
    if left_s >= schedule.least_s:
        assert search_s >= POINTS * (max(LEAST_POINT_S, min(60, 6 * request_s)) + tail_s) * 0.999
        assert POINTS * (schedule.point_s(search_s) + tail_s) <= search_s * 1.001
    assert schedule.enough_s(3, 0) > around_s + 5 * schedule.least_s
