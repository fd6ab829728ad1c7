"""Arithmetic of the algorithms whose weights and inputs have a scale for each block: NVFP4 and block FP8.

As in `engines.quantize.algorithms`, which has the roles of the tensors. Here `scale` is

    of NVFP4    [out, in / 16] e4m3, in units of `second_scale`; the codes of two input features share a byte
    of FP8      float32, one for each 128 rows and 128 columns; the last blocks may be smaller
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from trtpipe.engines.quantize.algorithms import Arithmetic, Tensors, Unencoded
from trtpipe.engines.reference.linear import Fp8Block, Linear, Nvfp4, nvfp4_operand
from trtpipe.engines.reference.matmul import e4m3_operand
from trtpipe.engines.reference.number_formats import (
    E2M1_MAX,
    E4M3_MAX,
    FP8_BLOCK,
    NVFP4_BLOCK,
    in_nvfp4_units,
    pack_e2m1,
)

# The smallest scale of a block of weights: e4m3's smallest number.
MIN_BLOCK_SCALE = 2.0**-9


class Nvfp4Vectors(Arithmetic):
    """NVFP4 weights and inputs; the scales of a tensor are shared by the linears of one input."""

    def encode(self, linear: Unencoded) -> Tensors:
        weight, second = linear.weight, linear.tensor_scale(linear.group, E2M1_MAX * E4M3_MAX)
        largest = weight.view(len(weight), -1, NVFP4_BLOCK).abs().amax(dim=2).float()
        scale = largest / (E2M1_MAX * second)
        # A block of zeros has the scale 1, as in ModelOpt.
        scale = scale.where(scale > 0, 1.0).clamp(MIN_BLOCK_SCALE, E4M3_MAX).to(torch.float8_e4m3fn)
        return {
            "weight": pack_e2m1(in_nvfp4_units(weight, scale, second)),
            "scale": scale,
            "second_scale": second,
            "input_scale": linear.input_scale(E2M1_MAX * E4M3_MAX),
        }

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        weight = nvfp4_operand(stored["weight"], stored["scale"], dtype)
        input_scale = stored["input_scale"].reshape(1)
        return Nvfp4(weight, input_scale, input_scale * stored["second_scale"].reshape(1))


class Fp8Blocks(Arithmetic):
    """FP8 weights with a scale for each block of 128 by 128; FP8 inputs with a scale for each block of a token."""

    def encode(self, linear: Unencoded) -> Tensors:
        weight = linear.weight
        rows, width = weight.shape
        padded = functional.pad(weight, (0, -width % FP8_BLOCK, 0, -rows % FP8_BLOCK))
        blocks = padded.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).float() / E4M3_MAX
        codes = (blocks / scale.where(scale > 0, 1.0)).to(torch.float8_e4m3fn)
        return {"weight": codes.flatten(2, 3).flatten(0, 1)[:rows, :width].contiguous(), "scale": scale}

    def apply(self, stored: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Linear:
        codes = e4m3_operand(stored["weight"], dtype)
        scale = stored["scale"].reshape(*(-(-size // FP8_BLOCK) for size in codes.shape))
        return Fp8Block.of(codes, scale)
