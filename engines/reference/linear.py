"""A linear layer's weight as it is held, and how it is applied: one class for each arithmetic.

Each computes what TensorRT-LLM's kernel for its algorithm does: what is rounded to which type, where scales come in,
what accumulates in which type. The order of a sum is the library's own. "The model's type" is the type computed in.
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

# The smallest scale of a token, or a token of zeros would divide by zero.
MIN_TOKEN_SCALE = 1.0 / (E4M3_MAX * 512)


class Linear(ABC):
    """[T, in] -> [T, out] in the type of the input.

    In two halves, so that the first one can be part of the kernel that computes the input.
    """

    @abstractmethod
    def encode(self, x: torch.Tensor) -> Any:
        """What is multiplied: the input itself, or its codes and what belongs to them. Row by row."""

    @abstractmethod
    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        """Of what `encode` made of an input of type `dtype`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self.encode(x), x.dtype)


@dataclass(frozen=True)
class Plain(Linear):
    """A weight [out, in] in the model's type. Weight-only algorithms are this too, once the weight is decoded."""

    weight: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return multiply(operand, self.weight)


@dataclass(frozen=True)
class Smoothed(Linear):
    """`linear` of the input times a vector [in] of the model's type; the product is rounded to that type."""

    vector: torch.Tensor
    linear: Linear

    def encode(self, x: torch.Tensor) -> Any:
        return self.linear.encode(x * self.vector)

    def product(self, operand: Any, dtype: torch.dtype) -> torch.Tensor:
        return self.linear.product(operand, dtype)


@dataclass(frozen=True)
class Stacked(Linear):
    """Linears of one input side by side: features of the output follow each other."""

    parts: tuple[Linear, ...]

    def encode(self, x: torch.Tensor) -> tuple[Any, ...]:
        return tuple(part.encode(x) for part in self.parts)

    def product(self, operand: tuple[Any, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([part.product(of, dtype) for part, of in zip(self.parts, operand, strict=True)], dim=-1)


@dataclass(frozen=True)
class Fp8(Linear):
    """Both sides e4m3 with a scale each, found by calibration.

    codes         [out, in], see `e4m3_operand`
    input_scale   [1] float32; what the input is divided by
    output_scale  [1] float32; what the product of codes is multiplied by
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
    """Both sides e4m3; every token takes its scale from its own largest magnitude, every output row has one.

    codes      [out, in], see `e4m3_operand`
    row_scale  [out] float32
    """

    codes: torch.Tensor
    row_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of [T, in], and what each row was divided by, [T, 1] float32."""
        scale = (x.abs().amax(dim=-1, keepdim=True).float() / E4M3_MAX).clamp(min=MIN_TOKEN_SCALE)
        return to_e4m3(x / scale), scale

    def product(self, operand: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        codes, scale = operand
        return _rescaled(e4m3_product(codes, self.codes), scale, self.row_scale, dtype)


@one_kernel
def _rescaled(product: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of codes times the scales of its rows and of its columns."""
    return (product * rows * columns).to(dtype)


@dataclass(frozen=True)
class Int8(Linear):
    """Both sides int8, the sum exact in int32.

    codes         [out, in], see `int8_operand`
    input_scale   [1] float32, found by calibration
    output_scale  [out] float32; what the product of codes is multiplied by
    """

    codes: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return to_int8(x / self.input_scale)

    def product(self, operand: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return int8_product(operand, self.codes, self.output_scale, dtype)


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
        linear = Fp8(e4m3_operand(weight, dtype), input_scale, input_scale * stored["scale"].reshape(1))
    elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
        linear = Fp8PerToken(e4m3_operand(weight, dtype), stored["scale"])
    else:
        input_scale = stored["input_scale"].reshape(1)
        linear = Int8(int8_operand(weight), input_scale, input_scale * stored["scale"])
    return linear if smooth is None else Smoothed(smooth.to(dtype), linear)


def _w4a8(stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """int4 weights that meet e4m3 inputs on FP8 tensor cores."""
    # The main loop multiplies int4 by the group's scale in fp16 and rounds to e4m3, which is what the tensor cores
    # take; the second scale, the largest weight / 448, keeps those within e4m3's range and comes back at the end.
    input_scale, second = stored["input_scale"].reshape(1), stored["second_scale"].reshape(1)
    weight = to_e4m3(_times_groups(unpack_int4(stored["weight"]), (stored["scale"] / second).half()))
    codes, output_scale = e4m3_operand(weight, dtype), input_scale * second
    if "smooth" not in stored:
        return Fp8(codes, input_scale, output_scale)
    # One vector does both, so that the input is rounded to the model's type only once on its way to e4m3.
    vector = (stored["smooth"].to(dtype) / input_scale).to(dtype)
    return Smoothed(vector, Fp8(codes, torch.ones_like(input_scale), output_scale))


def _times_groups(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] times their group's scale [out, groups], computed in the scale's type."""
    grouped = codes.to(scale.dtype).view(*scale.shape, -1)
    return (grouped * scale[:, :, None]).flatten(1)
