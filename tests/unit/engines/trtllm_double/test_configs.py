"""Values of a checkpoint's config.json that the double of trtllm-build refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, hf_folder
from tests.support.tiny_builds import Output, build, checkpoint, refusal
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.convert import convert


@pytest.mark.parametrize(
    ("version", "place", "key", "told"),
    [
        ("1.2.1", "mapping", "dp_size", "TypeError: Mapping.__init__() got an unexpected keyword argument 'dp_size'"),
        ("0.21.0", "mapping", "attn_tp_size",
         "TypeError: Mapping.__init__() got an unexpected keyword argument 'attn_tp_size'"),
        ("1.1.0", "mapping", "pp_partition",
         "TypeError: Mapping.__init__() got an unexpected keyword argument 'pp_partition'"),
        ("1.2.1", "quantization", "alpha",
         "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'alpha'"),
        ("0.21.0", "quantization", "mamba_ssm_cache_dtype",
         "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'mamba_ssm_cache_dtype'"),
    ],
)  # fmt: skip
def test_a_key_that_a_release_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, version: str, place: str, key: str, told: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", version)
    source = checkpoint(tmp_path / "checkpoint", toolchain="0.21.0")
    config = json.loads((source / "config.json").read_text())
    config[place][key] = None
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(capsys, source) == told


def test_a_key_at_the_top_is_taken(tmp_path: Path, capsys: Output) -> None:
    assert build(checkpoint(tmp_path / "checkpoint", config={"producer": "us"})) == 0
    assert "[W] Implicitly setting LLaMAConfig.producer = us" in capsys.readouterr().out


@pytest.mark.parametrize("family", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_experts_are_built_however_ranks_divide_them(tmp_path: Path, capsys: Output, family: dict[str, Any]) -> None:
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **family)
    for ep in (1, 2, 4):
        (source := tmp_path / f"checkpoint{ep}" / "checkpoint").mkdir(parents=True)
        convert(hf, source, dtype=None, mapping=Mapping(tp_size=4, pp_size=2, moe_ep_size=ep))
        assert build(source) == 0
    capsys.readouterr()
    config = json.loads((source / "config.json").read_text())
    config["mapping"] |= {"moe_tp_size": 4, "moe_ep_size": 1}
    (source / "config.json").write_text(json.dumps(config))
    shutil.rmtree(source.parent / "engine")
    assert "The value updated is not the same shape as the original" in refusal(capsys, source)


@pytest.mark.parametrize("qwen", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_a_qwen_is_built_and_not_without_its_type(tmp_path: Path, capsys: Output, qwen: dict[str, Any]) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **qwen, tie_word_embeddings=True)
    convert(hf, source, dtype=None, mapping=Mapping(tp_size=2, pp_size=2))
    assert build(source) == 0
    assert f"Implicitly setting QWenConfig.qwen_type = {qwen['model_type']}" in capsys.readouterr().out
    config = json.loads((source / "config.json").read_text())
    del config["qwen_type"]
    (source / "config.json").write_text(json.dumps(config))
    shutil.rmtree(source.parent / "engine")
    assert refusal(capsys, source) == "AttributeError: 'QWenConfig' object has no attribute 'qwen_type'"


def test_a_phi3_is_built_with_its_windows(tmp_path: Path, capsys: Output) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **PHI3, sliding_window=64)
    convert(hf, source, dtype=None, mapping=Mapping(tp_size=4))
    assert build(source) == 0
    assert "Implicitly setting Phi3Config.rotary_pct = 1.0" in capsys.readouterr().out
    config = json.loads((source.parent / "engine" / "config.json").read_text())["pretrained_config"]
    assert config["runtime_defaults"] == {"max_attention_window": [64]}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architecture": "Qwen9ForCausalLM"}, "KeyError: 'Qwen9ForCausalLM'"),
        ({"architecture": "GraniteForCausalLM"}, "ContractError: the double does not know GraniteForCausalLM"),
        ({"architecture": "MixtralForCausalLM"},
         "ContractError: hidden_act is silu, that of one matrix is swiglu"),
        ({"dtype": "auto"}, "AssertionError: Unsupported dtype: auto"),
        ({"hidden_act": "gelu"}, "ContractError: hidden_act is gelu, Llama's is silu"),
        ({"position_embedding_type": "learned_absolute"},
         "ContractError: position_embedding_type is learned_absolute: no rotary embedding applies"),
        ({"rotary_base": None},
         "ContractError: config.json lacks rotary_base: the loader has a default, which is not this model's"),
        ({"rotary_scaling": {"factor": 8.0}}, "ContractError: rotary_scaling has the type None, not one of "
         "llama3, linear, dynamic, yarn, longrope, su"),
        ({"moe": {"experts": 8}}, "TypeError: MoeConfig.__init__() got an unexpected keyword argument 'experts'"),
        ({"mapping": {"world_size": 2}},
         "ValueError: world_size must equal to tp_size * pp_size * cp_size, but got 2 != 1 * 1 * 1."),
        ({"mapping": {"world_size": 2, "tp_size": 2, "moe_tp_size": 1, "moe_ep_size": 1}},
         "ValueError: moe_tp_size * moe_ep_size * moe_cluster_size must equal to moe_world_size, but got 1 != 2"),
        ({"mapping": {"world_size": 2, "tp_size": 2, "attn_tp_size": 1, "attn_cp_size": 1}},
         "ValueError: tp_size * cp_size must equal to attn_tp_size * attn_cp_size, but got 2 * 1 != 1 * 1"),
        ({"mapping": {"world_size": 3, "tp_size": 3}},
         "AssertionError: num_attention_heads must be divisible by tp_size"),
        ({"mapping": {"world_size": 2, "tp_size": 2}, "num_key_value_heads": 3},
         "ContractError: 3 key/value heads over 2 ranks: ranks would get parts of heads"),
        ({"mapping": {"world_size": 2, "tp_size": 2}, "intermediate_size": 255},
         "ContractError: intermediate_size 255 over 2 ranks: the remainder would be lost"),
        ({"mapping": {"world_size": 2, "pp_size": 2, "pp_partition": [2, 2]}},
         "ValueError: pp_partition [2, 2] does not match pp_size 2 and 3 layers."),
        ({"quantization": {"quant_algo": "FP9"}}, "AssertionError"),
        ({"quantization": {"quant_algo": "NVFP4"}},
         "ContractError: the double does not know NVFP4 with a KV cache in None, or Meta's recipe"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}},
         "ContractError: pre_quant_scale is false: the smoothing of W4A16_AWQ would be left out without an error"),
    ],
)  # fmt: skip
def test_a_config_that_is_refused(tmp_path: Path, capsys: Output, config: dict[str, Any], told: str) -> None:
    assert refusal(capsys, checkpoint(tmp_path / "checkpoint", config=config)) == told


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("architecture", "KeyError: 'architecture'"),
        ("dtype", "TypeError: PretrainedConfig.__init__() missing 1 required keyword-only argument: 'dtype'"),
        ("hidden_size",
         "TypeError: PretrainedConfig.__init__() missing 1 required keyword-only argument: 'hidden_size'"),
        ("intermediate_size",
         "ContractError: config.json lacks intermediate_size: the loader has a default, which is not this model's"),
    ],
)  # fmt: skip
def test_a_config_that_lacks_a_key(tmp_path: Path, capsys: Output, key: str, told: str) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    config = json.loads((source / "config.json").read_text())
    del config[key]
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(capsys, source) == told


def test_a_folder_without_config(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "checkpoint").mkdir()
    told = refusal(capsys, tmp_path / "checkpoint")
    assert told.startswith("FileNotFoundError: [Errno 2] No such file or directory: ")
