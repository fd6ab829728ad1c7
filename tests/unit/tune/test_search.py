"""The search alone: on surfaces whose best point is known, within its bound, and within its time."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.schedule import LEAST_POINT_S, POINTS, Schedule
from trtpipe.pipeline.tune.search import REPEATS, OutOfTime, Score, Winner, most_measurements, round_sizes, search

# Settings -> what each of their values multiplies the rate by; a target as it is has a rate of 10.
Surface = dict[str, dict[int, float]]
A = Candidate.of({"a": 1})
factor = st.sampled_from([0.5, 0.8, 0.95, 1.1, 1.25, 1.6])
surfaces = st.dictionaries(st.sampled_from("abcd"), st.dictionaries(st.integers(1, 3), factor, min_size=1), min_size=1)


class Machine:
    """Measures candidates on a surface, and counts; `best` of them together break it, as memory would."""

    def __init__(self, surface: Surface, *, broken: Candidate | None = None, most: float = math.inf) -> None:
        self.surface, self.broken, self.most = surface, broken, most
        self.measured: list[tuple[Candidate, int, int]] = []

    def __call__(self, candidate: Candidate, number: int, repeat: int, size: int) -> Score:
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
        # +9%, with an error of 26%
        ([7.0, 9.0, 20.0], Winner(candidate=AS_IT_IS, gain=0.0, complete=True)),
    ],
)
def test_a_gain_has_the_error_of_its_repeats_and_must_exceed_it(changed: list[float], expected: Winner) -> None:
    rates = {AS_IT_IS: [10.0, 12.0, 11.0], A: changed}
    found = search([A], lambda one, number, repeat, size: Score(rates[one][repeat]))
    assert replace(found, error=found.error and round(found.error, 3)) == expected


def test_a_candidate_whose_time_was_over_is_measured_longer_and_a_broken_one_is_not() -> None:
    surface = {"a": {1: 1.5}, "b": {1: 0.9}, "c": {1: 0.8}, "d": {1: 0.7}}
    machine, rounds = Machine(surface), []

    def measure(candidate: Candidate, number: int, repeat: int, size: int) -> Score:
        found = machine(candidate, number, repeat, size)
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


@given(st.floats(10, 1e5), st.integers(0, 20), st.floats(0, 60), st.floats(0, 20), st.floats(0, 30))
def test_a_schedule_spends_no_more_than_its_time_and_leaves_each_measurement_the_least(
    seconds: float, candidates: int, start_s: float, request_s: float, tail_s: float
) -> None:
    fitting = Schedule(seconds=seconds, candidates=candidates).fitting(start_s, request_s, tail_s)
    sizes = round_sizes(fitting.candidates)
    limits = [fitting.limit_s(number) for number in range(len(sizes))]
    repeated = (REPEATS - 1) * sizes[-1] * limits[-1]
    assert sum(size * limit for size, limit in zip(sizes, limits, strict=True)) + repeated <= seconds * 1.001
    assert limits == sorted(limits)  # later rounds measure longer
    if fitting.candidates:
        assert limits[0] >= start_s + POINTS * (max(LEAST_POINT_S, min(60, 6 * request_s)) + tail_s) * 0.999
        assert start_s + POINTS * (fitting.point_s(0) + tail_s) <= limits[0] * 1.001
