"""Kernels that are compiled for recorded steps round where PyTorch's own do: to the bit, and for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from engines.reference import fused
from engines.reference.fused import add_norm, one_kernel, recorded, rms_norm, rotated, swiglu
from engines.reference.linear import divide_to_e4m3, divide_to_int8, rescale, tokens_to_e4m3

HEADS, SIZE = 3, 8
WIDTH = HEADS * SIZE

# What compiles for a GPU compiles for a CPU too, by another compiler behind the same front.
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not fused._can_compile(), reason="there is no compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kernels")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


def calls(rows: int) -> list[tuple[Any, tuple[Any, ...]]]:
    random = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 3).bfloat16()

    x, y, weight, scale = numbers(rows, WIDTH), numbers(rows, WIDTH), numbers(WIDTH), torch.tensor([0.01])
    product, columns = numbers(rows, WIDTH).float(), numbers(WIDTH).float()
    return [
        (rms_norm, (x, weight, 1e-5)),
        (add_norm, (x, y, weight, 1e-5)),
        (swiglu, (x, y)),
        (rotated, (x.view(rows, HEADS, SIZE), 2, numbers(rows, 1, SIZE), numbers(rows, 1, SIZE))),
        (divide_to_e4m3, (x, scale)),
        (divide_to_int8, (x, scale)),
        (tokens_to_e4m3, (x,)),
        (rescale, (product, numbers(rows, 1).float(), columns, torch.bfloat16)),
    ]


def bits(result: torch.Tensor | tuple[torch.Tensor, ...]) -> list[list[int]]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.contiguous().view(torch.uint8).flatten().tolist() for part in parts]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_compiled_they_compute_the_same(rows: int, cache: Path) -> None:
    for function, arguments in calls(rows):
        plain = function(*arguments)
        with recorded():
            assert bits(function(*arguments)) == bits(plain), function.__name__
    assert list(cache.rglob("*.cpp"))


def test_only_a_recorded_step_is_compiled_and_once_for_any_number_of_rows() -> None:
    @one_kernel
    def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    def run(rows: int) -> int:
        """How many graphs were made for it."""
        before = counters["stats"]["unique_graphs"]
        assert scaled(torch.full((rows, 4), 1.5), torch.full((4,), 2.0)).tolist() == [[3.0] * 4] * rows
        return int(counters["stats"]["unique_graphs"] - before)

    assert run(3) == 0
    with recorded():
        assert [run(rows) for rows in (3, 7, 4, 1, 9)] == [1, 0, 0, 1, 0]
    assert run(3) == 0


def test_without_a_compiler_everything_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert fused._can_compile.__wrapped__() is False
