"""Linear layers: one class for each storage format and arithmetic of the weight.

Each class reproduces TensorRT-LLM's kernel for its algorithm: rounding, application of scales, type of accumulation.
The order of a sum is the library's. "The model's type" is the compute type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.reference.cuda.fused import one_kernel
from trtpipe.engines.reference.matmul import e4m3_operand, e4m3_product, int8_operand, int8_product, multiply
from trtpipe.engines.reference.number_formats import E4M3_MAX, quantize_rows, to_e4m3, to_int8, unpack_int4

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


def make_linear(algo: QuantAlgo | None, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """Make a linear from a checkpoint's tensors, for inputs of the type `dtype`, on the tensors' device.

    `stored` has these roles, as far as `algo` uses them:
      weight        codes, or float numbers; AWQ's codes are packed as in `unpack_int4`
      scale         of the weight: float32, one, [out] or [out, groups]. W8A16 without it is quantized here
      second_scale  of W4A8's weight: float32, one
      input_scale   float32, one
      smooth        [in], factors of the input; absent also when they are folded into a norm
    """
    weight, smooth = stored["weight"], stored.get("smooth")
    if algo is QuantAlgo.W4A8_AWQ:
        return _w4a8(stored, dtype)
    linear: Linear
    if algo is None:
        linear = Plain(weight.to(dtype))
    elif algo is QuantAlgo.W8A16:
        codes, scale = (weight, stored["scale"]) if "scale" in stored else quantize_rows(weight.to(dtype))
        # The kernel multiplies codes and scale in the model's type, before the product.
        linear = Plain(codes.to(dtype) * scale.to(dtype)[:, None])
    elif algo is QuantAlgo.W4A16_AWQ:
        linear = Plain(_times_groups(unpack_int4(weight), stored["scale"].to(dtype)))
    elif algo is QuantAlgo.FP8:
        input_scale = stored["input_scale"].reshape(1)
        linear = Fp8(e4m3_operand(weight, dtype), input_scale, input_scale * stored["scale"].reshape(1))
    elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
        linear = Fp8PerToken(e4m3_operand(weight, dtype), stored["scale"])
    else:
        input_scale = stored["input_scale"].reshape(1)
        linear = Int8(int8_operand(weight), input_scale, input_scale * stored["scale"])
    return linear if smooth is None else Smoothed(smooth.to(dtype), linear)


def _w4a8(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """Linear of int4 weights and e4m3 inputs, multiplied on FP8 tensor cores."""
    # The main loop multiplies int4 by the group's scale in fp16 and rounds to e4m3 for the tensor cores; the second
    # scale, the largest weight / 448, keeps the products within e4m3's range and is multiplied back at the end.
    input_scale, second = stored["input_scale"].reshape(1), stored["second_scale"].reshape(1)
    weight = to_e4m3(_times_groups(unpack_int4(stored["weight"]), (stored["scale"] / second).half()))
    codes, output_scale = e4m3_operand(weight, dtype), input_scale * second
    if "smooth" not in stored:
        return Fp8(codes, input_scale, output_scale)
    # One vector smooths and scales, so that the input is rounded to the model's type only once before e4m3.
    vector = (stored["smooth"].to(dtype) / input_scale).to(dtype)
    return Smoothed(vector, Fp8(codes, torch.ones_like(input_scale), output_scale))


def _times_groups(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply codes [out, in] by their groups' scales [out, groups], in the scale's type."""
    grouped = codes.to(scale.dtype).view(*scale.shape, -1)
    return (grouped * scale[:, :, None]).flatten(1)
