"""`trtpipe prove` on this machine: one precision that holds, one whose engine cannot be served."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import trtpipe
from tests.support.factories import hf_folder
from trtpipe.pipeline.api.prove import scrubbed
from trtpipe.pipeline.prove.proof import Proof
from trtpipe.pipeline.serving.engine_python import beside

SIZES = {"build.max_batch_size": 8, "build.max_input_len": 128, "build.max_seq_len": 192}


@pytest.fixture
def model(in_folder: Path) -> str:
    return str(hf_folder(in_folder / "tiny", max_position_embeddings=256))


def states(proof: Proof, dtype: str) -> list[tuple[str, str]]:
    return [(step.name, step.state) for lane in proof.lanes if lane.dtype == dtype for step in lane.steps]


@pytest.mark.slow
@pytest.mark.real
def test_a_precision_holds_when_its_server_answers_as_the_reference_runtime(model: str, in_folder: Path) -> None:
    proof = trtpipe.prove(model, gpu="cpu", runtime="reference", dtype=["fp32", "int8-wo"], set=SIZES)
    names = ("build", "serve", "reference build", "reference text")
    assert states(proof, "fp32") == [(name, "held") for name in names]
    assert list(proof.refused) == ["int8-wo"]  # its kernel wants whole tiles
    assert [speed.concurrency for speed in proof.lanes[0].speeds] == [1, 8]
    assert all(speed.tokens_per_s > 0 and speed.ttft_ms > 0 for speed in proof.lanes[0].speeds)
    written = json.loads((in_folder / "proof" / "proof.json").read_text())
    # What was named and is refused has not held.
    assert (written["schema"], written["held"]) == ("trtpipe.proof/1", False)
    page = (in_folder / "proof" / "proof.html").read_text()
    assert "fp32: every step held." in page
    assert "int8-wo" in page


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.skipif(beside() is None, reason="no vLLM beside this environment: `make setup-vllm`")
def test_a_precision_that_the_reference_runtime_lacks_is_proved_without_it(in_folder: Path) -> None:
    model = hf_folder(in_folder / "small", hidden_size=128, intermediate_size=256, num_attention_heads=4,
                      num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
    sizes = {**SIZES, "calibration.data": "demo"}
    proof = trtpipe.prove(str(model), gpu="cpu", runtime="vllm", dtype="int8-pc-pt", set=sizes)
    assert proof.held
    assert states(proof, "int8-pc-pt") == [
        ("build", "held"), ("serve", "held"), ("reference build", "left out"), ("reference text", "left out"),
    ]  # fmt: skip
    page = (in_folder / "proof" / "proof.html").read_text()
    assert "what ran held; no reference build: the runtime reference does not run" in page


@pytest.mark.real
def test_what_failed_is_told_with_its_log_and_the_rest_is_left_out(
    model: str, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hf_abcdef")
    monkeypatch.setenv("HOME", str(in_folder))
    # A Python that says that it has vLLM, and has none.
    python = in_folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = -c ] && echo 0.32.0 && exit\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    proof = trtpipe.prove(model, gpu="cpu", runtime="vllm", dtype="fp32", set=SIZES, engine_python=python)
    assert not proof.held
    assert states(proof, "fp32") == [
        ("build", "held"), ("serve", "failed"), ("reference build", "left out"), ("reference text", "left out"),
    ]  # fmt: skip
    failed = proof.lanes[0].steps[1]
    assert "vllm" in failed.told.lower()
    assert str(in_folder) not in (in_folder / "proof" / "proof.json").read_text()


def test_a_report_holds_no_secret_and_no_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/ada")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("EMPTY_TOKEN", "")
    assert scrubbed("/people/ada/model asked with hf_abcdef") == "~/model asked with $HF_TOKEN"
