"""Search for the best candidate: successive halving over single changes, and over what the best of them make together.

Each round measures its candidates for longer than the one before, and keeps the better half. After the first round
all changes that beat the target as it is are tried together, after the second the two best candidates: settings whose
effects are independent of each other are so found without trying every combination. The target as it is takes part in
every round, since what a change gains is judged beside it. At the end the two best are measured again while their
results are close.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate

# Most measurements of one candidate in the last round.
REPEATS = 3
# Two results closer than this share are no difference: that of the bench's own search for a rate.
CLOSE = 0.05


@dataclass(frozen=True)
class Score:
    """Result of one measurement: requests/s within the objectives, 0 where no rate met them; None where the candidate
    could not be built, served or measured."""

    rate: float | None


# (candidate, number of the round, number of the repeat, number of candidates of the round) -> score
Measure = Callable[[Candidate, int, int, int], Score]


class OutOfTime(Exception):
    """No further measurement may begin."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Result of a search: the best candidate, and its gain over the target as it is, as a share; None where that was
    not comparable. `complete` is false when time was over before the last round."""

    candidate: Candidate
    gain: float | None
    complete: bool


def round_sizes(candidates: int) -> list[int]:
    """Most candidates that each round measures, for so many single changes and the target as it is."""
    sizes, left = [1 + candidates], candidates
    for number in range(64):
        if left <= 1:
            break
        left = math.ceil(left / 2) + (number < 2 and left > 2)
        sizes.append(1 + left)
    return sizes


def most_measurements(candidates: int) -> int:
    """Upper bound on the measurements of a search."""
    return sum(round_sizes(candidates)) + 2 * (REPEATS - 1)


def search(changes: Sequence[Candidate], measure: Measure) -> Winner:
    """Find the best of `changes` and of their combinations. `measure` may raise OutOfTime."""
    scores: dict[Candidate, list[tuple[int, float]]] = {}

    def score(one: Candidate, number: int, size: int, repeat: int = 0) -> None:
        found = measure(one, number, repeat, size).rate
        if found is not None:
            scores.setdefault(one, []).append((number, found))

    try:
        field, number = list(changes), 0
        while True:
            size = 1 + len(field)
            for one in (AS_IT_IS, *field):
                score(one, number, size)
            if len(field) <= 1:
                break
            field = _next(field, scores, number)
            number += 1
    except OutOfTime:
        return _winner(scores, complete=False)
    with contextlib.suppress(OutOfTime):
        _repeat(scores, number, score)
    return _winner(scores, complete=True)


def _next(field: list[Candidate], scores: dict[Candidate, list[tuple[int, float]]], number: int) -> list[Candidate]:
    """The candidates of the round after `number`: the better half, and what the best make together."""
    able = [one for one in field if scores.get(one, [(-1, 0.0)])[-1][0] == number]
    able.sort(key=lambda one: -rated(scores[one]))
    kept = able[: math.ceil(len(field) / 2)]
    if number < 2 and len(field) > 2:
        base = rated(scores[AS_IT_IS]) if AS_IT_IS in scores else 0.0
        gaining = [one for one in able if rated(scores[one]) > base]
        together = AS_IT_IS
        for one in gaining if number == 0 else able[:2]:
            together = together.joined(one)  # the better value of a setting comes first
        if together not in scores:
            kept.append(together)
    return kept


def _repeat(
    scores: dict[Candidate, list[tuple[int, float]]], number: int, score: Callable[[Candidate, int, int, int], None]
) -> None:
    """Measure the two best of the last round again while they are close."""
    for repeat in range(1, REPEATS):
        last = sorted((one for one in scores if scores[one][-1][0] == number), key=lambda one: -rated(scores[one]))
        if len(last) < 2 or rated(scores[last[1]]) < (1 - CLOSE) * rated(scores[last[0]]):
            return
        for one in last[:2]:
            score(one, number, len(last), repeat)


def rated(found: Sequence[tuple[int, float]]) -> float:
    """Mean of the measurements of a candidate's last round, which were the longest."""
    last = max(number for number, _ in found)
    rates = [rate for number, rate in found if number == last]
    return sum(rates) / len(rates)


def _winner(scores: dict[Candidate, list[tuple[int, float]]], *, complete: bool) -> Winner:
    """The best of those measured longest; the target as it is where none is better by more than CLOSE."""
    if not scores:
        return Winner(candidate=AS_IT_IS, gain=None, complete=complete)
    longest = max((found[-1][0] for one, found in scores.items() if one != AS_IT_IS), default=0)
    last = {one: rated(found) for one, found in scores.items() if found[-1][0] == longest}
    # A round that was cut off is judged by those of it that were measured.
    best = max(last, key=lambda one: last[one]) if last else AS_IT_IS
    beside = [entry for entry in scores.get(AS_IT_IS, ()) if entry[0] <= longest]
    base = rated(beside) if beside else None
    if base is not None and last.get(best, base) <= base * (1 + CLOSE):
        return Winner(candidate=AS_IT_IS, gain=0.0, complete=complete)
    return Winner(candidate=best, gain=last[best] / base - 1 if base else None, complete=complete)
