"""Axes of a plot: positions of values, and ticks at round numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# Ratio of largest to smallest value above which a linear axis hides differences between small values.
WIDE = 20
TICKS = 5
_DIGITS = (1, 2, 5)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """`low` to `high`, whose ends are ticks; `label` has the unit."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at the low end, 1 at the high one; values beyond the ends are moved to the ends."""
        inside = min(max(value, self.low), self.high)
        if self.log:
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)


def fitting(
    label: str, values: Iterable[float], *, from_zero: bool = True, ticks: int = TICKS, linear: bool = False
) -> Axis:
    """An axis for `values`: logarithmic where they are WIDE apart and all are positive, unless it is to be `linear`."""
    known = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if low > 0 and high / low >= WIDE and not linear:
        return _logarithmic(label, low, high, ticks)
    return _linear(label, 0.0 if from_zero and low >= 0 else low, high, ticks)


def _linear(label: str, low: float, high: float, count: int) -> Axis:
    high = high if high > low else low + (abs(low) or 1.0)
    step = round_step((high - low) / count)
    first, last = math.floor(low / step * (1 + 1e-12)), math.ceil(high / step * (1 - 1e-12))
    last = max(last, first + 1)
    return Axis(
        label=label, low=first * step, high=last * step, ticks=tuple(_tidy(n * step) for n in range(first, last + 1))
    )


def _logarithmic(label: str, low: float, high: float, count: int) -> Axis:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [_tidy(digit * 10.0**power) for power in powers for digit in _DIGITS]
    start = max(mark for mark in marks if mark <= low * (1 + 1e-9))
    stop = min(mark for mark in marks if mark >= high * (1 - 1e-9))
    inside = [mark for mark in marks if start <= mark <= stop]
    decades = [mark for mark in inside if f"{mark:e}".startswith("1.0")]
    # All of 1, 2, 5 where there is room; else powers of ten, and of many only every second, third, ...
    few = decades[:: math.ceil(len(decades) / (count + 1))]
    shown = inside if len(inside) <= count + 2 else few if len(few) > 1 else [start, stop]
    return Axis(label=label, low=start, high=stop, ticks=tuple(shown), log=True)


def round_step(smallest: float) -> float:
    """The smallest number, 1, 2 or 5 times a power of ten, that is at least `smallest`, which is above 0."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(digit * power for digit in (*_DIGITS, 10) if digit * power >= smallest * (1 - 1e-9))


def _tidy(value: float) -> float:
    """Round off what binary fractions add: 0.30000000000000004."""
    return float(f"{value:.9g}")


def tick(value: float) -> str:
    """A round number in few characters."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):g}{unit}"
    return f"{value:g}"
