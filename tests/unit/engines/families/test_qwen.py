"""Qwen: configs that are refused, what a checkpoint must state, and sliding windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG, QWEN2, QWEN3, hf_folder
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, read_config
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.restore import restore
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import family_of
from trtpipe.engines.hf.folder import UnknownModel, parse_model_config
from trtpipe.engines.model_config import ModelConfig

WINDOW = {"use_sliding_window": True, "sliding_window": 64}


def parsed(**overrides: Any) -> ModelConfig:
    raw = {key: value for key, value in {**CONFIG, **overrides}.items() if value is not None}
    return parse_model_config(raw, Path("hf/config.json"))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({**QWEN3, "head_dim": None}, "hf/config.json lacks head_dim: a Qwen3ForCausalLM needs it; download the"),
        ({**QWEN2, "num_key_value_heads": None}, "hf/config.json lacks num_key_value_heads: a Qwen2ForCausalLM needs"),
        ({**QWEN3, "model_type": "qwen2"}, "model_type is 'qwen2': a Qwen3ForCausalLM's is 'qwen3'"),
        ({**QWEN2, "hidden_act": "gelu"}, "hidden_act is 'gelu': a Qwen2ForCausalLM of TensorRT-LLM computes silu"),
        ({**QWEN2, **WINDOW, "max_window_layers": "all"}, "max_window_layers is 'all', not a number of layers"),
        ({**QWEN2, **WINDOW, "layer_types": ["sliding_attention"]}, "layer_types is not a list of 2 kinds of"),
        (
            {**QWEN2, **WINDOW, "max_window_layers": 0, "sliding_window": -1},
            "sliding_window is -1, not a positive whole number",
        ),
        ({**QWEN2, "use_sliding_window": 1}, "use_sliding_window is 1, not true or false"),
        (
            {**QWEN2, "rope_theta": 1000000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            "rope_theta 1000000.0 contradicts rope_parameters.rope_theta 10000.0",
        ),
    ],
)
def test_a_config_that_no_qwen_has_is_told_in_one_line(overrides: dict[str, Any], line: str) -> None:
    with pytest.raises(InputDataError) as error:
        parsed(**overrides)
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("Qwen2MoeForCausalLM", "did you mean 'Qwen3MoeForCausalLM'?"),
        ("Qwen3NextForCausalLM", "did you mean 'Qwen3ForCausalLM'?"),
        ("Gemma3ForCausalLM", "known: LlamaForCausalLM, "),
    ],
)
def test_a_relative_that_is_not_read_is_told_which_are(architecture: str, near: str) -> None:
    with pytest.raises(UnknownModel) as error:
        parsed(architectures=[architecture])
    assert str(error.value).startswith(
        f"hf/config.json describes a {architecture}: trtpipe reads no model of this architecture; {near}"
    )


@pytest.mark.parametrize("changes", [{"rope_theta": 1000000.0}, {"rope_theta": None, "rope_parameters": {
    "rope_theta": 1000000.0, "rope_type": "default"}}], ids=["transformers 4", "transformers 5"])  # fmt: skip
def test_the_rotary_base_is_read_in_both_spellings(changes: dict[str, Any]) -> None:
    model = parsed(**{**QWEN3, **changes})
    assert (model.rotary_base, model.rotary_scaling, model.norm_epsilon, model.attn_bias) == (1e6, None, 1e-6, False)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"attention_bias": True}, "has biases in its attention (attention_bias): a Qwen3ForCausalLM of TensorRT-LLM"),
        ({"num_key_value_heads": 4}, "has as many key/value heads as attention heads (4): TensorRT-LLM's Qwen3ForCa"),
    ],
)
def test_a_qwen3_that_tensorrt_llm_would_compute_wrong_is_refused(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    source = hf_folder(tmp_path / "hf", **QWEN3, **changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError) as error:
        convert(source, tmp_path / "out", dtype=None, mapping=Mapping())
    assert line in str(error.value)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("qwen", "changes", "line"),
    [
        (QWEN2, {"qwen_type": None}, "it lacks qwen_type, without which TensorRT-LLM cannot load a Qwen"),
        (QWEN3, {"seq_length": None}, "it lacks seq_length, without which"),
        (QWEN3, {"attn_bias": None}, "it lacks attn_bias, without which"),
        (QWEN3, {"qwen_type": "qwen2"}, "qwen_type is 'qwen2', a Qwen3ForCausalLM's is 'qwen3'"),
        (QWEN3, {"attn_bias": True}, "attn_bias is True, a Qwen3ForCausalLM's is False"),
        (QWEN2, {"attn_bias": False}, "attn_bias is False, a Qwen2ForCausalLM's is True"),
        (QWEN2, {"use_logn_attn": True}, "use_logn_attn is set, and logn scaling is not computed here"),
        (QWEN2, {"hidden_act": "gelu"}, "hidden_act is 'gelu', not silu"),
    ],
)
def test_a_checkpoint_that_tensorrt_llm_cannot_load_is_told(
    tmp_path: Path, qwen: dict[str, Any], changes: dict[str, Any], line: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    convert(hf_folder(tmp_path / "hf", **qwen), out, dtype=None, mapping=Mapping())
    written = json.loads((out / "config.json").read_text())
    kept = {key: value for key, value in {**written, **changes}.items() if value is not None}
    (out / "config.json").write_text(json.dumps(kept))
    with pytest.raises(CheckpointError) as error:
        read_config(out)
    assert str(error.value).startswith(f"{out / 'config.json'}: {line}")


@pytest.mark.parametrize(
    ("changes", "windows", "notice"),
    [
        ({"sliding_window": 64}, (), ""),  # not used
        ({**WINDOW, "max_window_layers": 0}, (64,), "the model attends"),
        ({**WINDOW, "max_window_layers": 1}, (256, 64), "some layers attend"),
        ({**WINDOW, "max_window_layers": 2}, (), ""),  # there are two layers
        (WINDOW, (), ""),  # from layer 28 on
        ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, (64, 256), "some layers attend"),
        ({**WINDOW, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, (), ""),
        ({**WINDOW, "sliding_window": 256, "max_window_layers": 0}, (), ""),  # no sequence is longer
    ],
)
@pytest.mark.parametrize("qwen", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_a_sliding_window_is_told_where_a_layer_has_one(
    qwen: dict[str, Any], changes: dict[str, Any], windows: tuple[int, ...], notice: str
) -> None:
    model = parsed(**{**qwen, **changes})
    assert model.attention_windows == windows
    notices = family_of(model).notices(model)
    assert [line.partition(" of 64 tokens")[0] for line in notices] == [f"{notice} within a sliding window"] * bool(
        windows
    )


def test_a_restored_qwen_has_only_keys_of_its_own(tmp_path: Path) -> None:
    for qwen in (QWEN2, QWEN3):
        source, out, back = (tmp_path / qwen["model_type"] / name for name in ("hf", "out", "back"))
        hf_folder(source, **qwen)
        out.mkdir()
        back.mkdir()
        convert(source, out, dtype=None, mapping=Mapping(tp_size=2, pp_size=2))
        restore(out, back)
        config = json.loads((back / "config.json").read_text())
        assert (config["model_type"], config["use_sliding_window"]) == (qwen["model_type"], False)
        assert not config.keys() & {"attention_bias", "mlp_bias", "qwen_type"}
