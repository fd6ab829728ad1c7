"""Progress of work on stderr: a bar with bytes, rate and time left, or lines now and then where there is no terminal.

`bench` has its own (console_bench), which does not load rich before the first request.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trtpipe.pipeline.cli import console
from trtpipe.pipeline.cli.console_text import bounded

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

# Seconds between lines of progress where stderr is not a terminal.
PERIOD_S = 15.0
# Seconds after which the hashing of a file is shown.
SLOW_S = 2.0
# Seconds after which a rate means something.
SETTLED_S = 0.5
# Characters of a bar, and its updates in a second.
BAR, UPDATES = 20, 4


class Work:
    """A piece of work that runs: `work(done, total)` tells its bytes, `work.step(text, detail)` what it does now."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        self._begun = self._step_began = time.monotonic()
        self.done = self.total = self._before = self._earlier = 0
        self.detail = "running"
        self._steps: set[str] = set()
        self._step = ""

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if self._earlier + done < self.done:  # another phase, such as the import of what was downloaded: counted on
            self._earlier = self.done
        done, total = self._earlier + done, self._earlier + total
        if total != self.total or done < self.done or not self.done:  # another phase of the work, or its first bytes
            self._begun, self._before = now, done
        self.done, self.total = done, total
        # A total may be rounded, as pip's log rounds it.
        if done >= total or console.size(done) == console.size(total):
            self.detail = f"{console.size(total)} done, going on"
        else:
            self.detail = f"{console.size(done)} of {console.size(total)}"
            if done > self._before and now - self._begun >= SETTLED_S:
                rate = (done - self._before) / (now - self._begun)
                self.detail += f", {console.size(rate)}/s, {duration((total - done) / rate)} left"
        self.show()

    def step(self, text: str, detail: str = "") -> None:
        self.detail = f"{text}  {detail}".rstrip()
        if text != self._step:
            self._step, self._step_began = text, time.monotonic()
        if text not in self._steps:
            self._steps.add(text)
            self.begin(text)
        self.show()

    def line(self) -> str:
        return f"{self.name:<9} {self.detail}"

    def begin(self, step: str) -> None:
        """Called when another step begins."""

    def show(self) -> None:
        """Called when there is something new to show."""


class _Bar(Work):
    """Work with a bar at the bottom of a terminal."""

    def __init__(self, name: str, reason: str, bars: Bars, task: TaskID) -> None:
        super().__init__(name, reason)
        self._bars, self._task = bars, task
        self.show()

    def show(self) -> None:
        told = bounded(self.line() + (f"  ({self.reason})" if self.reason else ""))
        self._bars.update(self._task, completed=self.done, total=self.total or None, description=told)


class _Lines(Work):
    """Work with a line for each step, and one every PERIOD_S seconds."""

    def begin(self, step: str) -> None:
        console.note(f"{self.name:<9} {step}")

    def tell(self, ended: threading.Event) -> None:
        while not ended.wait(PERIOD_S):
            console.note(f"{self.line()}, for {duration(time.monotonic() - self._step_began)} now")


# The work that is shown. One piece of work runs at a time.
_running: list[Work] = []


@contextlib.contextmanager
def working(name: str, reason: str = "", *, announce: bool = True) -> Iterator[Work]:
    """Show progress while the block runs; nothing with --quiet.

    announce  whether there is a line as it begins, where stderr is no terminal
    """
    with _shown(name, reason, announce=announce) as work:
        _running.append(work)
        try:
            yield work
        finally:
            _running.remove(work)


@contextlib.contextmanager
def _shown(name: str, reason: str, *, announce: bool) -> Iterator[Work]:
    where = console.err()
    if console.FLAGS.quiet:
        yield Work(name, reason)
    elif where.is_terminal:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
        from rich.table import Column

        text = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
        columns = (SpinnerColumn(), TimeElapsedColumn(), BarColumn(BAR), text)
        with Progress(
            *columns, console=where, transient=True, expand=True, redirect_stdout=False, refresh_per_second=UPDATES
        ) as bars:
            yield _Bar(name, reason, bars, bars.add_task("", total=None))
    else:
        if announce:
            console.note(f"{name:<9} running  ({reason})")
        work, ended = _Lines(name, reason), threading.Event()
        teller = threading.Thread(target=work.tell, args=(ended,), daemon=True)
        teller.start()
        try:
            yield work
        finally:
            ended.set()
            teller.join()


@contextlib.contextmanager
def hashing(path: Path, total: int) -> Iterator[Callable[[int], None]]:
    """Show the reading of a file of `total` bytes for its digest, once that takes longer than SLOW_S; what is yielded
    is called with the bytes that are read."""
    begun, shown = time.monotonic(), list[Work]()
    with contextlib.ExitStack() as stack:

        def tell(done: int) -> None:
            if time.monotonic() - begun < SLOW_S:
                return
            if not shown and _running:
                _running[-1].step(f"hashing {path.name}", f"{console.size(done)} of {console.size(total)}")
                return
            if not shown:
                shown.append(stack.enter_context(working("hashing", path.name)))
            shown[0](done, total)

        yield tell


def duration(seconds: float) -> str:
    """A time for people: 7 s, 3 min, 2 h."""
    for name, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {name}"
    return f"{seconds:.0f} s"
