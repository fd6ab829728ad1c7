"""A closed loop around an engine in this process: what `trtpipe bench` asks of a server, without the server."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trtpipe.pipeline.bench.load.loads import Closed
from trtpipe.pipeline.bench.monitors.gpu import GpuSampler

PROMPT_TOKENS = OUTPUT_TOKENS = 128
# Of `waves`: how often every place is taken.
WAVES = 4


class InProcess(Protocol):
    """An engine that is stepped: what it made in a step, as (request, new tokens, whether it has ended)."""

    @property
    def vocabulary(self) -> int: ...

    def add(self, number: int, prompt: Sequence[int], new: int) -> None: ...

    def step(self) -> Iterable[tuple[int, int, bool]]: ...

    def drain(self) -> None: ...


@dataclass
class _Slot:
    warmups: list[int]


def measure(engine: InProcess, levels: Sequence[int], seconds: float | None) -> dict[str, dict[str, float]]:
    """What `waves` gives by concurrency, and `steady` for so many seconds; None: `waves` alone."""
    found: dict[str, dict[str, float]] = {}
    for concurrency in levels:
        speed = found[str(concurrency)] = waves(engine, concurrency)
        if seconds is not None:
            speed["steady"] = steady(engine, concurrency, seconds)
        print(concurrency, speed, file=sys.stderr, flush=True)
    return found


def waves(
    engine: InProcess, concurrency: int, prompt: int = PROMPT_TOKENS, new: int = OUTPUT_TOKENS, waves: int = WAVES
) -> dict[str, float]:
    """Output tokens a second when all places start together and so end together, `waves` times over: prompts in one
    step, then tokens alone. With it the median time to the first token, and joules a token where a GPU tells them.

    One wave goes ahead: what an engine sets up when it first meets a size is not its speed.
    """
    random = _prompts(concurrency, "waves")
    _run(engine, random, concurrency, concurrency, prompt, new)
    with metered() as joules:
        began = time.perf_counter()
        waited = _run(engine, random, concurrency, concurrency * waves, prompt, new)
        seconds = time.perf_counter() - began
    tokens = concurrency * waves * new
    return {"waves": tokens / seconds, **told(tokens, waited, joules())}


def told(tokens: int, waited: Sequence[float], joules: float | None) -> dict[str, float]:
    """What is kept of a run beside its speed. waited: seconds to the first token of each request."""
    spent = {} if joules is None else {"joules_per_token": joules / tokens}
    return {"ttft_p50_ms": float(np.median(waited)) * 1e3, **spent}


@contextmanager
def metered() -> Iterator[Callable[[], float | None]]:
    """What this machine's GPUs use in the block, in joules, once it has ended; None where no GPU counts them."""
    sampler = GpuSampler.find("http://localhost")
    if sampler is not None:
        sampler.start()

    def joules() -> float | None:
        counted: list[Any] = [] if sampler is None else [(one[0].energy, one[-1].energy) for one in sampler.readings]
        if not counted or any(None in pair for pair in counted):
            return None
        return float(sum(last - first for first, last in counted))

    try:
        yield joules
    finally:
        if sampler is not None:
            sampler.stop()


def _prompts(concurrency: int, pattern: str) -> np.random.Generator:
    """Others for each: an engine has the keys and values of prompts that it has seen before."""
    return np.random.default_rng([concurrency, *pattern.encode()])


def _run(
    engine: InProcess, random: np.random.Generator, concurrency: int, requests: int, prompt: int, new: int
) -> list[float]:
    """So many requests, `concurrency` at once; seconds to the first token of each."""
    numbers = iter(range(requests))
    started: dict[int, float] = {}
    waited: list[float] = []

    def start() -> None:
        number = next(numbers, None)
        if number is not None:
            started[number] = time.perf_counter()
            engine.add(number, random.integers(0, engine.vocabulary, prompt).tolist(), new)

    for _ in range(concurrency):
        start()
    left = requests
    while left:
        for number, tokens, ended in engine.step():
            if tokens and number in started:
                waited.append(time.perf_counter() - started.pop(number))
            if ended:
                left -= 1
                start()
    return waited


def steady(engine: InProcess, concurrency: int, seconds: float) -> float:
    """Places spread over a request's time, as the load tester spreads them: prompts come with the tokens of others."""
    random = _prompts(concurrency, "steady")
    load = Closed(concurrency=concurrency, duration_s=seconds)
    slots = [_Slot(load.warmup_lengths(slot, OUTPUT_TOKENS)) for slot in range(concurrency)]
    running: dict[int, _Slot] = {}
    numbers = iter(range(1 << 60))

    def start(slot: _Slot) -> None:
        number = next(numbers)
        running[number] = slot
        prompt = random.integers(0, engine.vocabulary, PROMPT_TOKENS).tolist()
        engine.add(number, prompt, slot.warmups.pop(0) if slot.warmups else OUTPUT_TOKENS)

    for slot in slots:
        start(slot)
    made, began = 0, 0.0
    warm: set[int] = set()
    while True:
        for number, tokens, ended in engine.step():
            made += tokens
            if ended:
                slot = running.pop(number)
                if not slot.warmups:
                    warm.add(id(slot))
                start(slot)
        now = time.perf_counter()
        if not began and len(warm) == concurrency:
            made, began = 0, now
        elif began and now - began >= seconds:
            engine.drain()
            return made / (now - began)
