"""A linear's tensors as compressed-tensors stores them: from and to the roles of `engines.quantize.algorithms`.

Weight-only codes are packed into int32 along the input features, the first in the lowest bits, with an offset that
makes them unsigned: `weight_packed`, with the weight's shape in `weight_shape`. Other codes are stored as they are.
Scales have the model's type, those of rows a second dimension of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtpipe.engines.hf.compressed_tensors import PACKED, bits, storage
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.quantize.algorithms import Tensors
from trtpipe.engines.reference.number_formats import unpack_int4


def pack(made: Mapping[str, torch.Tensor], algo: QuantAlgo, dtype: torch.dtype) -> Tensors:
    """Tensors of a linear by their names in the format; `made` are those by role, `dtype` is the model's type."""
    scale = made["scale"].to(dtype)
    out = {"weight_scale": scale[:, None] if algo.row.scale == "row" else scale}
    if storage(algo.row) == PACKED:
        codes = unpack_int4(made["weight"]) if algo.row.scale == "group" else made["weight"]
        out["weight_packed"] = pack_int32(codes, bits(algo.row))
        out["weight_shape"] = torch.tensor(codes.shape)
    else:
        out["weight"] = made["weight"]
    if "input_scale" in made:
        out["input_scale"] = made["input_scale"].to(dtype)
    return out


def unpack(stored: Mapping[str, torch.Tensor], algo: QuantAlgo) -> Tensors:
    """The inverse of `pack`: tensors of a linear by role, scales in float32."""
    scale = stored["weight_scale"].float()
    out = {"scale": scale[:, 0] if algo.row.scale == "row" else scale}
    if storage(algo.row) == PACKED:
        codes = unpack_int32(stored["weight_packed"], bits(algo.row), int(stored["weight_shape"][1]))
        out["weight"] = _rows_of_bytes(codes) if algo.row.scale == "group" else codes
    else:
        out["weight"] = stored["weight"]
    if "input_scale" in stored:
        out["input_scale"] = stored["input_scale"].float()
    return out


def pack_int32(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes int8 [out, in] of `width` bits, 4 or 8 -> int32 [out, ceil(in * width / 32)]."""
    unsigned = (codes + (1 << (width - 1))).view(torch.uint8)
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % (32 // width)))
    if width == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)


def unpack_int32(packed: torch.Tensor, width: int, features: int) -> torch.Tensor:
    """The inverse of `pack_int32`: int8 [out, features]."""
    unsigned = packed.contiguous().view(torch.uint8)
    if width == 4:
        unsigned = torch.stack((unsigned & 0x0F, unsigned >> 4), dim=2).flatten(1)
    return unsigned[:, :features].view(torch.int8) - (1 << (width - 1))


def _rows_of_bytes(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of `unpack_int4`: two output rows to a byte."""
    low, high = codes[0::2] & 0x0F, codes[1::2] & 0x0F
    return (low | (high << 4)).view(torch.uint8)
