"""An algorithm is one row and one class: one that only this test has is listed, encoded, stored, read and computed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.factories import hf_folder
from tests.unit.engines.hf.test_inspection import quantized
from trtpipe.configs import facts, read
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError, parse_config, read_config
from trtpipe.engines.checkpoint.memory import rank_bytes
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.precision import resolve_precision
from trtpipe.engines.quantization import UNQUANTIZED, Algorithm, QuantAlgo, Quantization
from trtpipe.engines.reference.mlp import GatedMlp

NAME = "W8A16_SHIFT"
MODULE = '''
import torch

from trtpipe.engines.quantize.algorithms import Arithmetic
from trtpipe.engines.reference.linear import Plain


class Shift(Arithmetic):
    """INT8 weights with a power of two for each output row."""

    def encode(self, linear):
        scale = torch.exp2(torch.ceil(torch.log2(linear.weight.abs().amax(dim=1).float() / 127)))
        return {"weight": (linear.weight / scale[:, None]).round().to(torch.int8), "scale": scale}

    def apply(self, stored, dtype):
        return Plain((stored["weight"] * stored["scale"][:, None]).to(dtype))
'''
RECIPE = f"""
name: int8-shift
description: INT8 weights, a power of two for each output channel
quant_algo: {NAME}
kv_cache_quant_algo: null
modelopt: null
sms: [90]
exclude_modules: [lm_head]
thresholds: {{perplexity_ratio: 1.1, mean_kl: 0.1, top1_agreement: 0.8}}
"""


@pytest.fixture
def shift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[QuantAlgo]:
    (tmp_path / "shift_arithmetic.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    row = Algorithm(arithmetic="shift_arithmetic:Shift", codes="I8", scale="row", scale_name="power_of_two", passes=0)
    algo = QuantAlgo.__new_member__(QuantAlgo, NAME, row)  # type: ignore[attr-defined]
    algo._name_ = NAME
    # What a line more in the class would do.
    monkeypatch.setitem(QuantAlgo._member_map_, NAME, algo)
    monkeypatch.setitem(QuantAlgo._value2member_map_, NAME, algo)
    QuantAlgo._member_names_.append(NAME)
    read._adapter.cache_clear()
    yield algo
    QuantAlgo._member_names_.remove(NAME)
    read._adapter.cache_clear()
    sys.modules.pop("shift_arithmetic", None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return hf_folder(tmp_path / "hf", hidden_size=64, intermediate_size=128)


def test_a_recipe_names_an_added_algorithm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: QuantAlgo) -> None:
    shutil.copytree(facts.CONFIGS / "quant", tmp_path / "configs" / "quant")
    (tmp_path / "configs" / "quant" / "int8-shift.yaml").write_text(RECIPE)
    gpu = facts.find_gpu("h100")
    monkeypatch.setattr(facts, "CONFIGS", tmp_path / "configs")
    recipe = resolve_precision("int8-shift", gpu, facts.load_quant_recipes()).recipe
    assert recipe is not None
    assert recipe.quant_algo is shift
    assert (recipe.quantization.calibrated, recipe.quantization.packed) == (False, False)


@pytest.mark.parametrize(
    ("form", "file", "prefix", "scale"),
    [
        ("trtllm", "rank0.safetensors", "transformer.layers.1.mlp.fc.", "power_of_two"),
        ("hf", "model.safetensors", "model.layers.1.mlp.gate_proj.", "weight_scale"),
    ],
)
def test_it_is_stored_and_computed(
    tmp_path: Path, shift: QuantAlgo, source: Path, form: str, file: str, prefix: str, scale: str
) -> None:
    out = quantized(source, tmp_path / "out", Quantization(quant_algo=shift), form)
    assert inspect(out).problems == ()
    stored = load_file(out / file)
    codes, power = stored[prefix + "weight"], stored[prefix + scale]
    assert (codes.dtype, codes.shape, power.dtype, power.shape) == (torch.int8, (128, 64), torch.float32, (128,))
    assert set(torch.log2(power).frac().tolist()) == {0.0}
    weight = load_file(source / "model.safetensors")["model.layers.1.mlp.gate_proj.weight"].float()
    assert torch.all((codes * power[:, None] - weight).abs() <= power[:, None] / 2)
    opened = open_model(out, torch.device("cpu"))
    assert opened.config.quantization.quant_algo is shift
    x = torch.linspace(-1, 1, 64, dtype=torch.bfloat16).unsqueeze(0)
    mlp = opened.layer(1)[0].mlp
    assert isinstance(mlp, GatedMlp)
    first, _ = mlp.branches(x)
    assert torch.allclose(first.float(), x.float() @ (codes * power[:, None]).T, rtol=0.02, atol=0.02)


def test_a_checkpoint_states_an_added_algorithm(tmp_path: Path, shift: QuantAlgo, source: Path) -> None:
    out = quantized(source, tmp_path / "out", Quantization(quant_algo=shift), "trtllm", tp_size=2)
    raw = json.loads((out / "config.json").read_text())
    assert (raw["quantization"]["quant_algo"], raw["quantization"]["exclude_modules"]) == (NAME, ["lm_head"])
    assert read_config(out).quantization == Quantization(quant_algo=shift)
    raw["quantization"]["quant_algo"] = "W8A16_SHIFTED"
    with pytest.raises(CheckpointError, match=f"the algorithms read here are FP8, .*, {NAME}"):
        parse_config(raw, "config.json")


def test_its_memory_is_counted(shift: QuantAlgo, source: Path) -> None:
    model = read_model_config(source)
    floats, coded = (
        rank_bytes(model, DataType.BFLOAT16, Mapping(), quantization)
        for quantization in (UNQUANTIZED, Quantization(quant_algo=shift))
    )
    # Two layers of 4 heads of 16, 2 for keys and values: rows of q, k, v, o, gate, up and down, and their widths.
    weights = 2 * (128 * 64 + 64 * 64 + 2 * 128 * 64 + 64 * 128)
    rows = 2 * (128 + 64 + 2 * 128 + 64)
    assert floats - coded == weights - 4 * rows
