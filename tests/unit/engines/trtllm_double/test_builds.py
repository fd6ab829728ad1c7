"""The double of trtllm-build builds what the project writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.doubles import trtllm_build
from tests.support.factories import hf_folder
from tests.support.tiny_builds import (
    AWQ,
    FP8,
    FP8_KV,
    FP8_KV_ALONE,
    INT8_KV,
    INT8_WEIGHTS,
    ONE,
    ROWWISE,
    SMOOTH,
    TWO,
    W4A8,
    Output,
    build,
    checkpoint,
    engine_config,
    warnings,
)
from trtpipe.engines.base import Mapping
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.model_config import EmbeddingSharding
from trtpipe.engines.quantization import Quantization


def test_a_build_of_what_convert_writes(in_folder: Path, capsys: Output) -> None:
    source = in_folder / "checkpoint"
    source.mkdir()
    convert(hf_folder(in_folder / "hf", tokenizer=False), source, dtype=None, mapping=ONE)
    arguments = ["--checkpoint_dir", "checkpoint", "--output_dir", "out/engine"]
    assert trtllm_build.main(arguments) == 0
    assert sorted(path.name for path in (in_folder / "out" / "engine").iterdir()) == ["config.json", "rank0.engine"]
    # The default is the current directory.
    assert (in_folder / "model.cache").is_file()
    mark, text, rest = (in_folder / "out" / "engine" / "rank0.engine").read_bytes().split(b"\n")
    assert (mark, rest) == (b"CONTRACT DOUBLE, NO ENGINE", b"")
    inside = json.loads(text)
    assert (inside["rank"], inside["sm"], len(inside["inputs"])) == (0, 90, 64)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[TensorRT-LLM] TensorRT-LLM version: 1.2.1"
    assert all(re.match(r"\[\d\d/\d\d/\d{4}-\d\d:\d\d:\d\d\] \[TRT(-LLM)?\] \[[IW]\] \S", line) for line in lines[1:])
    told = [line.split("] [I] ")[1] for line in lines if "] [I] " in line]
    peak = next(index for index, line in enumerate(told) if line.startswith("Build phase peak memory: "))
    assert told[peak - 1] == "Timing cache serialized to model.cache"
    assert told[peak + 1] == "Serializing engine to out/engine/rank0.engine..."
    assert told[-1] == "Total time of building all engines: 00:00:01"


def test_config_json_of_an_engine(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    assert build(source, "--max_batch_size", "4", "--max_seq_len", "256", "--max_num_tokens", "512") == 0
    config = engine_config(source)
    assert list(config) == ["version", "pretrained_config", "build_config"]
    assert config["version"] == "1.2.1"
    assert config["pretrained_config"] == json.loads((source / "config.json").read_text())
    found = config["build_config"]
    plugins = found.pop("plugin_config")
    assert found == {
        "max_input_len": 200,
        "max_seq_len": 256,
        "max_batch_size": 4,
        "max_beam_width": 1,
        "max_num_tokens": 512,
        "opt_num_tokens": 4,
        "max_prompt_embedding_table_size": 0,
        "max_draft_len": 0,
        "opt_batch_size": 8,
        "kv_cache_type": "paged",
        "gather_context_logits": False,
        "gather_generation_logits": False,
        "strongly_typed": True,
        "force_num_profiles": None,
        "profiling_verbosity": "layer_names_only",
        "enable_debug_output": False,
        "speculative_decoding_mode": 1,
        "use_refit": False,
        "input_timing_cache": None,
        "output_timing_cache": str(tmp_path / "model.cache"),
        "lora_config": {
            "lora_dir": [],
            "lora_ckpt_source": "hf",
            "max_lora_rank": 64,
            "lora_target_modules": [],
            "trtllm_modules_to_hf_modules": {},
        },
        "weight_sparsity": False,
        "weight_streaming": False,
        "use_strip_plan": False,
        "max_encoder_input_len": 1024,
        "monitor_memory": False,
        "use_mrope": False,
    }
    # What run-time readers look at, and what is off.
    assert {name: plugins[name] for name in ("gpt_attention_plugin", "gemm_plugin", "nccl_plugin")} == {
        "gpt_attention_plugin": "auto",
        "gemm_plugin": None,
        "nccl_plugin": None,
    }
    on = ("remove_input_padding", "paged_kv_cache", "context_fmha", "use_paged_context_fmha")
    assert all(plugins[name] is True for name in on)
    assert (plugins["tokens_per_block"], plugins["dtype"]) == (32, "bfloat16")


def test_the_same_inputs_give_the_same_engine(tmp_path: Path) -> None:
    def made(name: str, *flags: str, sm: str = "90", seed: int = 0) -> bytes:
        place = tmp_path / name
        (place / "checkpoint").mkdir(parents=True)
        source = hf_folder(place / "hf", tokenizer=False, seed=seed)
        convert(source, place / "checkpoint", dtype=None, mapping=ONE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRTLLM_DOUBLE_SM", sm)
            assert build(place / "checkpoint", *flags) == 0
        return (place / "engine" / "rank0.engine").read_bytes()

    first = made("a")
    assert made("b") == first
    others = [made("weights", seed=1), made("settings", "--max_batch_size", "7"), made("gpu", sm="80")]
    assert len({first, *others}) == 4


def test_another_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", "0.21.0")
    source = checkpoint(tmp_path / "checkpoint", toolchain="0.21.0")
    assert build(source) == 0
    assert "[TensorRT-LLM] TensorRT-LLM version: 0.21.0" in capsys.readouterr().out
    config = engine_config(source)
    assert (config["version"], config["build_config"]["kv_cache_type"]) == ("0.21.0", "PAGED")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("VERSION", "1.3.0", "TRTLLM_DOUBLE_VERSION is 1.3.0, not one of 0.21.0, 1.0.0, 1.1.0, 1.2.1"),
        ("FAIL", "often", "TRTLLM_DOUBLE_FAIL is often, not one of oom, wrong-sm, disk-full, killed, crash, hang"),
        ("SM", "h100", "invalid literal for int() with base 10: 'h100'"),
    ],
)
def test_an_environment_that_means_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: Output, name: str, value: str, told: str
) -> None:
    monkeypatch.setenv(f"TRTLLM_DOUBLE_{name}", value)
    assert trtllm_build.main([]) == 2
    assert capsys.readouterr().err == f"trtllm-build: {told}\n"


@pytest.mark.parametrize(
    "mapping",
    [ONE, TWO, Mapping(pp_size=2), Mapping(tp_size=4), Mapping(tp_size=2, pp_size=3)],
    ids=["1", "tp2", "pp2", "tp4", "tp2-pp3"],
)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_every_mapping_of_a_converted_model(tmp_path: Path, capsys: Output, mapping: Mapping, tied: bool) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    # A vocabulary that no tp divides; 3 layers.
    hf = hf_folder(
        tmp_path / "hf", tokenizer=False, vocab_size=301, num_hidden_layers=3, attention_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip
    convert(hf, source, dtype=None, mapping=mapping, toolchain="0.21.0")
    assert (
        warnings(capsys, source)
        == ["FP8 Context FMHA is disabled because it must be used together with the fp8 quantization workflow."]
        * mapping.world_size
    )
    ranks = [f"rank{rank}.engine" for rank in range(mapping.world_size)]
    assert sorted(path.name for path in (tmp_path / "engine").glob("*.engine")) == ranks
    plugins = engine_config(source)["build_config"]["plugin_config"]
    assert plugins["nccl_plugin"] == (None if mapping.world_size == 1 else "bfloat16")


@pytest.mark.parametrize("embedding", list(EmbeddingSharding))
def test_every_way_of_sharing_the_embedding(tmp_path: Path, embedding: EmbeddingSharding) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    hf = hf_folder(tmp_path / "hf", tokenizer=False, vocab_size=301)
    convert(hf, source, dtype=None, mapping=TWO, embedding=embedding, toolchain="0.21.0")
    assert build(source) == 0


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0", "1.1.0", "1.2.1"])
@pytest.mark.parametrize("mapping", [ONE, TWO, Mapping(tp_size=2, pp_size=2)], ids=["1", "tp2", "tp2-pp2"])
def test_every_release_reads_what_is_written_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, mapping: Mapping
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", version)
    assert build(checkpoint(tmp_path / "checkpoint", FP8_KV, mapping, toolchain=version)) == 0


@pytest.mark.parametrize("mapping", [ONE, TWO, Mapping(pp_size=2)], ids=["1", "tp2", "pp2"])
@pytest.mark.parametrize(
    "quantization",
    [FP8, FP8_KV, ROWWISE, SMOOTH, INT8_WEIGHTS, AWQ, INT8_KV, FP8_KV_ALONE],
    ids=["fp8", "fp8-kv", "fp8-rowwise", "int8-sq", "int8-wo", "int4-awq", "int8-kv", "fp8-kv-alone"],
)
def test_every_algorithm(tmp_path: Path, capsys: Output, quantization: Quantization, mapping: Mapping) -> None:
    source = checkpoint(tmp_path / "checkpoint", quantization, mapping, toolchain="0.21.0")
    told = warnings(capsys, source)
    assert [line for line in told if "is disabled because" not in line] == []
    ranks = len(list(tmp_path.glob("engine/rank*.engine")))
    assert ranks == mapping.world_size


def test_int4_weights_with_fp8_inputs(tmp_path: Path, capsys: Output) -> None:
    source = checkpoint(tmp_path / "checkpoint", W4A8)
    extra = [line for line in warnings(capsys, source) if line.startswith("Provided but not required tensors: ")]
    # Of its activation scales only those of the linears whose inputs are shared are parameters.
    assert len(extra) == 1
    assert re.findall(r"layers\.0\.(\S+)'", extra[0]) == [
        "attention.qkv.activation_scaling_factor",
        "mlp.fc.activation_scaling_factor",
        "mlp.gate.activation_scaling_factor",
    ]


def test_int8_weights_with_the_loaders_own_exceptions(tmp_path: Path, capsys: Output) -> None:
    config = {"quantization": {"quant_algo": "W8A16", "kv_cache_quant_algo": None}}
    source = checkpoint(tmp_path / "checkpoint", INT8_WEIGHTS, config=config)
    assert warnings(capsys, source) == [
        "FP8 Context FMHA is disabled because it must be used together with the fp8 quantization workflow."
    ]
    plugins = engine_config(source)["build_config"]["plugin_config"]
    assert plugins["weight_only_quant_matmul_plugin"] == "bfloat16"
