"""Linear layers: one class for each storage format and arithmetic of the weight.

Each class reproduces TensorRT-LLM's kernel for its algorithm: rounding, application of scales, type of accumulation.
The order of a sum is the library's. "The model's type" is the compute type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtpipe.engines.reference.cuda.fused import one_kernel
from trtpipe.engines.reference.matmul import e4m3_product, int8_product, multiply, packed
from trtpipe.engines.reference.number_formats import E4M3_MAX, to_e4m3, to_int8

# Smallest scale of a token, which prevents a division by zero for a token of zeros.
MIN_TOKEN_SCALE = 1.0 / (E4M3_MAX * 512)


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

    def pack(self) -> Linear:
        """The same linear with its weight laid out for many products, which on a CPU takes a copy of the weight."""
        return self


@dataclass(frozen=True)
class Plain(Linear):
    """A weight [out, in] in the model's type, also a decoded weight of a weight-only algorithm."""

    weight: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return multiply(operand, self.weight)

    def pack(self) -> Plain:
        return Plain(packed(self.weight))


@dataclass(frozen=True)
class Smoothed(Linear):
    """Applies `linear` to the input times a vector [in] of the model's type, rounded to that type."""

    vector: torch.Tensor
    linear: Linear

    def encode(self, x: torch.Tensor) -> Any:
        return self.linear.encode(x * self.vector)

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.linear.product(operand, dtype)

    def pack(self) -> Smoothed:
        return replace(self, linear=self.linear.pack())


@dataclass(frozen=True)
class Stacked(Linear):
    """Linears of one input, with their outputs concatenated along the features."""

    parts: tuple[Linear, ...]

    def encode(self, x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(part.encode(x) for part in self.parts)

    def product(self, operand: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.product(of, dtype) for part, of in zip(self.parts, operand, strict=True)], dim=-1)

    def pack(self) -> Stacked:
        return Stacked(tuple(part.pack() for part in self.parts))


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

    def pack(self) -> Fp8:
        return replace(self, codes=packed(self.codes))


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

    def pack(self) -> Fp8PerToken:
        return replace(self, codes=packed(self.codes))


@one_kernel
def _rescaled(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply a product of codes by the scales of its rows and of its columns."""
    return (product * rows * columns).to(dtype)


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
