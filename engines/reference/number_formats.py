"""Conversion to and from numbers of eight and four bits."""

from __future__ import annotations

import torch

E4M3_MAX = 448.0


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, half to even; magnitudes beyond 448 become 448, as in the GPU's conversion."""
    # torch's cast does not guarantee saturation: on some devices it makes a NaN.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


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
