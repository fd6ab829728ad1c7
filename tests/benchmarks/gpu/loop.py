"""A closed loop around an engine in this process: what `trtpipe bench` asks of a server, without the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeline.bench.work.loads import Closed

PROMPT_TOKENS = OUTPUT_TOKENS = 128


class InProcess(Protocol):
    """An engine that is stepped: what it made in a step, as (request, new tokens, whether it has ended)."""

    def add(self, number: int, prompt: Sequence[int], new: int) -> None: ...

    def step(self) -> Iterable[tuple[int, int, bool]]: ...


@dataclass
class _Slot:
    warmups: list[int]
    left: int = 0


def closed(engine: InProcess, concurrency: int, seconds: float, vocabulary: int, seed: int = 0) -> float:
    """Tokens a second over `seconds`, once every slot has done its warm-up, as the load tester has it."""
    random = np.random.default_rng(seed)
    load = Closed(concurrency=concurrency, duration_s=seconds)
    slots = [_Slot(load.warmup_lengths(slot, OUTPUT_TOKENS)) for slot in range(concurrency)]
    running: dict[int, _Slot] = {}
    numbers = iter(range(1 << 60))
    warming = concurrency

    def start(slot: _Slot) -> None:
        nonlocal warming
        new = slot.warmups.pop(0) if slot.warmups else OUTPUT_TOKENS
        slot.left = new
        number = next(numbers)
        running[number] = slot
        engine.add(number, random.integers(0, vocabulary, PROMPT_TOKENS).tolist(), new)

    for slot in slots:
        start(slot)
    made, began = 0, 0.0
    warmed: set[int] = set()
    while True:
        for number, tokens, ended in engine.step():
            made += tokens
            if ended:
                slot = running.pop(number)
                if not slot.warmups:
                    warmed.add(id(slot))
                start(slot)
        now = time.perf_counter()
        if not began and len(warmed) == concurrency:
            made, began = 0, now
        elif began and now - began >= seconds:
            return made / (now - began)


def levels(
    engine: InProcess, asked: Sequence[int], seconds: float, vocabulary: int, drain: Callable[[], Any]
) -> dict[str, float]:
    """Tokens a second by concurrency."""
    found = {}
    for concurrency in asked:
        found[str(concurrency)] = closed(engine, concurrency, seconds, vocabulary, seed=concurrency)
        drain()
        print(concurrency, found[str(concurrency)], flush=True)
    return found
