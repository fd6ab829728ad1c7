"""Closed and open loops driven against senders that answer on the event loop.

Where a moment matters it is a stamp that the sender gives, so a machine that stalls changes nothing: Simulated keeps a
time of its own, the others answer when the test says so.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from time import monotonic_ns
from typing import Any

from trtpipe.pipeline.bench.load.arrivals import slot_starts
from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.load.workload import Asks, ReadAnswer, RequestSpec
from trtpipe.pipeline.bench.loop.closed import ClosedLoop
from trtpipe.pipeline.bench.loop.driver import Driver, Limits
from trtpipe.pipeline.bench.loop.in_flight import Failure, InFlightRequest
from trtpipe.pipeline.bench.loop.open import OpenLoop
from trtpipe.pipeline.bench.loop.request_factory import RequestFactory
from trtpipe.pipeline.bench.protocols.transport import Answer, ReadIds
from trtpipe.pipeline.bench.workers.share import Share

MS = 1_000_000
FAR = 3600 * 10**9
PATIENT = Limits(request_s=3600, token_s=3600, failures=5)
NOBODY = Failure("ConnectFailed", "nobody there")


def drive(loop: asyncio.AbstractEventLoop, driver: Driver, start_ns: int = 0) -> list[InFlightRequest]:
    # The limit is for a load point that never ends; none of them waits for anything.
    loop.run_until_complete(asyncio.wait_for(driver.run(start_ns), 30))
    return driver.ended


class Sender:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[list[InFlightRequest]] = []
        self.flying: list[InFlightRequest] = []
        self.cancelled: list[InFlightRequest] = []
        self.most = 0

    @property
    def started(self) -> list[InFlightRequest]:
        return [exchange for batch in self.batches for exchange in batch]

    def described(self) -> dict[str, Any]:
        return {}

    async def warm(self, calls: int) -> None:
        pass

    async def close(self) -> None:
        pass

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        now = monotonic_ns()
        if batch:
            self.batches.append(list(batch))
        for exchange in batch:
            exchange.sent_ns = now
            self.flying.append(exchange)
        self.most = max(self.most, len(self.flying))

    def cancel(self, exchange: InFlightRequest) -> None:
        self.flying.remove(exchange)
        self.cancelled.append(exchange)

    def answer(self, exchange: InFlightRequest, failure: Failure | None = None) -> None:
        """End a request with one response, or with a failure."""
        stamp = monotonic_ns()
        self.flying.remove(exchange)
        if failure is None:
            exchange.receive(b"x", stamp)
        exchange.end(stamp, failure)


class Quick(Sender):
    """Answers in the next turn of the loop, one after the other; `failing` says which fail."""

    def __init__(self, failing: Callable[[InFlightRequest], bool] = lambda _: False) -> None:
        super().__init__()
        self.failing = failing

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        super().start(batch)
        for exchange in batch:
            asyncio.get_running_loop().call_soon(self.reply, exchange)

    def reply(self, exchange: InFlightRequest) -> None:
        if exchange in self.flying:
            self.answer(exchange, NOBODY if self.failing(exchange) else None)


class Simulated(Sender):
    """First token after 40 ms, then one every 10 ms, whatever the load, in a time of its own.

    A request leaves when it is due, and each turn of the loop ends those that end next; what follows them is sent
    before the turn after it.
    """

    def __init__(self, *, unit_ns: int = MS, failing: Callable[[InFlightRequest], bool] = lambda _: False) -> None:
        super().__init__()
        self.left_ns: dict[str, int] = {}  # by the clock
        self._unit_ns = unit_ns
        self._failing = failing
        self._ends: list[tuple[int, int, InFlightRequest]] = []
        self._numbers = count()
        self._wound = False

    def start(self, batch: Sequence[InFlightRequest]) -> None:
        super().start(batch)
        for exchange in batch:
            assert exchange.sent_ns is not None
            self.left_ns[exchange.id] = exchange.sent_ns
            exchange.sent_ns = exchange.due_ns
            end = exchange.due_ns + (30 + 10 * exchange.max_tokens) * self._unit_ns
            heapq.heappush(self._ends, (end, next(self._numbers), exchange))
        self._wind()

    def _wind(self) -> None:
        if self._ends and not self._wound:
            self._wound = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._wound = False
        while self._ends:
            end, _, exchange = heapq.heappop(self._ends)
            if exchange in self.flying:
                self.flying.remove(exchange)
                exchange.stamps.extend(
                    [end - 10 * left * self._unit_ns for left in reversed(range(exchange.max_tokens))]
                )
                exchange.end(end, NOBODY if self._failing(exchange) else None)
            if self._ends and self._ends[0][0] > end:
                break
        self._wind()


def asks(max_tokens: int = 8) -> Iterator[InFlightRequest]:
    for number in count():
        yield InFlightRequest(f"r{number}", b"", input_tokens=2, max_tokens=max_tokens)


def closed(sender: Sender, load: Closed, limits: Limits = PATIENT, **changes: Any) -> ClosedLoop:
    """A driver as a load point makes it, for answers of eight tokens."""
    warmups = [
        [
            InFlightRequest(f"w{place}.{number}", b"", input_tokens=2, max_tokens=length)
            for number, length in enumerate(lengths)
        ]
        for place, lengths in enumerate(load.warmup_lengths(place, 8) for place in range(load.concurrency))
    ]
    settings: dict[str, Any] = {"measured": islice(asks(), load.measured_requests), **changes}
    return ClosedLoop(
        sender, limits, warmups=warmups, starts_ns=slot_starts(load).tolist(), duration_s=load.duration_s, **settings
    )


def opened(sender: Sender, due_ms: Sequence[float], limits: Limits = PATIENT, **changes: Any) -> OpenLoop:
    settings: dict[str, Any] = {"window_ns": (0, FAR), "requests": list(islice(asks(), len(due_ms))), **changes}
    return OpenLoop(sender, limits, due_ns=[round(due * MS) for due in due_ms], **settings)


def of_place(ended: Sequence[InFlightRequest], place: int) -> list[InFlightRequest]:
    return sorted((exchange for exchange in ended if exchange.slot == place), key=lambda exchange: exchange.due_ns)


def end_of(exchange: InFlightRequest) -> int:
    assert exchange.end_ns is not None
    return exchange.end_ns


def measured(ended: Sequence[InFlightRequest]) -> list[InFlightRequest]:
    return [exchange for exchange in ended if not exchange.warmup]


def fillers() -> Iterator[InFlightRequest]:
    return (InFlightRequest(f"f{number}", b"", input_tokens=2, max_tokens=8) for number in count())


class Letters:
    """A codec of nothing: what is said does not matter here."""

    protocol = "letters"

    def described(self) -> dict[str, Any]:
        return {}

    def encode(self, identity: str, prompt: str, max_tokens: int, options: Any, messages: Any = None) -> bytes:
        return prompt.encode()

    def decode(self, exchange: InFlightRequest) -> Answer:
        return Answer(list(exchange.stamps), [1] * len(exchange.stamps))

    def text(self, request: InFlightRequest, read_ids: ReadIds | None = None) -> str:
        return "it follows that, and so on"

    def content(self, request: InFlightRequest) -> str:
        return " and so on"


class Sessions:
    """Conversations of so many turns, the answers' ends 1, 2, 3... ms before the next turn is due."""

    distinct = None

    def __init__(self, turns: int) -> None:
        self._asker, self._codec = RequestFactory(), Letters()
        self._asks = Asks((RequestSpec("once", 2, 1, number, last=False) for number in count()), self._next)
        self._turns = turns

    def _next(self, ask: RequestSpec, answer: ReadAnswer) -> RequestSpec | None:
        turn = ask.turn + 1
        prompt = ask.prompt + answer()
        if turn == self._turns:
            return None
        return RequestSpec(prompt, 2, 1, ask.session, turn=turn, think_s=turn / 1000, last=False)

    def asks(self, share: Share) -> Asks:
        return self._asks

    def first(self, number: int) -> list[InFlightRequest]:
        return [self._asker.make(self._codec, ask) for ask in islice(self._asks, number)]

    def follow(self, exchange: InFlightRequest) -> tuple[InFlightRequest, int] | None:
        return self._asker.follow(self._codec, self._asks, exchange)


def turn_of(exchange: InFlightRequest) -> tuple[int, int]:
    """Its session, and its turn there."""
    return exchange.session, exchange.turn


def by_session(ended: Sequence[InFlightRequest]) -> dict[int, list[InFlightRequest]]:
    found: dict[int, list[InFlightRequest]] = {}
    for exchange in sorted(ended, key=turn_of):
        found.setdefault(exchange.session, []).append(exchange)
    return found
