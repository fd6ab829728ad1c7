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
        _, prompt, answer, _ = asked
        tokens = prompt + answer
        return -(-(tokens if self.window is None else min(tokens, self.window)) // self.tokens_per_block)


@dataclass
class Timeline:
    """Times in seconds, indexed by request; `first` is None for a request that never fits.

    ran    (number of equal steps, seconds of each, the step in their middle), in order
    most   most sequences in flight at once
    """

    asked: list[Asked] = field(default_factory=list)
    first: list[float | None] = field(default_factory=list)
    end: list[float | None] = field(default_factory=list)
    ran: list[tuple[int, float, Step]] = field(default_factory=list)
    most: int = 0

    @property
    def busy(self) -> float:
        """Seconds in steps."""
        return sum(repeat * took for repeat, took, _ in self.ran)

    @property
    def steps(self) -> int:
        return sum(repeat for repeat, _, _ in self.ran)


Follow = Callable[[int, float], "Asked | None"]


def simulate(requests: Iterable[Asked], places: Places, seconds: Seconds, *, follow: Follow | None = None) -> Timeline:
    """Serve `requests`; `follow` gives a client's next request when its request (index) has ended, which comes no
    earlier than any before it."""
    return _Simulation(requests, places, seconds, follow).run()


class _Simulation:
    """State of a simulation. A plan simulates a hundred thousand requests and more: methods treat all of a step at
    once."""

    def __init__(self, requests: Iterable[Asked], places: Places, seconds: Seconds, follow: Follow | None) -> None:
        self._places = places
        self._seconds = seconds
        self._follow = follow
        self._out = Timeline()
        self._need: list[int] = []  # blocks of each request
        self._coming: deque[tuple[float, int]] = deque()  # (arrival, index), in order
        self._waiting: deque[int] = deque()
        self._prompts: deque[int] = deque()  # requests taken whose prompt is not fully read
        self._read = 0  # prompt tokens read of the first of them
        self._ends: dict[int, list[int]] = {}  # step before which requests have ended -> these
        self._ending: list[int] = []  # those steps, as a heap
        self._active = self._decoding = self._blocks = 0
        self._cached = 0  # cached tokens of all decoding sequences
        self._step = 0
        self._now = 0.0
        self._seen = 0.0  # until when requests may have come that the next step takes
        self._add(requests)
        self._coming = deque(sorted(self._coming))

    def run(self) -> Timeline:
        coming, ending, waiting = self._coming, self._ending, self._waiting
        while True:
            if ending and ending[0] == self._step:
                self._finish()
            while coming and coming[0][0] <= self._seen:
                waiting.append(coming.popleft()[1])
            if waiting:
                self._take()
            if not self._active:
                if not coming:
                    return self._out
                self._now = self._seen = max(self._now, coming[0][0])
                continue
            self._advance()

    def _add(self, requests: Iterable[Asked]) -> None:
        out, places, coming = self._out, self._places, self._coming
        for one in requests:
            blocks = places.blocks(one)
            if blocks <= places.kv_blocks and (places.chunked or one.input - one.reused <= places.tokens):
                coming.append((one.arrival, len(out.asked)))
            self._need.append(blocks)
            out.asked.append(one)
            out.first.append(None)
            out.end.append(None)

    def _take(self) -> None:
        need, waiting, prompts = self._need, self._waiting, self._prompts
        active, batch, room = self._active, self._places.batch, self._places.kv_blocks - self._blocks
        while waiting and active < batch and need[waiting[0]] <= room:
            index = waiting.popleft()
            room -= need[index]
            active += 1
            prompts.append(index)
        self._active, self._blocks = active, self._places.kv_blocks - room
        self._out.most = max(self._out.most, active)

    def _finish(self) -> None:
        asked, ended = self._out.asked, self._ends.pop(heapq.heappop(self._ending))
        self._decoding -= len(ended)
        for index in ended:
            _, prompt, answer, _ = asked[index]
            self._cached -= prompt + answer
        self._leave(ended)

    def _leave(self, ended: Sequence[int]) -> None:
        need, end, now, follow = self._need, self._out.end, self._now, self._follow
        self._active -= len(ended)
        for index in ended:
            self._blocks -= need[index]
            end[index] = now
        if follow is not None:
            self._add([more for index in ended if (more := follow(index, now)) is not None])

    def _advance(self) -> None:
        decoding, now, coming = self._decoding, self._now, self._coming
        context, work, begun = self._chunks() if self._prompts else (0, 0.0, ())
        repeat = 1
        step = Step(context, decoding, self._cached, work, decoding + len(begun))
        took = self._seconds(step)
        if not context:
            repeat = self._ending[0] - self._step
            if coming and not self._waiting and took > 0:
                repeat = max(1, min(repeat, ceil((coming[0][0] - now) / took)))
            if repeat > 1:
                step = Step(0, decoding, self._cached + decoding * (repeat - 1) / 2, 0.0, decoding)
                took = self._seconds(step)
        self._out.ran.append((repeat, took, step))
        self._cached += repeat * decoding
        self._now = now = now + repeat * took
        self._seen = now - took if self._places.ahead else now
        self._step += repeat
        if begun:
            self._begin(begun)

    def _chunks(self) -> tuple[int, float, Sequence[int]]:
        """Prompt tokens read in this step, the work of their attention, and the requests whose prompt ends with it."""
        asked, prompts, chunked = self._out.asked, self._prompts, self._places.chunked
        whole = self._places.tokens - self._decoding
        room, read, work, begun = whole, self._read, 0.0, []
        while prompts and room > 0:
            _, prompt, _, reused = asked[prompts[0]]
            done = reused + read
            left = max(1, prompt - done)
            if left > room:
                # A prompt in one piece waits for an empty step, into which it fits; decoding sequences go on meanwhile.
                if chunked:
                    work += room * (done + room / 2)
                    read, room = read + room, 0
                break
            work += left * (done + left / 2)
            read, room = 0, room - left
            begun.append(prompts.popleft())
        self._read = read
        return whole - room, work, begun

    def _begin(self, begun: Sequence[int]) -> None:
        asked, first, ends, now, step = self._out.asked, self._out.first, self._ends, self._now, self._step
        done = []
        for index in begun:
            _, prompt, answer, _ = asked[index]
            first[index] = now
            if answer <= 1:
                done.append(index)
                continue
            self._decoding += 1
            self._cached += prompt + 1
            last = step + answer - 1
            if last in ends:
                ends[last].append(index)
            else:
                ends[last] = [index]
                heapq.heappush(self._ending, last)
        if done:
            self._leave(done)
