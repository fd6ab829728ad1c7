"""Arithmetic of the quantization algorithms: how a weight becomes codes and scales, and what is computed with them.

Codes and scales have the arithmetic of ModelOpt's exporters, and of llm-compressor in its format (see `Unencoded`).
`engines.quantization.QuantAlgo` names the class of each algorithm. All formats store the same tensors under their own
names; here they have roles:

    weight        [out, in] codes; four-bit codes are packed as in `unpack_int4`
    scale         of the weight, float32: one, [out] or [out, groups]
    second_scale  of four-bit weights, float32: one
    input_scale   float32: one
    smooth        [in], factors of the input
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.reference.linear import Fp8, Fp8PerToken, Int8, Int8PerToken, Linear, Plain, Smoothed
from trtpipe.engines.reference.matmul import e4m3_operand, int8_operand
from trtpipe.engines.reference.number_formats import E4M3_MAX, quantize_rows, to_e4m3, unpack_int4

Tensors = dict[str, torch.Tensor]

# Smallest scale of a row of FP8 weights, which prevents a division by zero for a row of zeros.
MIN_ROW_SCALE = 1.0 / (448.0 * 512.0)


@dataclass(frozen=True, kw_only=True)
class Unencoded:
    """A linear that is to be encoded.

    weight      [out, in], not all zeros, with the smoothing folded in
    matrix      weights that are one matrix in the format, this one included; they share the scale of a tensor
    group       weights of the linears with the same input, this one included
    input_amax  () -> [] float32, the largest magnitude of the input; raises InputDataError when it is not known
    group_size  number of input features that share a scale
    scalar      shape of a scale of a tensor in the format: (1,) or ()
    int8_max, int4_max  what the largest magnitude that shares a scale becomes. With half a step more than the largest
                code, as in llm-compressor, all scales are smaller, and the largest magnitudes are cut by half a step
    scale_type  type in which the format stores a scale; codes are for the scale that is stored
    """

    weight: torch.Tensor
    matrix: Sequence[torch.Tensor]
    group: Sequence[torch.Tensor]
    input_amax: Callable[[], torch.Tensor]
    group_size: int
    scalar: tuple[int, ...]
    int8_max: float
    int4_max: float
    scale_type: torch.dtype = torch.float32

    def tensor_scale(self, weights: Sequence[torch.Tensor], largest: float) -> torch.Tensor:
        """Scale by which the largest magnitude of `weights` becomes `largest`."""
        amax = torch.stack([weight.abs().amax().float() for weight in weights]).amax()
        return self.scale(amax, largest).reshape(self.scalar)

    def input_scale(self, largest: float) -> torch.Tensor:
        """Scale by which the largest magnitude of the input becomes `largest`."""
        return self.scale(self.input_amax(), largest).reshape(self.scalar)

    def scale(self, amax: torch.Tensor, largest: float) -> torch.Tensor:
        """Float32 scales, rounded as stored, by which `amax` becomes `largest`."""
        return (amax.float() / largest).to(self.scale_type).float()


class Arithmetic(ABC):
    """Encoding of a weight, and the linear that computes with it."""

    @abstractmethod
    def encode(self, linear: Unencoded) -> Tensors:
        """Codes and scales of a linear, by role. Raises InputDataError."""

    @abstractmethod
    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        """The linear of stored tensors, by role, for inputs of type `dtype`, as TensorRT-LLM's kernel computes it."""


class Fp8Tensor(Arithmetic):
    """FP8 weights and inputs, one scale each."""

    def encode(self, linear: Unencoded) -> Tensors:
        scale = linear.tensor_scale(linear.matrix, E4M3_MAX)
        # With a scale of no dimensions torch divides in the weight's type, which rounds twice, as in ModelOpt.
        codes = (linear.weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "scale": scale, "input_scale": linear.input_scale(E4M3_MAX)}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        input_scale = stored["input_scale"].reshape(1)
        codes, scale = e4m3_operand(stored["weight"], dtype), stored["scale"].reshape(1)
        return _smoothed(Fp8(codes, input_scale, input_scale * scale), stored, dtype)


class Fp8Row(Arithmetic):
    """FP8 weights with a scale for each output row, FP8 inputs with a scale for each token, found as it runs."""

    def encode(self, linear: Unencoded) -> Tensors:
        scale = linear.scale(linear.weight.abs().amax(dim=1), E4M3_MAX).clamp(min=MIN_ROW_SCALE)
        return {"weight": (linear.weight / scale[:, None]).to(torch.float8_e4m3fn), "scale": scale}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        return _smoothed(Fp8PerToken(e4m3_operand(stored["weight"], dtype), stored["scale"]), stored, dtype)


class Int8Row(Arithmetic):
    """INT8 weights with a scale for each output row, INT8 inputs with one scale."""

    def encode(self, linear: Unencoded) -> Tensors:
        return {**_int8_rows(linear), "input_scale": linear.input_scale(linear.int8_max)}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        input_scale = stored["input_scale"].reshape(1)
        linear = Int8(int8_operand(stored["weight"]), input_scale, input_scale * stored["scale"])
        return _smoothed(linear, stored, dtype)


class Int8RowPerToken(Arithmetic):
    """INT8 weights with a scale for each output row, INT8 inputs with a scale for each token, found as it runs."""

    def encode(self, linear: Unencoded) -> Tensors:
        return _int8_rows(linear)

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        return _smoothed(Int8PerToken(int8_operand(stored["weight"]), stored["scale"]), stored, dtype)


class Int8Weight(Arithmetic):
    """INT8 weights with a scale for each output row, inputs in the model's type."""

    def encode(self, linear: Unencoded) -> Tensors:
        return _int8_rows(linear)

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        # Without a scale the weight is float: a checkpoint's, which the engine build quantizes.
        coded = (stored["weight"], stored["scale"]) if "scale" in stored else quantize_rows(stored["weight"].to(dtype))
        codes, scale = coded
        # The kernel multiplies codes and scale in the model's type, before the product.
        return _smoothed(Plain(codes.to(dtype) * scale.to(dtype)[:, None]), stored, dtype)


class Int4Weight(Arithmetic):
    """Four-bit weights with a scale for each group, inputs in the model's type."""

    def encode(self, linear: Unencoded) -> Tensors:
        codes, scale = _pack_int4(linear)
        return {"weight": codes, "scale": scale}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        weight = _times_groups(unpack_int4(stored["weight"]), stored["scale"].to(dtype))
        return _smoothed(Plain(weight), stored, dtype)


class Int4WeightFp8(Arithmetic):
    """Four-bit weights with a scale for each group, FP8 inputs with one scale."""

    def encode(self, linear: Unencoded) -> Tensors:
        codes, scale = _pack_int4(linear)
        second, input_scale = linear.tensor_scale(linear.group, E4M3_MAX), linear.input_scale(E4M3_MAX)
        return {"weight": codes, "scale": scale, "second_scale": second, "input_scale": input_scale}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
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


def load_arithmetic(algo: QuantAlgo) -> Arithmetic:
    module, _, name = algo.row.arithmetic.partition(":")
    made: Arithmetic = getattr(importlib.import_module(module), name)()
    return made


def make_linear(algo: QuantAlgo | None, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    """Make a linear from a folder's tensors, by role, for inputs of the type `dtype`, on the tensors' device.

    Without an algorithm the weight is float. `smooth` is absent also where it is folded into a norm.
    """
    return Plain(stored["weight"].to(dtype)) if algo is None else load_arithmetic(algo).apply(stored, dtype)


def _smoothed(linear: Linear, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
    return Smoothed(stored["smooth"].to(dtype), linear) if "smooth" in stored else linear


def _int8_rows(linear: Unencoded) -> Tensors:
    scale = linear.scale(linear.weight.abs().amax(dim=1), linear.int8_max)
    scale[scale == 0] = 1.0
    return {"weight": (linear.weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8), "scale": scale}


def _pack_int4(linear: Unencoded) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [out/2, in], scales float32 [out, in/group]); output row 2j is in the low nibble of byte row j."""
    rows, width = linear.weight.shape
    grouped = linear.weight.view(rows, width // linear.group_size, linear.group_size)
    scale = linear.scale(grouped.abs().amax(dim=2), linear.int4_max)
    scale[scale == 0] = 1.0
    codes = (grouped / scale[:, :, None]).round().clamp(-8, 7).to(torch.int8).view(rows, width)
    low, high = codes[0::2] & 0x0F, codes[1::2] & 0x0F
    return (low | (high << 4)).view(torch.uint8), scale


def _times_groups(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply codes [out, in] by their groups' scales [out, groups], in the scale's type."""
    grouped = codes.to(scale.dtype).view(*scale.shape, -1)
    return (grouped * scale[:, :, None]).flatten(1)
