"""Mixtral: a Mistral whose MLP is experts. TensorRT-LLM's class is LLaMAForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from trtpipe.engines.checkpoint.experts import moe_block
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.families.mistral import Mistral
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, ModelConfig


class Mixtral(Mistral):
    architectures: ClassVar[Mapping[str, str]] = {"MixtralForCausalLM": "mixtral"}
    names = SourceNames(
        gate="w1", up="w3", down="w2", experts="block_sparse_moe.experts.", router="block_sparse_moe.gate"
    )
    expert_size = "intermediate_size"

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        model = super().read_config(architecture, fields)
        # The shares of a token's experts always sum to 1.
        return replace(model, experts=fields.experts(("num_local_experts",), self.expert_size, normalize=True))

    def checkpoint_config(self, model: ModelConfig, embedding: EmbeddingSharding) -> dict[str, Any]:
        return super().checkpoint_config(model, embedding) | {"moe": moe_block(model.experts)}

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        assert config.experts is not None
        return super().hf_config(config) | {
            "num_local_experts": config.experts.count,
            "num_experts_per_tok": config.experts.top_k,
        }


FAMILY = Mixtral()
