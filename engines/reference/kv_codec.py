"""Codec for keys and values of one layer in a quantized KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.number_formats import (
    in_nvfp4_units,
    nvfp4_scales,
    pack_e2m1,
    times_nvfp4_scales,
    to_e4m3,
    to_int8,
    unpack_e2m1,
)


@dataclass(frozen=True)
class KvCodec:
    """Encodes numbers into codes; number = code * scale, and in NVFP4 times the e4m3 scale of 16 numbers of a head.

    scale  [2 * kv_heads, 1] float32, for the key heads and then the value heads of a rank
    """

    algo: KvCacheQuantAlgo
    scale: torch.Tensor

    @classmethod
    def make(cls, algo: KvCacheQuantAlgo, keys: torch.Tensor, values: torch.Tensor, kv_heads: int) -> KvCodec:
        """Make the codec from the scales of a layer's keys and values, one number each."""
        scale = torch.cat((keys.reshape(1).expand(kv_heads), values.reshape(1).expand(kv_heads)))
        return cls(algo, scale[:, None])

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """[..., 2 * kv_heads, head_size] -> bytes as int8, also for e4m3 codes, which torch cannot index.

        A code has a byte. In NVFP4 the codes of a head have half a byte, and the scales of its vectors follow them.
        """
        if self.algo is KvCacheQuantAlgo.NVFP4:
            vectors = nvfp4_scales(kv, self.scale)
            codes = pack_e2m1(in_nvfp4_units(kv, vectors, self.scale))
            return torch.cat((codes.view(torch.int8), vectors.view(torch.int8)), dim=-1)
        scaled = kv / self.scale
        return to_int8(scaled) if self.algo is KvCacheQuantAlgo.INT8 else to_e4m3(scaled).view(torch.int8)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of `encode`, in `dtype`; always new memory."""
        if self.algo is KvCacheQuantAlgo.NVFP4:
            size = codes.shape[-1] * 16 // 9
            numbers, vectors = codes.split([size // 2, size // 16], dim=-1)
            exact = times_nvfp4_scales(unpack_e2m1(numbers, torch.float32), vectors.view(torch.float8_e4m3fn))
            return (exact * self.scale).to(dtype)
        exact = codes if self.algo is KvCacheQuantAlgo.INT8 else codes.view(torch.float8_e4m3fn)
        return (exact.to(dtype) * self.scale).to(dtype)
