"""Settings of speculation and of KV cache in the host's memory, as each runtime is given them, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.factories import hf_folder, write_safetensors
from tests.unit.test_runner import Recorder, plan
from trtpipe.engines import load_backend
from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.engines.passport import read_passport
from trtpipe.pipeline.registry import export
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.serving.host_memory import cache_bytes, require_host_memory
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ENGINE_FOLDER

NGRAM: dict[str, Any] = {"speculative_decoding_mode": "ngram", "max_draft_len": 4}


def spec(model: Path, runtime: str, serving: dict[str, Any] | None = None, *, pp: int = 1, **build: Any) -> BuildSpec:
    gpu = "h100" if runtime != "reference" else "cpu"
    return plan(model, gpu=gpu, dtype="bf16", runtime=runtime, pp=pp, build=build, serving=serving or {})


@pytest.mark.parametrize(
    ("runtime", "asked", "written"),
    [
        ("vllm", NGRAM, {"speculative-config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}}),
        ("vllm", {"speculative_decoding_mode": "eagle3", "max_draft_len": 3}, {"speculative-config": {
            "method": "eagle3", "num_speculative_tokens": 3, "model": "draft"}}),
        ("trtllm_pytorch", NGRAM, {
            "speculative_config": {
                "decoding_type": "NGram", "max_draft_len": 4, "max_matching_ngram_size": 4, "is_public_pool": False},
            "disable_overlap_scheduler": True}),
        ("trtllm_pytorch", {"speculative_decoding_mode": "draft_model", "max_draft_len": 2}, {
            "speculative_config": {
                "decoding_type": "DraftTarget", "max_draft_len": 2, "speculative_model_dir": "draft"},
            "disable_overlap_scheduler": True}),
        ("trtllm_pytorch", {"speculative_decoding_mode": "eagle3", "max_draft_len": 2}, {
            "speculative_config": {
                "decoding_type": "Eagle3", "max_draft_len": 2, "speculative_model_dir": "draft"}}),
    ],
)  # fmt: skip
def test_settings(in_folder: Path, runtime: str, asked: dict[str, Any], written: dict[str, Any]) -> None:
    model = hf_folder(in_folder / "tiny")
    small = hf_folder(in_folder / "small", num_hidden_layers=1)
    if asked["speculative_decoding_mode"] == "eagle3":
        head = {"fc.weight": np.zeros((2, 6), np.uint16), "midlayer.hidden_norm.weight": np.zeros(2, np.uint16)}
        write_safetensors(small / "model.safetensors", head, "BF16")
    more: dict[str, Any] = {} if asked is NGRAM else {"speculative_model": str(small)}
    made, plain = spec(model, runtime, **asked, **more), spec(model, runtime)
    rendered = load_backend(runtime).rendered
    texts = [yaml.safe_load(*rendered(one.build, one.engine_target).values()) for one in (made, plain)]
    assert {name: value for name, value in texts[0].items() if name not in texts[1]} == written


@pytest.mark.parametrize(
    ("runtime", "build", "serving", "refusal"),
    [
        ("reference", {"speculative_decoding_mode": "ngram"}, {}, "max_draft_len are given together"),
        ("reference", {"max_draft_len": 4}, {}, "max_draft_len are given together"),
        ("reference", {**NGRAM, "max_draft_len": 16}, {}, r"max_draft_len 16 is too much for build.max_num_tokens 64:"),
        ("vllm", {**NGRAM, "speculative_model": "small"}, {}, "needs build.speculative_decoding_mode="),
        ("vllm", {**NGRAM, "speculative_decoding_mode": "draft_model"}, {}, "needs build.speculative_model"),
        ("reference", {**NGRAM, "speculative_decoding_mode": "eagle3", "speculative_model": "small"}, {},
         "eagle3 is not for the reference runtime: it speculates by ngram, draft_model"),
        ("vllm", {**NGRAM, "speculative_decoding_mode": "lookahead_decoding"}, {}, "or --runtime tensorrt"),
        ("tensorrt_llm", NGRAM, {}, "it speculates by draft_tokens_external, lookahead_decoding"),
        ("vllm", {**NGRAM, "pp": 2}, {}, "vLLM does not speculate with several pipeline stages"),
        ("trtllm_pytorch", {**NGRAM, "max_beam_width": 2}, {}, "does not speculate with several beams"),
        ("reference", {}, {"kv_cache_host_memory_bytes": 1024}, "reference runtime: its KV cache is in"),
        ("vllm", {}, {"kv_cache_host_memory_bytes": 1024, "enable_kv_cache_reuse": False}, "needs serving.enable_kv"),
        ("vllm", {}, {"kv_cache_host_memory_bytes": -1}, "kv_cache_host_memory_bytes is -1"),
        ("trtllm_pytorch", {}, {"llm_args": {"kv_cache_config": {"host_cache_size": 9}}},
         "follows from serving.kv_cache_host_memory_bytes"),
    ],
)  # fmt: skip
def test_refusals(in_folder: Path, runtime: str, build: dict[str, Any], serving: dict[str, Any], refusal: str) -> None:
    with pytest.raises(UsageError, match=refusal):
        spec(hf_folder(in_folder / "tiny"), runtime, serving, **build)


def test_draft_models_that_are_none(in_folder: Path) -> None:
    model, other = hf_folder(in_folder / "tiny"), hf_folder(in_folder / "other", vocab_size=320)
    (in_folder / "pickled").mkdir()
    (in_folder / "pickled" / "config.json").write_text(json.dumps({"vocab_size": 9}))
    (in_folder / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    for folder, refusal in (
        (other, f"has a vocabulary of 320 tokens, the model one of {size}"),
        (in_folder / "pickled", "has no weights in safetensors files: only such files are read"),
        (in_folder / "absent", "has no config.json: there is no such folder"),
    ):
        asked: dict[str, Any] = {**NGRAM, "speculative_decoding_mode": "draft_model", "speculative_model": str(folder)}
        with pytest.raises(InputDataError, match=refusal):
            spec(model, "reference", **asked)
    asked |= {"speculative_decoding_mode": "eagle3", "speculative_model": str(hf_folder(in_folder / "whole"))}
    for runtime in ("vllm", "trtllm_pytorch"):
        with pytest.raises(InputDataError, match=r"whole is a whole model, and no EAGLE-3 head: .* no fc\.weight"):
            spec(model, runtime, **asked)
    # The name of the file does not matter.
    weights = in_folder / "whole" / "model.safetensors"
    weights.rename(weights.with_name("eagle3_head.safetensors"))
    with pytest.raises(InputDataError, match="whole is a whole model"):
        spec(model, "vllm", **asked)
    one = np.zeros((1, 1), np.uint16)
    head = {"fc.weight": one, "model.layers.0.mlp.up_proj.weight": one}
    write_safetensors(weights.with_name("eagle3_head.safetensors"), head, "BF16")
    assert spec(model, "vllm", **asked).build.speculative_decoding_mode == "eagle3"


def test_a_draft_model_is_in_the_engine_and_in_its_key(in_folder: Path, tmp_path: Path) -> None:
    model, small = hf_folder(in_folder / "tiny"), hf_folder(in_folder / "small", num_hidden_layers=1)
    asked: dict[str, Any] = {**NGRAM, "speculative_decoding_mode": "draft_model", "speculative_model": str(small)}
    store = Store(tmp_path / "home")
    chosen = spec(model, "reference", **asked)
    execute(chosen, store, Recorder())
    folder = RunFolder.of(chosen.target)
    engine = folder.linked("engine").resolve()
    assert (engine / "draft" / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()
    limits = json.loads((engine / "config.json").read_text())["build_config"]
    assert {name: limits[name] for name in asked} == {**asked, "speculative_model": "draft"}
    assert (folder.linked("repository") / ENGINE_FOLDER / "draft" / "config.json").is_file()
    # The folder's place is not in the key, its weights are.
    moved = small.rename(in_folder / "moved")
    execute(spec(model, "reference", **{**asked, "speculative_model": str(moved)}), store, Recorder())
    assert folder.linked("engine").resolve() == engine
    (moved / "model.safetensors").unlink()
    hf_folder(in_folder / "new", num_hidden_layers=1, seed=7)
    asked["speculative_model"] = str(in_folder / "new")
    execute(spec(model, "reference", **asked), store, Recorder())
    assert folder.linked("engine").resolve() != engine


def test_a_target_with_a_draft_model_is_finished_elsewhere(in_folder: Path, tmp_path: Path) -> None:
    model, small = hf_folder(in_folder / "tiny"), hf_folder(in_folder / "small", num_hidden_layers=1)
    asked = {**NGRAM, "speculative_decoding_mode": "draft_model", "speculative_model": str(small)}
    chosen, here, there = spec(model, "reference", **asked), Store(tmp_path / "here"), Store(tmp_path / "there")
    execute(chosen, here, Recorder())
    packed = export.pack(chosen.target, here, tmp_path)
    for folder in (model, small, here.home):
        shutil.rmtree(folder)
    arrived = export.unpack(packed, there)
    execute(arrived.spec, there, Recorder(), given=arrived.artefacts)
    engine = RunFolder.of(chosen.target).linked("engine")
    assert sorted(path.name for path in (engine / "draft").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_host_memory_of_a_repository(in_folder: Path, tmp_path: Path) -> None:
    chosen = spec(hf_folder(in_folder / "tiny"), "vllm", {"kv_cache_host_memory_bytes": 1 << 50})
    execute(chosen, Store(tmp_path / "home"), Recorder())
    repository = RunFolder.of(chosen.target).linked("repository")
    passport = read_passport(repository / ENGINE_FOLDER)
    assert cache_bytes(repository, passport, 4) == 1 << 50
    assert cache_bytes(repository, replace(passport, runtime="tensorrt_llm"), 4) == 1 << 52
    with pytest.raises(HostError, match=r"tiny does not fit this machine's memory: its KV cache takes 1048576.0 GiB"):
        require_host_memory("tiny", repository, passport)
