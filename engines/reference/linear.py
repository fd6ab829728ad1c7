"""Linear layers: one class for each storage format and arithmetic of the weight.

Each class reproduces TensorRT-LLM's kernel for its algorithm: rounding, application of scales, type of accumulation.
The order of a sum is the library's. "The model's type" is the compute type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trtpipe.engines.reference.fused import one_kernel
from trtpipe.engines.reference.matmul import e4m3_product, int8_product, multiply
from trtpipe.engines.reference.number_formats import (
    E4M3_MAX,
    FP8_BLOCK,
    in_nvfp4_units,
    nvfp4_scales,
    round_e2m1,
    times_nvfp4_scales,
    to_e4m3,
    to_int8,
    unpack_e2m1,
)

# Smallest scale of a token, which prevents a division by zero for a token of zeros.
MIN_TOKEN_SCALE = 1.0 / (E4M3_MAX * 512)
INT8_MAX = 127.0


class Linear(ABC):
    """[T, in] -> [T, out] in the type of the input.

    It has two steps, so that the first step can be fused into the kernel that computes the input.
    """

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Any:
        """First step, row by row: return the operand of the product, which is the input, or its codes and scales."""

    @abstractmethod
    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        """Second step: the product with `operand`, which `encode` made of an input of type `dtype`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.encode(x), x.dtype)


@dataclass(frozen=True)
class Plain(Linear):
    """A weight [out, in] in the model's type, also a decoded weight of a weight-only algorithm."""

    weight: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return multiply(operand, self.weight)


@dataclass(frozen=True)
class Smoothed(Linear):
    """Applies `linear` to the input times a vector [in] of the model's type, rounded to that type."""

    vector: torch.Tensor
    linear: Linear

    def encode(self, x: torch.Tensor) -> Any:
        return self.linear.encode(x * self.vector)

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.linear.product(operand, dtype)


@dataclass(frozen=True)
class Stacked(Linear):
    """Linears of one input, with their outputs concatenated along the features."""

    parts: tuple[Linear, ...]

    def encode(self, x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(part.encode(x) for part in self.parts)

    def product(self, operand: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.product(of, dtype) for part, of in zip(self.parts, operand, strict=True)], dim=-1)


@dataclass(frozen=True)
class Fp8(Linear):
    """Input and weight in e4m3, with one scale each from calibration.

    codes         [out, in], see `e4m3_operand`
    input_scale   [1] float32; divisor of the input
    output_scale  [1] float32; factor of the product of codes
    """

    codes: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return to_e4m3(x / self.input_scale)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return e4m3_product(operand, self.codes, self.output_scale, dtype)


@dataclass(frozen=True)
class Fp8PerToken(Linear):
    """Input and weight in e4m3; a token's scale comes from its largest magnitude, and each output row has a scale.

    codes      [out, in], see `e4m3_operand`
    row_scale  [out] float32
    """

    codes: torch.Tensor
    row_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of [T, in], and the divisor of each row, [T, 1] float32."""
        scale = (x.abs().amax(dim=-1, keepdim=True).float() / E4M3_MAX).clamp(min=MIN_TOKEN_SCALE)
        return to_e4m3(x / scale), scale

    def product(self, operand: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = operand
        return _rescaled(e4m3_product(codes, self.codes), scale, self.row_scale, dtype)


@one_kernel
def _rescaled(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a product of codes by the scales of its rows and of its columns."""
    return (product * rows * columns).to(dtype)


@dataclass(frozen=True)
class Fp8Block(Linear):
    """Input and weight in e4m3, with a scale for each block: 128 features of a token, 128 rows and columns of a weight.

    The last block of a row or column may be smaller. Products of blocks are summed in float32.

    codes         [out, in], see `e4m3_operand`
    column_scale  [blocks of in, out] float32, the weight's scales, each repeated for the rows of its block
    """

    codes: torch.Tensor
    column_scale: torch.Tensor

    @classmethod
    def of(cls, codes: torch.Tensor, scale: torch.Tensor) -> Fp8Block:
        """Make it of codes [out, in] and the scales of their blocks, [blocks of out, blocks of in]."""
        return cls(codes, scale.repeat_interleave(FP8_BLOCK, dim=0)[: len(codes)].t().contiguous())

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of [T, in], and the divisor of each block, [T, blocks of in] float32."""
        width = x.shape[-1]
        blocks = functional.pad(x, (0, -width % FP8_BLOCK)).unflatten(-1, (-1, FP8_BLOCK))
        scale = blocks.abs().amax(dim=-1).float() / E4M3_MAX
        scale = scale.where(scale > 0, 1.0)
        return to_e4m3(blocks / scale[..., None]).flatten(-2)[..., :width], scale

    def product(self, operand: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = operand
        out = torch.zeros(len(codes), len(self.codes), dtype=torch.float32, device=codes.device)
        for index, columns in enumerate(self.column_scale):
            place = slice(index * FP8_BLOCK, (index + 1) * FP8_BLOCK)
            out += e4m3_product(codes[:, place], self.codes[:, place]) * scale[:, index, None] * columns
        return out.to(dtype)


@dataclass(frozen=True)
class Nvfp4(Linear):
    """Input and weight in NVFP4: e2m1 with an e4m3 scale for 16 input features; those of an input are found as it runs.

    weight        [out, in], e2m1 numbers times the scales of their blocks, see `nvfp4_operand`
    input_scale   [1] float32, from calibration; unit of the scales of the input's blocks
    output_scale  [1] float32; factor of the product
    """

    weight: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] in the weight's type: e2m1 numbers times the scales of their blocks."""
        blocks = nvfp4_scales(x, self.input_scale)
        codes = round_e2m1(in_nvfp4_units(x, blocks, self.input_scale))
        return times_nvfp4_scales(codes.to(self.weight.dtype), blocks)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (multiply(operand, self.weight) * self.output_scale).to(dtype)


def nvfp4_operand(codes: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed e2m1 codes [out, in / 2] and scales of their blocks [out, in / 16], as `Nvfp4` wants them for inputs of
    type `dtype`: in bfloat16, or float32 for float16, whose range the sum of products may exceed."""
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    return times_nvfp4_scales(unpack_e2m1(codes, kind), blocks)


@dataclass(frozen=True)
class Int8(Linear):
    """Input and weight in int8, with an exact sum in int32.

    codes         [out, in], see `int8_operand`
    input_scale   [1] float32, from calibration
    output_scale  [out] float32; factor of the product of codes
    """

    codes: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return to_int8(x / self.input_scale)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return int8_product(operand, self.codes, self.output_scale, dtype)


@dataclass(frozen=True)
class Int8PerToken(Linear):
    """Input and weight in int8; a token's scale comes from its largest magnitude, and each output row has a scale.

    codes      [out, in], see `int8_operand`
    row_scale  [out] float32
    """

    codes: torch.Tensor
    row_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of [T, in], and the divisor of each row, [T, 1] float32."""
        scale = x.abs().amax(dim=-1, keepdim=True).float() / INT8_MAX
        scale = scale.where(scale > 0, 1.0)
        return to_int8(x / scale), scale

    def product(self, operand: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = operand
        return (int8_product(codes, self.codes, self.row_scale, torch.float32) * scale).to(dtype)
