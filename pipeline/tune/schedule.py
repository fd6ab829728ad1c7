"""Division of a search's time among its rounds and measurements."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.pipeline.tune.search import round_sizes

# Load points of a usual search for a rate, and the least and most seconds of one.
POINTS = 6
LEAST_POINT_S, MOST_POINT_S = 3.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rounds get equal shares of `seconds`, and so each measurement of a round more than one of the round before."""

    seconds: float
    candidates: int

    def limit_s(self, number: int) -> float:
        """Seconds of a measurement of this round, with the start of its server."""
        sizes = round_sizes(self.candidates)
        return self.seconds / (len(sizes) * sizes[min(number, len(sizes) - 1)])

    def search_s(self, number: int, start_s: float) -> float:
        """Seconds of these for the search for a rate, where a server starts in `start_s`; never fewer than it needs."""
        return max(POINTS * LEAST_POINT_S, self.limit_s(number) - start_s)

    def point_s(self, number: int, start_s: float) -> float:
        """Seconds of each of its load points."""
        return min(MOST_POINT_S, self.search_s(number, start_s) / POINTS)

    def fitting(self, start_s: float) -> Schedule:
        """The same for as many of the candidates as can each have their least time in the first round."""
        least = start_s + POINTS * LEAST_POINT_S
        able = [Schedule(seconds=self.seconds, candidates=number) for number in range(self.candidates + 1)]
        return next((one for one in reversed(able) if one.limit_s(0) >= least), able[0])
