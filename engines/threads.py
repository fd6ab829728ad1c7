"""Work in daemon threads: a signal does not wait for them, and neither does Python's exit, as it does for those of a
ThreadPoolExecutor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

# Seconds after which a wait begins anew: a signal that comes just before a wait does not end it.
LOOK_SECONDS = 0.5

S = TypeVar("S")
T = TypeVar("T")


def begin(work: Callable[[S], T], given: Sequence[S], at_once: int = 1) -> list[Future[T]]:
    """Call `work` with each of `given` in threads, `at_once` at a time. Returns at once, with an outcome for each."""
    outcomes: list[Future[T]] = [Future() for _ in given]
    left = iter(list(zip(given, outcomes, strict=True)))

    def run() -> None:
        for one, outcome in left:
            try:
                outcome.set_result(work(one))
            except BaseException as error:
                outcome.set_exception(error)

    for _ in range(min(at_once, len(outcomes))):
        threading.Thread(target=run, daemon=True).start()
    return outcomes


def result(outcome: Future[T]) -> T:
    """The result of a call, once it has ended. Raises what the call raised; a signal ends the wait."""
    while not outcome.done():
        wait([outcome], LOOK_SECONDS)
    return outcome.result()
