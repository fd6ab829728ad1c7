"""Builds and refusals of the double of trtllm-build that depend on the GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.tiny_builds import (
    AWQ,
    FP8,
    FP8_KV,
    FP8_KV_ALONE,
    INT8_KV,
    NO_FP8,
    ROWWISE,
    SMOOTH,
    TWO,
    W4A8,
    Output,
    build,
    checkpoint,
    refusal,
    warnings,
)
from trtpipe.engines.base import Mapping
from trtpipe.engines.quantization import UNQUANTIZED, Quantization

NO_INT8 = "RuntimeError: INT8/INT4 quantization is not supported on SM>=100."


@pytest.mark.parametrize(
    ("sm", "quantization", "told"),
    [
        (75, UNQUANTIZED, "AssertionError: pre SM 80 GPUs do not support bfloat16"),
        (87, UNQUANTIZED, "ContractError: SM87 is not in TensorRT-LLM's support matrix"),
        (80, UNQUANTIZED, None),
        (120, UNQUANTIZED, None),
        (80, FP8, NO_FP8),
        (86, ROWWISE, NO_FP8),
        (86, W4A8, NO_FP8),
        (89, FP8_KV, None),
        (89, ROWWISE, None),
        (89, W4A8, None),
        (103, FP8_KV, None),
        (120, FP8_KV, None),
        (100, ROWWISE, "RuntimeError: Per-channel or per-token scaling is not supported on SM>=100."),
        (80, SMOOTH, None),
        (90, SMOOTH, None),
        (100, SMOOTH, "RuntimeError: SmoothQuant is not supported on SM>=100."),
        (80, AWQ, None),
        (100, AWQ, NO_INT8),
        (103, INT8_KV, NO_INT8),
        (100, W4A8, NO_INT8),
        (120, W4A8, "ContractError: W4A8_AWQ is for SM89 and SM90"),
        (120, SMOOTH, None),
    ],
    ids=lambda value: "" if value is None or isinstance(value, str) else f"{getattr(value, 'quant_algo', value)}",
)
def test_what_a_gpu_builds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
    sm: int,
    quantization: Quantization,
    told: str | None,
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", str(sm))
    source = checkpoint(tmp_path / "checkpoint", quantization)
    if told is None:
        assert build(source) == 0
    else:
        assert build(source) == 1
        output = capsys.readouterr()
        assert output.err.splitlines()[-1] == told
        no_fp8 = "Networks with FP8 precision require hardware with FP8 support." in output.out
        assert no_fp8 == (told == NO_FP8)


def test_a_cache_in_fp8_without_fp8_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", "80")
    source = checkpoint(tmp_path / "checkpoint", FP8_KV_ALONE)
    assert warnings(capsys, source)[1] == ("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")


@pytest.mark.parametrize(
    ("sm", "flags", "told"),
    [
        (100, "--gemm_swiglu_plugin fp8",
         "NotImplementedError: gemm_swiglu_plugin=fp8 is not supported on SM 100."),
        (103, "--low_latency_gemm_plugin fp8",
         "NotImplementedError: low_latency_gemm_plugin=fp8 is not supported on SM 103."),
        (89, "--low_latency_gemm_plugin fp8",
         "ContractError: low_latency_gemm_plugin is for FP8 weights on SM90, not for FP8 on SM89"),
        (90, "--low_latency_gemm_plugin fp8", None),
    ],
)  # fmt: skip
def test_kernels_for_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, sm: int, flags: str, told: str | None
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", str(sm))
    source = checkpoint(tmp_path / "checkpoint", FP8_KV)
    if told is None:
        assert build(source, *flags.split()) == 0
    else:
        assert refusal(capsys, source, *flags.split()) == told


def test_no_gpu_is_a_division_by_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", "0")
    assert refusal(capsys, checkpoint(tmp_path / "checkpoint")).startswith("ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("gpus", "workers", "devices"), [("1", "4", [0, 0, 0, 0]), ("2", "4", [0, 1, 0, 1]), ("8", "3", [0, 1, 2, 0])]
)
def test_ranks_are_dealt_out_to_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, gpus: str, workers: str, devices: list[int]
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", gpus)
    source = checkpoint(tmp_path / "checkpoint", mapping=Mapping(tp_size=4), toolchain="0.21.0")
    assert build(source, "--workers", workers) == 0
    found = re.findall(r"Building rank \d of 4 on GPU (\d)", capsys.readouterr().out)
    assert [int(device) for device in found] == devices


def test_of_ranks_side_by_side_all_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", "2")
    source = checkpoint(tmp_path / "checkpoint", mapping=TWO, toolchain="0.21.0")
    (source / "rank0.safetensors").unlink()
    assert build(source, "--workers", "2") == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        "AssertionError",
        "Traceback (most recent call last):",
        "AssertionError: Engine building failed, please check error log.",
    ]
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["rank1.engine"]
