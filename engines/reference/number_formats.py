"""Conversion to and from numbers of eight and four bits, alone or in blocks that share a scale."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
# Largest magnitude of e2m1, whose other magnitudes are 0, 0.5, 1, 1.5, 2, 3 and 4.
E2M1_MAX = 6.0
# Consecutive numbers of NVFP4 that share an e4m3 scale, beside the scale that all numbers of the tensor share.
NVFP4_BLOCK = 16
# Consecutive input features of an activation, and rows and columns of a weight, that share a scale in block FP8.
FP8_BLOCK = 128


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, half to even; magnitudes beyond 448 become 448, as in the GPU's conversion."""
    # torch's cast does not guarantee saturation: on some devices it makes a NaN.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to numbers of e2m1, half to even, saturating at -6 and 6."""
    x = x.clamp(-E2M1_MAX, E2M1_MAX)
    step = 0.5 * (1 + (x.abs() >= 2).to(x.dtype)) * (1 + (x.abs() >= 4).to(x.dtype))
    return (x / step).round() * step


def pack_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Float32 [..., n] -> uint8 [..., n / 2] of rounded e2m1 numbers; an even column is in the low nibble.

    A nibble has the sign in bit 3. A negative number that rounds to zero keeps its sign.
    """
    size = round_e2m1(x).abs()
    codes = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size / 2 + 4)).to(torch.uint8)
    codes += 8 * (x < 0).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `pack_e2m1`: bytes [..., n / 2] of any 8-bit type -> numbers [..., n] of the type `dtype`."""
    size = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=dtype, device=packed.device)
    numbers = torch.cat((size, -size))
    both = packed.view(torch.uint8)
    return numbers[torch.stack((both & 0x0F, both >> 4), dim=-1).flatten(-2).int()]


def nvfp4_scales(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """e4m3 scales [..., n / 16] of the blocks of x [..., n], in units of the tensor's scale, as a GPU finds them.

    The largest magnitude of a block becomes 6, the largest of e2m1.
    """
    largest = x.unflatten(-1, (-1, NVFP4_BLOCK)).abs().amax(dim=-1).float()
    return to_e4m3(largest / E2M1_MAX / scale)


def in_nvfp4_units(x: torch.Tensor, blocks: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide x [..., n] by the scales of its blocks, [..., n / 16] e4m3, and by the tensor's: the numbers to round."""
    divisor = blocks.float() * scale
    # A block whose scale has become zero holds zeros.
    divisor = divisor.where(divisor > 0, torch.inf)
    return (x.reshape(*blocks.shape, NVFP4_BLOCK) / divisor[..., None]).flatten(-2)


def times_nvfp4_scales(codes: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Multiply e2m1 numbers [..., n] by the e4m3 scales of their blocks, in the numbers' type.

    bfloat16 and float16 hold each product exactly: it has at most six significant bits.
    """
    return (codes.reshape(*blocks.shape, NVFP4_BLOCK) * blocks.to(codes.dtype)[..., None]).flatten(-2)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Round to int8, half to even, saturating at -128 and 127."""
    return x.round().clamp(-128, 127).to(torch.int8)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [out / 2, in] of any 8-bit type -> int8 [out, in] in -8 to 7; row 2j is in the low nibble of row j."""
    both = packed.view(torch.int8)
    # The left shift drops the high nibble, the right shift restores the sign.
    return torch.stack(((both << 4) >> 4, both >> 4), dim=1).flatten(0, 1)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight [out, in] for W8A16 as an engine build does: (int8 [out, in], float32 [out]).

    The rules differ from calibrated int8: the largest magnitude of a row becomes 128, not 127, and halves
    are rounded away from zero.
    """
    exact = weight.float()
    scale = exact.abs().amax(dim=1) / 128
    # A row of zeros has the scale 0.
    ratio = exact / scale.where(scale > 0, 1.0)[:, None]
    whole = ratio.trunc()
    # Not floor(|x| + 0.5): the sum itself is rounded, so that the number just below a half would count as a half.
    whole += ratio.sign() * ((ratio - whole).abs() >= 0.5)
    return whole.clamp(-128, 127).to(torch.int8), scale
