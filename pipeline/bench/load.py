"""Closed loop: a fixed number of requests in flight.

Each of `concurrency` slots sends its next request as soon as the last one has ended. A slot's warm-up requests
are followed by its measured ones without a pause and without waiting for the other slots, so neither the burst
in which all slots start nor a second one after a drain is measured. The first warm-up request of slot k is
shortened to k/concurrency of the output length: equal requests that start together would end together for
ever, and this spreads the slots over one request's time before anything is measured.

The last requests of a level finish while the load falls; throughput leaves that stretch out (see metrics).
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.bench.client import Transport
from pipeline.bench.record import Failure, RequestFailed, RequestRecord

Clock = Callable[[], int]


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """The load of one level. Exactly one of `requests` and `duration_s` is set.

    requests    measured requests, over all slots
    duration_s  seconds for which measured requests are sent, from the moment the last slot has warmed up
    warmup      full-length warm-up requests of each slot
    """

    concurrency: int
    requests: int | None = None
    duration_s: float | None = None
    warmup: int = 1

    def __post_init__(self) -> None:
        if (self.requests is None) == (self.duration_s is None):
            raise ValueError("a closed loop ends by requests or by duration_s")

    def warmup_lengths(self, slot: int, output_tokens: int) -> list[int]:
        """Output lengths, in tokens, of a slot's warm-up requests in order."""
        if self.warmup == 0:
            return []
        shortened = math.ceil(output_tokens * slot / self.concurrency)
        return [shortened] * (shortened > 0) + [output_tokens] * self.warmup

    def total_requests(self, output_tokens: int) -> int | None:
        """Requests sent in all, warm-up included; None when a duration decides."""
        if self.requests is None:
            return None
        slots = range(self.concurrency)
        return self.requests + sum(len(self.warmup_lengths(slot, output_tokens)) for slot in slots)


class ClosedLoopDriver:
    """Drives one level. `records` grows by each request as it ends, so an interrupted level keeps what it has.

    prompts   an endless or long enough iterator of prompts of `input_tokens` tokens
    finished  called with each ended record, inside the loop that measures: it must be quick
    stopped   why the level ended early, None if it did not
    """

    def __init__(
        self,
        load: ClosedLoop,
        transport: Transport,
        prompts: Iterator[str],
        *,
        input_tokens: int,
        output_tokens: int,
        timeout_s: float,
        clock: Clock = time.perf_counter_ns,
        finished: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.load = load
        self.records: list[RequestRecord] = []
        self.stopped: str | None = None
        self._transport = transport
        self._prompts = prompts
        self._input_tokens = input_tokens
        self._output_tokens = output_tokens
        self._timeout_s = timeout_s
        self._clock = clock
        self._finished = finished
        self._issued = 0
        self._warming = load.concurrency
        self._deadline_ns: int | None = None
        self._failures_in_a_row = 0
        # A dead server must not cost a timeout for every request that is left.
        self._failure_limit = max(5, 2 * load.concurrency)

    async def run(self) -> None:
        """Returns when the last request has ended. An exception other than RequestFailed ends the run."""
        slots = [asyncio.ensure_future(self._slot(slot)) for slot in range(self.load.concurrency)]
        try:
            await asyncio.gather(*slots)
        finally:
            for task in slots:
                task.cancel()
            await asyncio.gather(*slots, return_exceptions=True)

    async def _slot(self, slot: int) -> None:
        due = self._clock()
        for length in self.load.warmup_lengths(slot, self._output_tokens):
            if self.stopped:
                return
            due = await self._request(slot, True, length, due)
        self._warming -= 1
        if self._warming == 0 and self.load.duration_s is not None:
            self._deadline_ns = due + int(self.load.duration_s * 1e9)
        while not self.stopped and self._take():
            due = await self._request(slot, False, self._output_tokens, due)

    def _take(self) -> bool:
        if self.load.requests is not None and self._issued >= self.load.requests:
            return False
        if self._deadline_ns is not None and self._clock() >= self._deadline_ns:
            return False
        self._issued += 1
        return True

    async def _request(self, slot: int, warmup: bool, max_tokens: int, due_ns: int) -> int:
        """Send one request and wait for its end; returns the moment at which the slot is free again."""
        record = RequestRecord(
            request_id=str(uuid.uuid4()),
            slot=slot,
            warmup=warmup,
            input_tokens=self._input_tokens,
            max_tokens=max_tokens,
            due_ns=due_ns,
        )
        prompt = next(self._prompts)
        try:
            await asyncio.wait_for(self._transport.send(prompt, record), self._timeout_s)
        except RequestFailed as error:
            record.failure = error.failure
        except asyncio.TimeoutError:
            record.failure = Failure("Timeout", f"not finished {self._timeout_s:g} s after it was sent")
        end = record.end_ns = self._clock()
        self.records.append(record)
        self._failures_in_a_row = self._failures_in_a_row + 1 if record.failure else 0
        if record.failure and self._failures_in_a_row >= self._failure_limit:
            self.stopped = f"{self._failures_in_a_row} requests in a row failed, the last by {record.failure.kind}"
        if self._finished is not None:
            self._finished(record)
        return end
