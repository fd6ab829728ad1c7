"""Casts between the three float types equal torch's, and no value that is infinite or NaN goes unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import BITS, cast_by_torch
from trtpipe.engines.checkpoint.cast import CHUNK, Caster, Overflow

LARGEST = {"BF16": 0x7F7F, "F16": 0x7BFF}


def is_nan(bits: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    infinity, largest = {"BF16": (0x7F80, 0x7FFF), "F16": (0x7C00, 0x7FFF), "F32": (0x7F800000, 0x7FFFFFFF)}[dtype]
    return (bits & largest) > infinity


def agree(bits: np.ndarray[Any, Any], source: str, target: str) -> None:
    found, wanted = Caster(source, target).cast(bits), cast_by_torch(bits, source, target)
    assert found.dtype == BITS[target]
    nan = is_nan(wanted, target)
    assert np.array_equal(is_nan(found, target), nan)
    assert np.array_equal(found[~nan], wanted[~nan])


@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F16", "F32"), ("F16", "BF16")])
def test_every_16_bit_pattern_is_cast_as_torch_does(source: str, target: str) -> None:
    agree(np.arange(1 << 16, dtype=np.uint16), source, target)


def test_every_bfloat16_that_fits_is_cast_to_float16_as_torch_does() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    magnitude = every & 0x7FFF
    agree(every[(magnitude <= 0x477F) | (magnitude >= 0x7F80)], "BF16", "F16")  # 0x477f is 65280


@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64), target=st.sampled_from(["BF16", "F16"]))
def test_float32_is_rounded_as_torch_does(values: list[int], target: str) -> None:
    bits = np.array(values, dtype=np.uint32)
    too_large = (cast_by_torch(bits, "F32", target) & 0x7FFF) == LARGEST[target] + 1
    agree(bits[~too_large | ((bits & 0x7FFFFFFF) == 0x7F800000)], "F32", target)


@pytest.mark.parametrize(
    ("value", "bfloat16", "half"),
    [
        (0x3F800000, 0x3F80, 0x3C00),  # 1
        (0xBF800000, 0xBF80, 0xBC00),  # -1
        (0x80000000, 0x8000, 0x8000),  # -0
        (0x3F808000, 0x3F80, 0x3C04),  # 1 + 2**-8: between two bfloat16, to the even one
        (0x3F818000, 0x3F82, 0x3C0C),  # 1 + 3 * 2**-8: to the even one, upwards
        (0x3F808001, 0x3F81, 0x3C04),  # a little more than half
        (0x3F801000, 0x3F80, 0x3C00),  # 1 + 2**-11: between two float16, to the even one
        (0x3F803000, 0x3F80, 0x3C02),  # 1 + 3 * 2**-11: to the even one, upwards
        (0x33800000, 0x3380, 0x0001),  # 2**-24: the smallest float16
        (0x33000000, 0x3300, 0x0000),  # half of it: to the even one, which is 0
        (0x33000001, 0x3300, 0x0001),
        (0x00000001, 0x0000, 0x0000),  # the smallest float32
        (0x00018000, 0x0002, 0x0000),  # a subnormal of both wide types
        (0x477FE000, 0x4780, 0x7BFF),  # 65504
        (0x477FEFFF, 0x4780, 0x7BFF),  # rounds down to 65504
        (0x7F800000, 0x7F80, 0x7C00),  # infinity stays
        (0xFF800000, 0xFF80, 0xFC00),
    ],
)
def test_rounding_to_nearest_even(value: int, bfloat16: int, half: int) -> None:
    bits = np.array([value], dtype=np.uint32)
    assert Caster("F32", "BF16").cast(bits).tolist() == [bfloat16]
    assert Caster("F32", "F16").cast(bits).tolist() == [half]


@pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF])
def test_nan_stays_nan(bits: int) -> None:
    value = np.array([bits], dtype=np.uint32)
    assert is_nan(Caster("F32", "BF16").cast(value), "BF16").all()
    assert is_nan(Caster("F32", "F16").cast(value), "F16").all()


@pytest.mark.parametrize(
    ("value", "source", "target", "line"),
    [
        (0x477FF000, "F32", "F16", "65520"),
        (0xC7800000, "F32", "F16", "65536"),
        (0x4780, "BF16", "F16", "65536"),
        (0x7F7FFFFF, "F32", "BF16", "3.40282e+38"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(value: int, source: str, target: str, line: str) -> None:
    with pytest.raises(Overflow) as error:
        Caster(source, target).cast(np.array([0, value], dtype=BITS[source]))
    assert str(error.value) == line


@pytest.mark.parametrize(("dtype", "infinity"), [("BF16", 0x7F80), ("F16", 0x7C00), ("F32", 0x7F800000)])
@pytest.mark.parametrize("place", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 4])
def test_one_value_that_is_no_number_is_seen_wherever_it_is(dtype: str, infinity: int, place: int) -> None:
    caster = Caster(dtype, dtype)
    sign = 0x80000000 if dtype == "F32" else 0x8000
    bits = np.full(2 * CHUNK + 5, infinity - 1, BITS[dtype])
    assert caster.all_finite(bits)
    for value in (infinity, infinity + 1, sign | infinity, sign | (infinity + 1)):
        bits[place] = value
        assert not caster.all_finite(bits)
