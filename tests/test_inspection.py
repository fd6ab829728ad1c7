"""`inspect` says what a folder holds and everything that is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engines.base import Mapping
from engines.errors import InputDataError
from engines.inspection import inspect
from engines.tensorrt_llm.convert import convert
from tests.factories import hf_folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    convert(hf_folder(tmp_path / "hf", shards=2), out, dtype=None, mapping=Mapping(tp_size=2))
    return out


def test_an_hf_folder(tmp_path: Path) -> None:
    found = inspect(hf_folder(tmp_path / "hf", shards=2))
    assert (found.kind, found.architecture, found.dtype) == ("huggingface", "LlamaForCausalLM", "bfloat16")
    assert found.mapping == {"shards": 2, "index": True}
    # 2 x 300 x 32 for both tables, 32 + 2 x 64 for norms, 2 layers of 3072 attention and 4608 feed-forward weights
    assert found.parameters == 2 * 300 * 32 + 32 + 2 * (2 * 32 + 3072 + 4608)
    assert found.nbytes == 2 * found.parameters
    assert found.problems == ()


def test_a_tensorrt_llm_checkpoint(checkpoint: Path) -> None:
    found = inspect(checkpoint)
    assert (found.kind, found.mapping["tp_size"], len(found.tensors)) == ("tensorrt_llm", 2, 2 * 17)
    assert {tensor.file for tensor in found.tensors} == {"rank0.safetensors", "rank1.safetensors"}
    assert found.problems == ()


def test_a_missing_rank_and_a_wrong_size_are_both_named(checkpoint: Path) -> None:
    (checkpoint / "rank1.safetensors").unlink()
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "intermediate_size": 50}))
    problems = inspect(checkpoint).problems
    assert "rank1.safetensors is missing: the mapping has 2 ranks" in problems
    fc = "rank0.safetensors: tensor 'transformer.layers.0.mlp.fc.weight'"
    assert f"{fc} has shape [24, 32], config.json implies [25, 32]" in problems


def test_a_quantized_checkpoint_must_have_its_codes_and_scales(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization"]["quant_algo"] = "FP8"
    (checkpoint / "config.json").write_text(json.dumps(config))
    found = inspect(checkpoint)
    assert found.quantization["quant_algo"] == "FP8"
    linear = "rank0.safetensors: tensor 'transformer.layers.0.mlp.fc."
    assert linear + "weight' is BF16, config.json implies F8_E4M3" in found.problems
    assert linear + "weights_scaling_factor' is missing" in found.problems


def test_a_damaged_file_is_a_problem_and_the_rest_is_still_shown(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    found = inspect(folder)
    assert {tensor.file for tensor in found.tensors} == {"model-00001-of-00002.safetensors"}
    assert any("is damaged" in problem for problem in found.problems)


@pytest.mark.parametrize(
    ("config", "telling"),
    [
        (None, "it has no config.json"),
        ({}, "names no architecture"),
        ({"version": "1.2.1", "pretrained_config": {}}, "is an engine folder"),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, config: object, telling: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputDataError, match=telling):
        inspect(tmp_path)
