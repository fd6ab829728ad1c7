"""Phi-3: what its checkpoint states, rows of joined linears for each rank, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.factories import CONFIG, PHI3, hf_folder
from tests.support.random_models import random_model
from tests.unit.engines.quantize.test_export import CASES, SAMPLES, ours
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.restore import differences, restore
from trtpipe.engines.errors import InputDataError, TrtpipeError
from trtpipe.engines.hf.folder import parse_model_config
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.rope import rotary_tables

CPU = torch.device("cpu")


def test_config_json_has_the_keys_of_tensorrt_llms_converter(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", **PHI3, attention_bias=False)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", dtype=None, mapping=Mapping(tp_size=2))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (found.pop("mapping")["tp_size"], found.pop("quantization")["quant_algo"]) == (2, None)
    assert found == {
        "architecture": "Phi3ForCausalLM", "dtype": "bfloat16", "logits_dtype": "float32", "vocab_size": 300,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_size": 8, "hidden_act": "swiglu", "norm_epsilon": 1e-5,
        "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": 256, "rotary_base": 10000.0,
        "rotary_scaling": None, "rotary_embedding_dim": 8, "rotary_pct": 1.0, "use_parallel_embedding": False,
        "embedding_sharding_dim": 0, "tie_word_embeddings": False, "qk_layernorm": False,
    }  # fmt: skip


def test_each_rank_has_its_rows_of_every_joined_part(tmp_path: Path) -> None:
    """Rows of q, k and v, and of up before those of gate, as TensorRT-LLM swaps them; each part is cut by itself."""
    source, out, back = hf_folder(tmp_path / "hf", **PHI3), tmp_path / "out", tmp_path / "back"
    out.mkdir()
    back.mkdir()
    convert(source, out, dtype=None, mapping=Mapping(tp_size=4))
    theirs, ours = load_file(source / "model.safetensors"), load_file(out / "rank3.safetensors")
    qkv, both = (theirs[f"model.layers.1.{name}.weight"] for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    # The fourth head of queries, and the second of two heads of keys and of values.
    rows = [*range(24, 32), *range(40, 48), *range(56, 64)]
    assert torch.equal(ours["transformer.layers.1.attention.qkv.weight"], qkv[rows])
    assert torch.equal(ours["transformer.layers.1.mlp.fc.weight"], torch.cat([both[84:96], both[36:48]]))
    assert "transformer.layers.1.mlp.gate.weight" not in ours
    assert differences(out, source) == []
    restore(out, back)
    assert load_file(back / "model.safetensors").keys() == theirs.keys()
    assert all(torch.equal(t, theirs[name]) for name, t in load_file(back / "model.safetensors").items())


def test_a_restored_folder_is_transformers_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = random_model("phi3", vocab_size=60, num_key_value_heads=2, rms_norm_eps=1e-3, **sizes)
    model.save_pretrained(tmp_path / "hf")
    for name in ("out", "back"):
        (tmp_path / name).mkdir()
    convert(tmp_path / "hf", tmp_path / "out", dtype=DataType.FLOAT32, mapping=Mapping(tp_size=2))
    restore(tmp_path / "out", tmp_path / "back")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "rope_scaling is of the type 'longrope': TensorRT-LLM's Phi3ForCausalLM states the two tables of a long",
        ),
        (
            {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}},
            "rope_scaling is of the type 'yarn': ",
        ),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor is 0.75: models that rotate a part of each head"),
        ({"head_dim": 16}, "head_dim is 16: a Phi3ForCausalLM of TensorRT-LLM has heads of hidden_size / num_atten"),
        ({"sliding_window": 0}, "sliding_window is 0, not a positive whole number"),
    ],
)
def test_a_config_that_no_checkpoint_can_state_is_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputDataError) as error:
        parse_model_config({**CONFIG, **PHI3, **changes}, Path("hf/config.json"))
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("mapping", "line"),
    [
        (Mapping(pp_size=2), "pp_size 2 is not for a Phi3ForCausalLM: TensorRT-LLM cannot divide its layers over pip"),
        (Mapping(tp_size=3), "tp_size 3 does not divide the 4 attention heads; tp sizes that fit: 1, 2, 4"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(tmp_path: Path, mapping: Mapping, line: str) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(TrtpipeError) as error:
        convert(hf_folder(tmp_path / "hf", **PHI3), tmp_path / "out", dtype=None, mapping=mapping)
    assert str(error.value).startswith(line)
    assert not list((tmp_path / "out").iterdir())


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phi3")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = random_model("phi3", vocab_size=128, num_key_value_heads=2, initializer_range=0.05, **sizes)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "form", "most"),
    [
        ("fp8-kv", "trtllm", 0.1), ("fp8-kv", "hf", 0.1), ("int8-sq", "trtllm", 0.05), ("int4-awq", "trtllm", 0.25),
        ("int4-awq", "compressed-tensors", 0.25),
    ],
)  # fmt: skip
def test_each_format_computes_the_layer(phi3: Path, tmp_path: Path, case: str, form: str, most: float) -> None:
    ours(phi3, tmp_path / "out", case, form)
    assert inspect(tmp_path / "out").problems == ()
    plain, coded = open_model(phi3, CPU), open_model(tmp_path / "out", CPU)
    assert coded.config.quantization.quant_algo == CASES[case][1].quant_algo
    hidden = torch.nn.functional.embedding(torch.from_numpy(SAMPLES[:2]).long(), plain.embedding()[0])
    tables = rotary_tables(plain.config, SAMPLES.shape[1])
    want, got = (run_layer(one.config, one.layer(0), hidden, *tables) for one in (plain, coded))
    error = ((got - want).float().norm() / (want - hidden).float().norm()).item()
    assert 0 < error < most
