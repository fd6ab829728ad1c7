"""Qwen3-MoE: a Qwen 3 whose MLP is experts. TensorRT-LLM's class is QWenForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.families.qwen import Qwen
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig


class QwenMoe(Qwen):
    architectures: ClassVar[Mapping[str, str]] = {"Qwen3MoeForCausalLM": "qwen3_moe"}
    names = SourceNames(gate="gate_proj", up="up_proj", down="down_proj", experts="mlp.experts.", router="mlp.gate")
    expert_size = "moe_intermediate_size"

    def read_config(self, architecture: str, fields: ConfigFields) -> ModelConfig:
        model = super().read_config(architecture, fields)
        dense, step = fields.raw.get("mlp_only_layers"), fields.raw.get("decoder_sparse_step")
        for key, value, usual in (("mlp_only_layers", dense, []), ("decoder_sparse_step", step, 1)):
            if value not in (None, usual):
                raise InputDataError(
                    f"{fields.path}: {key} is {value!r}", why="TensorRT-LLM has experts in every layer of such a model"
                )
        # TensorRT-LLM's own converter writes that shares do not sum to 1, whatever config.json says.
        normalize = fields.flag("norm_topk_prob")
        counts = ("num_experts", "num_local_experts")
        return replace(model, experts=fields.experts(counts, self.expert_size, normalize=normalize))

    def hf_config(self, config: CheckpointConfig) -> dict[str, Any]:
        experts = config.experts
        assert experts is not None
        return super().hf_config(config) | {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


FAMILY = QwenMoe()
