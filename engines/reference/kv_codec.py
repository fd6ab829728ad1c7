"""Codec for keys and values of one layer in a quantized KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.number_formats import to_e4m3, to_int8


@dataclass(frozen=True)
class KvCodec:
    """Encodes numbers into codes of one byte; number = code * scale.

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
        """[..., 2 * kv_heads, head_size] -> same shape in int8, also for e4m3 codes, which torch cannot index."""
        scaled = kv / self.scale
        return to_int8(scaled) if self.algo is KvCacheQuantAlgo.INT8 else to_e4m3(scaled).view(torch.int8)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Inverse of `encode`, in `dtype`; always new memory."""
        exact = codes if self.algo is KvCacheQuantAlgo.INT8 else codes.view(torch.float8_e4m3fn)
        return (exact.to(dtype) * self.scale).to(dtype)
