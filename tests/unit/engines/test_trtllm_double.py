"""The double of trtllm-build: it builds what the project writes, and refuses what the real one refuses."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import factories
from tests.support.doubles import trtllm_build
from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, hf_folder
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import config_json
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import plan_rank
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.model_config import EmbeddingSharding, ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization

# Sizes that INT4 in groups of 64 can be cut in two by; three layers, which two stages share unevenly.
MODEL = replace(factories.MODEL, hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_size=32)
ONE, TWO = Mapping(), Mapping(tp_size=2)
FP8 = Quantization(quant_algo=QuantAlgo.FP8)
FP8_KV = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)
ROWWISE = Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
SMOOTH = Quantization(quant_algo=QuantAlgo.W8A8_SQ_PER_CHANNEL)
INT8_WEIGHTS = Quantization(quant_algo=QuantAlgo.W8A16)
AWQ = Quantization(quant_algo=QuantAlgo.W4A16_AWQ, group_size=64)
W4A8 = Quantization(quant_algo=QuantAlgo.W4A8_AWQ)
INT8_KV = Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.INT8)
FP8_KV_ALONE = Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.FP8)

Tensors = dict[str, tuple[str, tuple[int, ...]]]
Change = Callable[[Tensors], object]


def rank_file(path: Path, tensors: Tensors) -> None:
    header, _ = header_bytes((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    data = sum(end - begin for begin, end in (s["data_offsets"] for s in json.loads(header[8:]).values()))
    path.write_bytes(header + bytes(data))


def checkpoint(
    folder: Path,
    quantization: Quantization = UNQUANTIZED,
    mapping: Mapping = ONE,
    *,
    model: ModelConfig = MODEL,
    toolchain: str | None = None,
    change: Change = lambda tensors: None,
    config: dict[str, Any] | None = None,
) -> Path:
    """The project's checkpoint of a model of zeros; `change` alters every rank's tensors, `config` replaces keys.

    What is written for 0.21.0 names no more of a mapping than every release needs.
    """
    folder.mkdir()
    written = config_json(model, DataType.BFLOAT16, mapping, quantization=quantization, toolchain=toolchain)
    written.update(config or {})
    (folder / "config.json").write_text(json.dumps(written))
    for rank in range(mapping.world_size):
        pp_rank, tp_rank = divmod(rank, mapping.tp_size)
        plans = plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, quantization=quantization)
        tensors: Tensors = {plan.name: (plan.dtype or "BF16", plan.shape) for plan in plans}
        change(tensors)
        rank_file(folder / f"rank{rank}.safetensors", tensors)
    return folder


def build(source: Path, *flags: str) -> int:
    out = source.parent / "engine"
    cache = source.parent / "model.cache"
    arguments = ["--checkpoint_dir", str(source), "--output_dir", str(out), "--output_timing_cache", str(cache)]
    return trtllm_build.main([*arguments, "--max_input_len", "200", *flags])


def engine_config(source: Path) -> Any:
    return json.loads((source.parent / "engine" / "config.json").read_text())


Output = pytest.CaptureFixture[str]


def refusal(capsys: Output, source: Path, *flags: str) -> str:
    """The last line of a build that must fail, and leave no engine."""
    assert build(source, *flags) == 1
    assert not list(source.parent.glob("engine/*.engine"))
    return capsys.readouterr().err.splitlines()[-1]


def warnings(capsys: Output, source: Path, *flags: str) -> list[str]:
    """What a build that must work warns of, beyond what every one does."""
    assert build(source, *flags) == 0
    lines = [line.split("] [W] ")[1] for line in capsys.readouterr().out.splitlines() if "] [W] " in line]
    usual = ("Option --gather_generation_logits", "padding removal and fMHA", "Implicitly setting")
    return [line for line in lines if not line.startswith(usual)]


# A build


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


# Checkpoints that the project writes


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


# Wrong checkpoints: config.json


@pytest.mark.parametrize(
    ("version", "place", "key", "told"),
    [
        ("1.2.1", "mapping", "dp_size", "TypeError: Mapping.__init__() got an unexpected keyword argument 'dp_size'"),
        ("0.21.0", "mapping", "attn_tp_size",
         "TypeError: Mapping.__init__() got an unexpected keyword argument 'attn_tp_size'"),
        ("1.1.0", "mapping", "pp_partition",
         "TypeError: Mapping.__init__() got an unexpected keyword argument 'pp_partition'"),
        ("1.2.1", "quantization", "alpha",
         "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'alpha'"),
        ("0.21.0", "quantization", "mamba_ssm_cache_dtype",
         "TypeError: QuantConfig.__init__() got an unexpected keyword argument 'mamba_ssm_cache_dtype'"),
    ],
)  # fmt: skip
def test_a_key_that_a_release_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, version: str, place: str, key: str, told: str
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_VERSION", version)
    source = checkpoint(tmp_path / "checkpoint", toolchain="0.21.0")
    config = json.loads((source / "config.json").read_text())
    config[place][key] = None
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(capsys, source) == told


def test_a_key_at_the_top_is_taken(tmp_path: Path, capsys: Output) -> None:
    assert build(checkpoint(tmp_path / "checkpoint", config={"producer": "us"})) == 0
    assert "[W] Implicitly setting LLaMAConfig.producer = us" in capsys.readouterr().out


@pytest.mark.parametrize("family", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_experts_are_built_however_ranks_divide_them(tmp_path: Path, capsys: Output, family: dict[str, Any]) -> None:
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **family)
    for ep in (1, 2, 4):
        (source := tmp_path / f"checkpoint{ep}" / "checkpoint").mkdir(parents=True)
        convert(hf, source, dtype=None, mapping=Mapping(tp_size=4, pp_size=2, moe_ep_size=ep))
        assert build(source) == 0
    capsys.readouterr()
    config = json.loads((source / "config.json").read_text())
    config["mapping"] |= {"moe_tp_size": 4, "moe_ep_size": 1}
    (source / "config.json").write_text(json.dumps(config))
    shutil.rmtree(source.parent / "engine")
    assert "The value updated is not the same shape as the original" in refusal(capsys, source)


@pytest.mark.parametrize("qwen", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_a_qwen_is_built_and_not_without_its_type(tmp_path: Path, capsys: Output, qwen: dict[str, Any]) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **qwen, tie_word_embeddings=True)
    convert(hf, source, dtype=None, mapping=Mapping(tp_size=2, pp_size=2))
    assert build(source) == 0
    assert f"Implicitly setting QWenConfig.qwen_type = {qwen['model_type']}" in capsys.readouterr().out
    config = json.loads((source / "config.json").read_text())
    del config["qwen_type"]
    (source / "config.json").write_text(json.dumps(config))
    shutil.rmtree(source.parent / "engine")
    assert refusal(capsys, source) == "AttributeError: 'QWenConfig' object has no attribute 'qwen_type'"


def test_a_phi3_is_built_with_its_windows(tmp_path: Path, capsys: Output) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    hf = hf_folder(tmp_path / "hf", tokenizer=False, **PHI3, sliding_window=64)
    convert(hf, source, dtype=None, mapping=Mapping(tp_size=4))
    assert build(source) == 0
    assert "Implicitly setting Phi3Config.rotary_pct = 1.0" in capsys.readouterr().out
    config = json.loads((source.parent / "engine" / "config.json").read_text())["pretrained_config"]
    assert config["runtime_defaults"] == {"max_attention_window": [64]}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architecture": "Qwen9ForCausalLM"}, "KeyError: 'Qwen9ForCausalLM'"),
        ({"architecture": "GraniteForCausalLM"}, "ContractError: the double does not know GraniteForCausalLM"),
        ({"architecture": "MixtralForCausalLM"},
         "ContractError: hidden_act is silu, that of one matrix is swiglu"),
        ({"dtype": "auto"}, "AssertionError: Unsupported dtype: auto"),
        ({"hidden_act": "gelu"}, "ContractError: hidden_act is gelu, Llama's is silu"),
        ({"position_embedding_type": "learned_absolute"},
         "ContractError: position_embedding_type is learned_absolute: no rotary embedding applies"),
        ({"rotary_base": None},
         "ContractError: config.json lacks rotary_base: the loader has a default, which is not this model's"),
        ({"rotary_scaling": {"factor": 8.0}}, "ContractError: rotary_scaling has the type None, not one of "
         "llama3, linear, dynamic, yarn, longrope, su"),
        ({"moe": {"experts": 8}}, "TypeError: MoeConfig.__init__() got an unexpected keyword argument 'experts'"),
        ({"mapping": {"world_size": 2}},
         "ValueError: world_size must equal to tp_size * pp_size * cp_size, but got 2 != 1 * 1 * 1."),
        ({"mapping": {"world_size": 2, "tp_size": 2, "moe_tp_size": 1, "moe_ep_size": 1}},
         "ValueError: moe_tp_size * moe_ep_size * moe_cluster_size must equal to moe_world_size, but got 1 != 2"),
        ({"mapping": {"world_size": 2, "tp_size": 2, "attn_tp_size": 1, "attn_cp_size": 1}},
         "ValueError: tp_size * cp_size must equal to attn_tp_size * attn_cp_size, but got 2 * 1 != 1 * 1"),
        ({"mapping": {"world_size": 3, "tp_size": 3}},
         "AssertionError: num_attention_heads must be divisible by tp_size"),
        ({"mapping": {"world_size": 2, "tp_size": 2}, "num_key_value_heads": 3},
         "ContractError: 3 key/value heads over 2 ranks: ranks would get parts of heads"),
        ({"mapping": {"world_size": 2, "tp_size": 2}, "intermediate_size": 255},
         "ContractError: intermediate_size 255 over 2 ranks: the remainder would be lost"),
        ({"mapping": {"world_size": 2, "pp_size": 2, "pp_partition": [2, 2]}},
         "ValueError: pp_partition [2, 2] does not match pp_size 2 and 3 layers."),
        ({"quantization": {"quant_algo": "FP9"}}, "AssertionError"),
        ({"quantization": {"quant_algo": "NVFP4"}},
         "ContractError: the double does not know NVFP4 with a KV cache in None, or Meta's recipe"),
        ({"quantization": {"quant_algo": "W4A16_AWQ"}},
         "ContractError: pre_quant_scale is false: the smoothing of W4A16_AWQ would be left out without an error"),
    ],
)  # fmt: skip
def test_a_config_that_is_refused(tmp_path: Path, capsys: Output, config: dict[str, Any], told: str) -> None:
    assert refusal(capsys, checkpoint(tmp_path / "checkpoint", config=config)) == told


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("architecture", "KeyError: 'architecture'"),
        ("dtype", "TypeError: PretrainedConfig.__init__() missing 1 required keyword-only argument: 'dtype'"),
        ("hidden_size",
         "TypeError: PretrainedConfig.__init__() missing 1 required keyword-only argument: 'hidden_size'"),
        ("intermediate_size",
         "ContractError: config.json lacks intermediate_size: the loader has a default, which is not this model's"),
    ],
)  # fmt: skip
def test_a_config_that_lacks_a_key(tmp_path: Path, capsys: Output, key: str, told: str) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    config = json.loads((source / "config.json").read_text())
    del config[key]
    (source / "config.json").write_text(json.dumps(config))
    assert refusal(capsys, source) == told


def test_a_folder_without_config(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "checkpoint").mkdir()
    told = refusal(capsys, tmp_path / "checkpoint")
    assert told.startswith("FileNotFoundError: [Errno 2] No such file or directory: ")


# Wrong checkpoints: tensors

QKV = "transformer.layers.0.attention.qkv."


def test_a_missing_rank_ends_with_a_bare_assertion(tmp_path: Path, capsys: Output) -> None:
    source = checkpoint(tmp_path / "checkpoint", mapping=TWO, toolchain="0.21.0")
    (source / "rank1.safetensors").unlink()
    assert build(source) == 1
    assert capsys.readouterr().err == "Traceback (most recent call last):\nAssertionError\n"
    # The ranks before it have been written by then.
    assert sorted(path.name for path in (tmp_path / "engine").iterdir()) == ["config.json", "rank0.engine"]


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def test_missing_tensors_are_named(tmp_path: Path, capsys: Output) -> None:
    change = renamed(QKV + "weight", QKV + "kernel")
    told = refusal(capsys, checkpoint(tmp_path / "checkpoint", change=change))
    assert told == "RuntimeError: Required but not provided tensors:{'transformer.layers.0.attention.qkv.weight'}"


def test_tensors_of_no_use_are_warned_of(tmp_path: Path, capsys: Output) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update({"rotary_inv_freq": ("F32", (16,)), "bonus": ("BF16", (1,))})

    source = checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)
    assert warnings(capsys, source) == ["Provided but not required tensors: {'bonus', 'rotary_inv_freq'}"]


def test_a_table_of_the_wrong_shape_is_no_better_than_a_weight(tmp_path: Path, capsys: Output) -> None:
    def change(tensors: Tensors) -> None:
        tensors["rotary_inv_freq"] = ("F32", (32,))

    assert refusal(capsys, checkpoint(tmp_path / "checkpoint", change=change)) == (
        "RuntimeError: Encounter error 'The value updated is not the same shape as the original. "
        "Updated: (32,), original: (16,)' for parameter 'rotary_inv_freq'"
    )


def test_the_head_may_be_missing_where_the_embedding_is(tmp_path: Path, capsys: Output) -> None:
    def headless(tensors: Tensors) -> None:
        tensors.pop("lm_head.weight", None)

    assert build(checkpoint(tmp_path / "checkpoint", change=headless)) == 0
    two_stages = Mapping(pp_size=2)
    source = checkpoint(tmp_path / "cut", mapping=two_stages, toolchain="0.21.0", change=headless)
    assert build(source) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "RuntimeError: Required but not provided tensors:{'lm_head.weight'}"


@pytest.mark.parametrize(
    ("quantization", "mapping", "name", "stored", "updated", "original"),
    [
        (UNQUANTIZED, ONE, QKV + "weight", ("BF16", (256, 100)), (256, 100), (256, 128)),
        # Whole instead of the rank's half.
        (UNQUANTIZED, TWO, QKV + "weight", ("BF16", (256, 128)), (256, 128), (128, 128)),
        (UNQUANTIZED, ONE, "transformer.layers.2.mlp.proj.weight", ("BF16", (256, 128)), (256, 128), (128, 256)),
        (UNQUANTIZED, ONE, "lm_head.weight", ("BF16", (301, 128)), (301, 128), (300, 128)),
        (UNQUANTIZED, ONE, "transformer.ln_f.weight", ("BF16", (1, 128)), (1, 128), (128,)),
        (FP8, ONE, QKV + "weights_scaling_factor", ("F32", (256,)), (256,), (1,)),
        (ROWWISE, ONE, QKV + "per_channel_scale", ("F32", (1,)), (1,), (256,)),
        (SMOOTH, TWO, QKV + "weights_scaling_factor", ("F32", (256,)), (256,), (128,)),
        (SMOOTH, ONE, QKV + "prequant_scaling_factor", ("BF16", (1, 128)), (1, 128), (128,)),
        # Packed along the inputs; the loader has turned it round and sees four numbers in an element.
        (AWQ, ONE, QKV + "weight", ("I8", (256, 64)), (64, 128), (128, 64)),
        (AWQ, ONE, QKV + "weights_scaling_factor", ("F32", (2, 256)), (256, 2), (2, 256)),
        (FP8_KV_ALONE, ONE, "transformer.layers.0.attention.kv_cache_rcp_scaling_factor", ("F32", (2,)), (2,), (1,)),
    ],
)  # fmt: skip
def test_a_tensor_of_another_shape(
    tmp_path: Path,
    capsys: Output,
    quantization: Quantization,
    mapping: Mapping,
    name: str,
    stored: tuple[str, tuple[int, ...]],
    updated: tuple[int, ...],
    original: tuple[int, ...],
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name] = stored

    source = checkpoint(tmp_path / "checkpoint", quantization, mapping, toolchain="0.21.0", change=change)
    assert refusal(capsys, source) == (
        "RuntimeError: Encounter error 'The value updated is not the same shape as the original. "
        f"Updated: {updated}, original: {original}' for parameter '{name}'"
    )


def test_scalars_may_have_no_dimension(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for name, (dtype, shape) in tensors.items():
            tensors[name] = (dtype, () if shape == (1,) else shape)

    assert build(checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)) == 0


def test_another_element_type_is_taken_with_a_warning(tmp_path: Path, capsys: Output) -> None:
    def change(tensors: Tensors) -> None:
        tensors["transformer.ln_f.weight"] = ("F32", (128,))

    source = checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)
    assert warnings(capsys, source) == ["Parameter was initialized as DataType.BF16 but set to DataType.FLOAT"]


@pytest.mark.parametrize("stored", ["I8", "U8"])
def test_fp8_stored_as_bytes_is_the_same(tmp_path: Path, capsys: Output, stored: str) -> None:
    def change(tensors: Tensors) -> None:
        tensors[QKV + "weight"] = (stored, (256, 128))

    assert warnings(capsys, checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)) == []


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda data: data[:5], "HeaderTooSmall"),
        (lambda data: data[:-1], "MetadataIncompleteBuffer"),
        (lambda data: b"\xff" * 8 + data[8:], "HeaderTooLarge"),
        (lambda data: data[:8] + b"?" + data[9:], "InvalidHeaderDeserialization"),
        (lambda data: data.replace(b'"BF16"', b'"F16" ', 1).replace(b"[300,128]", b"[301,128]", 1),
         "TensorInvalidInfo"),
        # The embedding is 300 x 128 numbers of two bytes.
        (lambda data: data.replace(b"[0,76800]", b"[8,76808]"), 'InvalidOffset("transformer.vocab_embedding.weight")'),
    ],
    ids=["short", "cut", "long-header", "no-json", "untrue", "gap"],
)  # fmt: skip
def test_a_damaged_rank_file(tmp_path: Path, capsys: Output, damage: Callable[[bytes], bytes], told: str) -> None:
    source = checkpoint(tmp_path / "checkpoint")
    path = source / "rank0.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    assert refusal(capsys, source) == f"SafetensorError: Error while deserializing header: {told}"


# Wrong checkpoints: quantization


@pytest.mark.parametrize(
    ("quantization", "lost", "told"),
    [
        (FP8, QKV + "activation_scaling_factor",
         f"RuntimeError: Required but not provided tensors:{{'{QKV}activation_scaling_factor'}}"),
        (ROWWISE, QKV + "per_channel_scale",
         f"RuntimeError: Required but not provided tensors:{{'{QKV}per_channel_scale'}}"),
        (SMOOTH, QKV + "prequant_scaling_factor",
         f"RuntimeError: Required but not provided tensors:{{'{QKV}prequant_scaling_factor'}}"),
        (W4A8, QKV + "weights_scaling_factor_2", f"KeyError: '{QKV}weights_scaling_factor_2'"),
        (INT8_KV, "transformer.layers.0.attention.kv_cache_scaling_factor",
         "RuntimeError: Required but not provided tensors:{'transformer.layers.0.attention.kv_cache_rcp_scaling_factor'"
         ", 'transformer.layers.0.attention.kv_cache_scaling_factor'}"),
        (FP8_KV, "transformer.layers.0.attention.v_cache_scaling_factor",
         "AssertionError: transformer.layers.0.attention.v_cache_scaling_factor not found"),
    ],
)  # fmt: skip
def test_a_scale_that_is_missing(
    tmp_path: Path, capsys: Output, quantization: Quantization, lost: str, told: str
) -> None:
    source = checkpoint(tmp_path / "checkpoint", quantization, change=lambda tensors: tensors.pop(lost))
    assert refusal(capsys, source) == told


def test_biases_of_a_feed_forward_are_required(tmp_path: Path, capsys: Output) -> None:
    told = refusal(capsys, checkpoint(tmp_path / "checkpoint", config={"mlp_bias": True}))
    assert re.findall(r"layers\.0\.(\S+)'", told) == ["mlp.fc.bias", "mlp.gate.bias", "mlp.proj.bias"]


def test_a_pruned_checkpoint_may_have_other_shapes(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[QKV + "weight"] = ("BF16", (0,))

    source = checkpoint(tmp_path / "checkpoint", change=change, config={"is_pruned": True})
    assert build(source) == 0
    assert engine_config(source)["build_config"]["use_strip_plan"] is True


def test_ranks_that_share_a_context_share_a_file(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "checkpoint", config={"mapping": {"world_size": 2, "cp_size": 2}})
    assert build(source) == 0
    assert sorted(path.name for path in source.parent.glob("engine/*.engine")) == ["rank0.engine", "rank1.engine"]


def test_stages_of_a_given_number_of_layers(tmp_path: Path, capsys: Output) -> None:
    # The project gives the first stage two of the three.
    source = checkpoint(tmp_path / "checkpoint", mapping=Mapping(pp_size=2), toolchain="0.21.0")
    config = json.loads((source / "config.json").read_text())
    for partition, status in (([2, 1], 0), ([1, 2], 1)):
        config["mapping"]["pp_partition"] = partition
        (source / "config.json").write_text(json.dumps(config))
        assert build(source) == status
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("RuntimeError: Required but not provided tensors:{'transformer.layers.1.")


def test_one_scale_of_the_cache_is_enough(tmp_path: Path, capsys: Output) -> None:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if re.search("[.][kv]_cache_scaling_factor", name)]:
            del tensors[name]

    assert warnings(capsys, checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)) == []


def with_exceptions(tmp_path: Path, quantization: Quantization, exceptions: list[str]) -> Path:
    source = checkpoint(tmp_path / "checkpoint", quantization)
    config = json.loads((source / "config.json").read_text())
    config["quantization"]["exclude_modules"] = exceptions
    (source / "config.json").write_text(json.dumps(config))
    return source


@pytest.mark.parametrize("quantization", [FP8, SMOOTH], ids=["fp8", "int8-sq"])
def test_a_list_of_exceptions_that_forgets_the_head(tmp_path: Path, capsys: Output, quantization: Quantization) -> None:
    told = refusal(capsys, with_exceptions(tmp_path, quantization, ["*router"]))
    assert told.startswith("RuntimeError: Required but not provided tensors:{'lm_head.activation_scaling_factor', ")


def test_rowwise_fp8_never_has_a_head(tmp_path: Path, capsys: Output) -> None:
    assert build(with_exceptions(tmp_path, ROWWISE, [])) == 0

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = ("F8_E4M3", (300, 128))

    assert build(checkpoint(tmp_path / "head", ROWWISE, change=change)) == 1
    assert capsys.readouterr().err.endswith("\nAssertionError\n")


def test_scales_of_a_head_that_has_none_are_dropped(tmp_path: Path, capsys: Output) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weights_scaling_factor"] = tensors["lm_head.activation_scaling_factor"] = ("F32", (1,))

    assert warnings(capsys, checkpoint(tmp_path / "checkpoint", FP8_KV, change=change)) == []


def test_zero_points_are_tensors_of_their_own(tmp_path: Path, capsys: Output) -> None:
    quantization = {"quant_algo": "W4A16_AWQ", "group_size": 64, "pre_quant_scale": True, "has_zero_point": True}
    source = checkpoint(tmp_path / "checkpoint", AWQ, config={"quantization": quantization})
    told = refusal(capsys, source)
    assert told.startswith(
        "RuntimeError: Required but not provided tensors:{'transformer.layers.0.attention.dense.zero'"
    )


def test_weights_alone_have_an_embedding_too_unless_it_is_excepted(tmp_path: Path, capsys: Output) -> None:
    told = refusal(capsys, with_exceptions(tmp_path, INT8_WEIGHTS, ["lm_head"]))
    assert told == ("RuntimeError: Required but not provided tensors:{'transformer.vocab_embedding.per_token_scale'}")
    shutil.rmtree(tmp_path / "checkpoint")
    assert build(with_exceptions(tmp_path, INT8_WEIGHTS, ["lm_head", "*vocab_embedding", "*mlp.fc*"])) == 0


def test_w4a8_knows_no_groups_of_64(tmp_path: Path, capsys: Output) -> None:
    groups = Quantization(quant_algo=QuantAlgo.W4A8_AWQ, group_size=64)
    told = refusal(capsys, checkpoint(tmp_path / "checkpoint", groups))
    assert told == "NotImplementedError: W4A8_AWQ with group_size = 64 is not implemented yet!"


@pytest.mark.parametrize(
    ("quantization", "mapping", "sizes", "told"),
    [
        (INT8_WEIGHTS, ONE, {"hidden_size": 32}, "Updated: (32, 256), original: (64, 256)"),
        # Eight heads of 20 in all.
        (INT8_WEIGHTS, ONE, {"head_size": 20}, "Updated: (128, 160), original: (128, 192)"),
        # The inputs are not shared, and are rounded up to 64 for each rank all the same.
        (AWQ, TWO, {"hidden_size": 192}, "Updated: (192, 32), original: (256, 32)"),
    ],
    ids=["inputs", "outputs", "int4-awq"],
)
def test_sizes_that_the_network_rounds_up(
    tmp_path: Path, capsys: Output, quantization: Quantization, mapping: Mapping, sizes: dict[str, int], told: str
) -> None:
    model = replace(MODEL, **sizes)  # type: ignore[arg-type]
    source = checkpoint(tmp_path / "checkpoint", quantization, mapping, model=model, toolchain="0.21.0")
    assert refusal(capsys, source) == (
        "RuntimeError: Encounter error 'The value updated is not the same shape as the original. "
        f"{told}' for parameter '{QKV}weight'"
    )


# Arguments


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


# Settings that do not go together


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


# The GPU


NO_FP8 = "AssertionError: Engine building failed, please check the error log."
NO_INT8 = "RuntimeError: INT8/INT4 quantization is not supported on SM>=100."


@pytest.mark.parametrize(
    ("sm", "quantization", "told"),
    [
        (75, UNQUANTIZED, "AssertionError: pre SM 80 GPUs do not support bfloat16"),
        (87, UNQUANTIZED, "ContractError: SM87 is not in TensorRT-LLM's support matrix"),
        (80, UNQUANTIZED, None),
        (120, UNQUANTIZED, None),
        (80, FP8, NO_FP8),
        (86, ROWWISE, NO_FP8),
        (86, W4A8, NO_FP8),
        (89, FP8_KV, None),
        (89, ROWWISE, None),
        (89, W4A8, None),
        (103, FP8_KV, None),
        (120, FP8_KV, None),
        (100, ROWWISE, "RuntimeError: Per-channel or per-token scaling is not supported on SM>=100."),
        (80, SMOOTH, None),
        (90, SMOOTH, None),
        (100, SMOOTH, "RuntimeError: SmoothQuant is not supported on SM>=100."),
        (80, AWQ, None),
        (100, AWQ, NO_INT8),
        (103, INT8_KV, NO_INT8),
        (100, W4A8, NO_INT8),
        (120, W4A8, "ContractError: W4A8_AWQ is for SM89 and SM90"),
        (120, SMOOTH, None),
    ],
    ids=lambda value: "" if value is None or isinstance(value, str) else f"{getattr(value, 'quant_algo', value)}",
)
def test_what_a_gpu_builds(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
    sm: int,
    quantization: Quantization,
    told: str | None,
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", str(sm))
    source = checkpoint(tmp_path / "checkpoint", quantization)
    if told is None:
        assert build(source) == 0
    else:
        assert build(source) == 1
        output = capsys.readouterr()
        assert output.err.splitlines()[-1] == told
        no_fp8 = "Networks with FP8 precision require hardware with FP8 support." in output.out
        assert no_fp8 == (told == NO_FP8)


def test_a_cache_in_fp8_without_fp8_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", "80")
    source = checkpoint(tmp_path / "checkpoint", FP8_KV_ALONE)
    assert warnings(capsys, source)[1] == ("FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")


@pytest.mark.parametrize(
    ("sm", "flags", "told"),
    [
        (100, "--gemm_swiglu_plugin fp8",
         "NotImplementedError: gemm_swiglu_plugin=fp8 is not supported on SM 100."),
        (103, "--low_latency_gemm_plugin fp8",
         "NotImplementedError: low_latency_gemm_plugin=fp8 is not supported on SM 103."),
        (89, "--low_latency_gemm_plugin fp8",
         "ContractError: low_latency_gemm_plugin is for FP8 weights on SM90, not for FP8 on SM89"),
        (90, "--low_latency_gemm_plugin fp8", None),
    ],
)  # fmt: skip
def test_kernels_for_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, sm: int, flags: str, told: str | None
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", str(sm))
    source = checkpoint(tmp_path / "checkpoint", FP8_KV)
    if told is None:
        assert build(source, *flags.split()) == 0
    else:
        assert refusal(capsys, source, *flags.split()) == told


def test_no_gpu_is_a_division_by_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", "0")
    assert refusal(capsys, checkpoint(tmp_path / "checkpoint")).startswith("ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("gpus", "workers", "devices"), [("1", "4", [0, 0, 0, 0]), ("2", "4", [0, 1, 0, 1]), ("8", "3", [0, 1, 2, 0])]
)
def test_ranks_are_dealt_out_to_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output, gpus: str, workers: str, devices: list[int]
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", gpus)
    source = checkpoint(tmp_path / "checkpoint", mapping=Mapping(tp_size=4), toolchain="0.21.0")
    assert build(source, "--workers", workers) == 0
    found = re.findall(r"Building rank \d of 4 on GPU (\d)", capsys.readouterr().out)
    assert [int(device) for device in found] == devices


def test_of_ranks_side_by_side_all_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_GPUS", "2")
    source = checkpoint(tmp_path / "checkpoint", mapping=TWO, toolchain="0.21.0")
    (source / "rank0.safetensors").unlink()
    assert build(source, "--workers", "2") == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        "AssertionError",
        "Traceback (most recent call last):",
        "AssertionError: Engine building failed, please check error log.",
    ]
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["rank1.engine"]


# Ways to end


@pytest.mark.parametrize(
    ("fail", "quantization", "logged", "told"),
    [
        ("oom", UNQUANTIZED, "[TRT] [W] Requested amount of GPU memory (33555480576 bytes) could not be allocated. "
         "There may not be enough free memory for allocation to succeed.", NO_FP8),
        ("oom", UNQUANTIZED, "[TRT] [E] [globWriter.cpp::makeResizableGpuMemory::433] Error Code 2: OutOfMemory "
         "(no further information)",
         NO_FP8),
        ("wrong-sm", FP8, "Networks with FP8 precision require hardware with FP8 support.", NO_FP8),
        ("wrong-sm", UNQUANTIZED, "The engine plan file is generated on an incompatible device, expecting compute 9.0 "
         "got compute 8.0, please rebuild.", NO_FP8),
    ],
)  # fmt: skip
def test_failures_of_tensorrt(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
    fail: str,
    quantization: Quantization,
    logged: str,
    told: str,
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", fail)
    assert build(checkpoint(tmp_path / "checkpoint", quantization)) == 1
    output = capsys.readouterr()
    assert logged in output.out
    assert output.err.splitlines()[-1] == told
    assert list((tmp_path / "engine").iterdir()) == []


def test_a_full_disk_leaves_a_partial_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "disk-full")
    assert build(checkpoint(tmp_path / "checkpoint")) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "OSError: [Errno 28] No space left on device"
    part = (tmp_path / "engine" / "rank0.engine").read_bytes()
    assert part.startswith(b"CONTRACT DOUBLE, NO ENGINE\n")
    assert not part.endswith(b"}\n")


def test_wrong_arguments_come_before_any_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "killed")
    assert build(checkpoint(tmp_path / "checkpoint"), "--tp_size", "1") == 2


def test_a_build_that_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_SLEEP", "0.35")
    begun = time.monotonic()
    assert build(checkpoint(tmp_path / "checkpoint", mapping=TWO, toolchain="0.21.0")) == 0
    assert time.monotonic() - begun >= 0.35
    # Once a build, not once a rank; a busy machine may sleep longer at a time.
    assert 1 <= capsys.readouterr().out.count("Profiling tactics") <= 4


def test_less_is_logged_when_less_is_asked_for(tmp_path: Path, capsys: Output) -> None:
    assert build(checkpoint(tmp_path / "checkpoint"), "--log_level", "error") == 0
    assert capsys.readouterr().out == "[TensorRT-LLM] TensorRT-LLM version: 1.2.1\n"


def command(folder: Path) -> list[str]:
    """The double as a program: a copy in a folder of its own, in a Python without packages."""
    copy = folder / "trtllm-build"
    shutil.copyfile(trtllm_build.__file__, copy)
    out, cache = str(folder / "engine"), str(folder / "model.cache")
    arguments = ["--checkpoint_dir", str(folder / "checkpoint"), "--output_dir", out, "--output_timing_cache", cache]
    return [sys.executable, "-I", "-S", str(copy), *arguments]


@pytest.mark.process
def test_the_file_needs_nothing_but_python(tmp_path: Path) -> None:
    checkpoint(tmp_path / "checkpoint")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "engine" / "rank0.engine").is_file()


@pytest.mark.process
@pytest.mark.parametrize(
    ("fail", "status", "left"),
    [("killed", -signal.SIGKILL, ["config.json", "rank0.engine"]), ("crash", -signal.SIGSEGV, [])],
)
def test_a_build_that_is_ended_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: str, status: int, left: list[str]
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", fail)
    checkpoint(tmp_path / "checkpoint")
    done = subprocess.run(command(tmp_path), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert "Build TensorRT engine Unnamed Network 0" in done.stdout
    assert sorted(path.name for path in (tmp_path / "engine").iterdir()) == left


@pytest.mark.process
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_a_build_that_hangs_ends_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: signal.Signals
) -> None:
    monkeypatch.setenv("TRTLLM_DOUBLE_FAIL", "hang")
    checkpoint(tmp_path / "checkpoint")
    # A shell starts what it runs in the background so.
    ignoring = ["sh", "-c", "trap '' INT TERM; exec \"$@\"", "sh", *command(tmp_path)]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert any("Global timing cache in use" in line for line in child.stdout)
            child.send_signal(ending)
            assert child.wait(timeout=60) == -ending
        finally:
            child.kill()
