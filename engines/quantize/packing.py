"""A linear's tensors as compressed-tensors stores them, from their roles in `engines.quantize.algorithms`.

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


def pack_int32(codes: torch.Tensor, width: int) -> torch.Tensor:
    """Codes int8 [out, in] of `width` bits, 4 or 8 -> int32 [out, ceil(in * width / 32)]."""
    unsigned = (codes + (1 << (width - 1))).view(torch.uint8)
    unsigned = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % (32 // width)))
    if width == 4:
        unsigned = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    return unsigned.contiguous().view(torch.int32)
