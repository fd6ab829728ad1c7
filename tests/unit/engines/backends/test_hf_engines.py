"""Engines without a compile: Hugging Face folders in the type asked for, the runtimes' settings, their passport."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support.factories import MIXTRAL, hf_folder
from tests.unit.test_runner import Recorder, plan
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines import load_backend
from trtpipe.engines.backends import vllm
from trtpipe.engines.base import Checkpoint, DataType
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.hf import engine as hf_engine
from trtpipe.engines.hf import layout as hf_layout
from trtpipe.engines.hf.chat_template import TOOL_TEMPLATE
from trtpipe.engines.hf.export import export
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.engines.passport import read_passport
from trtpipe.pipeline.resolve import read_spec, resolve
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.build import BUILD
from trtpipe.pipeline.stages.quantize import QUANTIZE
from trtpipe.pipeline.store.store import Store


def test_an_engine_for_a_cpu_has_its_own_settings(in_folder: Path, tmp_path: Path) -> None:
    chosen = plan(hf_folder(in_folder / "tiny"), gpu="cpu", dtype="fp32", runtime="vllm")
    execute(chosen, Store(tmp_path / "home"), Recorder())
    engine = RunFolder.of(chosen.target).linked("engine")
    assert yaml.safe_load((engine / "engine_args.yaml").read_text()) == {
        "tensor-parallel-size": 1, "pipeline-parallel-size": 1, "max-num-seqs": 4, "max-model-len": 128,
        "max-num-batched-tokens": 64, "block-size": 32, "dtype": "float32", "enforce-eager": True,
        "kv-cache-dtype": "auto",
    }  # fmt: skip
    passport = read_passport(engine)
    assert (passport.gpu, passport.sm, passport.sms, passport.toolchain) == ("cpu", None, None, None)
    assert passport.versions == {"engine_args": "2"}


def test_a_folder_in_its_own_type_is_linked(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", vocab_size=20000)
    (tmp_path / "out").mkdir()
    export(source, tmp_path / "out", dtype=DataType.BFLOAT16)
    assert (tmp_path / "out" / "model.safetensors").stat().st_ino == (source / "model.safetensors").stat().st_ino
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert inspect(tmp_path / "out").problems == ()


def test_another_type_is_cast_into_shards_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_layout, "SHARD_BYTES", 40_000)
    source = hf_folder(tmp_path / "hf", dtype="F32", torch_dtype="float32")
    (tmp_path / "out").mkdir()
    told: list[tuple[int, int]] = []
    export(source, tmp_path / "out", dtype=DataType.FLOAT16, progress=lambda done, total: told.append((done, total)))
    found = inspect(tmp_path / "out")
    assert (found.problems, found.dtype, found.mapping["index"]) == ((), "float16", True)
    assert found.mapping["shards"] > 1
    assert told[-1] == (found.nbytes, found.nbytes)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == found.nbytes
    assert {info.name: info.file for info in found.tensors} == index["weight_map"]
    name = "model.layers.1.mlp.down_proj.weight"
    raw = (source / "model.safetensors").read_bytes()
    entry = read_header(source / "model.safetensors").tensors[name]
    wide = np.frombuffer(raw, np.float32, int(np.prod(entry.shape)), entry.offset).reshape(entry.shape)
    shard = tmp_path / "out" / index["weight_map"][name]
    half = read_header(shard).tensors[name]
    cast = np.frombuffer(shard.read_bytes(), np.float16, int(np.prod(half.shape)), half.offset).reshape(half.shape)
    assert np.array_equal(cast, wide.astype(np.float16))


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", intermediate_size=48)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError, match=r"has shape \[48, 32\]: config.json implies \[64, 32\]"):
        export(source, tmp_path / "out", dtype=DataType.BFLOAT16)


@pytest.mark.parametrize(
    ("runtime", "asked", "settings"),
    [
        ("trtllm_pytorch", {"tp": 4, "moe_ep": 2}, {"moe_expert_parallel_size": 2, "moe_tensor_parallel_size": 2}),
        ("trtllm_pytorch", {"tp": 4}, {}),
        ("vllm", {"tp": 4, "moe_ep": 4}, {"enable-expert-parallel": True}),
        ("vllm", {"tp": 4, "moe_tp": 4}, {}),
    ],
)
def test_settings_of_ranks_that_divide_experts(
    in_folder: Path, runtime: str, asked: dict[str, int], settings: dict[str, Any]
) -> None:
    chosen = plan(hf_folder(in_folder / "tiny", **MIXTRAL), gpu="h100", dtype="bf16", runtime=runtime, **asked)
    (text,) = load_backend(runtime).rendered(chosen.build, chosen.engine_target).values()
    found = yaml.safe_load(text)
    assert {name: value for name, value in found.items() if "moe" in name or "expert" in name} == settings


def test_groups_of_experts_that_a_runtime_has_not(in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny", **MIXTRAL)
    with pytest.raises(UsageError, match="vLLM does not divide experts among 2 groups of ranks"):
        plan(model, gpu="h100", dtype="bf16", runtime="vllm", tp=4, moe_ep=2)
    with pytest.raises(UsageError, match="vLLM does not execute quantized experts on a CPU"):
        plan(model, gpu="cpu", dtype="int8-pc-pt", runtime="vllm")
    with pytest.raises(UsageError, match="moe_ep_size 2 is for a model with experts, and this one has none"):
        plan(hf_folder(in_folder / "dense"), gpu="h100", dtype="bf16", runtime="trtllm_pytorch", tp=4, moe_ep=2)


@pytest.mark.parametrize(
    ("gpu", "runtime", "dtype"),
    [("a100", "tensorrt_llm", "int8-wo"), ("a100", "vllm", "bf16"), ("h100", "tensorrt_llm", "fp8-kv")],
)
def test_the_automatic_precision_of_a_model_with_experts(in_folder: Path, gpu: str, runtime: str, dtype: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192}
    chosen = plan(hf_folder(in_folder / "tiny", **sizes, **MIXTRAL), gpu=gpu, dtype="auto", runtime=runtime)
    assert chosen.precision.name == dtype
    # On another machine the family is not known again.
    assert read_spec(chosen.to_json(), "spec").precision.name == dtype


def made(model: Path, store: Store, runtime: str, **options: Any) -> tuple[BuildSpec, Path]:
    chosen = plan(model, gpu="h100", dtype="bf16", runtime=runtime, **options)
    execute(chosen, store, Recorder())
    return chosen, RunFolder.of(chosen.target).linked("engine")


@pytest.mark.parametrize(
    ("runtime", "file", "settings"),
    [
        (
            "trtllm_pytorch",
            "llm_args.yaml",
            {
                "backend": "pytorch",
                "tensor_parallel_size": 2,
                "pipeline_parallel_size": 1,
                "max_batch_size": 4,
                "max_input_len": 64,
                "max_seq_len": 128,
                "max_num_tokens": 64,
                "max_beam_width": 1,
                "kv_cache_config": {"dtype": "auto", "tokens_per_block": 32},
            },
        ),
        (
            "vllm",
            "engine_args.yaml",
            {
                "tensor-parallel-size": 2,
                "pipeline-parallel-size": 1,
                "max-num-seqs": 4,
                "max-model-len": 128,
                "max-num-batched-tokens": 64,
                "block-size": 32,
                "dtype": "bfloat16",
                "max-cudagraph-capture-size": 64,
                "kv-cache-dtype": "auto",
            },
        ),
    ],
)
def test_an_engine_is_the_folder_and_its_settings(
    in_folder: Path, tmp_path: Path, runtime: str, file: str, settings: dict[str, Any]
) -> None:
    model, store = hf_folder(in_folder / "tiny"), Store(tmp_path / "home")
    chosen, engine = made(model, store, runtime, tp=2)
    assert chosen.target == f"tiny.h100.bf16.tp2.{runtime}"
    assert yaml.safe_load((engine / file).read_text()) == settings
    assert (engine / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    passport = read_passport(engine)
    released = runtime == "trtllm_pytorch"
    assert (passport.runtime, passport.toolchain) == (runtime, "1.2.1" if released else None)
    assert passport.sms == load_quant_recipes()["none"].sms, "nothing in it is compiled for one card"
    size = (model / "model.safetensors").stat().st_size
    assert (passport.rank_bytes, passport.gpu_bytes) == (size, size / 2), "the loader splits the file into the ranks"
    # One folder for every number of ranks.
    recorder = Recorder()
    execute(plan(model, gpu="h100", dtype="bf16", runtime=runtime), store, recorder)
    assert [name for name, _ in recorder.started] == ["build", "package"]
    repository = RunFolder.of(chosen.target).linked("repository")
    models = ["tensorrt_llm"] if released else [
        "ensemble", "postprocessing", "preprocessing", "tensorrt_llm", "tensorrt_llm_bls",
    ]  # fmt: skip
    assert sorted(path.name for path in repository.iterdir()) == models
    assert (repository / "tensorrt_llm" / "1" / "model.safetensors").is_file()


def test_what_transformers_5_renamed_has_its_older_names_too(in_folder: Path, tmp_path: Path) -> None:
    """TensorRT-LLM's reader knows only these, and computes with a rope_theta of 10000 where there is none."""
    linear = {"rope_type": "linear", "factor": 2.0}

    def saved(name: str, **options: Any) -> Path:
        folder = hf_folder(in_folder / name, dtype="BF16", rope_parameters={"rope_theta": 5e5, **linear}, **options)
        config = json.loads((folder / "config.json").read_text())
        del config["rope_theta"], config["torch_dtype"]
        (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        (folder / TOOL_TEMPLATE).parent.mkdir()
        (folder / TOOL_TEMPLATE).write_text("for tools")
        return folder

    def told(folder: Path) -> tuple[Any, ...]:
        config = json.loads((folder / "config.json").read_text())
        assert config["rope_parameters"] == {"rope_theta": 5e5, **linear}
        return config["rope_theta"], config["rope_scaling"], config["torch_dtype"], config["dtype"]

    model, draft = saved("tiny", rope_theta=5e5), saved("small", rope_theta=5e5, num_hidden_layers=1)
    speculation = {"speculative_decoding_mode": "draft_model", "max_draft_len": 2, "speculative_model": str(draft)}
    chosen, engine = made(model, Store(tmp_path / "home"), "trtllm_pytorch", build=speculation)
    run = RunFolder.of(chosen.target)
    served = run.linked("repository") / "tensorrt_llm" / "1"
    names = (5e5, linear, "bfloat16", "bfloat16")
    assert [told(one) for one in (engine, engine / "draft", served, served / "draft")] == [names] * 4
    # The chat template that it has in a folder of its own is there, and none of the draft model.
    assert [path.read_text() for path in (engine / TOOL_TEMPLATE, served / TOOL_TEMPLATE)] == ["for tools"] * 2
    assert [path.name for path in (served / "draft").rglob("*") if path.suffix == ".jinja"] == []
    # So have folders that commands write, and engines of checkpoints without them: folders that came quantized.
    written, placed = tmp_path / "written", tmp_path / "placed"
    for folder in (written, placed):
        folder.mkdir()
    export(model, written, dtype=DataType.FLOAT16)
    hf_engine.lay_out(Checkpoint(path=model), placed, {})
    assert (told(written), told(placed)) == ((5e5, linear, "float16", "float16"), names)
    assert (written / TOOL_TEMPLATE).read_text() == "for tools"
    # A config without new names stays as it is.
    old = hf_folder(in_folder / "old")
    hf_engine.lay_out(Checkpoint(path=old), tmp_path / "home", {})
    assert (tmp_path / "home" / "config.json").read_bytes() == (old / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "method", "cache"),
    [
        ({"runtime": "vllm", "dtype": "nvfp4", "gpu": "h100", "kv_cache": "fp8"}, "modelopt_fp4", "fp8"),
        ({"runtime": "vllm", "dtype": "nvfp4", "gpu": "b200", "kv_cache": "nvfp4"}, "modelopt_fp4", "nvfp4"),
        ({"runtime": "vllm", "dtype": "fp8-block", "gpu": "h100"}, "modelopt", "auto"),
    ],
)
def test_vllm_is_told_the_method_of_modelopts_block_formats(options: dict[str, Any], method: str, cache: str) -> None:
    spec = resolve([("option", {"model": "llama3-8b", **options})])
    text = load_backend("vllm").rendered(spec.build, spec.engine_target)["engine_args.yaml"]
    settings = yaml.safe_load(text)
    assert (settings["quantization"], settings["kv-cache-dtype"]) == (method, cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"runtime": "trtllm_pytorch", "toolchain": "0.21"},
            "toolchain 0.21.0 does not serve the runtime trtllm_pytorch",
        ),
        (
            {"runtime": "trtllm_pytorch", "dtype": "int8"},
            "the LLM API of TensorRT-LLM 1.2.1 does not run W8A8_SQ_PER_CHANNEL on h100 (SM90): its PyTorch backend "
            "has no kernel for it that is known; it runs FP8, FP8_PER_CHANNEL_PER_TOKEN, ",
        ),
        (
            {"runtime": "trtllm_pytorch", "dtype": "fp8", "kv_cache": "int8"},
            "the LLM API of TensorRT-LLM 1.2.1 does not run INT8 as its KV cache on h100 (SM90): its PyTorch "
            "backend has no kernel for it that is known; it runs FP8, ",
        ),
        (
            {"runtime": "trtllm_pytorch", "gpu": "a100", "dtype": "int4-awq", "kv_cache": "int8"},
            "the LLM API of TensorRT-LLM 1.2.1 does not run INT8 as its KV cache on a100 (SM80): its PyTorch "
            "backend has no kernel for it that is known; use --kv-cache none, or --runtime tensorrt_llm",
        ),
        (
            {"runtime": "trtllm_pytorch", "kv_cache": "int8"},
            "the runtime trtllm_pytorch does not run unquantized weights with an INT8 KV cache: the Hugging Face "
            "folder of such a model has no scales of the cache; use --kv-cache none",
        ),
        (
            {"runtime": "vllm", "dtype": "w4a8-awq"},
            "the runtime vllm does not run W4A8_AWQ: it does not read the formats",
        ),
        (
            {"runtime": "tensorrt_llm", "dtype": "nvfp4"},
            "the runtime tensorrt_llm does not run NVFP4 on h100 (SM90): its kernels need SM100, SM103, SM120; "
            "use --runtime vllm, which computes with the weights alone there, or another --dtype",
        ),
        (
            {"runtime": "tensorrt_llm", "dtype": "fp8-block"},
            "the runtime tensorrt_llm does not run FP8_BLOCK_SCALES: it does not read the formats that can hold it "
            "(hf); use --runtime trtllm_pytorch or vllm, or another --dtype",
        ),
        (
            {"runtime": "trtllm_pytorch", "dtype": "fp8-pc-pt", "gpu": "l40s"},
            "the LLM API of TensorRT-LLM 1.2.1 does not run FP8_PER_CHANNEL_PER_TOKEN on l40s (SM89): its PyTorch "
            "backend runs it on SM90 alone; it runs FP8, W4A16_AWQ, W4A8_AWQ, W8A16, bf16 there: choose --dtype of "
            "these (`trtpipe quants` lists them), or --runtime tensorrt_llm",
        ),
        (
            {"runtime": "trtllm_pytorch", "dtype": "int8", "gpu": "a100", "toolchain": "1.3"},
            "the LLM API of TensorRT-LLM 1.3.0rc29 does not run W8A8_SQ_PER_CHANNEL on a100 (SM80): its PyTorch "
            "backend has no kernel for it that is known; it runs W4A16_AWQ, W8A16, bf16 there: choose --dtype of "
            "these (`trtpipe quants` lists them)",
        ),
        (
            {"toolchain": "1.3"},
            "TensorRT-LLM 1.3.0rc29 builds no engines: they ended with 1.2; newer releases keep the LLM API alone; "
            "build with --runtime trtllm_pytorch, have `trtpipe migrate` carry a target over, or stay with ",
        ),
        (
            {"runtime": "trtllm_pytorch", "serving": {"llm_args": {"cuda_grph_config": {}}}},
            "serving.llm_args.cuda_grph_config is none that LLM takes: it refuses unknown ones; did you mean "
            "'cuda_graph_config'?",
        ),
        (
            {"runtime": "trtllm_pytorch", "serving": {"llm_args": {"kv_cache_config": {"dtype": "fp8"}}}},
            "serving.llm_args.kv_cache_config.dtype follows from --kv-cache; give --kv-cache instead",
        ),
        (
            {"runtime": "trtllm_pytorch", "serving": {"llm_args": {"trust_remote_code": True}}},
            "serving.llm_args.trust_remote_code is not taken: the engine would run code that is not TensorRT-LLM's own",
        ),
        (
            {"runtime": "trtllm_pytorch", "serving": {"llm_args": {"sleep_config": {}}}},
            "serving.llm_args.sleep_config is unknown to TensorRT-LLM 1.2.1 (--toolchain): it came with 1.3.0",
        ),
        (
            {"runtime": "trtllm_pytorch", "toolchain": "1.3", "serving": {"llm_args": {"enable_sleep": True}}},
            "serving.llm_args.enable_sleep is unknown to TensorRT-LLM 1.3.0rc29 (--toolchain): 1.2.1 was its last",
        ),
        ({"runtime": "vllm", "serving": {"llm_args": {}}}, "serving.llm_args is not for the runtime vllm: they are"),
        *(
            (
                {"runtime": "vllm", "kv_cache": "int8", **options},
                "vLLM has no INT8 KV cache with scales: a Hugging Face folder has no place for them; use "
                f"--kv-cache {caches}",
            )
            for options, caches in (
                ({"dtype": "fp8"}, "fp8 or none"),
                ({}, "none"),
                ({"gpu": "a100", "dtype": "int8"}, "none"),
                ({"gpu": "cpu"}, "none"),
            )
        ),
        (
            {"runtime": "vllm", "kv_cache": "fp8"},
            "the runtime vllm does not run unquantized weights with an FP8 KV cache: the Hugging Face folder of such a "
            "model has no scales of the cache; use --kv-cache none, or a --dtype that quantizes the weights",
        ),
        (
            {"runtime": "trtllm_pytorch", "kv_cache": "fp8"},
            "the runtime trtllm_pytorch does not run unquantized weights with an FP8 KV cache",
        ),
        (
            {"runtime": "trtllm_pytorch", "gpu": "cpu"},
            "runtime trtllm_pytorch needs an NVIDIA GPU; use --runtime reference or vllm with --gpu cpu",
        ),
        (
            {"runtime": "vllm", "gpu": "cpu", "dtype": "fp8"},
            "vLLM does not execute FP8 on a CPU: it has kernels for it on GPUs alone; use --runtime reference, or "
            "--dtype bf16, fp8-pc-pt or int8-pc-pt",
        ),
        (
            {"runtime": "vllm", "gpu": "cpu", "dtype": "int8"},
            "vLLM does not execute W8A8_SQ_PER_CHANNEL on a CPU: it has kernels for it on GPUs alone",
        ),
        (
            {"runtime": "vllm", "gpu": "cpu", "kv_cache": "fp8"},
            "vLLM's FP8 KV cache is not for every CPU: it needs AVX-512 or AMX",
        ),
        (
            {"runtime": "vllm", "gpu": "cpu", "kv_cache": "nvfp4"},
            "vLLM's NVFP4 KV cache is not for every CPU: it has kernels for it on GPUs alone",
        ),
        (
            {"runtime": "vllm", "gpu": "v100"},
            "v100 (SM70) cannot run engines of the vllm runtime: vLLM 0.25 and newer have no kernels before SM75",
        ),
        ({"runtime": "trtllm_pytorch", "gpu": "v100"}, "v100 (SM70) cannot run TensorRT-LLM engines: TensorRT-LLM re"),
        ({"runtime": "vllm", "gpu": "cpu", "tp": 2}, "vLLM on a CPU has one rank"),
        ({"runtime": "vllm", "gpu": "cpu", "load": "chat"}, "--load plans sizes for a GPU"),
        ({"runtime": "vllm", "build": {"reduce_fusion": True}}, "build.reduce_fusion is not for the vllm runtime"),
    ],
)
def test_what_a_runtime_cannot_run_is_refused_in_the_plan(options: dict[str, Any], message: str) -> None:
    layer = {"model": "llama3-8b", "gpu": "h100", "dtype": "bf16", **options}
    with pytest.raises(UsageError) as error:
        resolve([("option", layer)])
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("dtype", "form", "method"),
    [("int8", "compressed-tensors", "compressed-tensors"), ("fp8-kv", "hf", "modelopt"), ("bf16", None, None)],
)
def test_vllm_gets_a_recipe_in_a_format_that_it_reads(dtype: str, form: str | None, method: str | None) -> None:
    gpu = "a100" if dtype == "int8" else "h100"
    spec = resolve([("option", {"model": "llama3-8b", "gpu": gpu, "dtype": dtype, "runtime": "vllm"})])
    assert (QUANTIZE.settings(spec).layout.form if QUANTIZE.applies(spec) else None) == form
    settings = yaml.safe_load(vllm.rendered(spec.build, BUILD.settings(spec).target)["engine_args.yaml"])
    assert settings.get("quantization") == method


def test_an_engine_of_the_llm_api_runs_where_its_formats_do() -> None:
    def sms(**layer: str) -> tuple[int, ...] | None:
        return resolve([("option", {"model": "llama3-8b", "gpu": "h100", "runtime": "trtllm_pytorch", **layer})]).sms

    # FP8 per channel runs on Ada as an engine, and on Hopper alone by the LLM API.
    assert sms(dtype="fp8-pc-pt", runtime="vllm") == (89, 90)
    assert sms(dtype="fp8-pc-pt") == (90,)
    assert sms(dtype="w4a8-awq") == (89, 90)
    assert sms(dtype="fp8-pc-pt", runtime="tensorrt_llm") == (90,)
