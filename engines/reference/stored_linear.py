"""Tensors of a linear in a quantized folder, in the form in which `engines.quantize.algorithms` computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.compressed_tensors import bits
from trtpipe.engines.quantization import Quantization
from trtpipe.engines.quantize.algorithms import Tensors

# Name of a tensor after the linear's name -> its role. A name means the same in the folders of every method.
ROLES = {
    "weight": "weight",
    "weight_packed": "weight",
    "weight_scale": "scale",
    "weight_scale_inv": "scale",
    "weight_scale_2": "second_scale",
    "input_scale": "input_scale",
    "pre_quant_scale": "smooth",
}


def read_linear(tensors: Mapping[str, torch.Tensor], linear: str, quantization: Quantization) -> Tensors:
    """The tensors of `linear` by role; scales in float32, those of rows [out].

    Raises InputDataError for a scale that no number can have been encoded with, and for packed codes of another shape
    than stands beside them.
    """
    algo, out = quantization.quant_algo, Tensors()
    for name, role in ROLES.items():
        full = f"{linear}.{name}"
        if full in tensors:
            out[role] = _scale(tensors[full], full) if role.endswith("scale") else tensors[full]
    if algo is None:
        return out
    if algo.row.scale == "row":
        out["scale"] = out["scale"].flatten()
    if out["weight"].dtype == torch.int32:
        codes = _unpack(out["weight"], tensors[f"{linear}.weight_shape"].tolist(), bits(algo.row), linear)
        out["weight"] = pack_int4(codes) if quantization.packed else codes
    return out


def cache_scale(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A scale of the KV cache, [] or [1] float32; 1 where the folder stores none."""
    return _scale(tensors[name], name) if name in tensors else torch.ones(())


def unpack_int32(packed: torch.Tensor, width: int, features: int) -> torch.Tensor:
    """Inverse of `engines.quantize.packing.pack_int32`: int8 [out, features]."""
    unsigned = packed.contiguous().view(torch.uint8)
    if width == 4:
        unsigned = torch.stack((unsigned & 0x0F, unsigned >> 4), dim=2).flatten(1)
    return (unsigned[:, :features].to(torch.int16) - (1 << (width - 1))).to(torch.int8)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Inverse of `unpack_int4`: codes int8 [out, in] -> uint8 [out / 2, in]."""
    low, high = codes[0::2] & 0x0F, codes[1::2] & 0x0F
    return (low | (high << 4)).view(torch.uint8)


def _unpack(words: torch.Tensor, shape: list[int], width: int, linear: str) -> torch.Tensor:
    if shape[0] != len(words) or -(-shape[1] * width // 32) != words.shape[1]:
        raise InputDataError(
            f"{linear}.weight_shape is {shape}",
            why=f"weight_packed holds {len(words)} rows of {words.shape[1]} words",
            remedy="download the model again",
        )
    return unpack_int32(words, width, shape[1])


def _scale(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """In float32, except scales that are codes themselves.

    Raises InputDataError for one that is not above zero. Of a weight it may be zero: for codes that are zeros.
    """
    exact, weight = tensor.float(), ".weight_scale" in name
    if not bool((exact.isfinite() & ((exact >= 0) if weight else (exact > 0))).all()):
        raise InputDataError(
            f"tensor '{name}' holds a scale that is not a positive number",
            why="codes times such a scale are no weights",
            remedy="download or export the model again",
        )
    return tensor if tensor.dtype.itemsize == 1 else exact
