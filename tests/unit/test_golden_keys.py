"""The key of every stage's artefact: a change that moves code must not make a single artefact stale.

A key here that differs means that every user's artefacts of that stage are made again. Where that is meant, raise the
stage's `version` and run `make golden`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.support.golden import check_golden
from trtpipe.configs import facts
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.runner import wanted_record
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.store.store import Store

PLANS: dict[str, dict[str, Any]] = {
    "the reference runtime": {"gpu": "cpu", "dtype": "fp32"},
    "the reference runtime, FP8": {"gpu": "cpu", "dtype": "fp8-kv"},
    "vLLM": {"gpu": "h100", "dtype": "bf16", "runtime": "vllm"},
    "vLLM, FP8": {"gpu": "h100", "dtype": "fp8", "runtime": "vllm"},
    "the LLM API": {"gpu": "h100", "dtype": "bf16", "runtime": "trtllm_pytorch"},
    "an H100, FP8": {"gpu": "h100", "dtype": "fp8-kv"},
    "two H100s": {"gpu": "h100", "dtype": "bf16", "tp": 2},
    "two stages": {"gpu": "h100", "dtype": "bf16", "pp": 2},
    "an A100, INT8": {"gpu": "a100", "dtype": "int8"},
    "an A100, INT8 weights": {"gpu": "a100", "dtype": "int8-wo"},
    "another release": {"gpu": "h100", "dtype": "bf16", "toolchain": "0.21.0"},
    "a draft model": {"gpu": "cpu", "dtype": "fp32"},
}
SIZES = [f"build.{name}={value}" for name, value in
         (("max_batch_size", 4), ("max_input_len", 64), ("max_seq_len", 128), ("max_num_tokens", 256))]  # fmt: skip


def test_the_key_of_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    model, store = hf_folder(tmp_path / "tiny"), Store(tmp_path / "home")
    draft = [f"build.speculative_model={hf_folder(tmp_path / 'draft', num_hidden_layers=1)}",
             "build.speculative_decoding_mode=draft_model", "build.max_draft_len=2"]  # fmt: skip
    keys: dict[str, dict[str, str]] = {}
    for name, options in PLANS.items():
        # As a recorded spec, which is not judged: INT8 weights of so small a model have no kernel.
        recorded = facts.find_model(str(model), source=None, revision=None)
        sets = [*SIZES, *draft] if name == "a draft model" else SIZES
        plan = resolve([("option", {"model": str(model), **options}), set_layer(sets)], model=recorded)
        keys[name] = {}
        for stage in stages_of(plan):
            inputs = {makes: hashlib.sha256(makes.encode()).hexdigest() for makes in stage.inputs(plan)}
            keys[name][stage.name] = wanted_record(stage, plan, inputs, store).key
    check_golden("keys.json", json.dumps(keys, indent=2) + "\n")
