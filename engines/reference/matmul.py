"""Matrix products of rows and a weight, for floats, e4m3 codes and int8 codes.

The order of a sum is the library's, and may be another for another number of rows or of threads, so that a row's result
may round otherwise in another batch; a product of two codes is exact.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional

from trtpipe.engines.reference.fused import compiling, one_kernel

# A sum of this many products of two int8 is below 2^24, and so exact in float32.
_EXACT_COLUMNS = 1024
# On a CPU without 16-bit instructions, the number of rows from which converting a 16-bit weight to float32 pays: the
# product itself takes six times as long in 16 bits. Milliseconds of the products of a step of SmolLM2 on two AVX2
# cores, in 16 bits and converted: 52 and 90 for 2 rows, 119 and 120 for 4, 254 and 177 for 8, 1177 and 337 for 32.
_MANY_ROWS = 3
# Elements of a 16-bit weight that are converted at a time: few enough for the caches.
_CONVERTED = 1 << 20
# Numbers of rows that a packed weight is multiplied with. oneDNN keeps half a megabyte for each shape of a weight and
# number of rows that it meets, up to 1024 times, which prompts of any length would reach.
_PACKED_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Number of rows for which oneDNN chooses the layout of a packed weight.
_TYPICAL_ROWS = 8


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Copy a float32 weight [out, in] on a CPU into oneDNN's blocked layout for `multiply`; return any other as it is.

    Milliseconds of the products of a step of SmolLM2 on two AVX2 cores, with MKL's linear and packed: 44 and 40 for
    one row, 115 and 41 for 2, 145 and 63 for 8, 356 and 199 for 32.
    """
    if weight.is_cuda or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    copy: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
    return copy


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] @ weight [out, in].T, both of one type. Columns of the result may be contiguous, not rows.

    weight  may be `packed`

    On a CPU without 16-bit instructions one or two rows are multiplied in 16 bits, and more in float32; each result is
    rounded once to the type.
    """
    if weight.is_mkldnn:
        parts = [_packed_product(part, weight) for part in x.split(_PACKED_ROWS[-1])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    if _one_recorded(x, weight):
        return _row_product(x, weight, None, x.dtype)
    if weight.is_cuda:
        return functional.linear(x, weight)
    if weight.dtype == torch.float32:
        return _float32_product(x, weight)
    if len(x) == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if len(x) >= _MANY_ROWS and not _has_instructions(weight.dtype):
        return _converted_product(x, weight)
    # The weight as left factor is up to twice as fast in 16 bits.
    return torch.mm(weight, x.t()).t()


def _packed_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`multiply` by a packed weight, for at most 256 rows; rows of zeros fill them up to one of `_PACKED_ROWS`."""
    rows = len(x)
    missing = next(number for number in _PACKED_ROWS if number >= rows) - rows
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out[:rows] if missing else out


def _float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`multiply` in float32 on a CPU. MKL divides the rows of the left factor among threads: the weight has many."""
    return torch.mm(weight, x.t()).t() if torch.get_num_threads() > 1 else functional.linear(x, weight)


def _converted_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`multiply` in float32 for 16-bit types. The weight is converted in parts: memory for all of it, as large as the
    head's, would be paged in at each call."""
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    rows = max(1, _CONVERTED // weight.shape[1])
    for first in range(0, len(weight), rows):
        part = slice(first, first + rows)
        out[:, part] = _float32_product(wide, weight[part].float())
    return out


def _one_recorded(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a CUDA graph of one row is recorded: libraries' kernels, made for tiles of rows, underuse memory then."""
    return len(x) == 1 and weight.is_cuda and compiling()


def _row_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    from trtpipe.engines.reference.cuda.kernels import row_product

    return row_product(x, weight, scale, dtype)


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions that multiply numbers of the 16-bit type `dtype`."""
    return torch.cpu._is_avx512_bf16_supported() if dtype == torch.bfloat16 else torch.cpu._is_amx_fp16_supported()


def e4m3_operand(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert e4m3 codes [out, in] for `e4m3_product`; they stay e4m3 if the device multiplies e4m3.

    Otherwise they become bfloat16, which holds every e4m3 number, if that is the model's type; else float32, since
    products of codes exceed float16.
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
    """x @ weight.T for e4m3 x, summed in float32, where a product of two codes is exact. A scale [1] is multiplied with
    the sum in float32, and the result is rounded once to `dtype`.

    The result is float32, or bfloat16 for bfloat16 weights: its rounding by 2^-9 is small beside the codes' 2^-4.
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
    """Convert int8 codes [out, in] for `int8_product`; they become float32 where torch's int8 product is not exact."""
    # Without VNNI instructions the library adds pairs of products in int16, where the sums saturate.
    return codes if codes.device.type == "cuda" or torch.cpu._is_vnni_supported() else codes.float()


def int8_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ weight.T for int8 x, exact in int32, times a scale [out] in float32, rounded once to `dtype`."""
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
            # cuBLAS needs more than 16 rows, and sizes that are multiples of 8; zero padding adds nothing.
            x, weight = _padded(x, max(rows, 32)), _padded(weight, features)
        return torch._int_mm(x, weight.t())[:rows, :features]
    out = torch.zeros(len(x), len(weight), dtype=torch.int32, device=x.device)
    for first in range(0, x.shape[1], _EXACT_COLUMNS):
        columns = slice(first, first + _EXACT_COLUMNS)
        out += _float32_product(x[:, columns].float(), weight[:, columns]).to(torch.int32)
    return out


def _padded(matrix: torch.Tensor, rows: int) -> torch.Tensor:
    """Pad the matrix with zeros up to `rows` rows, and both sizes to multiples of 8."""
    height, width = matrix.shape
    rows += -rows % 8
    if rows == height and width % 8 == 0:
        return matrix
    return functional.pad(matrix, (0, -width % 8, 0, rows - height))
