"""How keys and values of one layer are held in a quantized cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.number_formats import to_e4m3, to_int8


@dataclass(frozen=True)
class KvCodec:
    """Codes of one byte; number = code * scale.

    scale  [2 * kv_heads, 1] float32, of the keys' heads and then the values' heads of a rank
    """

    algo: KvCacheQuantAlgo
    scale: torch.Tensor

    @classmethod
    def make(cls, algo: KvCacheQuantAlgo, keys: torch.Tensor, values: torch.Tensor, kv_heads: int) -> KvCodec:
        """From the scales of a layer's keys and values, one number each."""
        scale = torch.cat((keys.reshape(1).expand(kv_heads), values.reshape(1).expand(kv_heads)))
        return cls(algo, scale[:, None])

    def encode(self, kv: torch.Tensor) -> torch.Tensor:
        """[..., 2 * kv_heads, head_size] -> the same shape; int8, whatever the codes: torch moves no e4m3 about."""
        scaled = kv / self.scale
        return to_int8(scaled) if self.algo is KvCacheQuantAlgo.INT8 else to_e4m3(scaled).view(torch.int8)

    def decode(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What `encode` made, in `dtype`; always fresh memory."""
        exact = codes if self.algo is KvCacheQuantAlgo.INT8 else codes.view(torch.float8_e4m3fn)
        return (exact.to(dtype) * self.scale).to(dtype)
