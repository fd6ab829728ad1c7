"""Tensors of a linear in a quantized folder, in the form in which `engines.quantize.algorithms` computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.compressed_tensors import bits
from trtpipe.engines.hf.stored import Stored


def read_linear(tensors: Mapping[str, torch.Tensor], linear: str, stored: Stored) -> dict[str, torch.Tensor]:
    """The tensors of `linear` by role: scales in float32, one of a row [out], packed codes as in `unpack_int4`.

    Raises InputDataError for a scale that no number of the type can have been encoded with, and for packed codes of
    another shape than is said beside them.
    """
    out: dict[str, torch.Tensor] = {}
    for role, name in stored.roles().items():
        full = f"{linear}.{name}"
        if full not in tensors:
            continue
        tensor = tensors[full]
        out[role] = _scale(tensor, full, divides=role == "input_scale") if "scale" in role else tensor
    algo = stored.quantization.quant_algo
    if algo is None:
        return out
    if algo.row.scale == "row" and out["scale"].dim() == 2:
        out["scale"] = out["scale"][:, 0]
    if out["weight"].dtype == torch.int32:
        shape = tensors[f"{linear}.weight_shape"].tolist()
        words, width = out["weight"], bits(algo.row)
        if shape[0] != len(words) or -(-shape[1] * width // 32) != words.shape[1]:
            raise InputDataError(
                f"{linear}.weight_shape is {shape}", why=f"weight_packed holds {len(words)} rows of other length"
            )
        codes = unpack_words(words, width)[:, : shape[1]]
        out["weight"] = _pack_rows(codes) if stored.quantization.packed else codes
    return out


def cache_scale(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A scale of the KV cache, [] or [1] float32; 1 where the folder stores none."""
    return _scale(tensors[name], name, divides=True) if name in tensors else torch.ones(())


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [out, n] -> int8 [out, n * 32 / bits]: the first code is in the lowest bits, with half the range added."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).to(torch.int8).flatten(1)


def _pack_rows(codes: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] in -8 to 7 -> uint8 [out / 2, in], row 2j in the low nibble: see `unpack_int4`."""
    return ((codes[0::2] & 0x0F) | ((codes[1::2] & 0x0F) << 4)).view(torch.uint8)


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
