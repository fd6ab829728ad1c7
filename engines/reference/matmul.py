"""Products of rows with a weight, by what both are held as: floats, e4m3 codes, int8 codes.

The order of a sum is the library's own; a product of two codes is exact.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from trtpipe.engines.reference.cuda.fused import compiling, one_kernel

# Sums of so many products of two int8 are below 2^24, and so exact in float32.
_EXACT_COLUMNS = 1024
# Without instructions for 16 bits the library takes six times as long for them as for float32. So many rows pay for
# widening the weight.
_MANY_ROWS = 32


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] @ weight [out, in].T, both of one type. Columns of the result may be contiguous, not rows."""
    if _one_recorded(x, weight):
        return _row_product(x, weight, None, x.dtype)
    # On a CPU, weights as the left factor are up to twice as fast in 16 bits, and slower in 32.
    if weight.dtype == torch.float32 or weight.is_cuda:
        return functional.linear(x, weight)
    if len(x) == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if len(x) >= _MANY_ROWS and not _has_instructions(weight.dtype):
        return functional.linear(x.float(), weight.float()).to(x.dtype)
    return torch.mm(weight, x.t()).t()


def _one_recorded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a graph is made for one row: libraries' kernels, made for tiles of many, leave memory waiting."""
    return len(x) == 1 and weight.is_cuda and compiling()


def _row_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    from trtpipe.engines.reference.cuda.kernels import row_product

    return row_product(x, weight, scale, dtype)


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of 16 bits as they are."""
    return torch.cpu._is_avx512_bf16_supported() if dtype == torch.bfloat16 else torch.cpu._is_amx_fp16_supported()


def e4m3_operand(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 codes [out, in] as `e4m3_product` wants them: as they are where the device multiplies them.

    Elsewhere in bfloat16, which holds every e4m3 number, when that is the model's type; else in float32: products
    of codes exceed float16.
    """
    on_tensor_cores = (
        codes.device.type == "cuda"
        and torch.cuda.get_device_capability(codes.device) >= (8, 9)
        and not any(size % 16 for size in codes.shape)
    )
    if on_tensor_cores:
        return codes
    return codes.to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)


def e4m3_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """x @ weight.T for e4m3 x, summed in float32; a product of two codes is exact there. With a scale [1], that times
    the sum, in float32, rounded once to `dtype`.

    float32, or bfloat16 for weights held in it: a rounding by 2^-9, small beside the 2^-4 of the codes.
    """
    if weight.dtype != torch.float8_e4m3fn:
        product = multiply(x.to(weight.dtype), weight)
        return product if scale is None else (product * scale).to(dtype)
    if _one_recorded(x, weight):
        return _row_product(x, weight, scale, dtype)
    one = _one(x.device)
    return torch._scaled_mm(x, weight.t(), scale_a=one if scale is None else scale, scale_b=one, out_dtype=dtype)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def int8_operand(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes [out, in] as `int8_product` wants them: float32 where torch's own int8 product is not exact."""
    # Without these instructions the library adds pairs of products in int16, where they saturate.
    return codes if codes.device.type == "cuda" or torch.cpu._is_vnni_supported() else codes.float()


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ weight.T for int8 x, exact in int32; times a scale [out], in float32, rounded once to `dtype`."""
    if _one_recorded(x, weight):
        return _row_product(x, weight, scale, dtype)
    return _scaled(_int8_sums(x, weight), scale, dtype)


@one_kernel
def _scaled(sums: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (sums * scale).to(dtype)


def _int8_sums(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T in int32."""
    if weight.dtype == torch.int8:
        rows, features = len(x), len(weight)
        if x.device.type == "cuda":
            # cuBLAS takes more than 16 rows, and multiples of 8; zeros add nothing.
            x, weight = _padded(x, max(rows, 32)), _padded(weight, features)
        return torch._int_mm(x, weight.t())[:rows, :features]
    out = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    for first in range(0, x.shape[1], _EXACT_COLUMNS):
        columns = slice(first, first + _EXACT_COLUMNS)
        out += functional.linear(x[:, columns].float(), weight[:, columns]).to(torch.int32)
    return out


def _padded(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """The matrix with zeros up to `rows` rows, and both sizes multiples of 8."""
    height, width = matrix.shape
    rows += -rows % 8
    if rows == height and width % 8 == 0:
        return matrix
    return functional.pad(matrix, (0, -width % 8, 0, rows - height))
