"""Schedule of token times, and the alarm that wakes the server for them.

All answers have one token rate, so their next tokens are due in the order in which the last ones were: two plain
queues, one for first tokens and one for all others, stay in order when each answer is appended. Only an answer whose
request was read after a later one, or after its first token was due, is inserted before others. The alarm is set to
absolute times, so a late token makes no other token late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

from trtpipe.engines.errors import UsageError

# Least time between two wake-ups: tokens that become due in between are sent together, never early.
GRAIN_NS = 50_000
_FAR = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The first response of a request is due `ttft_s` after the whole request has reached this machine; each later one
    follows after `itl_s` per token of a response. So token k is due at arrival + ttft_s + k * itl_s, and all tokens of
    a response are due with its first. With `prefill_s`, first responses are at least that far apart, and requests that
    come faster wait for one another: the server begins 1 / prefill_s requests per second at most.
    """

    ttft_s: float
    itl_s: float
    tokens_per_response: int = 1
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        if min(self.ttft_s, self.itl_s, self.prefill_s) < 0:
            raise UsageError("tokens cannot be due before their request", remedy="give times of zero or more")
        # A response of a thousand tokens still fits into one frame of any peer.
        if not 1 <= self.tokens_per_response <= 1000:
            raise UsageError(
                f"{self.tokens_per_response} tokens a response are not possible", remedy="give a number from 1 to 1000"
            )

    @property
    def first_ns(self) -> int:
        return round(self.ttft_s * 1e9)

    @property
    def prefill_ns(self) -> int:
        return round(self.prefill_s * 1e9)

    @property
    def step_ns(self) -> int:
        """Nanoseconds from one response to the next."""
        return round(self.itl_s * 1e9) * self.tokens_per_response


class Rings(Protocol):
    """Interface of an alarm, as the schedule uses it."""

    def at(self, when_ns: int) -> None: ...


class Flushes(Protocol):
    """Interface of a connection: `flush` is called when all bytes that are sent together have been put there."""

    def flush(self) -> None: ...


class Due(Protocol):
    """Interface of an answer. `due_ns` belongs to the schedule.

    left   ticks to come, the last one included; the schedule drops an answer with 0
    """

    due_ns: int
    left: int

    def begin(self) -> None:
        """Called right before the first tick."""

    def tick(self) -> None:
        """Called at every tick but the last."""

    def end(self) -> None:
        """Called at the last tick."""


class Schedule:
    """Calls answers at their times, then flushes the connections that have put themselves into `outbox`."""

    def __init__(self, timing: Timing, alarm: Rings, clock: Callable[[], int] = monotonic_ns) -> None:
        self.timing = timing
        self.clock = clock
        self.outbox: list[Flushes] = []
        self._alarm = alarm
        self._set_for = _FAR
        self._begun_ns = -_FAR
        self._first: deque[Due] = deque()
        self._following: deque[Due] = deque()

    def add(self, answer: Due, arrival_ns: int) -> None:
        """Add the answer to a request that has been read. With `prefill_s`, answers begin in call order."""
        timing = self.timing
        answer.due_ns = arrival_ns + timing.first_ns
        if timing.prefill_ns:
            answer.due_ns = self._begun_ns = max(answer.due_ns, self._begun_ns + timing.prefill_ns)
        _put(self._first, answer)
        if answer.due_ns < self._set_for:
            self._set(answer.due_ns)

    def wake(self) -> None:
        """Run what is due; called when the alarm rings."""
        now = self.clock()
        self._run(now)
        self.flush()
        heads = [queue[0].due_ns for queue in (self._first, self._following) if queue]
        self._set(max(min(heads), now + GRAIN_NS) if heads else _FAR)

    def flush(self) -> None:
        outbox = self.outbox
        for link in outbox:
            link.flush()
        outbox.clear()

    def _run(self, now: int) -> None:
        """Call every answer that is due, in order of due times."""
        step = self.timing.step_ns
        first = self._first
        following = self._following
        while True:
            more = bool(first) and first[0].due_ns <= now
            limit = first[0].due_ns if more else now
            while following and following[0].due_ns <= limit:
                answer = following.popleft()
                answer.left = left = answer.left - 1
                if left > 0:
                    answer.tick()
                    answer.due_ns += step
                    if following and following[-1].due_ns > answer.due_ns:
                        _put(following, answer)
                    else:
                        following.append(answer)
                elif left == 0:
                    answer.end()
            if not more:
                return
            answer = first.popleft()
            if answer.left:
                answer.begin()
                following.appendleft(answer)

    def _set(self, at_ns: int) -> None:
        self._set_for = at_ns
        self._alarm.at(at_ns)


def _put(queue: deque[Due], answer: Due) -> None:
    """Insert an answer behind all that are due no later, which is at or near the end."""
    place = len(queue)
    while place and queue[place - 1].due_ns > answer.due_ns:
        place -= 1
    queue.insert(place, answer)
