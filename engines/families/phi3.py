"""Phi-3 and Phi-4: a Mistral with one linear for q, k and v, and one for gate and up.

Their class in TensorRT-LLM is Phi3ForCausalLM, whose MLP has one matrix for gate and up too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.families.mistral import Mistral
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, ModelConfig


class Phi3(Mistral):
    architectures: ClassVar[Mapping[str, str]] = {"Phi3ForCausalLM": "phi3"}
    names = SourceNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")
    # Its class in TensorRT-LLM has embedding and head on every rank, and passes no activations between stages.
    stages = False

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        model = super().read_config(architecture, fields)
        if model.rotary_scaling is not None:
            raise InputDataError(
                f"{fields.path}: rope_scaling is of the type {model.rotary_kind!r}",
                why=f"TensorRT-LLM's {architecture} states the two tables of a long context in keys not written here",
                remedy="use a model without it, such as Phi-3-mini-4k or Phi-4",
            )
        if model.head_size * model.num_attention_heads != model.hidden_size:
            raise InputDataError(
                f"{fields.path}: head_dim is {model.head_size}",
                why=f"a {architecture} of TensorRT-LLM has heads of hidden_size / num_attention_heads features",
            )
        # transformers computes no biases, whatever attention_bias says.
        return replace(model, attn_bias=False)

    def checkpoint_config(self, model: ModelConfig, embedding: EmbeddingSharding) -> dict[str, Any]:
        out = super().checkpoint_config(model, embedding) | {"rotary_pct": 1.0}
        del out["attn_bias"], out["mlp_bias"]
        return out

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        # transformers' default padding token is out of range for a small vocabulary.
        return super().hf_config(config) | {"pad_token_id": None}


FAMILY = Phi3()
