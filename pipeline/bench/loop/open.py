"""Open loop, which sends each request at its due time: due times are fixed before the first request, and neither server
nor client moves them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns

from trtpipe.pipeline.bench.loop.alarm import Alarm
from trtpipe.pipeline.bench.loop.driver import Driver, Follow, Limits, Live
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Sender


class OpenLoop(Driver):
    """Sends each request at its due time.

    due_ns         due time of each of `requests`, from the start, in order
    window_ns      measured part, from the start: requests due outside it are not measured
    max_in_flight  requests beyond this number wait, which shows as dispatch delay; None for no limit
    """

    def __init__(
        self, sender: Sender, limits: Limits, *, requests: Sequence[InFlightRequest], due_ns: Sequence[int],
        window_ns: tuple[int, int], max_in_flight: int | None = None, follow: Follow | None = None,
        watch: Callable[[Live], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sender, limits, follow, watch)
        self._requests = requests
        self._offsets = due_ns
        self._window_ns = window_ns
        self.window = (0, 0)  # the measured part by the clock, once it has begun
        self._most = max_in_flight
        self._next = 0
        self._waiting: deque[InFlightRequest] = deque()

    @property
    def _until_ns(self) -> int | None:
        return self._due[-1] if self._due else None

    def _begin(self) -> None:
        # Start a little later, so that the first request is no later than the others.
        start = self._start_ns or monotonic_ns() + 20_000_000
        self._due = [start + offset for offset in self._offsets]
        self.window = (start + self._window_ns[0], start + self._window_ns[1])
        self._alarm = Alarm(self._loop, partial(self._step, self._ring))
        if self._due:
            self._alarm.at(self._due[0])
        else:  # few requests among many processes: this one has none, and takes its time as the others do
            self._loop.call_later(max(0, self.window[1] - monotonic_ns()) / 1e9, self._finish)

    def _close(self) -> None:
        self._alarm.close()
        if self.stopped is not None or self.interrupted:
            # Nothing is known about the rest of the window.
            self.window = (self.window[0], min(self.window[1], monotonic_ns()))

    def _ring(self) -> None:
        now = monotonic_ns()
        while self._next < len(self._due) and self._due[self._next] <= now:
            request = self._requests[self._next]
            request.due_ns = self._due[self._next]
            self._waiting.append(request)
            self._next += 1
        if self._next < len(self._due):
            self._alarm.at(self._due[self._next])
        self._serve()

    def _freed(self, request: InFlightRequest) -> None:
        self._loop.call_soon(self._step, self._after, request)

    def _after(self, request: InFlightRequest) -> None:
        if self._is_over:
            return
        self._continue(request)
        self._serve()
        if self._next == len(self._due) and not (self._waiting or self._flying or self._later):
            self._finish()

    def _serve(self) -> None:
        room = len(self._waiting) if self._most is None else max(0, self._most - len(self._flying))
        batch = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        for request in batch:
            request.warmup = not self.window[0] <= request.due_ns < self.window[1]
        self._send(batch)

    def _send_due(self, batch: Sequence[InFlightRequest]) -> None:
        self._waiting.extend(batch)
        self._serve()
