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

from tests.support.factories import gguf_bytes, hf_folder
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
    "a GGUF file": {"gpu": "cpu", "dtype": "fp32", "model": "tiny.gguf"},
    "a quantized folder, FP8 KV cache": {"gpu": "h100", "model": "fp8"},
    "a quantized folder, NVFP4 KV cache": {"gpu": "b200", "model": "nvfp4-cache"},
    "a quantized folder, NVFP4 KV cache, vLLM": {"gpu": "b200", "model": "nvfp4-cache", "runtime": "vllm"},
    "tasks": {"gpu": "cpu", "dtype": "fp8-kv", "tasks": "task.yaml"},
}
TASK = {
    "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": "data.jsonl"}, "test_split": "train",
    "output_type": "generate_until", "doc_to_text": "question", "doc_to_target": "answer",
}  # fmt: skip
SIZES = [f"build.{name}={value}" for name, value in
         (("max_batch_size", 4), ("max_input_len", 64), ("max_seq_len", 128), ("max_num_tokens", 256))]  # fmt: skip


def test_the_key_of_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0")
    monkeypatch.chdir(tmp_path)
    store = Store(tmp_path / "home")
    hf_folder(tmp_path / "tiny")
    for name, cache in (("fp8", "FP8"), ("nvfp4-cache", "NVFP4")):
        folder = hf_folder(tmp_path / name)
        quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": cache, "exclude_modules": ["lm_head"]}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    (tmp_path / "tiny.gguf").write_bytes(gguf_bytes())
    (tmp_path / "task.yaml").write_text(json.dumps(TASK))
    (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    draft = [f"build.speculative_model={hf_folder(tmp_path / 'draft', num_hidden_layers=1)}",
             "build.speculative_decoding_mode=draft_model", "build.max_draft_len=2"]  # fmt: skip
    keys: dict[str, dict[str, str]] = {}
    for name, options in PLANS.items():
        # As a recorded spec, which is not judged: INT8 weights of so small a model have no kernel.
        options = {"model": "tiny", **options}
        recorded = facts.find_model(options["model"], source=None, revision=None)
        sets = [*SIZES, *draft] if name == "a draft model" else SIZES
        plan = resolve([("option", options), set_layer(sets)], model=recorded)
        keys[name] = {}
        for stage in stages_of(plan):
            inputs = {makes: hashlib.sha256(makes.encode()).hexdigest() for makes in stage.inputs(plan)}
            keys[name][stage.name] = wanted_record(stage, plan, inputs, store).key
    check_golden("keys.json", json.dumps(keys, indent=2) + "\n")
