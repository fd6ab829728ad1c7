"""GPU kernels in the Triton language, for operations where PyTorch's kernels move more memory than decoding needs.

With TRITON_INTERPRET=1 they run on a CPU, one element at a time.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton import language as tl

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.kv_codec import KvCodec

# Most cached tokens in one iteration of a `paged_attention` program, and pipeline stages: loads overlap computation.
_TOKENS, _STAGES = 128, 2
# Least number of rows of a product on tensor cores.
_ROWS = 16
# Elements of a weight's row that a program of `row_product` reads at once.
_COLUMNS = 2048
# Warps of 32 threads in a program of either kernel.
_WARPS = 4


def paged_attention(
    query: torch.Tensor,
    pool: torch.Tensor,
    codec: KvCodec | None,
    tables: torch.Tensor,
    positions: torch.Tensor,
    kv_heads: int,
    tokens_per_block: int,
) -> torch.Tensor:
    """Attention of n decoding tokens over the cache, themselves included: [n, heads, head_size] -> [n, heads * size].

    query      the last dimension and heads contiguous, of the model's type
    pool       [blocks, tokens_per_block * 2 * kv_heads * head_size], each contiguous; codes where there is a codec
    tables     [n * width] int64, blocks of each request in the order of its tokens
    positions  [n] int64, positions of the decoding tokens; later positions are not read

    Sums and softmax are in float32; attention weights are rounded to the model's type before the product with values.
    """
    n, heads, size = query.shape
    group, columns = heads // kv_heads, max(_ROWS, triton.next_power_of_2(size))
    out = torch.empty(n, heads * size, dtype=query.dtype, device=query.device)
    if codec is not None and codec.algo is KvCacheQuantAlgo.FP8:
        pool = pool.view(torch.float8_e4m3fn)
    _attend[(n, kv_heads)](
        query, query.stride(0), pool, pool.stride(0), None if codec is None else codec.scale, tables, len(tables) // n,
        positions, out, size**-0.5, KV=kv_heads, GROUP=group, SIZE=size, BLOCK=tokens_per_block,
        ROWS=max(_ROWS, triton.next_power_of_2(group)), COLUMNS=columns,
        TOKENS=_tokens_at_once(query.device, columns * query.element_size()), num_stages=_STAGES, num_warps=_WARPS,
    )  # fmt: skip
    return out


@functools.cache
def _tokens_at_once(device: torch.device, nbytes: int) -> int:
    """Tokens per iteration, with keys and values of `nbytes` each per token, that fit a multiprocessor's memory."""
    tokens = _TOKENS
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        while 2 * _STAGES * nbytes * tokens > memory:
            tokens //= 2
    return tokens


# do_not_specialize: no second compilation for a width of tables that is divisible by 16.
@triton.jit(do_not_specialize=["width"])
def _attend(  # type: ignore[no-untyped-def]
    query, query_stride, pool, pool_stride, scales, tables, width, positions, out, softmax_scale,
    KV: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + request)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    # Query heads that share a key head are the rows of one product.
    wanted = (rows < GROUP)[:, None] & (columns < SIZE)[None, :]
    place = (head * GROUP + rows)[:, None] * SIZE + columns[None, :]
    q = tl.load(query + request * query_stride + place, mask=wanted, other=0.0)
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, position + 1, TOKENS):
        at = first + tl.arange(0, TOKENS)
        seen = at <= position
        block = tl.load(tables + request * width + at // BLOCK, mask=seen, other=0)
        token = pool + block * pool_stride + (at % BLOCK) * (2 * KV * SIZE) + head * SIZE
        kept = seen[:, None] & (columns < SIZE)[None, :]
        k = tl.load(token[:, None] + columns[None, :], mask=kept, other=0.0)
        v = tl.load(token[:, None] + KV * SIZE + columns[None, :], mask=kept, other=0.0)
        if scales is not None:
            k = (k.to(tl.float32) * tl.load(scales + head)).to(q.dtype)
            v = (v.to(tl.float32) * tl.load(scales + KV + head)).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * softmax_scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        kept_share = tl.exp(largest - larger)
        weights = tl.exp(scores - larger[:, None])
        total = total * kept_share + tl.sum(weights, 1)
        sums = sums * kept_share[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger
    answer = (sums / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + request * (KV * GROUP * SIZE) + place, answer, mask=wanted)


def row_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x [1, in] @ weight [out, in].T -> [1, out], at the memory bandwidth of reading the weight.

    Both are floats, e4m3 or int8, with contiguous rows. Sums are in float32, for int8 in int32; a scale [1] or [out],
    if given, is applied in float32; the result is rounded once to `dtype`.
    """
    features, columns = weight.shape
    out = torch.empty(1, features, dtype=dtype, device=x.device)
    _multiply[(features,)](
        x, weight, weight.stride(0), scale, out, columns,
        SUM=tl.int32 if weight.dtype == torch.int8 else tl.float32, SCALED_BY_ROW=scale is not None and len(scale) > 1,
        AT_ONCE=_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _multiply(  # type: ignore[no-untyped-def]
    x, weight, weight_stride, scale, out, IN: tl.constexpr, SUM: tl.constexpr, SCALED_BY_ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([AT_ONCE], SUM)
    # Unrolled, so that all loads of a row are issued before the first value is needed.
    for first in tl.static_range(0, IN, AT_ONCE):
        at = first + tl.arange(0, AT_ONCE)
        # evict_first: the weight is not read again before the next step, so it should not occupy the cache.
        own = tl.load(weight + row * weight_stride + at, mask=at < IN, other=0.0, eviction_policy="evict_first")
        sums += own.to(SUM) * tl.load(x + at, mask=at < IN, other=0.0).to(SUM)
    total = tl.sum(sums)
    if scale is not None:
        total = total.to(tl.float32) * tl.load(scale + (row if SCALED_BY_ROW else 0))
    tl.store(out + row, total.to(out.dtype.element_ty))
