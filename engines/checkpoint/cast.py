"""Casts between BF16, F16 and F32 on raw bit patterns, and a check for infinite and NaN values.

numpy has no bfloat16, so its values are handled as integers. Arrays are processed in slices that fit a core's cache,
with scratch arrays allocated once: allocating an array for every step would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# Raw bit patterns: uint16 for BF16 and F16, uint32 for F32.
Bits = npt.NDArray[Any]

CHUNK = 1 << 17

# dtype -> (mask of all bits but the sign, smallest masked pattern that is infinite or NaN)
_EXPONENT = {"BF16": (0x7FFF, 0x7F80), "F16": (0x7FFF, 0x7C00), "F32": (0x7FFFFFFF, 0x7F800000)}


class Overflow(Exception):
    """A finite value exceeds the target type; `value` is the largest magnitude found."""

    def __init__(self, value: float) -> None:
        self.value = value
        super().__init__(f"{value:g}")


class Caster:
    """Cast from one type to another, for one thread. Rounds to nearest even; NaN stays NaN.

    source, target  BF16, F16 or F32
    """

    def __init__(self, source: str, target: str) -> None:
        self.source = source
        self.target = target
        self._item = np.uint32 if source == "F32" else np.uint16
        self._mask, self._infinite = (self._item(bits) for bits in _EXPONENT[source])
        self._magnitude = np.empty(CHUNK, self._item)
        self._wide = np.empty(CHUNK, np.uint32)
        self._odd = np.empty(CHUNK, np.uint32)

    def all_finite(self, bits: Bits) -> bool:
        """Whether all values are finite. `bits` is a flat, contiguous array of the source type."""
        for start in range(0, len(bits), CHUNK):
            part = bits[start : start + CHUNK]
            magnitude = self._magnitude[: len(part)]
            np.bitwise_and(part, self._mask, out=magnitude)
            if magnitude.max() >= self._infinite:
                return False
        return True

    def cast(self, bits: Bits) -> Bits:
        """Return the values in the target type; `bits` itself when the types are equal. Raises Overflow."""
        if self.source == self.target:
            return bits
        out = np.empty(len(bits), np.uint32 if self.target == "F32" else np.uint16)
        for start in range(0, len(bits), CHUNK):
            part = bits[start : start + CHUNK]
            self._cast_chunk(part, out[start : start + len(part)])
        return out

    def _cast_chunk(self, part: Bits, out: Bits) -> None:
        wide = self._widen(part)
        if self.target == "F32":
            out[:] = wide
        elif self.target == "BF16":
            self._to_bfloat16(wide, out)
        else:
            values = wide.view(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                half = values.astype(np.float16)
            self._check_overflow(np.isinf(half), values)
            out[:] = half.view(np.uint16)

    def _widen(self, part: Bits) -> Bits:
        """Convert to float32 bit patterns; exact."""
        if self.source == "F32":
            return part
        wide = self._wide[: len(part)]
        if self.source == "BF16":
            np.left_shift(part, np.uint32(16), out=wide, dtype=np.uint32)
        else:
            wide.view(np.float32)[:] = part.view(np.float16)
        return wide

    def _to_bfloat16(self, wide: Bits, out: Bits) -> None:
        values = wide.view(np.float32)
        nan = np.isnan(values)
        rounded = self._odd[: len(wide)]
        # Half a unit of the last bit kept, minus one when that bit is 0: adding it rounds to nearest even.
        np.right_shift(wide, np.uint32(16), out=rounded)
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, wide, out=rounded)
        np.right_shift(rounded, np.uint32(16), out=rounded)
        out[:] = rounded
        self._check_overflow((rounded & np.uint32(0x7FFF)) == 0x7F80, values)
        if nan.any():
            # Rounding could carry a NaN's payload into infinity or into the sign bit; make it a quiet NaN instead.
            out[nan] = ((wide[nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)

    @staticmethod
    def _check_overflow(infinite: npt.NDArray[np.bool_], values: npt.NDArray[np.float32]) -> None:
        if infinite.any():
            lost = infinite & np.isfinite(values)
            if lost.any():
                raise Overflow(float(np.abs(values[lost]).max()))
