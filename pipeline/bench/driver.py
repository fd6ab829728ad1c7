"""When requests leave: a closed loop keeps a number of them in flight, an open loop sends each at its time.

Closed loop: each place sends its next request as soon as the last one has ended. Its warm-up requests are followed by
its measured ones without a pause and without waiting for the other places, so neither the burst in which all start nor
a second one after a drain is measured. The first warm-up request of place k is shortened to k/concurrency of the output
length: equal requests that start together would end together for ever, and this spreads the places over one request's
time before anything is measured. A place that finds no measured request left goes on with others until the last
measured one has ended: those of the end are answered under the load of all others.

Open loop: the times are set before the first request leaves, and nothing that server or client does moves them.

What comes in one turn of the event loop is read before anything is sent: reads carry stamps, and must not wait.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns, process_time_ns, time_ns
from typing import Any

from pipeline.bench.alarm import Alarm, Metronome
from pipeline.bench.exchange import Exchange
from pipeline.bench.wire.transport import Sender

# After a request that has ended: the next turn of its conversation and the nanoseconds until it is due, or None.
Follow = Callable[[Exchange], "tuple[Exchange, int] | None"]

SWEEP_S = 0.25
# Requests in a row that find no connection, after which a server is gone, however many others were to come.
UNREACHED = 5
# First tokens that the live view keeps.
RECENT = 512


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to give up.

    request_s  a request that has not ended after so many seconds has failed (Timeout)
    token_s    one of which nothing but signs of life has come for so many seconds has failed (Stalled)
    failures   so many in a row end the level: a dead server must not cost a timeout for every request that is left
    """

    request_s: float
    token_s: float
    failures: int


@dataclass(frozen=True, kw_only=True)
class Client:
    """What the client itself did in a level.

    lateness_ns    of the event loop, measured every 10 ms
    cpu_ns, wall_ns  of this process, from the first request to the last end
    peak           most requests in flight
    clock_step_ns  by which somebody set the time of day meanwhile
    """

    lateness_ns: list[int]
    cpu_ns: int
    wall_ns: int
    peak: int
    clock_step_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Live:
    """Where a level stands. `first_ns` are the last times to the first bytes of an answer; `left_s` seconds until the
    last request is due, None where a number of requests decides, not time."""

    elapsed_s: float
    warmed: int
    done: int
    failed: int
    in_flight: int
    responses: int
    first_ns: Sequence[int]
    left_s: float | None = None

    @classmethod
    def sum(cls, parts: Iterable[Live]) -> Live:
        """Of processes that share a level."""
        known = list(parts)
        counts = ("warmed", "done", "failed", "in_flight", "responses")
        return cls(
            elapsed_s=max(one.elapsed_s for one in known),
            first_ns=[first for one in known for first in one.first_ns],
            left_s=max((one.left_s for one in known if one.left_s is not None), default=None),
            **{name: sum(getattr(one, name) for one in known) for name in counts},
        )


class Driver:
    """What both loops share. One level; `ended` grows by each request as it ends, so that an interrupted one keeps what
    it has.

    stopped      why the level ended early, None if it did not
    interrupted  it was told to end
    """

    def __init__(
        self, sender: Sender, limits: Limits, follow: Follow | None, watch: Callable[[Live], None] | None
    ) -> None:
        self.ended: list[Exchange] = []
        self.cut = 0  # abandoned when the level ended
        self.stopped: str | None = None
        self.interrupted = False
        self.client: Client | None = None
        self._sender = sender
        self._limits = limits
        self._follow = follow
        self._watch = watch
        self._later: list[tuple[int, str, Exchange]] = []  # a heap: when it is due, its id
        self._flying: dict[str, Exchange] = {}
        self._peak = 0
        self._in_a_row = self._unreached = 0
        self._warmed = self._failed = self._responses = 0
        self._firsts: deque[int] = deque(maxlen=RECENT)
        self._sweeper: asyncio.TimerHandle | None = None
        self._over: asyncio.Future[None] | None = None  # from the moment it runs

    async def run(self, start_ns: int = 0) -> None:
        """Begin at `start_ns`, or now where it is 0. Returns when the last request has ended, or the level was
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
            if self.interrupted:  # before it began
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
            for exchange in abandoned:
                exchange.on_ended = None
            for exchange in abandoned:
                self._sender.cancel(exchange)
            self.cut = len(abandoned)
            self._flying.clear()
            self.client = Client(
                lateness_ns=metronome.lateness_ns, cpu_ns=cpu, wall_ns=wall, peak=self._peak, clock_step_ns=apart
            )

    def interrupt(self) -> None:
        """End now, or as soon as it begins; what is in flight is abandoned and counted in `cut`."""
        self.interrupted = True
        self._finish()

    # What a loop has to say

    @property
    def _until_ns(self) -> int | None:
        """When the last request is due, where that is known."""
        raise NotImplementedError

    def _begin(self) -> None:
        raise NotImplementedError

    def _freed(self, exchange: Exchange) -> None:
        """A request has ended."""
        raise NotImplementedError

    def _close(self) -> None:
        """Nothing more is sent."""

    def _send_due(self, batch: Sequence[Exchange]) -> None:
        """Turns of conversations whose time has come."""
        self._send(batch)

    # What it may use

    def _continue(self, exchange: Exchange) -> bool:
        """Have the next turn of a conversation sent when it is due; False where there is none."""
        following = None if self._follow is None else self._follow(exchange)
        if following is None:
            return False
        turn, think_ns = following
        assert exchange.end_ns is not None
        turn.slot, turn.warmup = exchange.slot, exchange.warmup
        turn.due_ns = exchange.end_ns + think_ns
        heapq.heappush(self._later, (turn.due_ns, turn.id, turn))
        self._later_alarm.at(self._later[0][0])
        return True

    def _send(self, batch: Sequence[Exchange]) -> None:
        if not batch:
            return
        for exchange in batch:
            exchange.on_ended = self._ended
            self._flying[exchange.id] = exchange
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
        """Of a callback: the loop would log its error, and the level wait for ever."""
        try:
            step(*arguments)
        except Exception as error:
            self._finish(error)

    # What happens

    def _ring_later(self) -> None:
        now = monotonic_ns()
        batch = []
        while self._later and self._later[0][0] <= now:
            batch.append(heapq.heappop(self._later)[2])
        if self._later:
            self._later_alarm.at(self._later[0][0])
        self._send_due(batch)

    def _ended(self, exchange: Exchange) -> None:
        del self._flying[exchange.id]
        self.ended.append(exchange)
        self._responses += len(exchange.stamps)
        self._warmed += exchange.warmup
        if exchange.failure is None:
            self._in_a_row = self._unreached = 0
            if exchange.stamps and exchange.sent_ns is not None:
                self._firsts.append(exchange.stamps[0] - exchange.sent_ns)
        else:
            self._failed += not exchange.warmup
            self._in_a_row += 1
            last = exchange.failure
            self._unreached = self._unreached + 1 if last.kind == "ConnectFailed" else 0
            most = self._limits.failures
            if (self._in_a_row >= most or self._unreached >= min(most, UNREACHED)) and self.stopped is None:
                self.stopped = f"{self._in_a_row} requests in a row failed, the last by {last.kind}: {last.message}"
                self._finish()
        self._freed(exchange)

    def _sweep(self) -> None:
        """Now and then: who has waited too long, and what is there to show."""
        now = monotonic_ns()
        request_ns, token_ns = self._limits.request_s * 1e9, self._limits.token_s * 1e9
        for exchange in list(self._flying.values()):
            kind, told = "", ""
            # One that waits for a connection waits no longer either.
            sent = exchange.due_ns if exchange.sent_ns is None else exchange.sent_ns
            if now - sent > request_ns:
                kind, told = "Timeout", f"not over within {self._limits.request_s:g} s"
            elif exchange.sent_ns is not None and now - (exchange.heard_ns() or sent) > token_ns:
                kind, told = "Stalled", f"nothing more within {self._limits.token_s:g} s"
            if kind:
                self._sender.cancel(exchange)
                responses = sum(exchange.mark in data for data in exchange.data)
                exchange.fail(kind, f"{told}, after {responses} responses")
        if self._watch is not None:
            self._watch(
                Live(
                    elapsed_s=(now - self._began) / 1e9,
                    warmed=self._warmed,
                    done=len(self.ended) - self._warmed,
                    failed=self._failed,
                    in_flight=len(self._flying),
                    responses=self._responses + sum(len(exchange.stamps) for exchange in self._flying.values()),
                    first_ns=self._firsts,
                    left_s=None if self._until_ns is None else max(0.0, (self._until_ns - now) / 1e9),
                )
            )
        self._sweeper = self._loop.call_later(SWEEP_S, self._step, self._sweep)


class ClosedLoop(Driver):
    """A place for each of `warmups`.

    warmups     requests of each place before its measured ones, in order
    measured    the others, for whichever place is free
    fillers     without end, for places that are ready before the last has begun, or find none left while some are still
                answered: requests or conversations, as those that are measured; None: those measure at once, these rest
    starts_ns   when each place begins, from the start
    duration_s  measure so long from the moment the last place has warmed up, instead of until `measured` ends
    """

    def __init__(
        self, sender: Sender, limits: Limits, *, warmups: Sequence[Sequence[Exchange]], measured: Iterator[Exchange],
        starts_ns: Sequence[int], fillers: Iterator[Exchange] | None = None, duration_s: float | None = None,
        follow: Follow | None = None, watch: Callable[[Live], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sender, limits, follow, watch)
        self._warmups = [deque(mine) for mine in warmups]
        self._measured = measured
        self._fillers = fillers
        self._starts = starts_ns
        self._duration_s = duration_s
        self._deadline: int | None = None
        self._warm: set[int] = set()
        # Places whose request, or conversation, is measured; and those at a filler.
        self._measuring: set[int] = set()
        self._filling: set[int] = set()
        self._exhausted = False  # nothing that is measured is left to begin
        self._resting = 0
        self._free: list[tuple[int, int, Exchange | None]] = []  # place, since when, its last request
        self._beginning: deque[tuple[int, int]] = deque()
        self._whole_ns = 0  # by the clock: when the last place begins

    @property
    def _until_ns(self) -> int | None:
        return self._deadline

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

    def _freed(self, exchange: Exchange) -> None:
        if not self._free:
            self._loop.call_soon(self._step, self._serve)
        assert exchange.end_ns is not None
        self._free.append((exchange.slot, exchange.end_ns, exchange))

    def _serve(self) -> None:
        if self._is_over:
            return
        free = [one for one in self._free if not self._goes_on(*one)]
        self._free.clear()
        places = [place for place, _, _ in free]
        self._measuring.difference_update(places)
        self._filling.difference_update(places)
        batch: list[Exchange] = []
        for place, since, _ in free:
            exchange = self._next(place, since)
            if exchange is None:
                self._resting += 1
            else:
                exchange.slot = place
                exchange.due_ns = since
                batch.append(exchange)
        self._send(batch)
        if self._exhausted and not self._measuring:  # nobody waits for turns of fillers that are still to come
            self._resting += len(self._later)
            self._later.clear()
        if self._resting == len(self._warmups):
            self._finish()

    def _goes_on(self, place: int, since: int, last: Exchange | None) -> bool:
        if last is None:
            return False
        wanted = (place in self._measuring and not self._is_past(since)) or (
            place in self._filling and self._needs_fillers(since)
        )
        return wanted and self._continue(last)

    def _needs_fillers(self, since: int) -> bool:
        """Not all places have begun, or some are still at the last that is measured."""
        return since < self._whole_ns or (self._exhausted and bool(self._measuring))

    def _is_past(self, moment: int) -> bool:
        return self._deadline is not None and moment >= self._deadline

    def _send_due(self, batch: Sequence[Exchange]) -> None:
        late = [turn for turn in batch if not turn.warmup and self._is_past(turn.due_ns)]
        self._send([turn for turn in batch if turn not in late])
        self._free.extend((turn.slot, turn.due_ns, None) for turn in late)
        self._serve()

    def _next(self, place: int, since: int) -> Exchange | None:
        if self._warmups[place]:
            return self._unmeasured(self._warmups[place].popleft())
        if place not in self._warm:
            self._warm.add(place)
            if len(self._warm) == len(self._warmups) and self._duration_s is not None:
                self._deadline = since + int(self._duration_s * 1e9)
        if self._fillers is None or since >= self._whole_ns:
            exchange = None if self._is_past(since) else next(self._measured, None)
            if exchange is not None:
                self._measuring.add(place)
                return exchange
            self._exhausted = True
        # A warm-up still under way is not waited for: what comes after it is not measured either.
        if self._fillers is None or not self._needs_fillers(since):
            return None
        self._filling.add(place)
        return self._unmeasured(next(self._fillers))

    @staticmethod
    def _unmeasured(exchange: Exchange) -> Exchange:
        exchange.warmup = True
        return exchange


class OpenLoop(Driver):
    """Each request at its time.

    due_ns         of each of `exchanges`, from the start, in order
    window_ns      from the start: what is due outside is not measured
    max_in_flight  more than that wait, and their dispatch delay says so; None for no bound
    """

    def __init__(
        self, sender: Sender, limits: Limits, *, exchanges: Sequence[Exchange], due_ns: Sequence[int],
        window_ns: tuple[int, int], max_in_flight: int | None = None, follow: Follow | None = None,
        watch: Callable[[Live], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sender, limits, follow, watch)
        self._exchanges = exchanges
        self._offsets = due_ns
        self._window_ns = window_ns
        self.window = (0, 0)  # the same once it has begun, by the clock
        self._most = max_in_flight
        self._next = 0
        self._waiting: deque[Exchange] = deque()

    @property
    def _until_ns(self) -> int | None:
        return self._due[-1] if self._due else None

    def _begin(self) -> None:
        # A little later, so that the first is no later than the others.
        start = self._start_ns or monotonic_ns() + 20_000_000
        self._due = [start + offset for offset in self._offsets]
        self.window = (start + self._window_ns[0], start + self._window_ns[1])
        self._alarm = Alarm(self._loop, partial(self._step, self._ring))
        self._alarm.at(self._due[0])

    def _close(self) -> None:
        self._alarm.close()
        if self.stopped is not None or self.interrupted:
            # Of the rest nothing is known.
            self.window = (self.window[0], min(self.window[1], monotonic_ns()))

    def _ring(self) -> None:
        now = monotonic_ns()
        while self._next < len(self._due) and self._due[self._next] <= now:
            exchange = self._exchanges[self._next]
            exchange.due_ns = self._due[self._next]
            self._waiting.append(exchange)
            self._next += 1
        if self._next < len(self._due):
            self._alarm.at(self._due[self._next])
        self._serve()

    def _freed(self, exchange: Exchange) -> None:
        self._loop.call_soon(self._step, self._after, exchange)

    def _after(self, exchange: Exchange) -> None:
        if self._is_over:
            return
        self._continue(exchange)
        self._serve()
        if self._next == len(self._due) and not (self._waiting or self._flying or self._later):
            self._finish()

    def _serve(self) -> None:
        room = len(self._waiting) if self._most is None else max(0, self._most - len(self._flying))
        batch = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        for exchange in batch:
            exchange.warmup = not self.window[0] <= exchange.due_ns < self.window[1]
        self._send(batch)

    def _send_due(self, batch: Sequence[Exchange]) -> None:
        self._waiting.extend(batch)
        self._serve()
