"""Which precision runs where: what was asked for, or a refusal; never something else instead."""

from __future__ import annotations

import pytest

from engines.base import DataType
from engines.errors import UsageError
from engines.gpu import GpuSpec
from engines.quant import Precision, parse_float, resolve_precision

CPU = GpuSpec(name="cpu", sm=None, source="test")


def gpu(name: str, sm: int) -> GpuSpec:
    return GpuSpec(name=name, sm=sm, memory_gib=80.0, source="test")


def refusal(requested: str, device: GpuSpec) -> str:
    with pytest.raises(UsageError) as error:
        resolve_precision(requested, device)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(
    ("requested", "name", "dtype"),
    [
        ("bf16", "bf16", DataType.BFLOAT16),
        ("bfloat16", "bf16", DataType.BFLOAT16),
        ("fp16", "fp16", DataType.FLOAT16),
        ("float16", "fp16", DataType.FLOAT16),
        ("fp32", "fp32", DataType.FLOAT32),
        ("float32", "fp32", DataType.FLOAT32),
    ],
)
@pytest.mark.parametrize("device", [CPU, gpu("a100", 80), gpu("h100", 90)])
def test_what_is_asked_for_is_given(requested: str, name: str, dtype: DataType, device: GpuSpec) -> None:
    assert resolve_precision(requested, device) == Precision(name=name, dtype=dtype, reason="requested")


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (CPU, "auto: the CPU computes bfloat16"),
        (gpu("a100", 80), "auto: SM80 is at least SM80 and computes bfloat16"),
        (gpu("b200", 100), "auto: SM100 is at least SM80 and computes bfloat16"),
    ],
)
def test_auto_says_why(device: GpuSpec, reason: str) -> None:
    assert resolve_precision("auto", device) == Precision(name="bf16", dtype=DataType.BFLOAT16, reason=reason)


@pytest.mark.parametrize("requested", ["auto", "fp16", "fp8", "int8"])
def test_gpus_older_than_sm80_are_refused(requested: str) -> None:
    assert refusal(requested, gpu("t4", 75)).startswith("t4 (SM75) cannot run TensorRT-LLM engines")


def test_fp8_needs_sm89() -> None:
    assert refusal("fp8", gpu("a100", 80)).startswith("fp8 needs SM89 or newer, a100 (SM80) has none")


@pytest.mark.parametrize(
    ("requested", "device"),
    [("fp8", gpu("l40s", 89)), ("fp8", CPU), ("int8", gpu("a100", 80)), ("int8", gpu("h100", 90)), ("int8", CPU)],
)
def test_quantized_checkpoints_are_not_written_yet(requested: str, device: GpuSpec) -> None:
    line = refusal(requested, device)
    assert f"--dtype {requested} is not available in this release" in line
    assert line.endswith("use --dtype bf16, fp16 or fp32")


@pytest.mark.parametrize(
    ("requested", "remedy"),
    [
        ("bfloat", "did you mean 'bfloat16'?"),
        ("BF16", "did you mean 'bf16'?"),
        ("q4_k_m", "known: auto, bf16, bfloat16, float16, float32, fp16, fp32, fp8, int8"),
    ],
)
def test_an_unknown_name_gets_the_nearest(requested: str, remedy: str) -> None:
    assert refusal(requested, CPU) == f"unknown dtype '{requested}'; {remedy}"


def test_parse_float_takes_no_quantized_name() -> None:
    with pytest.raises(UsageError, match="unknown dtype 'fp8'"):
        parse_float("fp8")
