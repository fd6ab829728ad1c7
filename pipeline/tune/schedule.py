"""Division of a search's time among its rounds and measurements."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.pipeline.tune.search import KEPT, REPEATS, round_sizes

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

    around_s   of a measurement without its search: its server is started and stopped
    request_s  of one request alone
    tail_s     of a load point after its length, in which the requests that are under way are answered
    """

    seconds: float
    candidates: int
    around_s: float = 0.0
    request_s: float = 0.0
    tail_s: float = 0.0

    @property
    def least_point_s(self) -> float:
        return min(MOST_POINT_S, max(LEAST_POINT_S, REQUESTS * self.request_s))

    @property
    def least_s(self) -> float:
        """Seconds of the shortest measurement."""
        return self.around_s + POINTS * (self.least_point_s + self.tail_s)

    def limit_s(self, number: int) -> float:
        """Seconds of a measurement of this round."""
        return self.seconds / ((len(round_sizes(self.candidates)) + REPEATS - 1) * self.size(number))

    def size(self, number: int) -> int:
        """Most measurements of this round."""
        sizes = round_sizes(self.candidates)
        return sizes[min(number, len(sizes) - 1)]

    @property
    def first_s(self) -> float:
        """Seconds of the search for a rate of which nothing is known."""
        return max(POINTS * LEAST_POINT_S, FIRST * self.seconds)

    @property
    def longer_s(self) -> float:
        """Seconds of a search whose first measurement has twice the time of this one's."""
        return 2 * self.first_s / FIRST

    def search_s(self, share_s: float, left_s: float, others: int = 0) -> float:
        """Seconds of the search for a rate in a measurement of `share_s`, as far as these leave the time of `others`
        after it and of those that are kept; never fewer than it needs, nor more than are left."""
        share_s = min(share_s, left_s - (others + KEPT) * self.least_s)
        return max(0.0, min(left_s, max(self.least_s, share_s)) - self.around_s)

    def point_s(self, search_s: float) -> float:
        """Length of a load point of such a search, in seconds."""
        return min(MOST_POINT_S, max(self.least_point_s, search_s / POINTS - self.tail_s))

    def enough_s(self, changes: int, each_s: float) -> float:
        """Seconds of a search that measures so many changes for `each_s`, and one more time the best of them beside the
        target as it is."""
        return (self.around_s + POINTS * LEAST_POINT_S + (changes + KEPT) * max(each_s, self.least_s)) / (1 - FIRST)
