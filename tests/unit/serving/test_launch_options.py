"""Options that the gateway takes from a model's repository."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.engines.test_passport import passport
from trtpipe.pipeline.serving.launch_options import gateway_model
from trtpipe.triton_repo.layout import ENGINE_FOLDER


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("qwen2.5-7b", None, "hermes"),
        ("meta-llama/Llama-3.1-8B-Instruct", None, "llama3_json"),
        ("qwen2.5-7b", "pythonic", "pythonic"),
        ("somebody/else", None, None),
        (None, None, None),
    ],
)
def test_the_format_of_tool_calls_is_that_of_the_model_file(
    tmp_path: Path, model: str | None, given: str | None, expected: str | None
) -> None:
    engine = tmp_path / ENGINE_FOLDER
    engine.mkdir(parents=True)
    (tmp_path / "tensorrt_llm/config.pbtxt").touch()
    limits = {"max_input_len": 8, "max_seq_len": 16}
    weights = {} if model is None else {"model": model}
    dataclasses.replace(passport(), weights=weights, build_config=limits).write(engine)
    assert gateway_model(str(tmp_path), (), given).tool_format == expected
