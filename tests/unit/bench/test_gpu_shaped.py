"""Folders of models' shapes that are written without a model, and engines of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.gpu import shaped
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.stored import read_stored

SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("model", ["llama3-70b", "mixtral-8x7b"])
def test_an_fp8_folder_is_what_its_config_says(tmp_path: Path, model: str) -> None:
    shaped.write(tmp_path / "folder", model, fp8=True, **SMALL)
    stored = read_stored(tmp_path / "folder")
    assert stored is not None
    located = locate_tensors(tmp_path / "folder")
    stored.check("folder", read_model_config(tmp_path / "folder", quantized=True), located)
    engine = shaped.vllm_engine(tmp_path / "folder", tmp_path / "engine", "h100", 4, 4 if "mixtral" in model else 1)
    settings = (engine / "engine_args.yaml").read_text()
    assert "tensor-parallel-size: 4" in settings
    assert ("enable-expert-parallel: true" in settings) == ("mixtral" in model)
    assert "quantization:" not in settings
    assert json.loads((engine / "config.json").read_text())["quantization_config"]["quant_method"] == "modelopt"
