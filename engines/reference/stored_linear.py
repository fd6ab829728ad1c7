"""Tensors of a linear in a quantized folder, in the form in which `engines.quantize.algorithms` computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.compressed_tensors import bits
from trtpipe.engines.hf.stored import FP8, MODELOPT, Stored
from trtpipe.engines.quantization import QuantAlgo
from trtpipe.engines.quantize.algorithms import Tensors
from trtpipe.engines.quantize.formats import HUGGING_FACE

# Names of the tensors, of any method, that are scales.
_DIVISORS = ("input_scale",)
_FACTORS = ("weight_scale", "weight_scale_2", "weight_scale_inv")
_NAMES = ("weight", "weight_packed", "weight_shape", "pre_quant_scale", *_DIVISORS, *_FACTORS)
# Role -> names, in folders of the method fp8, where weights have one scale or one a block.
_FP8 = {"weight": ("weight",), "scale": ("weight_scale", "weight_scale_inv"), "input_scale": ("input_scale",)}


def read_linear(tensors: Mapping[str, torch.Tensor], linear: str, stored: Stored) -> Tensors:
    """The tensors of `linear` by role.

    Raises InputDataError for a scale that no number can have been encoded with, and for packed codes of another shape
    than stands beside them.
    """
    algo = stored.quantization.quant_algo
    if algo is None:
        return {"weight": tensors[f"{linear}.weight"]}
    found = {name: tensors[f"{linear}.{name}"] for name in _NAMES if f"{linear}.{name}" in tensors}
    for name, tensor in found.items():
        if name in (*_DIVISORS, *_FACTORS):
            found[name] = _scale(tensor, f"{linear}.{name}", divides=name in _DIVISORS)
    if stored.method == MODELOPT:
        return {role: found[name] for role, name in HUGGING_FACE.names(algo).items() if name in found}
    if stored.method == FP8:
        return {role: found[name] for role, names in _FP8.items() for name in names if name in found}
    if "weight_shape" in found:
        shape, words = found["weight_shape"].tolist(), found["weight_packed"]
        if shape[0] != len(words) or -(-shape[1] * bits(algo.row) // 32) != words.shape[1]:
            held = f"weight_packed holds {len(words)} rows of {words.shape[1]} words"
            raise InputDataError(f"{linear}.weight_shape is {shape}", why=held, remedy="download the model again")
    return _unpack(found, algo)


def _unpack(stored: Mapping[str, torch.Tensor], algo: QuantAlgo) -> Tensors:
    """The inverse of `engines.quantize.packing.pack`."""
    scale = stored["weight_scale"]
    out = {"scale": scale[:, 0] if algo.row.scale == "row" else scale}
    if "weight_packed" in stored:
        codes = unpack_int32(stored["weight_packed"], bits(algo.row), int(stored["weight_shape"][1]))
        out["weight"] = pack_int4(codes) if algo.row.scale == "group" else codes
    else:
        out["weight"] = stored["weight"]
    if "input_scale" in stored:
        out["input_scale"] = stored["input_scale"]
    return out


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


def cache_scale(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A scale of the KV cache, [] or [1] float32; 1 where the folder stores none."""
    return _scale(tensors[name], name, divides=True) if name in tensors else torch.ones(())


def _scale(tensor: torch.Tensor, name: str, *, divides: bool) -> torch.Tensor:
    """In float32, except scales that are codes themselves. Raises InputDataError for one that is not above zero.

    divides  whether numbers are divided by it; others may be 0, for a row of zeros
    """
    exact = tensor.float()
    if not bool((exact.isfinite() & ((exact > 0) if divides else (exact >= 0))).all()):
        raise InputDataError(
            f"tensor '{name}' holds a scale that is not a positive number",
            why="codes times such a scale are no weights",
            remedy="download or export the model again",
        )
    return tensor if tensor.dtype.itemsize == 1 else exact
