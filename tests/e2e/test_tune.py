"""`trtpipe tune` on real servers: vLLM on this machine's CPU, each candidate built, served and measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trtpipe
from tests.e2e.conftest import Cli
from tests.support.factories import hf_folder
from trtpipe.pipeline.serving.engine_python import beside

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.clock,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        beside() is None, reason="no vLLM beside this environment: `make setup-vllm`, on Linux x86-64 and Python 3.11"
    ),
]

TARGET = "tiny.cpu.fp32.vllm"


def test_a_target_of_vllm_is_tuned_from_a_batch_of_one(cli: Cli, tmp_path: Path) -> None:
    """A step reads all weights, 130 MB, for one request as for two: a larger batch must win."""
    model = hf_folder(
        tmp_path / "tiny", dtype="F32", hidden_size=512, intermediate_size=1536, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=2, torch_dtype="float32",
    )  # fmt: skip
    sizes = ("max_batch_size=1", "max_input_len=128", "max_seq_len=192", "max_num_tokens=128")
    words = [word for size in sizes for word in ("--set", f"build.{size}")]
    cli.ok("build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32", "--runtime", "vllm", *words)
    asked = ("tune", TARGET, "--slo", "latency:p50<2s", "--find", "max-rate", "--minutes", "20",
             "--input-tokens", "16", "--output-tokens", "16", "--json")  # fmt: skip
    study = json.loads(cli.ok(*asked).out)
    assert study["winner"]["changes"]["build.max_batch_size"] == 2
    # Two at once are nearly twice as many; the target as it is was measured as often as the winner, in turn.
    assert study["winner"]["gain"] > max(0.2, 2 * study["winner"]["error"])
    (folder,) = (cli.folder / "runs" / TARGET / "tune").iterdir()
    for run in study["runs"]:
        assert (folder / run["report"]).is_file() or run["told"]
    assert trtpipe.settings(recipe=folder / "recipe.yaml").build.max_batch_size == 2
    # The search is over: asked again, nothing is measured.
    assert json.loads(cli.ok(*asked).out)["runs"] == study["runs"]
