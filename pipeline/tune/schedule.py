"""Division of a search's time among its rounds and measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trtpipe.pipeline.tune.search import REPEATS, round_sizes

# Load points of a usual search for a rate, and the least and most seconds of one.
POINTS = 6
LEAST_POINT_S, MOST_POINT_S = 3.0, 60.0
# Least length of a load point in times of one request: a shorter one holds few requests, and chance decides.
REQUESTS = 6
# Share of the time in which the first measurement may find how fast the target is.
FIRST = 0.1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds get equal shares of `seconds`, the last one as many as it is repeated, and so each measurement of a round
    more than one of the round before.

    start_s    of a server, until it is ready
    request_s  of one request alone
    tail_s     of a load point after its length, in which the requests that are under way are answered
    """

    seconds: float
    candidates: int
    start_s: float = 0.0
    request_s: float = 0.0
    tail_s: float = 0.0

    @property
    def least_point_s(self) -> float:
        return min(MOST_POINT_S, max(LEAST_POINT_S, REQUESTS * self.request_s))

    @property
    def least_s(self) -> float:
        """Seconds of the shortest measurement."""
        return self.start_s + POINTS * (self.least_point_s + self.tail_s)

    def limit_s(self, number: int) -> float:
        """Seconds of a measurement of this round, with the start of its server."""
        sizes = round_sizes(self.candidates)
        return self.seconds / ((len(sizes) + REPEATS - 1) * sizes[min(number, len(sizes) - 1)])

    @property
    def first_s(self) -> float:
        """Seconds of the search for a rate of which nothing is known."""
        return max(POINTS * LEAST_POINT_S, FIRST * self.seconds)

    def search_s(self, number: int) -> float:
        """Seconds of these for the search for a rate; never fewer than it needs."""
        return max(self.least_s, self.limit_s(number)) - self.start_s

    def point_s(self, number: int) -> float:
        """Length of each of its load points, in seconds."""
        return min(MOST_POINT_S, self.search_s(number) / POINTS - self.tail_s)

    @property
    def enough_s(self) -> float:
        """Seconds of the shortest search that measures a change beside the target as it is, REPEATS times each."""
        return math.ceil(2 * REPEATS * self.least_s / 60) * 60

    def fitting(self, start_s: float, request_s: float, tail_s: float = 0.0) -> Schedule:
        """The same for as many of the candidates as can each have their least time in the first round."""
        able = [
            replace(self, candidates=number, start_s=start_s, request_s=request_s, tail_s=tail_s)
            for number in range(self.candidates + 1)
        ]
        return next((one for one in reversed(able) if one.limit_s(0) >= one.least_s), able[0])
