"""Search for the best candidate: successive halving over single changes, and over what the best of them make together.

Each round measures its candidates for longer than the one before, and keeps the better half. After the first round
all changes that beat the target as it is are tried together, after the second the two best candidates: settings whose
effects are independent of each other are so found without trying every combination. The target as it is takes part in
every round, since what a change gains is judged beside it. At the end the best and the target as it is are measured
again in turn, and so is a second that is close: the spread of these measurements is the error of the gain, and without
it a gain is not proven. Where time is short, one measurement of every change comes first, then one more of what gained,
and further rounds last.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate

# Measurements of the best and of the target as it is in the last round.
REPEATS = 3
# Measurements whose time is kept for the last round: one of the best, and one of the target as it is.
KEPT = 2
# Number of the repeat in which a change of which nothing is known yet is measured once more, at the end.
ONCE_MORE = REPEATS
# Two results closer than this share are no difference: that of the bench's own search for a rate.
CLOSE = 0.05


@dataclass(frozen=True)
class Score:
    """Result of one measurement: requests/s within the objectives, 0 where no rate met them; None where that is not
    known, since the candidate is broken (it could not be built or served) or the time of the measurement was over.

    at_least  whether time was over before a rate was too high: the highest may be above `rate`
    """

    rate: float | None
    broken: bool = False
    at_least: bool = False


# (candidate, number of the round, number of the repeat) -> score
Measure = Callable[[Candidate, int, int], Score]
# (number of measurements, candidate, round, repeat) -> whether there is time for so many, of which this is the first;
# true where it is measured already
TimeFor = Callable[[int, Candidate, int, int], bool]


class OutOfTime(Exception):
    """No further measurement may begin."""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Result of a search.

    candidate  the best
    gain       of it over the target as it is, as a share; None where that was not comparable
    error      standard error of the gain, as a share too; None where one of both was measured once
    complete   false when time was over before the last round
    proven     false where the gain is more than CLOSE, but less than twice its error, or that is not known, or the
               target as it is may have a higher rate; where nothing gained, false if a change may have a higher rate
    """

    candidate: Candidate
    gain: float | None
    complete: bool
    error: float | None = None
    proven: bool = True


def round_sizes(candidates: int) -> list[int]:
    """Most candidates that each round measures, for so many single changes and the target as it is."""
    sizes, left = [1 + candidates], candidates
    for number in range(64):
        if left <= 1:
            break
        left = math.ceil(left / 2) + (number < 2)
        sizes.append(1 + left)
    return sizes


def most_measurements(candidates: int) -> int:
    """Upper bound on the measurements of a search."""
    return sum(round_sizes(candidates)) + 3 * (REPEATS - 1)


Scores = dict[Candidate, list[tuple[int, float]]]
# Candidates and rounds of which a measurement says no more than that the rate is reached.
Reached = set[tuple[Candidate, int]]


def search(
    changes: Sequence[Candidate], measure: Measure, time_for: TimeFor = lambda *measurement: True
) -> Winner:  # fmt: skip
    """Find the best of as many `changes` as there is time for, and of their combinations. `measure` may raise
    OutOfTime."""
    scores: Scores = {}
    reached: Reached = set()
    unknown: dict[Candidate, int] = {}  # the last round in which the time of a measurement was over

    def score(one: Candidate, number: int, repeat: int = 0) -> None:
        found = measure(one, number, repeat)
        if found.rate is not None:
            scores.setdefault(one, []).append((number, found.rate))
            if found.at_least:
                reached.add((one, number))
        elif not found.broken:
            unknown[one] = number

    def fits(one: Candidate, number: int, repeat: int = 0) -> bool:
        """Whether there is time for a measurement and, once a change has gained, for the repeats after it.

        Before that no time is kept for repeats, so that more changes are measured.
        """
        base = rated(scores[AS_IT_IS]) if AS_IT_IS in scores else 0.0
        gained = any(rated(found) > base for found in scores.values())
        return time_for(1 + KEPT * gained, one, number, repeat)

    field: list[Candidate] = []
    number = 0
    try:
        score(AS_IT_IS, 0)
        for one in changes:
            if not fits(one, 0):
                break
            field.append(one)
            score(one, 0)
        while len(field) > 1:
            following = _next(field, scores, reached, unknown, number)
            if not following or not time_for(1 + len(following) + KEPT, AS_IT_IS, number + 1, 0):
                break
            field, number = following, number + 1
            for one in (AS_IT_IS, *field):
                if fits(one, number):  # the measurements before it may have taken longer than they should
                    score(one, number)
    except OutOfTime:
        return _winner(scores, reached, complete=False)
    with contextlib.suppress(OutOfTime):
        for one in [one for one in unknown if one not in scores]:
            if fits(one, number, ONCE_MORE):
                score(one, number, ONCE_MORE)
        _repeat(scores, score)
    return _winner(scores, reached, complete=True)


def _next(
    field: list[Candidate], scores: Scores, reached: Reached, unknown: dict[Candidate, int], number: int
) -> list[Candidate]:  # fmt: skip
    """The candidates of the round after `number`: the better half, and what the best make together. One whose time was
    over counts at least as much as the target as it is: the next round measures longer."""
    base = rated(scores[AS_IT_IS]) if AS_IT_IS in scores else 0.0
    worth = {one: base for one in field if unknown.get(one) == number}
    worth |= {one: rated(scores[one]) for one in field if scores.get(one, [(-1, 0.0)])[-1][0] == number}
    worth |= {one: max(base, rate) for one, rate in worth.items() if (one, number) in reached}
    able = sorted(worth, key=lambda one: -worth[one])
    kept = able[: math.ceil(len(field) / 2)]
    if number < 2 and len(field) > 1:
        together = AS_IT_IS
        for one in [one for one in able if worth[one] > base] if number == 0 else able[:2]:
            together = together.joined(one)  # the better value of a setting comes first
        if together not in scores:
            kept.append(together)
    return kept


def _repeat(scores: Scores, score: Callable[[Candidate, int, int], None]) -> None:
    """Measure the target as it is, the best of the last round and one close to it again, in turn."""
    number = _last_round(scores)
    for repeat in range(1, REPEATS):
        # A best that was measured again may be the best no longer.
        last = sorted((one for one in scores if scores[one][-1][0] == number), key=lambda one: -rated(scores[one]))
        again = [one for one in last[:2] if rated(scores[one]) >= (1 - CLOSE) * rated(scores[last[0]])]
        if any(one.changes for one in again):
            for one in dict.fromkeys((AS_IT_IS, *again)):
                score(one, number, repeat)


def _last_round(scores: Scores) -> int:
    """The last round in which a change has a result."""
    return max((found[-1][0] for one, found in scores.items() if one.changes), default=0)


def rated(found: Sequence[tuple[int, float]]) -> float:
    """Mean of the measurements of a candidate's last round, which were the longest."""
    return statistics.fmean(_longest(found))


def _longest(found: Sequence[tuple[int, float]]) -> list[float]:
    last = max(number for number, _ in found)
    return [rate for number, rate in found if number == last]


def _winner(scores: Scores, reached: Reached, *, complete: bool) -> Winner:
    """The best of those measured longest; the target as it is where none is better by more than CLOSE."""
    if not scores:
        return Winner(candidate=AS_IT_IS, gain=None, complete=complete)
    longest = _last_round(scores)
    beside = [entry for entry in scores.get(AS_IT_IS, ()) if entry[0] <= longest]
    base = rated(beside) if beside else None
    # A round that was cut off is judged by those of it that were measured.
    last = {one: rated(found) for one, found in scores.items() if one.changes and found[-1][0] == longest}
    gaining = {one: rate for one, rate in last.items() if base is None or rate > base * (1 + CLOSE)}
    if not gaining:
        proven = not any((one, longest) in reached for one in last)
        return Winner(candidate=AS_IT_IS, gain=0.0, complete=complete, proven=proven)
    # One that was measured again comes before one that may have been lucky once.
    best = max(gaining, key=lambda one: (len(_longest(scores[one])) > 1, gaining[one]))
    error = _error(_longest(scores[best]), _longest(beside)) if beside else None
    gain = gaining[best] / base - 1 if base else None
    proven = gain is None or (error is not None and gain > 2 * error)
    proven &= not (beside and (AS_IT_IS, max(number for number, _ in beside)) in reached)
    return Winner(candidate=best, gain=gain, complete=complete, error=error, proven=proven)


def _error(of: Sequence[float], beside: Sequence[float]) -> float | None:
    """Standard error of the ratio of two means."""
    if min(len(of), len(beside)) < 2 or not statistics.fmean(beside) or not statistics.fmean(of):
        return None
    parts = [statistics.stdev(one) / statistics.fmean(one) / math.sqrt(len(one)) for one in (of, beside)]
    return math.hypot(*parts) * statistics.fmean(of) / statistics.fmean(beside)
