"""Work in daemon threads: outcomes in order, so many at once, and errors where they are asked for."""

from __future__ import annotations

import threading

import pytest

from trtpipe.engines import threads


def test_outcomes_are_in_the_order_of_what_was_given() -> None:
    both, running = threading.Barrier(2), threading.Semaphore(2)

    def work(number: int) -> int:
        assert running.acquire(blocking=False), "two at once"
        assert threading.current_thread().daemon
        both.wait(10)
        running.release()
        return number * 10

    outcomes = threads.begin(work, range(6), at_once=2)
    assert [threads.result(outcome) for outcome in outcomes] == [0, 10, 20, 30, 40, 50]


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    wrong, right = threads.begin(int, ["x", "1"])
    with pytest.raises(ValueError, match="invalid literal"):
        threads.result(wrong)
    assert threads.result(right) == 1


def test_a_wait_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before it is seen then."""
    over, waits = threading.Event(), []

    def look(outcomes: object, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(threads, "wait", look)
    [outcome] = threads.begin(threading.Event.wait, [over])
    with pytest.raises(KeyboardInterrupt):
        threads.result(outcome)
    over.set()
    assert waits == [threads.LOOK_SECONDS] * 3
