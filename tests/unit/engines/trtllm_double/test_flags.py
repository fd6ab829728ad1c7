"""Flags of the double of trtllm-build, and settings that do not go together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import trtllm_build
from tests.support.tiny_builds import (
    FP8,
    FP8_KV,
    FP8_KV_ALONE,
    INT8_KV,
    INT8_WEIGHTS,
    TWO,
    Output,
    build,
    checkpoint,
    engine_config,
    refusal,
    warnings,
)
from trtpipe.engines.quantization import UNQUANTIZED, Quantization


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("1.2.1", ["--max_output_len", "5"]),
        ("1.2.1", ["--tp_size", "2"]),
        ("1.2.1", ["--multi_block_mode", "enable"]),
        ("1.2.1", ["--enable_xqa", "enable"]),
        ("1.0.0", ["--auto_parallel", "2"]),
        ("1.0.0", ["--gpus_per_node", "8"]),
        ("1.0.0", ["--cluster_key", "H100"]),
        ("1.0.0", ["--visualize_network"]),
        # Abbreviations mean nothing.
        ("1.2.1", ["--max_batch", "4"]),
        ("1.2.1", ["--max_batch_size", "many"]),
        ("1.2.1", ["--gemm_plugin", "fp4"]),
        ("1.2.1", ["--gemm_swiglu_plugin", "auto"]),
        ("1.2.1", ["--gemm_allreduce_plugin", "float32"]),
        ("1.2.1", ["--context_fmha", "true"]),
        ("1.2.1", ["--context_fmha"]),
        ("1.2.1", ["--strip_plan", "enable"]),
        ("1.2.1", ["--kv_cache_type", "circular"]),
        ("1.2.1", ["--logits_dtype", "bfloat16"]),
        ("1.2.1", ["--speculative_decoding_mode", "ngram"]),
    ],
    ids=" ".join,
)
def test_flags_that_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, version: str, flags: list[str]
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", version)
    assert build(checkpoint(tmp_path / "checkpoint", toolchain="0.21.0"), *flags) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("trtllm-build: error: ")
    assert not (tmp_path / "engine").exists()


def test_flags_that_only_the_oldest_release_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", "0.21.0")
    source = checkpoint(tmp_path / "checkpoint", toolchain="0.21.0")
    assert build(source, "--auto_parallel", "1", "--gpus_per_node", "8", "--cluster_key", "H100") == 0


def test_flags_are_what_the_engine_is_built_with(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", FP8_KV)
    flags = [
        "--max_decoder_seq_len", "128", "--max_multimodal_len", "7", "--max_beam_width", "2", "--opt_num_tokens", "16",
        "--kv_cache_type", "PAGED", "--tokens_per_block", "64", "--gemm_plugin", "fp8", "--use_fused_mlp", "disable",
        "--profiling_verbosity", "detailed", "--strip_plan", "--weight_streaming", "--logits_dtype", "float16",
        "--gather_all_token_logits",
    ]  # fmt: skip
    assert build(source, *flags) == 0
    config = engine_config(source)
    found, plugins = config["build_config"], config["build_config"]["plugin_config"]
    assert config["pretrained_config"]["logits_dtype"] == "float16"
    assert {
        "max_seq_len": 128,
        "max_prompt_embedding_table_size": 7,
        "max_beam_width": 2,
        "opt_num_tokens": 16,
        "kv_cache_type": "paged",
        "profiling_verbosity": "detailed",
        "use_strip_plan": True,
        "weight_streaming": True,
        "gather_context_logits": True,
        "gather_generation_logits": True,
    }.items() <= found.items()
    assert {"tokens_per_block": 64, "gemm_plugin": "fp8", "use_fused_mlp": False}.items() <= plugins.items()


def test_a_file_of_settings_replaces_sizes_and_not_plugins(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"max_batch_size": 3, "max_seq_len": 64, "kv_cache_type": "PAGED"}))
    assert build(source, "--build_config", str(settings), "--max_batch_size", "9", "--gemm_plugin", "auto") == 0
    found = engine_config(source)["build_config"]
    assert (found["max_batch_size"], found["max_seq_len"], found["kv_cache_type"]) == (3, 64, "paged")
    assert found["plugin_config"]["gemm_plugin"] == "auto"


def test_a_config_alone_builds_with_weights_of_chance(in_folder: Path) -> None:
    source = checkpoint(in_folder / "checkpoint")
    (source / "rank0.safetensors").unlink()
    assert trtllm_build.main(["--model_config", str(source / "config.json"), "--output_dir", "engine"]) == 0
    assert (in_folder / "engine" / "rank0.engine").is_file()


def test_neither_checkpoint_nor_config(in_folder: Path, capsys: Output) -> None:
    assert trtllm_build.main([]) == 1
    assert capsys.readouterr().err.endswith("AttributeError: 'NoneType' object has no attribute 'lower'\n")


def test_a_dry_run_writes_no_engine(tmp_path: Path) -> None:
    assert build(checkpoint(tmp_path / "checkpoint"), "--dry_run") == 0
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["config.json"]


def test_a_fast_build_has_its_weights_beside_the_engine(tmp_path: Path, capsys: Output) -> None:
    assert build(checkpoint(tmp_path / "checkpoint"), "--fast_build") == 0
    assert (tmp_path / "engine" / "rank0_managed_weights.safetensors").is_file()
    shutil.rmtree(tmp_path / "engine")
    quantization = {"quant_algo": "W8A16"}
    config = {"quantization": quantization, "disable_weight_only_quant_plugin": True}
    told = refusal(capsys, checkpoint(tmp_path / "int8", INT8_WEIGHTS, config=config), "--fast_build")
    assert told == "RuntimeError: Manage weights of weight only quant works only with plugin currently."


@pytest.mark.parametrize("kind", ["hf", "nemo"])
def test_adapters_are_copied(tmp_path: Path, kind: str) -> None:
    adapter = tmp_path / "adapter"
    if kind == "hf":
        adapter.mkdir()
        for name in ("adapter_config.json", "adapter_model.safetensors", "README.md"):
            (adapter / name).write_text(name)
    else:
        adapter.write_text("nemo")
    source = checkpoint(tmp_path / "checkpoint")
    flags = ["--lora_plugin", "auto", "--lora_dir", str(adapter), "--lora_ckpt_source", kind, "--max_lora_rank", "8"]
    assert build(source, *flags, "--lora_target_modules", "attn_q", "attn_v") == 0
    copied = "lora/0" if kind == "hf" else "lora/0.nemo"
    assert engine_config(source)["build_config"]["lora_config"] == {
        "lora_dir": [copied],
        "lora_ckpt_source": kind,
        "max_lora_rank": 8,
        "lora_target_modules": ["attn_q", "attn_v"],
        "trtllm_modules_to_hf_modules": {},
    }
    if kind == "hf":
        names = sorted(path.name for path in (tmp_path / "engine" / "lora" / "0").iterdir())
        assert names == ["adapter_config.json", "adapter_model.safetensors"]
    else:
        assert (tmp_path / "engine" / "lora" / "0.nemo").read_text() == "nemo"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--multiple_profiles enable --opt_num_tokens 16",
         "RuntimeError: multiple_profiles is enabled, while opt_num_tokens is set. "
         "They are not supposed to be working in the same time for now."),
        ("--streamingllm enable",
         "AssertionError: StreamingLLM is no longer supported because attention sink cannot work with the non-cyclic "
         "kv cache kernel & runtime changes."),
        ("--pp_reduce_scatter enable", "AssertionError: PP reduce scatter is only supported in the mixtral model."),
        ("--kv_cache_type continuous --paged_kv_cache enable", "AssertionError"),
        ("--kv_cache_type paged --paged_kv_cache disable", "AssertionError"),
        ("--gather_context_logits --max_draft_len 3",
         "RuntimeError: Gather context logits is not support with draft len > 0."),
        ("--gemm_swiglu_plugin fp8 --use_fused_mlp disable",
         "RuntimeError: GemmSwiGLU plugin requires --use_fused_mlp flag"),
        ("--low_latency_gemm_swiglu_plugin fp8 --use_fused_mlp disable",
         "RuntimeError: GemmSwiGLU plugin requires --use_fused_mlp flag"),
        ("--gemm_swiglu_plugin fp8 --lora_plugin auto",
         "AssertionError: gemm_swiglu_plugin does not go with lora_plugin"),
        ("--gemm_allreduce_plugin bfloat16 --lora_plugin auto",
         "AssertionError: gemm_allreduce_plugin does not go with lora_plugin"),
        ("--speculative_decoding_mode eagle --max_draft_len 3", "AssertionError"),
        ("--tokens_per_block 48", "ContractError: tokens_per_block is 48, not a power of two"),
    ],
    ids=lambda value: value if value.startswith("--") else "",
)  # fmt: skip
def test_settings_that_are_refused(tmp_path: Path, capsys: Output, flags: str, told: str) -> None:
    assert refusal(capsys, checkpoint(tmp_path / "checkpoint", FP8_KV), *flags.split()) == told


@pytest.mark.parametrize(
    ("flags", "told", "built"),
    [
        ("--reduce_fusion enable", ["Overriding reduce_fusion to False"], {"reduce_fusion": False}),
        ("--user_buffer enable", ["Overriding user_buffer to False"], {"user_buffer": False}),
        ("--reduce_fusion enable --user_buffer enable",
         ["Overriding reduce_fusion to False", "Overriding user_buffer to False"],
         {"reduce_fusion": False, "user_buffer": False}),
        ("--norm_quant_fusion enable", ["Overriding norm_quant_fusion to False"], {"norm_quant_fusion": False}),
        ("--context_fmha disable",
         ["Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled."],
         {"context_fmha": False, "use_fp8_context_fmha": False, "use_paged_context_fmha": False}),
        ("--use_fp8_context_fmha disable", ["FP8 Context FMHA is enabled to support FP8 Paged Context FMHA."],
         {"use_fp8_context_fmha": True, "use_paged_context_fmha": True}),
        ("--use_fp8_context_fmha disable --use_paged_context_fmha disable", [],
         {"use_fp8_context_fmha": False, "use_paged_context_fmha": False}),
        ("--paged_kv_cache disable",
         ["Option --paged_kv_cache is deprecated, use --kv_cache_type=paged/disabled instead."],
         {"paged_kv_cache": False}),
        ("--kv_cache_type disabled", [], {"paged_kv_cache": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_settings_that_are_turned_off(
    tmp_path: Path, capsys: Output, flags: str, told: list[str], built: dict[str, bool]
) -> None:
    source = checkpoint(tmp_path / "checkpoint", FP8_KV)
    assert warnings(capsys, source, *flags.split()) == told
    plugins = engine_config(source)["build_config"]["plugin_config"]
    assert {name: plugins[name] for name in built} == built


def test_reduce_fusion_is_for_several_ranks_of_a_llama(tmp_path: Path, capsys: Output) -> None:
    flags = ["--reduce_fusion", "enable", "--user_buffer", "enable"]
    for name, kept in (("LlamaForCausalLM", True), ("MistralForCausalLM", False)):
        (tmp_path / name).mkdir()
        config = {"architecture": name}
        source = checkpoint(tmp_path / name / "checkpoint", FP8_KV, TWO, toolchain="0.21.0", config=config)
        assert len(warnings(capsys, source, *flags)) == (0 if kept else 4)
        plugins = engine_config(source)["build_config"]["plugin_config"]
        assert (plugins["reduce_fusion"], plugins["user_buffer"]) == (kept, kept)


WORKFLOW = "FP8 Context FMHA is disabled because it must be used together with the fp8 quantization workflow."


@pytest.mark.parametrize(
    ("quantization", "told", "fp8", "paged"),
    [
        (UNQUANTIZED, [WORKFLOW], False, True),
        (FP8, ["FP8 Paged Context FMHA is disabled because it must be used together with fp8 KV Cache."], False, True),
        (FP8_KV, [], True, True),
        (FP8_KV_ALONE,
         [WORKFLOW, "FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled."], False, False),
        (INT8_KV,
         [WORKFLOW, "Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently."],
         False, False),
    ],
    ids=["none", "fp8", "fp8-kv", "fp8-kv-alone", "int8-kv"],
)  # fmt: skip
def test_attention_that_trtllm_build_falls_back_to_is_told(
    tmp_path: Path, capsys: Output, quantization: Quantization, told: list[str], fp8: bool, paged: bool
) -> None:
    source = checkpoint(tmp_path / "checkpoint", quantization)
    assert warnings(capsys, source) == told
    plugins = engine_config(source)["build_config"]["plugin_config"]
    assert (plugins["use_fp8_context_fmha"], plugins["use_paged_context_fmha"]) == (fp8, paged)


@pytest.mark.parametrize("version", ["0.21.0", "1.0.0"])
def test_attention_sinks_of_older_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, version: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", version)
    source = checkpoint(tmp_path / "checkpoint", toolchain="0.21.0")
    told = warnings(capsys, source, "--streamingllm", "enable")
    assert told[0].startswith("Paged Context FMHA is disabled because StreamingLLM is not supported")
    assert engine_config(source)["build_config"]["plugin_config"]["use_paged_context_fmha"] is False


@pytest.mark.parametrize(
    ("flags", "told", "sizes"),
    [
        ("--max_batch_size 2 --max_seq_len 256",
         "max_num_tokens (8192) shouldn't be greater than max_seq_len * max_batch_size (512), "
         "specifying to max_seq_len * max_batch_size (512).", {"max_num_tokens": 512, "opt_num_tokens": 2}),
        ("--max_num_tokens 20000",
         "Specifying a `max_num_tokens` larger than 16384 is usually not recommended. Got `max_num_tokens` = 20000",
         {"max_num_tokens": 20000}),
        ("--max_num_tokens 8",
         "When enable_context_fmha is turned on, max_num_tokens (8) should be at least tokens_per_block (32), "
         "specifying to tokens_per_block (32). At this time, you also need to enable context chunking at runtime, "
         "otherwise you may encounter errors.", {"max_num_tokens": 32, "opt_num_tokens": 8}),
        ("--opt_num_tokens 9000",
         "opt_num_tokens (9000) shouldn't be greater than max_num_tokens (8192), specifying to max_num_tokens (8192).",
         {"opt_num_tokens": 8192}),
        ("--max_input_len 300",
         "max_input_len is 300 is larger than max_seq_len 256, clipping it to max_seq_len", {"max_input_len": 256}),
        ("--max_seq_len 300",
         "max_seq_len 300 is larger than max_position_embeddings 256 * rotary scaling 1, "
         "the model accuracy might be affected", {"max_seq_len": 300}),
        ("--remove_input_padding disable",
         "remove_input_padding is not enabled, the specified max_num_tokens/opt_num_tokens will be ignored.",
         {"max_num_tokens": 524288}),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") else "",
)  # fmt: skip
def test_sizes_that_are_changed(tmp_path: Path, capsys: Output, flags: str, told: str, sizes: dict[str, int]) -> None:
    source = checkpoint(tmp_path / "checkpoint", FP8_KV)
    assert warnings(capsys, source, *flags.split()) == [told]
    assert sizes.items() <= engine_config(source)["build_config"].items()


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.0, "alpha": 1000}, 512),
    ],
)
def test_the_length_that_is_left_out(tmp_path: Path, scaling: dict[str, Any] | None, length: int) -> None:
    source = checkpoint(tmp_path / "checkpoint", config={"rotary_scaling": scaling})
    assert build(source) == 0
    assert engine_config(source)["build_config"]["max_seq_len"] == length


def test_draft_tokens_are_added(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    flags = "--speculative_decoding_mode draft_tokens_external --max_draft_len 9 --max_batch_size 64"
    assert build(source, *flags.split(), "--max_num_tokens", "128") == 0
    found = engine_config(source)["build_config"]
    sizes = (found["max_seq_len"], found["max_num_tokens"], found["speculative_decoding_mode"])
    assert sizes == (265, 640, 2)
    eagle = checkpoint(tmp_path / "eagle", config={"num_eagle_layers": 4})
    assert build(eagle, "--speculative_decoding_mode", "eagle", "--max_draft_len", "9") == 0
    found = engine_config(eagle)["build_config"]
    assert (found["max_seq_len"], found["speculative_decoding_mode"]) == (269, 32)
