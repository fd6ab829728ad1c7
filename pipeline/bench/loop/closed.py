"""Closed loop, which keeps a fixed number of requests in flight.

Each slot sends its next request as soon as its last one has ended. Its warm-up requests are followed by its measured
ones without a pause and without waiting for the other slots, so neither the burst in which all slots start nor a second
one after a drain is measured. The first warm-up request of slot k is shortened to k/concurrency of the output length:
equal requests that start together would always end together, and this spreads the slots over one request's time
before anything is measured. A slot that finds no measured request left sends others until the last measured one has
ended, so the last measured requests are answered under full load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic_ns

from trtpipe.pipeline.bench.loop.alarm import Alarm
from trtpipe.pipeline.bench.loop.driver import Driver, Follow, Limits, Live
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Sender


class ClosedLoop(Driver):
    """Has a slot for each entry of `warmups`.

    warmups     requests of each slot before its measured ones, in order
    measured    measured requests, taken by whichever slot is free
    fillers     endless requests or conversations, for slots that are ready before the last slot has begun, or that
                find no measured request left while some are unanswered; None: early slots measure, late ones rest
    starts_ns   when each slot begins, from the start
    duration_s  time to measure, from the moment the last slot has warmed up, instead of until `measured` ends
    """

    def __init__(
        self, sender: Sender, limits: Limits, *,
        warmups: Sequence[Sequence[InFlightRequest]], measured: Iterator[InFlightRequest],
        starts_ns: Sequence[int], fillers: Iterator[InFlightRequest] | None = None, duration_s: float | None = None,
        follow: Follow | None = None, watch: Callable[[Live], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sender, limits, follow, watch)
        self._warmups = [deque(mine) for mine in warmups]
        self._measured = measured
        self._fillers = fillers
        self._starts = starts_ns
        self._duration_s = duration_s
        self.deadline: int | None = None  # end of the duration, once all slots have warmed up
        self._warm: set[int] = set()
        # Slots whose request or conversation is measured, and slots with a filler.
        self._measuring: set[int] = set()
        self._filling: set[int] = set()
        self._exhausted = False  # no measured request is left to begin
        self._resting = 0
        self._free: list[tuple[int, int, InFlightRequest | None]] = []  # slot, since when it is free, its last request
        self._beginning: deque[tuple[int, int]] = deque()
        self._whole_ns = 0  # when the last slot begins, by the clock

    @property
    def _until_ns(self) -> int | None:
        return self.deadline

    def _begin(self) -> None:
        start = self._start_ns or monotonic_ns()
        self._beginning.extend((place, start + offset) for place, offset in enumerate(self._starts))
        self._whole_ns = start + self._starts[-1]
        self._alarm = Alarm(self._loop, partial(self._step, self._ramp))
        self._alarm.at(start)

    def _ramp(self) -> None:
        now = monotonic_ns()
        while self._beginning and self._beginning[0][1] <= now:
            self._free.append((*self._beginning.popleft(), None))
        if self._beginning:
            self._alarm.at(self._beginning[0][1])
        self._serve()

    def _close(self) -> None:
        self._alarm.close()

    def _freed(self, request: InFlightRequest) -> None:
        if not self._free:
            self._loop.call_soon(self._step, self._serve)
        assert request.end_ns is not None
        self._free.append((request.slot, request.end_ns, request))

    def _serve(self) -> None:
        if self._is_over:
            return
        free = [one for one in self._free if not self._goes_on(*one)]
        self._free.clear()
        places = [place for place, _, _ in free]
        self._measuring.difference_update(places)
        self._filling.difference_update(places)
        batch: list[InFlightRequest] = []
        for place, since, _ in free:
            request = self._next(place, since)
            if request is None:
                self._resting += 1
            else:
                request.slot = place
                request.due_ns = since
                batch.append(request)
        self._send(batch)
        if self._exhausted and not self._measuring:  # later turns of fillers are not waited for
            self._resting += len(self._later)
            self._later.clear()
        if self._resting == len(self._warmups):
            self._finish()

    def _goes_on(self, place: int, since: int, last: InFlightRequest | None) -> bool:
        if last is None:
            return False
        if place in self._measuring:
            # A turn that is due after the deadline is moved to the deadline.
            return not self._is_past(since) and self._continue(last, self.deadline)
        return place in self._filling and self._needs_fillers(since) and self._continue(last)

    def _needs_fillers(self, since: int) -> bool:
        """Whether some slots have not begun, or some still have a measured request after the last one was taken."""
        return since < self._whole_ns or (self._exhausted and bool(self._measuring))

    def _is_past(self, moment: int) -> bool:
        return self.deadline is not None and moment >= self.deadline

    def _send_due(self, batch: Sequence[InFlightRequest]) -> None:
        late = [turn for turn in batch if not turn.warmup and self._is_past(turn.due_ns)]
        self._send([turn for turn in batch if turn not in late])
        self._free.extend((turn.slot, turn.due_ns, None) for turn in late)
        self._serve()

    def _next(self, place: int, since: int) -> InFlightRequest | None:
        if self._warmups[place]:
            return self._unmeasured(self._warmups[place].popleft())
        if place not in self._warm:
            self._warm.add(place)
            if len(self._warm) == len(self._warmups) and self._duration_s is not None:
                self.deadline = since + int(self._duration_s * 1e9)
                self._cap_later(self.deadline)
        if self._fillers is None or since >= self._whole_ns:
            request = None if self._is_past(since) else next(self._measured, None)
            if request is not None:
                self._measuring.add(place)
                return request
            self._exhausted = True
        # Warm-up requests in flight are not waited for: nothing after them is measured.
        if self._fillers is None or not self._needs_fillers(since):
            return None
        self._filling.add(place)
        return self._unmeasured(next(self._fillers))

    @staticmethod
    def _unmeasured(request: InFlightRequest) -> InFlightRequest:
        request.warmup = True
        return request
