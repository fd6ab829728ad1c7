"""Reading a Hugging Face model folder: one meaning for every spelling, a refusal for every doubt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import CONFIG, MODEL, hf_folder
from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.draft import draft_files
from trtpipe.engines.hf.folder import (
    UnknownModel,
    index_of,
    locate_tensors,
    read_index,
    read_model_config,
    require_tokenizer,
)
from trtpipe.engines.hf.safetensors_file import SafetensorsError
from trtpipe.engines.model_config import ModelConfig

INDEX = "model.safetensors.index.json"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def config(folder: Path, **overrides: Any) -> ModelConfig:
    """What is read from the tiny config with `overrides`; None removes a key."""
    folder.mkdir(exist_ok=True)
    values = {key: value for key, value in {**CONFIG, **overrides}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return read_model_config(folder)


def refused(error: pytest.ExceptionInfo[InputDataError]) -> str:
    assert error.value.exit_code == 3
    return str(error.value)


def edit_index(folder: Path, name: str, shard: str) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"][name] = shard
    path.write_text(json.dumps(index))


# --- config.json ---


def test_every_field_under_tensorrt_llms_name(folder: Path) -> None:
    assert config(folder) == MODEL


def test_what_transformers_leaves_out_has_its_default(folder: Path) -> None:
    read = config(folder, num_key_value_heads=None, rms_norm_eps=None, rope_theta=None, tie_word_embeddings=None,
                  torch_dtype=None, hidden_act=None)  # fmt: skip
    assert (read.num_key_value_heads, read.norm_epsilon, read.rotary_base) == (4, 1e-6, 10000.0)
    assert (read.tie_word_embeddings, read.dtype, read.hidden_act) == (False, None, "silu")


def test_flags(folder: Path) -> None:
    read = config(folder, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    assert (read.tie_word_embeddings, read.attn_bias, read.mlp_bias) == (True, True, True)


def test_head_dim_may_differ_from_hidden_size_by_heads(folder: Path) -> None:
    assert config(folder, head_dim=16).head_size == 16
    assert config(folder, hidden_size=30, head_dim=16).head_size == 16
    with pytest.raises(InputDataError, match="hidden_size 30 is not divisible by num_attention_heads 4, and head_dim"):
        config(folder, hidden_size=30)


@pytest.mark.parametrize("overrides", [
    {"torch_dtype": "float16"},
    {"torch_dtype": None, "dtype": "float16"},
    {"torch_dtype": "float16", "dtype": None},
])  # fmt: skip
def test_both_spellings_of_the_type(folder: Path, overrides: dict[str, Any]) -> None:
    assert config(folder, **overrides).dtype is DataType.FLOAT16


def test_a_null_torch_dtype_beside_a_dtype(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": None, "dtype": "float16"}))
    assert read_model_config(folder).dtype is DataType.FLOAT16


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, **LLAMA3}),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
         {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}}, {"rope_theta": 1e4}),
    ],
)  # fmt: skip
def test_both_spellings_of_the_rotary_settings_read_equally(
    folder: Path, old: dict[str, Any], new: dict[str, Any]
) -> None:
    by_old = config(folder, **old)
    by_new = config(folder, rope_theta=None, rope_parameters=new)
    by_both = config(folder, **old, rope_parameters=new)
    assert by_old == by_new == by_both
    assert by_old.rotary_base == old["rope_theta"]


@pytest.mark.parametrize("values", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": None},
    {"rope_type": "yarn", "factor": 4, "beta_fast": 32, "beta_slow": 1.0, "mscale": 1.0, "truncate": False},
    {"type": "longrope", "short_factor": [1.0, 1.05], "long_factor": [1, 2.5]},
])  # fmt: skip
def test_scalings_that_models_have(folder: Path, values: dict[str, Any]) -> None:
    assert config(folder, rope_scaling=values).rotary_scaling == values


def test_scaling_is_kept_as_it_stands(folder: Path) -> None:
    assert config(folder, rope_scaling=LLAMA3).rotary_scaling == LLAMA3
    assert config(folder, rope_scaling={"type": "linear", "factor": 2}).rotary_scaling == {
        "type": "linear",
        "factor": 2,
    }


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
         "rope_theta 10000.0 contradicts rope_parameters.rope_theta 500000.0"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "rope_scaling .* contradicts"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 32.0}}, "rope_scaling .* contradicts"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
         "rope_scaling has type 'linear' and rope_type 'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling names no rope_type, so its factor cannot be applied"),
        ({"rope_scaling": {"rope_type": 3}}, "the rope_type 3, not a name"),
        ({"rope_scaling": "linear"}, "rope_scaling is not an object"),
        ({"rope_parameters": []}, "rope_parameters is not an object"),
        ({"rope_theta": "big"}, "rope_theta is 'big', not a positive number"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_scaling": {**LLAMA3, "factor": "8.0"}}, r"rope_scaling\.factor is '8\.0', not a positive number"),
        ({"rope_scaling": {**LLAMA3, "factor": -2}}, r"rope_scaling\.factor is -2, not a positive number"),
        ({"rope_parameters": {**LLAMA3, "factor": float("nan")}}, r"rope_parameters\.factor is nan, not a positive"),
        ({"rope_scaling": {"type": "linear", "factor": [2.0]}}, r"rope_scaling\.factor is \[2\.0\], not a positive"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": True}}, r"rope_scaling\.low_freq_factor is True, not a"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}},
         r"rope_scaling\.original_max_position_embeddings is 0, not a positive number"),
        ({"rope_scaling": {"type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}},
         r"rope_scaling\.short_factor is 1\.0, not a list of numbers"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0, None]}},
         r"rope_scaling\.long_factor\[1\] is None, not a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: models that rotate a part of each head are"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {**LLAMA3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)  # fmt: skip
def test_rotary_settings_in_doubt_are_refused(folder: Path, overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why) as error:
        config(folder, **overrides)
    assert str(folder / "config.json") in refused(error)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"vocab_size": None}, "vocab_size is None, not a positive whole number"),
        ({"hidden_size": "32"}, "hidden_size is '32', not a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a positive whole number"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"intermediate_size": True}, "intermediate_size is True"),
        ({"intermediate_size": 48.0}, "intermediate_size is 48.0"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"attention_bias": "no"}, "attention_bias is 'no', not true or false"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is none of bfloat16, float16, float32"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': a LlamaForCausalLM of TensorRT-LLM computes silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "describes an already quantized model"),
    ],
)
def test_values_that_cannot_be_are_refused(folder: Path, overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(InputDataError, match=why) as error:
        config(folder, **overrides)
    assert str(folder / "config.json") in refused(error)


@pytest.mark.parametrize(
    ("architectures", "line"),
    [
        (["BertModel"], "describes a BertModel: trtpipe reads no model of this architecture; known: L"),
        (["LLamaForCausalLM"], "did you mean 'LlamaForCausalLM'?"),
        ([], "names no architecture"),
        (None, "names no architecture"),
        ("LlamaForCausalLM", "names no architecture"),
        ([7], "names no architecture"),
    ],
)
def test_not_a_llama(folder: Path, architectures: object, line: str) -> None:
    with pytest.raises(UnknownModel) as error:
        config(folder, architectures=architectures)
    assert line in refused(error)


def test_a_checkpoint_of_tensorrt_llm_is_told_as_one(folder: Path) -> None:
    with pytest.raises(UnknownModel) as error:
        config(folder, architectures=None, architecture="LlamaForCausalLM")
    assert refused(error) == (
        f"{folder} is a TensorRT-LLM checkpoint; give the Hugging Face folder that it was made of"
    )


def test_no_config(folder: Path) -> None:
    for why in ("there is no such folder", "it has no config.json"):
        with pytest.raises(UnknownModel) as error:
            read_model_config(folder)
        assert refused(error).startswith(f"{folder} is not a Hugging Face model folder: {why}; ")
        folder.mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("text", "why"), [("{", "is not JSON"), ("[]", "holds a list, not an object"), ("\xff", "is not JSON")]
)
def test_a_config_that_is_no_object(folder: Path, text: str, why: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputDataError) as error:
        read_model_config(folder)
    assert f"model config {folder / 'config.json'} {why}" in refused(error)


# --- weights ---


def test_sharded_and_single_folders_hold_the_same_tensors(tmp_path: Path) -> None:
    single = locate_tensors(hf_folder(tmp_path / "single"))
    sharded = locate_tensors(hf_folder(tmp_path / "sharded", shards=3))
    assert sharded.keys() == single.keys()
    assert {t.path.name for t in single.values()} == {"model.safetensors"}
    assert {t.path.name for t in sharded.values()} == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)}
    assert all(sharded[name].entry.shape == single[name].entry.shape for name in single)


def test_shards_may_be_links_as_in_the_hub_cache(folder: Path, tmp_path: Path) -> None:
    hf_folder(folder, shards=2)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for shard in list(folder.glob("*.safetensors")):
        shard.rename(blobs / shard.stem)
        shard.symlink_to(blobs / shard.stem)
    assert len(locate_tensors(folder)) == 21


def test_a_single_file_is_read_in_place_of_shards(folder: Path) -> None:
    """As transformers does, whether the shards are all there or not."""
    hf_folder(folder, shards=2)
    hf_folder(folder, seed=1)
    for number in range(3):
        if number:
            (folder / f"model-0000{number}-of-00002.safetensors").unlink()
        assert index_of(folder) is None
        assert {one.path for one in locate_tensors(folder).values()} == {folder / "model.safetensors"}
        assert [path.name for path in draft_files(folder) if path.suffix == ".safetensors"] == ["model.safetensors"]
        assert folder / INDEX not in draft_files(folder)


def test_an_index_of_the_single_file(folder: Path) -> None:
    hf_folder(folder)
    names = dict.fromkeys(locate_tensors(folder), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    assert index_of(folder) == folder / INDEX
    assert folder / INDEX in draft_files(folder)
    assert len(locate_tensors(folder)) == 21


def test_a_missing_shard(folder: Path) -> None:
    hf_folder(folder, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputDataError) as error:
        locate_tensors(folder)
    assert refused(error) == (
        f"model-00002-of-00002.safetensors is missing: {folder / INDEX} names it; "
        "download the model again to complete it"
    )


def test_a_tensor_missing_from_its_shard(folder: Path) -> None:
    hf_folder(folder, shards=2)
    edit_index(folder, "model.extra.weight", "model-00001-of-00002.safetensors")
    with pytest.raises(SafetensorsError) as error:
        locate_tensors(folder)
    assert "tensor 'model.extra.weight' is not in model-00001-of-00002.safetensors" in refused(error)


def test_a_tensor_in_another_shard_than_the_index_says(folder: Path) -> None:
    hf_folder(folder, shards=2)
    edit_index(folder, "lm_head.weight", "model-00002-of-00002.safetensors")
    with pytest.raises(InputDataError) as error:
        locate_tensors(folder)
    assert refused(error) == (
        "tensor 'lm_head.weight' is in model-00001-of-00002.safetensors, "
        "the index says model-00002-of-00002.safetensors"
    )


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "."])
def test_an_index_that_points_outside(folder: Path, shard: str) -> None:
    hf_folder(folder, shards=2)
    edit_index(folder, "lm_head.weight", shard)
    with pytest.raises(InputDataError) as error:
        locate_tensors(folder)
    assert refused(error) == f"{folder / INDEX} names a shard outside its folder ({shard!r})"


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}])
def test_an_index_without_a_map(folder: Path, index: dict[str, Any]) -> None:
    hf_folder(folder)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputDataError, match="has no usable weight_map"):
        locate_tensors(folder)


def test_an_index_of_a_model_with_many_experts_is_read(tmp_path: Path) -> None:
    # Qwen3-235B-A22B has 36,000 linears of experts, in NVFP4 with four tensors each.
    shard = "model-00001-of-00028.safetensors"
    names = {f"model.layers.0.mlp.experts.{number}.weight": shard for number in range(145_000)}
    path = tmp_path / INDEX
    path.write_text(json.dumps({"weight_map": names}))
    assert read_index(path) == names
    path.write_text(json.dumps({"weight_map": {str(number): "a" for number in range(500_000)}}))
    with pytest.raises(InputDataError) as error:
        read_index(path)
    assert refused(error) == f"weight index {path} cannot be read: it holds more than 1,500,000 values"


def test_a_damaged_shard_is_named(folder: Path) -> None:
    hf_folder(folder, shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SafetensorsError) as error:
        locate_tensors(folder)
    assert f"{shard} is damaged: the header describes" in refused(error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "last.ckpt"])
def test_pickles_are_refused_not_read(folder: Path, name: str) -> None:
    hf_folder(folder)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InputDataError) as error:
        locate_tensors(folder)
    assert f"{folder} holds only pickle weights ({name}): a pickle can run code when it is loaded" in refused(error)


def test_no_weights(folder: Path) -> None:
    config(folder)
    with pytest.raises(InputDataError, match=f"has no weights: neither model.safetensors nor {INDEX} is there"):
        locate_tensors(folder)


def test_a_tokenizer_is_required(folder: Path) -> None:
    require_tokenizer(hf_folder(folder))
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(InputDataError) as error:
        require_tokenizer(folder)
    assert f"{folder} has no tokenizer.json" in refused(error)


def test_a_tied_model_may_lack_its_head(tmp_path: Path) -> None:
    tied = hf_folder(tmp_path / "tied", tie_word_embeddings=True)
    assert "lm_head.weight" not in locate_tensors(tied)
    assert read_model_config(tied).tie_word_embeddings


def test_a_sliding_window_is_told_where_it_is_narrower_than_a_sequence(tmp_path: Path) -> None:
    from trtpipe.engines.families.mistral import FAMILY

    narrow = read_model_config(hf_folder(tmp_path / "a", architectures=["MistralForCausalLM"], sliding_window=64))
    (line,) = FAMILY.notices(narrow)
    assert "sliding window of 64 tokens" in line
    assert "max_attention_window_size 64" in line
    wide = read_model_config(hf_folder(tmp_path / "b", architectures=["MistralForCausalLM"], sliding_window=256))
    absent = read_model_config(hf_folder(tmp_path / "c", architectures=["MistralForCausalLM"], sliding_window=None))
    assert FAMILY.notices(wide) == FAMILY.notices(absent) == []
