"""Alarm at an absolute time, by the kernel's timerfd: uvloop's own timers have a resolution of a millisecond."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from time import monotonic_ns

from trtpipe.engines.errors import HostError

_CLOCK_MONOTONIC = 1
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """Calls `callback` once for each time set by `at`. Belongs to one event loop.

    Raises HostError where there is no timerfd.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        if not hasattr(_LIBC, "timerfd_create"):
            raise HostError("this system has no timerfd", remedy="measure on Linux")
        self._fd = _LIBC.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK_CLOEXEC)
        if self._fd < 0:
            raise HostError("no timer can be made", why=os.strerror(ctypes.get_errno()), remedy="close other programs")
        loop.add_reader(self._fd, self._fire)

    def at(self, when_ns: int) -> None:
        """Set the alarm to a time of `time.monotonic_ns`, replacing an earlier one; a past time fires at once."""
        seconds, nanoseconds = divmod(max(1, when_ns), 1_000_000_000)
        spec = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
        _LIBC.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _fire(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # the alarm was set again between the event and this call
        self._callback()


class Metronome:
    """Measures how late the event loop is: an alarm every `period_ns`, and the time from each beat to its handling.

    Beats that were due while the loop was blocked count one by one: as one beat they would vanish among punctual ones.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, period_ns: int = 10_000_000) -> None:
        self.lateness_ns: list[int] = []
        self._period = period_ns
        self._due = monotonic_ns() + period_ns
        self._alarm = Alarm(loop, self._beat)
        self._alarm.at(self._due)

    def close(self) -> None:
        self._alarm.close()

    def _beat(self) -> None:
        now = monotonic_ns()
        while self._due <= now:
            self.lateness_ns.append(now - self._due)
            self._due += self._period
        self._alarm.at(self._due)
