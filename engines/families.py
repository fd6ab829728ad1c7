"""Table of the Hugging Face architectures that can be converted, with their differences.

Both rows map to TensorRT-LLM's LLaMAForCausalLM: pre-norm decoder, RMSNorm, rotary embedding in the
"neox" half-split layout, gated SiLU feed-forward, optional grouped-query attention.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts of one HF architecture for the converter.

    reduce_fusion  whether upstream can fuse this architecture's all-reduce with the norm after it
    """

    reduce_fusion: bool


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(reduce_fusion=True),
    "MistralForCausalLM": Family(reduce_fusion=False),
}
