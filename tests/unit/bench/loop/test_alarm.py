"""The alarm and the metronome, on real event loops and the real clock: late is possible at any time, early is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic_ns
from typing import Any, TypeVar

import pytest
import uvloop

from trtpipe.pipeline.bench.loop.alarm import Alarm, Metronome

MS = 1_000_000
HOUR = 3600 * 1000 * MS
T = TypeVar("T")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Any:
    loop = request.param()

    def until_complete(scenario: Coroutine[Any, Any, T]) -> T:
        made: T = loop.run_until_complete(asyncio.wait_for(scenario, 60))
        return made

    yield until_complete
    loop.close()


Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Rings:
    """An alarm, and the moments at which it rang."""

    def __init__(self) -> None:
        self.moments: list[int] = []
        self.rang = asyncio.Event()
        self.alarm = Alarm(asyncio.get_running_loop(), self._ring)

    def _ring(self) -> None:
        self.moments.append(monotonic_ns())
        self.rang.set()

    async def ring(self, at_ns: int) -> None:
        """Set it and wait for it."""
        self.rang.clear()
        self.alarm.at(at_ns)
        await self.rang.wait()


async def a_while() -> None:
    """Until an alarm in some milliseconds has rung: another one that was due earlier has then rung as well."""
    later = Rings()
    await later.ring(monotonic_ns() + 20 * MS)
    later.alarm.close()


def timers() -> int:
    """Open descriptors of timers."""
    return sum("timerfd" in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())


def test_an_alarm_rings_once_and_never_early(run: Run) -> None:
    async def scenario() -> None:
        rings = Rings()
        for number, wait in enumerate([0, 1, 1_000, 50_000, 999_999, MS, 3 * MS, 20 * MS, 7 * MS], 1):
            due = monotonic_ns() + wait
            await rings.ring(due)
            assert rings.moments[-1] >= due
            assert len(rings.moments) == number
        await a_while()
        assert len(rings.moments) == 9
        rings.alarm.close()

    run(scenario())


@pytest.mark.parametrize("due", [-HOUR, -1, 0, 1, 999_999_999, 1_000_000_000])
def test_at_once_for_a_time_that_has_passed(run: Run, due: int) -> None:
    async def scenario() -> None:
        rings = Rings()
        await rings.ring(due)
        await a_while()
        assert len(rings.moments) == 1
        rings.alarm.close()

    run(scenario())


def test_it_is_not_set_before_it_is_told(run: Run) -> None:
    async def scenario() -> None:
        rings = Rings()
        await a_while()
        assert rings.moments == []
        rings.alarm.close()

    run(scenario())


def test_an_alarm_rings_at_the_time_that_was_set_last(run: Run) -> None:
    async def scenario() -> None:
        rings = Rings()
        rings.alarm.at(monotonic_ns() + 5 * MS)
        rings.alarm.at(monotonic_ns() + HOUR)
        await a_while()
        assert rings.moments == []
        due = monotonic_ns() + 5 * MS
        await rings.ring(due)  # an earlier one than before wins as well
        assert rings.moments[0] >= due
        rings.alarm.close()

    run(scenario())


def test_one_that_is_set_anew_when_it_was_about_to_ring_does_not(run: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        rang: list[str] = []

        def first() -> None:
            rang.append("first")
            other.at(monotonic_ns() + HOUR)

        def second() -> None:
            rang.append("second")
            one.at(monotonic_ns() + HOUR)

        one, other = Alarm(loop, first), Alarm(loop, second)
        one.at(1)
        other.at(1)  # both have rung when the loop next looks
        await a_while()
        assert len(rang) == 1
        one.close()
        other.close()

    run(scenario())


def test_a_callback_may_set_it_again(run: Run) -> None:
    async def scenario() -> None:
        moments: list[int] = []
        over = asyncio.Event()

        def ring() -> None:
            moments.append(monotonic_ns())
            if len(moments) < 5:
                alarm.at(start + len(moments) * MS)
            else:
                over.set()

        start = monotonic_ns()
        alarm = Alarm(asyncio.get_running_loop(), ring)
        alarm.at(start)
        await over.wait()
        assert all(moment >= start + number * MS for number, moment in enumerate(moments))
        alarm.close()

    run(scenario())


def test_close_releases_the_descriptor_and_nothing_rings_afterwards(run: Run) -> None:
    async def scenario() -> None:
        before = timers()
        made = [Rings() for _ in range(50)]
        assert timers() == before + 50
        for rings in made:
            rings.alarm.at(1)
            rings.alarm.close()
        assert timers() == before
        await a_while()
        assert [rings.moments for rings in made] == [[]] * 50

    run(scenario())


def test_an_error_of_the_callback_is_not_swallowed(run: Run) -> None:
    async def scenario() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context["exception"]))

        def fail() -> None:
            raise BlockingIOError("in the callback")

        alarm = Alarm(asyncio.get_running_loop(), fail)
        alarm.at(1)
        await a_while()
        assert [str(problem) for problem in problems] == ["in the callback"]
        alarm.close()

    run(scenario())


def test_the_metronome_counts_beats(run: Run) -> None:
    async def scenario() -> None:
        before = timers()
        start = monotonic_ns()
        metronome = Metronome(asyncio.get_running_loop(), period_ns=2 * MS)
        while len(metronome.lateness_ns) < 8:
            await asyncio.sleep(0.001)
        elapsed = monotonic_ns() - start
        beats = len(metronome.lateness_ns)
        assert beats <= elapsed // (2 * MS), "a beat came early"
        assert min(metronome.lateness_ns) >= 0
        assert max(metronome.lateness_ns) <= elapsed
        metronome.close()
        await a_while()
        assert len(metronome.lateness_ns) == beats
        assert timers() == before

    run(scenario())


def test_a_loop_that_stands_still_shows_in_every_beat_it_missed(run: Run) -> None:
    async def scenario() -> None:
        metronome = Metronome(asyncio.get_running_loop(), period_ns=10 * MS)
        while not metronome.lateness_ns:
            await asyncio.sleep(0.001)
        beats = len(metronome.lateness_ns)
        time.sleep(0.1)  # the next beat was due within 10 ms
        while len(metronome.lateness_ns) == beats:
            await asyncio.sleep(0)
        missed = metronome.lateness_ns[beats : beats + 9]  # all heard at one moment, 10 ms apart
        assert missed[0] >= 90 * MS
        assert missed == [missed[0] - number * 10 * MS for number in range(9)]
        metronome.close()

    run(scenario())
