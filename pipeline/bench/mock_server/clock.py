"""When tokens are due, and the one alarm that wakes for them.

All answers tick at one rate, so their next tokens are due in the order in which the last ones were: two plain queues,
one for first tokens and one for all others, are in order when each answer is put at their end. Only one whose request
was read after a later one, or later than its first token was due, has to be put before others. The alarm is set to
absolute times, so a late token makes no other one late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic_ns
from typing import Protocol

from trtpipe.engines.errors import UsageError

# The least between two wake-ups: where tokens are closer, those due meanwhile go out together. Never early.
GRAIN_NS = 50_000
_FAR = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The first response of a request is due `ttft_s` after the whole request has reached this machine; each one after
    it `itl_s` later for every token of a response. So token k is due at arrival + ttft_s + k * itl_s, and with several
    tokens a response all of them when the first one is. With `prefill_s` first responses are at least so far apart, and
    requests that come faster wait for one another: 1 / prefill_s a second are the most that this server can begin.
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
        """From one response to the next."""
        return round(self.itl_s * 1e9) * self.tokens_per_response


class Rings(Protocol):
    """What the schedule needs of an alarm."""

    def at(self, when_ns: int) -> None: ...


class Flushes(Protocol):
    """What the schedule needs of a connection: it is told when all that is to go out together has been put there."""

    def flush(self) -> None: ...


class Due(Protocol):
    """What the schedule needs of an answer. `due_ns` is the schedule's own.

    left   ticks to come, the last one included; zero takes the answer off the schedule
    """

    due_ns: int
    left: int

    def begin(self) -> None:
        """The first tick has come; it follows at once."""

    def tick(self) -> None:
        """A tick that others follow."""

    def end(self) -> None:
        """The last tick."""


class Schedule:
    """Calls answers at their times, then flushes the connections that put themselves into `outbox`."""

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
        """A request has been read. With `prefill_s` they are begun in the order in which they are."""
        timing = self.timing
        answer.due_ns = arrival_ns + timing.first_ns
        if timing.prefill_ns:
            answer.due_ns = self._begun_ns = max(answer.due_ns, self._begun_ns + timing.prefill_ns)
        _put(self._first, answer)
        if answer.due_ns < self._set_for:
            self._set(answer.due_ns)

    def wake(self) -> None:
        """The alarm has rung."""
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
        """Everything that is due, in the order in which it was."""
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
    """Behind all that are due no later than it: the end, or near to it."""
    place = len(queue)
    while place and queue[place - 1].due_ns > answer.due_ns:
        place -= 1
    queue.insert(place, answer)
