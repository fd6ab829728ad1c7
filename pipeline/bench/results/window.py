"""Window of a load point: the time over which its rates are taken."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.pipeline.bench.results.records import NONE, Records

WINDOW = (
    "Closed loop: from the moment the last place ended its warm-up until its duration is over; where a number of "
    "requests ends it, until the last measured one ended, or, where a place rests that finds none left, until the "
    "first does: every place is busy throughout, or at a conversation. Open loop: the measured part of the schedule. "
    "Open at the start, closed at the end. None if there is no such time."
)


@dataclass(frozen=True, kw_only=True)
class Window:
    """The time over which rates are taken; see WINDOW. Nanoseconds."""

    start_ns: int
    stop_ns: int

    @property
    def seconds(self) -> float:
        return (self.stop_ns - self.start_ns) / 1e9


def closed_window(records: Records, concurrency: int, until_ns: int | None = None) -> Window | None:
    """The window of a closed loop; see WINDOW. `until_ns`: when its duration was over."""
    import numpy as np

    mine = records.measured() & (records.end != NONE)
    slots = np.unique(records.slot[mine])
    if len(slots) < concurrency:
        return None
    start = max(int(records.due[mine & (records.slot == slot)].min()) for slot in slots)
    rests = min(int(records.end[records.slot == slot].max()) for slot in slots)
    stop = min(rests, int(records.end[mine].max())) if until_ns is None else until_ns
    return Window(start_ns=start, stop_ns=stop) if stop > start else None
