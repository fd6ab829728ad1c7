"""Our own kernels compute what PyTorch does; without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.cuda import kernels
from trtpipe.engines.reference.cuda.kernels import paged_attention, row_product
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.number_formats import to_e4m3

# The interpreter's own, for a loop to a number that it has as an array.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter does not multiply bfloat16.
FLOATS = [torch.float32, torch.float16, *[torch.bfloat16][: int(GPU)]]
EPSILON = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("columns", [24, 1024, 2200])
def test_the_product_of_one_row_and_a_weight_is_that_of_float64(
    random: torch.Generator, dtype: torch.dtype, columns: int
) -> None:
    x, weight = (torch.randn(rows, columns, generator=random).to(dtype) for rows in (1, 5))
    product = row_product(x.to(DEVICE), weight.to(DEVICE), None, dtype).cpu()
    exact = x.double() @ weight.double().t()
    assert (product.shape, product.dtype) == ((1, 5), dtype)
    assert torch.allclose(product.double(), exact, rtol=EPSILON[dtype], atol=EPSILON[dtype])


def test_a_product_of_e4m3_codes_is_scaled_once(random: torch.Generator) -> None:
    # Small whole numbers: their sums are exact in whatever order.
    x, weight = (to_e4m3(torch.randint(-8, 9, (rows, 300), generator=random).float()) for rows in (1, 7))
    scale = torch.tensor([0.37])
    product = row_product(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), torch.float16).cpu()
    assert torch.equal(product, ((x.float() @ weight.float().t()) * scale).half())


def test_a_product_of_int8_codes_is_exact_and_has_a_scale_for_each_row(random: torch.Generator) -> None:
    x, weight = (torch.randint(-128, 128, (rows, 5000), generator=random, dtype=torch.int8) for rows in (1, 7))
    scale = torch.rand(7, generator=random)
    product = row_product(x.to(DEVICE), weight.to(DEVICE), scale.to(DEVICE), torch.float32).cpu()
    assert torch.equal(product, (x.int() @ weight.int().t()) * scale)


# Tokens of one tile or of several, or the first alone; blocks smaller than a tile and as large.
@pytest.mark.parametrize(("kv_heads", "group", "size", "block"), [(2, 3, 24, 8), (1, 4, 64, 128), (2, 1, 16, 64)])
@pytest.mark.parametrize("algo", [None, KvCacheQuantAlgo.FP8, KvCacheQuantAlgo.INT8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_each_request_sees_its_own_tokens_and_no_others(
    random: torch.Generator, dtype: torch.dtype, algo: KvCacheQuantAlgo | None,
    kv_heads: int, group: int, size: int, block: int,
) -> None:  # fmt: skip
    positions = torch.tensor([0, 5, 127, 128, 299])
    n, width = len(positions), 299 // block + 1
    query = torch.randn(n, kv_heads * (group + 2), size, generator=random).to(dtype)[:, : kv_heads * group]
    cached = torch.randn(n * width + 1, block, 2 * kv_heads, size, generator=random).to(dtype)
    codec = None
    if algo is not None:
        codec = KvCodec.make(algo, torch.tensor([0.02]), torch.tensor([0.03]), kv_heads)
        cached = codec.encode(cached)
    spare = n * width
    tables = torch.randperm(spare, generator=random).view(n, width)
    seen = cached[tables].flatten(1, 2)
    if codec is not None:
        seen = codec.decode(seen, dtype)
    # What nobody may read: a block that no request has, and what a block's last owner left behind the newest token.
    poison = torch.nan if codec is None else 127  # among e4m3 codes this is a NaN too
    cached[spare] = poison
    for request, position in enumerate(positions.tolist()):
        last = position // block
        cached[tables[request, last], position % block + 1 :] = poison
        tables[request, last + 1 :] = spare
    on_device = None if codec is None else KvCodec(codec.algo, codec.scale.to(DEVICE))
    answer = paged_attention(
        query.to(DEVICE), cached.flatten(1).to(DEVICE), on_device, tables.flatten().to(DEVICE), positions.to(DEVICE),
        kv_heads, block,
    ).cpu()  # fmt: skip
    assert (answer.shape, answer.dtype) == ((n, kv_heads * group * size), dtype)
    for request, position in enumerate(positions.tolist()):
        own = seen[request, : position + 1].double()
        keys, values = (part.repeat_interleave(group, dim=1) for part in own.split(kv_heads, dim=1))
        scores = torch.einsum("hd,thd->ht", query[request].double(), keys) * size**-0.5
        exact = torch.einsum("ht,thd->hd", scores.softmax(-1), values).flatten()
        assert torch.allclose(answer[request].double(), exact, rtol=EPSILON[dtype], atol=EPSILON[dtype])


def test_a_tile_is_smaller_than_what_the_tests_see() -> None:
    assert kernels._TOKENS < 299
    assert kernels._COLUMNS < 2200
