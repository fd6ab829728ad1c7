"""Driver of a load point, closed or open: it passes requests to a sender, records their ends, and enforces time limits.

All bytes that arrive in one turn of the event loop are read before anything is sent: reads are stamped and must not
wait.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns, process_time_ns, time_ns
from typing import Any

from trtpipe.pipeline.bench.loop.alarm import Alarm, Metronome
from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest
from trtpipe.pipeline.bench.protocols.transport import Sender

# Called after a request has ended; returns the next turn of its conversation and nanoseconds until it is due, or None.
Follow = Callable[[InFlightRequest], "tuple[InFlightRequest, int] | None"]

SWEEP_S = 0.25
# After this many requests in a row without a connection, the server counts as gone, however many requests are left.
UNREACHED = 5
# Most first-token times kept for the live view.
RECENT = 512


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits after which requests or the load point are given up.

    request_s  a request that has not ended after this many seconds has failed (Timeout)
    token_s    a request without data, keep-alives aside, for this many seconds has failed (Stalled)
    failures   this many failures in a row end the load point: a dead server must not cost a timeout per request
    """

    request_s: float
    token_s: float
    failures: int


@dataclass(frozen=True, kw_only=True)
class Client:
    """Measurements of the client itself in a load point.

    lateness_ns    lateness of the event loop, measured every 10 ms
    cpu_ns, wall_ns  CPU and wall time of this process, from the first request to the last end
    peak           most requests in flight
    clock_step_ns  amount by which the time of day was set meanwhile
    """

    lateness_ns: list[int]
    cpu_ns: int
    wall_ns: int
    peak: int
    clock_step_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Live:
    """Progress of a load point. `first_ns` are the latest times to first byte of an answer; `left_s` seconds until the
    last request is due, None where a number of requests ends the load point. `made` of `to_make` requests have been
    made; both are 0 once the load point has begun."""

    elapsed_s: float
    warmed: int
    done: int
    failed: int
    in_flight: int
    responses: int
    first_ns: Sequence[int]
    left_s: float | None = None
    made: int = 0
    to_make: int = 0

    @classmethod
    def sum(cls, parts: Iterable[Live]) -> Live:
        """Combined progress of processes that share a load point."""
        known = list(parts)
        counts = ("warmed", "done", "failed", "in_flight", "responses", "made", "to_make")
        return cls(
            elapsed_s=max(one.elapsed_s for one in known),
            first_ns=[first for one in known for first in one.first_ns],
            left_s=max((one.left_s for one in known if one.left_s is not None), default=None),
            **{name: sum(getattr(one, name) for one in known) for name in counts},
        )


# Progress before a load point's first request.
NOTHING = Live(elapsed_s=0, warmed=0, done=0, failed=0, in_flight=0, responses=0, first_ns=())


class Driver:
    """Common part of both loops; drives one load point. Each request is added to `ended` as it ends, so that an
    interrupted load point keeps its results.

    stopped      why the load point ended early, None if it did not
    interrupted  whether `interrupt` was called
    """

    def __init__(
        self, sender: Sender, limits: Limits, follow: Follow | None, watch: Callable[[Live], None] | None
    ) -> None:
        self.ended: list[InFlightRequest] = []
        self.cut = 0  # requests abandoned when the load point ended
        self.stopped: str | None = None
        self.interrupted = False
        self.client: Client | None = None
        self._sender = sender
        self._limits = limits
        self._follow = follow
        self._watch = watch
        self._later: list[tuple[int, str, InFlightRequest]] = []  # later turns, as a heap: due time, id
        self._flying: dict[str, InFlightRequest] = {}
        self._peak = 0
        self._in_a_row = self._unreached = 0
        self._warmed = self._failed = self._responses = 0
        self._firsts: deque[int] = deque(maxlen=RECENT)
        self._sweeper: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] | None = None  # set once it runs

    async def run(self, start_ns: int = 0) -> None:
        """Begin at `start_ns`, or now where it is 0. Returns when the last request has ended, or the load point was
        stopped or interrupted."""
        self._start_ns = start_ns
        self._loop = asyncio.get_running_loop()
        over = self._over = self._loop.create_future()
        metronome = Metronome(self._loop)
        self._later_alarm = Alarm(self._loop, partial(self._step, self._ring_later))
        cpu, wall = process_time_ns(), monotonic_ns()
        self._began = wall
        apart = time_ns() - wall
        self._sweeper = self._loop.call_later(SWEEP_S, self._step, self._sweep)
        try:
            self._begin()
            if self.interrupted:  # before `run` was called
                self._finish()
            await over
        finally:
            apart = time_ns() - monotonic_ns() - apart
            wall, cpu = monotonic_ns() - wall, process_time_ns() - cpu
            self._sweeper.cancel()
            metronome.close()
            self._later_alarm.close()
            self._close()
            abandoned = list(self._flying.values())
            for request in abandoned:
                request.on_ended = None
            for request in abandoned:
                self._sender.cancel(request)
            self.cut = len(abandoned)
            self._flying.clear()
            self.client = Client(
                lateness_ns=metronome.lateness_ns, cpu_ns=cpu, wall_ns=wall, peak=self._peak, clock_step_ns=apart
            )

    def interrupt(self) -> None:
        """End now, or as soon as the load point begins; requests in flight are abandoned and counted in `cut`."""
        self.interrupted = True
        self._finish()

    # Implemented by each loop

    @property
    def _until_ns(self) -> int | None:
        """When the last request is due, where it is known."""
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _freed(self, request: InFlightRequest) -> None:
        """Called when a request has ended."""
        raise NotImplementedError

    def _close(self) -> None:
        """Called when nothing more is sent."""

    def _send_due(self, batch: Sequence[InFlightRequest]) -> None:
        """Send turns of conversations that are due."""
        self._send(batch)

    # Used by each loop

    def _continue(self, request: InFlightRequest, latest_ns: int | None = None) -> bool:
        """Schedule the next turn of a conversation for its due time, or for `latest_ns` if that is earlier; False
        where there is no next turn."""
        following = None if self._follow is None else self._follow(request)
        if following is None:
            return False
        turn, think_ns = following
        assert request.end_ns is not None
        turn.slot, turn.warmup = request.slot, request.warmup
        turn.due_ns = request.end_ns + think_ns if latest_ns is None else min(request.end_ns + think_ns, latest_ns)
        heapq.heappush(self._later, (turn.due_ns, turn.id, turn))
        self._later_alarm.at(self._later[0][0])
        return True

    def _cap_later(self, latest_ns: int) -> None:
        """Move measured turns that are due later to this time."""
        for _, _, turn in self._later:
            turn.due_ns = turn.due_ns if turn.warmup else min(turn.due_ns, latest_ns)
        self._later = sorted((turn.due_ns, name, turn) for _, name, turn in self._later)
        if self._later:
            self._later_alarm.at(self._later[0][0])

    def _send(self, batch: Sequence[InFlightRequest]) -> None:
        if not batch:
            return
        for request in batch:
            request.on_ended = self._ended
            self._flying[request.id] = request
        self._peak = max(self._peak, len(self._flying))
        self._sender.start(batch)

    @property
    def _is_over(self) -> bool:
        return self._over is None or self._over.done()

    def _finish(self, error: Exception | None = None) -> None:
        if self._over is None or self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _step(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run a callback; its error ends the load point, which would never end if asyncio only logged the error."""
        try:
            step(*arguments)
        except Exception as error:
            self._finish(error)

    # Events

    def _ring_later(self) -> None:
        now = monotonic_ns()
        batch = []
        while self._later and self._later[0][0] <= now:
            batch.append(heapq.heappop(self._later)[2])
        if self._later:
            self._later_alarm.at(self._later[0][0])
        self._send_due(batch)

    def _ended(self, request: InFlightRequest) -> None:
        del self._flying[request.id]
        self.ended.append(request)
        self._responses += len(request.stamps)
        self._warmed += request.warmup
        if request.failure is None:
            self._in_a_row = self._unreached = 0
            if request.stamps and request.sent_ns is not None:
                self._firsts.append(request.stamps[0] - request.sent_ns)
        else:
            self._failed += not request.warmup
            self._in_a_row += 1
            last = request.failure
            self._unreached = self._unreached + 1 if last.kind == "ConnectFailed" else 0
            most = self._limits.failures
            if (self._in_a_row >= most or self._unreached >= min(most, UNREACHED)) and self.stopped is None:
                self.stopped = f"{self._in_a_row} requests in a row failed, the last by {last.kind}: {last.message}"
                self._finish()
        self._freed(request)

    def _sweep(self) -> None:
        """Called now and then: fail requests that have waited too long, and report progress."""
        now = monotonic_ns()
        request_ns, token_ns = self._limits.request_s * 1e9, self._limits.token_s * 1e9
        for request in list(self._flying.values()):
            kind, told = "", ""
            # A request that still waits for a connection has waited since it was due.
            sent = request.due_ns if request.sent_ns is None else request.sent_ns
            if now - sent > request_ns:
                kind, told = "Timeout", f"not over within {self._limits.request_s:g} s"
            elif request.sent_ns is not None and now - (request.heard_ns() or sent) > token_ns:
                kind, told = "Stalled", f"nothing more within {self._limits.token_s:g} s"
            if kind:
                self._sender.cancel(request)
                responses = sum(request.mark in data for data, _ in request.reads())
                request.fail(kind, f"{told}, after {responses} responses")
            else:
                request.compact()
        if self._watch is not None:
            self._watch(
                Live(
                    elapsed_s=(now - self._began) / 1e9,
                    warmed=self._warmed,
                    done=len(self.ended) - self._warmed,
                    failed=self._failed,
                    in_flight=len(self._flying),
                    responses=self._responses + sum(len(request.stamps) for request in self._flying.values()),
                    first_ns=self._firsts,
                    left_s=None if self._until_ns is None else max(0.0, (self._until_ns - now) / 1e9),
                )
            )
        self._sweeper = self._loop.call_later(SWEEP_S, self._step, self._sweep)
