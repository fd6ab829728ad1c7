"""Qwen3-MoE: keys of its two configs, and what TensorRT-LLM would convert wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG, QWEN3_MOE
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, config_json, parse_config
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.folder import parse_model_config
from trtpipe.engines.model_config import Experts, ModelConfig


def parsed(**changes: Any) -> ModelConfig:
    raw = {**CONFIG, **QWEN3_MOE, **changes}
    return parse_model_config({key: value for key, value in raw.items() if value is not None}, Path("hf/config.json"))


def test_keys_of_its_checkpoint() -> None:
    raw = config_json(parsed(), DataType.BFLOAT16, Mapping(tp_size=4, moe_ep_size=2))
    wanted = {
        "architecture": "Qwen3MoeForCausalLM", "qwen_type": "qwen3_moe", "hidden_act": "swiglu", "attn_bias": False,
        "intermediate_size": 48, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 0,
        "mlp_only_layers": [], "decoder_sparse_step": 1, "seq_length": 8192,
        "moe": {
            "num_experts": 4, "shared_expert_intermediate_size": 0, "top_k": 2, "normalization_mode": 1,
            "sparse_mixer_epsilon": 0.01, "tp_mode": 0, "device_limited_n_group": 0, "device_limited_topk_group": 0,
            "device_limited_routed_scaling_factor": 1.0,
        },
    }  # fmt: skip
    assert {key: raw[key] for key in wanted} == wanted
    read = parse_config(raw, "config.json")
    assert read.experts == Experts(count=4, top_k=2, normalize=True, intermediate_size=24)
    assert read.mapping == Mapping(tp_size=4, moe_ep_size=2)
    with pytest.raises(CheckpointError, match=r"config\.json lacks moe_intermediate_size"):
        parse_config({**raw, "moe_intermediate_size": None}, "config.json")


@pytest.mark.parametrize(("stated", "mode"), [(True, 1), (False, 0), (None, 0)])
def test_shares_sum_to_1_where_the_config_says_so(stated: bool | None, mode: int) -> None:
    # TensorRT-LLM's own converter writes 0 for all of them.
    assert config_json(parsed(norm_topk_prob=stated), DataType.BFLOAT16, Mapping())["moe"]["normalization_mode"] == mode


def test_either_key_of_the_number_of_experts_is_read() -> None:
    assert parsed(num_experts=None, num_local_experts=6).experts == parsed(num_experts=6).experts
    with pytest.raises(InputDataError, match="num_experts 4 contradicts num_local_experts 6"):
        parsed(num_local_experts=6)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mlp_only_layers": [0]}, "mlp_only_layers is [0]: TensorRT-LLM has experts in every layer of such a model"),
        (
            {"decoder_sparse_step": 2},
            "decoder_sparse_step is 2: TensorRT-LLM has experts in every layer of such a model",
        ),
        ({"num_experts": None}, "num_experts is None, not a positive whole number"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds num_experts 4"),
        ({"head_dim": None}, "lacks head_dim"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputDataError) as error:
        parsed(**changes)
    assert line in str(error.value)
