"""Simulation of in-flight batching, step by step: requests that the scheduler takes into a step, and token times.

A discrete-event simulation of TensorRT-LLM's guaranteed_no_evict policy: a request is taken when a slot of the batch is
free and the KV cache has room for all the tokens it may ever have; every decoding sequence gets a token in each step,
and prompts fill the rest of max_num_tokens, in chunks where context chunking is on. Steps in which no request begins or
ends are simulated together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from trtpipe.pipeline.planner.cost import Step

Seconds = Callable[[Step], float]


class Asked(NamedTuple):
    """A request: arrival time in seconds, prompt and output tokens, and prompt tokens in a reused cache.

    A tuple, since a plan makes a hundred thousand.
    """

    arrival: float
    input: int
    output: int
    reused: int = 0


@dataclass(frozen=True, kw_only=True)
class Places:
    """Capacity of the scheduler.

    batch      sequences in flight
    tokens     tokens of a step
    kv_blocks  number of blocks of tokens_per_block tokens
    chunked    whether a prompt may be spread over steps
    window     tokens of a sequence that the cache keeps; None: all
    ahead      whether a step is put together while the one before runs: requests that come meanwhile miss both
    """

    batch: int
    tokens: int
    kv_blocks: int
    tokens_per_block: int = 32
    chunked: bool = True
    window: int | None = None
    ahead: bool = False

    def blocks(self, asked: Asked) -> int:
        tokens = asked.input + asked.output
        return -(-(tokens if self.window is None else min(tokens, self.window)) // self.tokens_per_block)


@dataclass
class Timeline:
    """Times in seconds, indexed by request; `first` is None for a request that never fits.

    gaps   (seconds, number of tokens that came after that time) of every step with decoding sequences
    busy   seconds in steps
    steps  number of steps
    most   most sequences in flight at once
    """

    asked: list[Asked] = field(default_factory=list)
    first: list[float | None] = field(default_factory=list)
    end: list[float | None] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    busy: float = 0.0
    steps: int = 0
    most: int = 0


Follow = Callable[[int, float], "Asked | None"]


def simulate(
    requests: Iterable[Asked],
    places: Places,
    seconds: Seconds,
    *,
    follow: Follow | None = None,
    watch: Callable[[int, Step], None] | None = None,
) -> Timeline:
    """Serve `requests`; `follow` gives a client's next request when its request (index) has ended.

    `watch` is called for each run of equal steps, with their number and the step in their middle.
    """
    return _Simulation(requests, places, seconds, follow, watch).run()


class _Simulation:
    def __init__(
        self, requests: Iterable[Asked], places: Places, seconds: Seconds, follow: Follow | None,
        watch: Callable[[int, Step], None] | None,
    ) -> None:  # fmt: skip
        self._places = places
        self._seconds = seconds
        self._follow = follow
        self._watch = watch
        self._out = Timeline()
        self._need: list[int] = []  # blocks of each request
        self._coming: list[tuple[float, int]] = []
        self._waiting: deque[int] = deque()
        self._prompts: deque[int] = deque()  # requests taken whose prompt is not fully read
        self._read = 0  # prompt tokens read of the first of them
        self._ending: list[tuple[int, int]] = []  # (step before which the request has ended, index)
        self._active = self._decoding = self._blocks = 0
        self._cached = 0  # cached tokens of all decoding sequences
        self._step = 0
        self._now = 0.0
        self._seen = 0.0  # until when requests may have come that the next step takes
        for asked in requests:
            self._add(asked)

    def run(self) -> Timeline:
        coming, ending, waiting = self._coming, self._ending, self._waiting
        while True:
            if ending and ending[0][0] == self._step:
                self._finish()
            while coming and coming[0][0] <= self._seen:
                waiting.append(heapq.heappop(coming)[1])
            if waiting:
                self._take()
            if not self._active:
                if not coming:
                    return self._out
                self._now = self._seen = max(self._now, coming[0][0])
                continue
            self._advance()

    def _add(self, asked: Asked) -> None:
        out, need = self._out, self._places.blocks(asked)
        out.asked.append(asked)
        out.first.append(None)
        out.end.append(None)
        self._need.append(need)
        if need <= self._places.kv_blocks and (
            self._places.chunked or asked.input - asked.reused <= self._places.tokens
        ):
            heapq.heappush(self._coming, (asked.arrival, len(out.asked) - 1))

    def _take(self) -> None:
        while self._waiting and self._active < self._places.batch:
            need = self._need[self._waiting[0]]
            if self._blocks + need > self._places.kv_blocks:
                return
            self._blocks += need
            self._active += 1
            self._prompts.append(self._waiting.popleft())
        self._out.most = max(self._out.most, self._active)

    def _finish(self) -> None:
        asked = self._out.asked
        while self._ending and self._ending[0][0] == self._step:
            _, index = heapq.heappop(self._ending)
            self._decoding -= 1
            self._cached -= asked[index].input + asked[index].output
            self._leave(index)

    def _leave(self, index: int) -> None:
        self._active -= 1
        self._blocks -= self._need[index]
        self._out.end[index] = self._now
        if self._follow is not None:
            more = self._follow(index, self._now)
            if more is not None:
                self._add(more)

    def _advance(self) -> None:
        out, decoding, now = self._out, self._decoding, self._now
        context, work, begun = self._chunks() if self._prompts else (0, 0.0, ())
        repeat = 1
        step = Step(context, decoding, self._cached, work, decoding + len(begun))
        took = self._seconds(step)
        if not context:
            repeat = self._ending[0][0] - self._step
            if self._coming and not self._waiting and took > 0:
                repeat = max(1, min(repeat, ceil((self._coming[0][0] - now) / took)))
            if repeat > 1:
                step = Step(0, decoding, self._cached + decoding * (repeat - 1) / 2, 0.0, decoding)
                took = self._seconds(step)
        if self._watch is not None:
            self._watch(repeat, step)
        if decoding:
            out.gaps.append((took, repeat * decoding))
            self._cached += repeat * decoding
        spell = repeat * took
        self._now = now = now + spell
        self._seen = now - took if self._places.ahead else now
        out.busy += spell
        out.steps += repeat
        self._step += repeat
        for index in begun:
            self._begin(index)

    def _chunks(self) -> tuple[int, float, Sequence[int]]:
        """Prompt tokens read in this step, the work of their attention, and the requests whose prompt ends with it."""
        places, room = self._places, self._places.tokens - self._decoding
        context, work, begun = 0, 0.0, []
        while self._prompts and room > 0:
            index = self._prompts[0]
            asked = self._out.asked[index]
            done = asked.reused + self._read
            left = max(1, asked.input - done)
            if left > room and not places.chunked:
                # The prompt fits into an empty step and waits for one; decoding sequences go on meanwhile.
                break
            take = min(left, room)
            work += take * (done + take / 2)
            context, room = context + take, room - take
            if take < left:
                self._read += take
                break
            self._read = 0
            begun.append(self._prompts.popleft())
        return context, work, begun

    def _begin(self, index: int) -> None:
        asked = self._out.asked[index]
        self._out.first[index] = self._now
        if asked.output <= 1:
            self._leave(index)
            return
        self._decoding += 1
        self._cached += asked.input + 1
        heapq.heappush(self._ending, (self._step + asked.output - 1, index))
