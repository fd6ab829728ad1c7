"""Work that a signal ends, or leaves, with the thread pools that it has begun."""

from __future__ import annotations

import concurrent.futures.thread as pools
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from trtpipe.engines import threads

# Seconds that work has for its end after a signal.
END_SECONDS = 1.0
# Seconds between two calls of `stop`: work may begin another request meanwhile.
AGAIN_SECONDS = 0.05

T = TypeVar("T")


def interruptible(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """The result of `work`, which is called in a thread and may begin thread pools. Raises what it raises.

    Where a signal ends the wait for it (KeyboardInterrupt, Ended), `stop` is called until the work has ended, for
    END_SECONDS at most. Threads that last longer are left: a pool would wait for them, and so would Python's exit.
    """
    # The threads that it starts are daemons as its own is.
    [outcome] = threads.begin(lambda call: call(), [work])
    try:
        return threads.result(outcome)
    except BaseException:
        if not outcome.done():
            _end(outcome, stop)
        raise


def _end(outcome: Future[T], stop: Callable[[], None]) -> None:
    deadline = time.monotonic() + END_SECONDS
    try:
        while not outcome.done() and time.monotonic() < deadline:
            stop()
            wait([outcome], AGAIN_SECONDS)
    finally:
        # Python's exit waits for the threads of every ThreadPoolExecutor, also for daemons: there is no other way.
        with pools._global_shutdown_lock:
            for thread in [one for one in pools._threads_queues if one.daemon]:
                del pools._threads_queues[thread]  # type: ignore[attr-defined]  # typeshed has a Mapping
