"""Kernels that are compiled for recorded steps round where PyTorch's own do: to the bit, and for any number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference import fused
from trtpipe.engines.reference.fused import (
    HeadNorms,
    add_norm,
    encoded,
    one_kernel,
    recorded,
    rms_norm,
    rotate_and_keep,
    swiglu,
)
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.linear import Fp8, Fp8PerToken, Int8, Linear, Plain, Smoothed, Stacked

HEADS, SIZE = 3, 8
CACHES = (None, KvCacheQuantAlgo.FP8, KvCacheQuantAlgo.INT8)
WIDTH = HEADS * SIZE

# What compiles for a GPU compiles for a CPU too, by another compiler behind the same front.
pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Asked here, not when tests are collected: the answer takes seconds to import.
    if not fused.can_compile():
        pytest.skip("there is no compiler")
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("kernels")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield folder


def calls(rows: int) -> list[tuple[Any, tuple[Any, ...]]]:
    random = torch.Generator().manual_seed(rows)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 3).bfloat16()

    x, y, weight = numbers(rows, WIDTH), numbers(rows, WIDTH), numbers(WIDTH)
    linears = every_linear()
    encoders = [linear.encode for linear in linears]
    return [
        (rms_norm, (x, weight, 1e-5)),
        (add_norm, (x, None, weight, 1e-5, encoders[:1])),
        (add_norm, (x, y, weight, 1e-5, encoders)),
        *[(swiglu, (x, y, encode)) for encode in encoders[:2]],
        *[(encoded, (x, encode)) for encode in encoders[2:4]],
        *[(linear.product, (encode(x), torch.bfloat16)) for linear, encode in zip(linears, encoders, strict=True)],
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cache_algo", "normed", "numbers"),
    [
        (KvCacheQuantAlgo.FP8, True, (1, 2, 5)),
        *[(one, False, (1, 2, 5)) for one in CACHES],
    ],
)
def test_keys_and_values_are_rotated_and_kept_where_they_belong(
    cache_algo: KvCacheQuantAlgo | None, normed: bool, numbers: tuple[int, ...]
) -> None:
    turned, kept = 2, 2
    one = torch.ones(1)
    encode = None if cache_algo is None else KvCodec.make(cache_algo, one, one, kv_heads=1).encode
    for rows in numbers:
        random = torch.Generator().manual_seed(rows)
        x, cos, sin = (torch.randn(rows, heads, SIZE, generator=random).bfloat16() for heads in (HEADS, 1, 1))
        weight = (torch.rand(1, turned, SIZE, generator=random) + 0.5).bfloat16()
        norms = HeadNorms(weight, 1e-6) if normed else None
        slots = torch.randperm(9, generator=random)[:rows, None]
        pools = [torch.zeros(9, kept, SIZE, dtype=torch.bfloat16 if encode is None else torch.int8) for _ in range(2)]
        plain = rotate_and_keep(x, turned, norms, cos, sin, encode, slots, pools[0])
        with recorded():
            compiled = rotate_and_keep(x, turned, norms, cos, sin, encode, slots, pools[1])
        assert bits([compiled, pools[1]]) == bits([plain, pools[0]])
        heads = x[:, :turned]
        if normed:
            heads = heads / heads.float().square().mean(-1, keepdim=True).sqrt() * weight
        swapped = torch.cat(heads.chunk(2, -1)[::-1], -1)
        assert torch.allclose(plain[:, :turned].float(), (heads * cos + swapped * sin).float(), atol=0.1)
        assert torch.equal(plain[:, turned:], x[:, turned:])
        new = plain[:, -kept:] if encode is None else encode(plain[:, -kept:])
        assert torch.equal(pools[0][slots[:, 0]], new)
        assert int(pools[0].flatten(1).any(1).sum()) == rows


def every_linear() -> list[Linear]:
    random = torch.Generator().manual_seed(0)
    weight = (torch.randn(WIDTH, WIDTH, generator=random) * 3).bfloat16()
    codes = torch.randint(-128, 128, (WIDTH, WIDTH), generator=random, dtype=torch.int8)
    fp8 = Fp8(weight, torch.tensor([0.01]), torch.tensor([0.02]))
    rows = torch.rand(WIDTH, generator=random)
    int8 = Int8(codes, torch.tensor([0.05]), rows)
    return [
        Plain(weight), fp8, int8, Fp8PerToken(weight, rows), Smoothed(weight[0], int8), Stacked((fp8, Plain(weight))),
    ]  # fmt: skip


def bits(result: Any) -> list[list[int]]:
    if isinstance(result, torch.Tensor):
        return [result.contiguous().view(torch.uint8).flatten().tolist()]
    return [part for one in result for part in bits(one)]


# One row is compiled apart, any other number together.
@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_compiled_they_compute_the_same(rows: int, cache: Path) -> None:
    for function, arguments in calls(rows):
        plain = function(*arguments)
        with recorded():
            assert bits(function(*arguments)) == bits(plain), function.__name__
    assert list(cache.rglob("*.cpp"))


@pytest.mark.slow  # the compiler takes ten seconds to import
def test_only_a_recorded_step_is_compiled_and_once_for_any_number_of_rows() -> None:
    from torch._dynamo.utils import counters

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
    assert fused.can_compile.__wrapped__() is False
