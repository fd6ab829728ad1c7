"""What weights take on a GPU: to the byte of the files that are written, and refused when they are too many."""

from __future__ import annotations

import dataclasses
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, hf_folder
from trtpipe.configs.facts import find_shape
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.checkpoint.memory import checkpoint_bytes, expert_bytes, rank_bytes
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, QuantAlgo, Quantization

BF16 = DataType.BFLOAT16
LLAMA_70B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_size": 128,
}  # fmt: skip


@pytest.fixture
def llama_70b(tmp_path: Path) -> ModelConfig:
    return dataclasses.replace(read_model_config(hf_folder(tmp_path / "tiny")), **LLAMA_70B)


@pytest.mark.parametrize("mapping", [Mapping(), Mapping(tp_size=2), Mapping(tp_size=2, pp_size=2)])
@pytest.mark.parametrize(
    "family",
    [{}, MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE],
    ids=["llama", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"],
)
def test_as_many_bytes_as_the_largest_rank_file_holds(tmp_path: Path, family: dict[str, Any], mapping: Mapping) -> None:
    if family is PHI3 and mapping.pp_size > 1:
        return
    source = hf_folder(tmp_path / "hf", num_hidden_layers=3, **family)
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", dtype=BF16, mapping=mapping)
    files = [read_header(path).tensors.values() for path in (tmp_path / "out").glob("rank*.safetensors")]
    largest = max(sum(entry.nbytes for entry in entries) for entries in files)
    assert rank_bytes(read_model_config(source), BF16, mapping, UNQUANTIZED) == largest


@pytest.mark.parametrize(
    ("name", "parameters", "of_experts"),
    [
        ("mixtral-8x7b", 46_702_792_704, 32 * 8 * 3 * 4096 * 14336),
        ("mixtral-8x22b", 140_630_071_296, 56 * 8 * 3 * 6144 * 16384),
        ("qwen3-30b-a3b", 30_532_122_624, 48 * 128 * 3 * 2048 * 768),
    ],
)
def test_published_models_with_experts(name: str, parameters: int, of_experts: int) -> None:
    model = find_shape(name)[1]
    assert sum(prod(shape) for shape in source_shapes(model).values()) == parameters
    # Routers have four bytes a weight, all else two.
    assert model.experts is not None
    routers = model.num_hidden_layers * model.experts.count * model.hidden_size
    assert rank_bytes(model, BF16, Mapping(), UNQUANTIZED) == 2 * parameters + 2 * routers
    for mapping in (Mapping(tp_size=4), Mapping(tp_size=4, moe_ep_size=4)):
        assert expert_bytes(model, BF16, mapping, UNQUANTIZED) == 2 * of_experts // 4
    assert expert_bytes(find_shape("llama3-8b")[1], BF16, Mapping(), UNQUANTIZED) == 0


def test_llama_3_70b(llama_70b: ModelConfig) -> None:
    # 70,553,706,496 parameters, two bytes each.
    assert rank_bytes(llama_70b, BF16, Mapping(), UNQUANTIZED) == 141_107_412_992
    fp8 = rank_bytes(llama_70b, BF16, Mapping(), Quantization(quant_algo=QuantAlgo.FP8))
    int8 = rank_bytes(llama_70b, BF16, Mapping(), Quantization(quant_algo=QuantAlgo.W8A16))
    assert fp8 == pytest.approx(72_656_000_000, rel=1e-3)
    assert int8 == pytest.approx(fp8, rel=1e-3), "a byte a weight, although its checkpoint has two"


def test_the_files_of_a_checkpoint(llama_70b: ModelConfig) -> None:
    int8 = Quantization(quant_algo=QuantAlgo.W8A16)
    assert checkpoint_bytes(llama_70b, BF16, Mapping(), int8) == 141_107_412_992, "its weights are encoded later"
    # Norms, and the embedding of 128256 x 8192, are whole on each of two ranks.
    copied = 2 * (128_256 * 8192 + 161 * 8192)
    assert checkpoint_bytes(llama_70b, BF16, Mapping(tp_size=2), UNQUANTIZED) == 141_107_412_992 + copied
