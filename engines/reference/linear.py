"""A linear layer's weight as it is held, and how it is applied: one class for each arithmetic.

Each computes what TensorRT-LLM's kernel for its algorithm does: what is rounded to which type, where scales come in,
what accumulates in which type. The order of a sum is the library's own. "The model's type" is the type computed in.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional

from engines.quant import QuantAlgo
from engines.reference.codes import E4M3_MAX, quantize_rows, to_e4m3, to_int8, unpack_int4
from engines.reference.fused import one_kernel

# The smallest scale of a token, or a token of zeros would divide by zero.
MIN_TOKEN_SCALE = 1.0 / (E4M3_MAX * 512)
# Sums of so many products of two int8 are below 2^24, and so exact in float32.
_EXACT_COLUMNS = 1024
# Without instructions for 16 bits the library takes six times as long for them as for float32. So many rows pay for
# widening the weight.
_MANY_ROWS = 32


class Linear(Protocol):
    """[T, in] -> [T, out] in the type of the input."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Branches(Protocol):
    """Two linears of one input: [T, in] -> two of [T, out]."""

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class Plain:
    """A weight [out, in] in the model's type. Weight-only algorithms are this too, once the weight is decoded."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight)


@dataclass(frozen=True)
class Smoothed:
    """`linear` of the input times a vector [in] of the model's type; the product is rounded to that type."""

    vector: torch.Tensor
    linear: Linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x * self.vector)


@dataclass(frozen=True)
class Stacked:
    """Linears of one input side by side: features of the output follow each other."""

    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True)
class Fp8:
    """Both sides e4m3 with a scale each, found by calibration.

    codes         [out, in], see `_e4m3_operand`
    input_scale   [1] float32; what the input is divided by
    output_scale  [1] float32; what the product of codes is multiplied by
    """

    codes: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(divide_to_e4m3(x, self.input_scale), x.dtype)

    def product(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of an input in e4m3."""
        if self.codes.dtype == torch.float8_e4m3fn:
            # The library's epilogue multiplies in float32 and rounds once, as the line below does.
            one = _one(x.device)
            return torch._scaled_mm(x, self.codes.t(), scale_a=self.output_scale, scale_b=one, out_dtype=dtype)
        return (_e4m3_product(x, self.codes) * self.output_scale).to(dtype)


@dataclass(frozen=True)
class Fp8PerToken:
    """Both sides e4m3; every token takes its scale from its own largest magnitude, every output row has one.

    codes      [out, in], see `_e4m3_operand`
    row_scale  [out] float32
    """

    codes: torch.Tensor
    row_scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = tokens_to_e4m3(x)
        return rescale(_e4m3_product(codes, self.codes), scale, self.row_scale, x.dtype)


@dataclass(frozen=True)
class Int8:
    """Both sides int8, the sum exact in int32.

    codes        [out, in], see `_int8_operand`
    input_scale  [1] float32, found by calibration
    row_scale    [out] float32
    """

    codes: torch.Tensor
    input_scale: torch.Tensor
    row_scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = _int8_product(divide_to_int8(x, self.input_scale), self.codes)
        return (product * (self.input_scale * self.row_scale)).to(x.dtype)


@dataclass(frozen=True)
class Each:
    """Branches that have nothing in common but their input."""

    first: Linear
    second: Linear

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


@dataclass(frozen=True)
class OneProduct:
    """Branches [out, in] each, one below the other: a GPU reads the one matrix faster than two of half the size."""

    both: Linear

    @classmethod
    def of(cls, first: Plain | Fp8, second: Plain | Fp8) -> OneProduct | None:
        """None for branches that have not their scales in common."""
        if isinstance(first, Plain) and isinstance(second, Plain):
            return cls(Plain(torch.cat([first.weight, second.weight])))
        if isinstance(first, Fp8) and isinstance(second, Fp8) and torch.equal(first.output_scale, second.output_scale):
            # torch moves no e4m3 about.
            codes = torch.cat([one.codes.view(torch.int8) for one in (first, second)]).view(first.codes.dtype)
            return cls(replace(first, codes=codes)) if torch.equal(first.input_scale, second.input_scale) else None
        return None

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.both(x).chunk(2, dim=-1)
        return first, second


@dataclass(frozen=True)
class OneInput:
    """FP8 branches whose inputs have the same scale, and so the same codes."""

    first: Fp8
    second: Fp8

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes = divide_to_e4m3(x, self.first.input_scale)
        return self.first.product(codes, x.dtype), self.second.product(codes, x.dtype)


def make_branches(first: Linear, second: Linear) -> Branches:
    """Two linears of one input, what they have in common done once."""
    if isinstance(first, (Plain, Fp8)) and isinstance(second, (Plain, Fp8)):
        weight = first.weight if isinstance(first, Plain) else first.codes
        # Elsewhere weights are the page cache's memory, and side by side would be a copy.
        together = OneProduct.of(first, second) if weight.is_cuda else None
        if together is not None:
            return together
    if isinstance(first, Fp8) and isinstance(second, Fp8) and torch.equal(first.input_scale, second.input_scale):
        return OneInput(first, second)
    return Each(first, second)


@one_kernel
def divide_to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return to_e4m3(x / scale)


@one_kernel
def divide_to_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return to_int8(x / scale)


@one_kernel
def tokens_to_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of [T, in], and what each row was divided by, [T, 1] float32."""
    scale = (x.abs().amax(dim=-1, keepdim=True).float() / E4M3_MAX).clamp(min=MIN_TOKEN_SCALE)
    return to_e4m3(x / scale), scale


@one_kernel
def rescale(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of codes times the scales of its rows and of its columns."""
    return (product * rows * columns).to(dtype)


def make_linear(algo: QuantAlgo | None, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """The linear that the tensors of a checkpoint describe, for inputs of the type `dtype`, on the tensors' device.

    stored holds, by role and as far as `algo` has them:
      weight        codes, or float numbers; AWQ's are packed as `unpack_int4` reads them
      scale         of the weight: float32, one, [out] or [out, groups]. W8A16 without it is quantized here
      second_scale  of W4A8's weight: float32, one
      input_scale   float32, one
      smooth        [in], what the input is multiplied by first; also absent when a norm has taken it up
    """
    weight, smooth = stored["weight"], stored.get("smooth")
    if algo is QuantAlgo.W4A8_AWQ:
        return _w4a8(stored, dtype)
    linear: Linear
    if algo is None:
        linear = Plain(weight.to(dtype))
    elif algo is QuantAlgo.W8A16:
        codes, scale = (weight, stored["scale"]) if "scale" in stored else quantize_rows(weight.to(dtype))
        # The kernel multiplies the two in the model's type, before the product.
        linear = Plain(codes.to(dtype) * scale.to(dtype)[:, None])
    elif algo is QuantAlgo.W4A16_AWQ:
        linear = Plain(_times_groups(unpack_int4(weight), stored["scale"].to(dtype)))
    elif algo is QuantAlgo.FP8:
        input_scale = stored["input_scale"].reshape(1)
        linear = Fp8(_e4m3_operand(weight, dtype), input_scale, input_scale * stored["scale"].reshape(1))
    elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
        linear = Fp8PerToken(_e4m3_operand(weight, dtype), stored["scale"])
    else:
        linear = Int8(_int8_operand(weight), stored["input_scale"].reshape(1), stored["scale"])
    return linear if smooth is None else Smoothed(smooth.to(dtype), linear)


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, in] @ weight [out, in].T, both of one type. Columns of the result may be contiguous, not rows."""
    # On a CPU, weights as the left factor are up to twice as fast in 16 bits, and slower in 32.
    if weight.dtype == torch.float32 or weight.is_cuda:
        return functional.linear(x, weight)
    if len(x) == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    if len(x) >= _MANY_ROWS and not _has_instructions(weight.dtype):
        return functional.linear(x.float(), weight.float()).to(x.dtype)
    return torch.mm(weight, x.t()).t()


def _has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies numbers of 16 bits as they are."""
    return torch.cpu._is_avx512_bf16_supported() if dtype == torch.bfloat16 else torch.cpu._is_amx_fp16_supported()


def _w4a8(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """int4 weights that meet e4m3 inputs on FP8 tensor cores."""
    # The main loop multiplies int4 by the group's scale in fp16 and rounds to e4m3, which is what the tensor cores
    # take; the second scale, the largest weight / 448, keeps those within e4m3's range and comes back at the end.
    input_scale, second = stored["input_scale"].reshape(1), stored["second_scale"].reshape(1)
    weight = to_e4m3(_times_groups(unpack_int4(stored["weight"]), (stored["scale"] / second).half()))
    codes, output_scale = _e4m3_operand(weight, dtype), input_scale * second
    if "smooth" not in stored:
        return Fp8(codes, input_scale, output_scale)
    # One vector does both, so that the input is rounded to the model's type only once on its way to e4m3.
    vector = (stored["smooth"].to(dtype) / input_scale).to(dtype)
    return Smoothed(vector, Fp8(codes, torch.ones_like(input_scale), output_scale))


def _times_groups(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] times their group's scale [out, groups], computed in the scale's type."""
    grouped = codes.to(scale.dtype).view(*scale.shape, -1)
    return (grouped * scale[:, :, None]).flatten(1)


def _e4m3_operand(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 codes [out, in] as `_e4m3_product` wants them: as they are where the device multiplies them.

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


def _e4m3_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for e4m3 x, summed in float32; a product of two codes is exact there.

    float32, or bfloat16 for weights held in it: a rounding by 2^-9, small beside the 2^-4 of the codes.
    """
    if weight.dtype != torch.float8_e4m3fn:
        return multiply(x.to(weight.dtype), weight)
    one = _one(x.device)
    return torch._scaled_mm(x, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, device=device)


def _int8_operand(codes: torch.Tensor) -> torch.Tensor:
    """int8 codes [out, in] as `_int8_product` wants them: float32 where torch's own int8 product is not exact."""
    # Without these instructions the library adds pairs of products in int16, where they saturate.
    return codes if codes.device.type == "cuda" or torch.cpu._is_vnni_supported() else codes.float()


def _int8_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for int8 x, exact in int32."""
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
