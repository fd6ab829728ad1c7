"""Quantized experts: ModelOpt's bytes where it writes them, one scale of the inputs for all, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.expert_models import make
from tests.unit.engines.quantize.test_export import CASES, SAMPLES
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.precision import with_kv_cache
from trtpipe.engines.quantize import job
from trtpipe.engines.quantize.worker import work
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.rope import rotary_tables

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 128, "hidden_size": 128, "head_dim": 32, "initializer_range": 0.05}
CPU = torch.device("cpu")
EXPERTS = 4


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    make("mixtral", folder, torch.bfloat16, **SIZES, num_local_experts=EXPERTS, intermediate_size=192)
    np.save(folder / "samples.npy", SAMPLES)
    return folder


def quantized(source: Path, out: Path, case: str, form: str, **options: Any) -> dict[str, torch.Tensor]:
    """The tensors of the first file that the worker writes."""
    modelopt, quantization = CASES[case]
    out.mkdir()
    spec = {
        "source": str(source), "out": str(out), "format": form, "dtype": "bfloat16", "device": "cpu",
        "quantization": {
            "quant_algo": quantization.quant_algo, "kv_cache_quant_algo": quantization.kv_cache_quant_algo,
            "group_size": quantization.group_size,
        },
        "modelopt": modelopt, "samples": str(source / "samples.npy"), "batch_tokens": 10000,
        "scratch": str(out.parent), "hidden_bytes": 1 << 30, "mapping": {}, "embedding": "none", "toolchain": None,
        "scales_in": None, "scales_out": None, "notes": str(out.with_suffix(".json")), **options,
    }  # fmt: skip
    work(spec, lambda done, total: None)
    return load_file(out / ("rank0.safetensors" if form == "trtllm" else "model.safetensors"))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("case", ["fp8-kv", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_unified_folder_is_modelopts(mixtral: Path, tmp_path: Path, case: str) -> None:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import MixtralForCausalLM

    name, quantization = CASES[case]
    # ModelOpt finds experts only where they are computed one after another.
    model = MixtralForCausalLM.from_pretrained(mixtral, dtype=torch.bfloat16, experts_implementation="eager")
    recipe = copy.deepcopy(getattr(mtq, name))
    assert quantization.kv_cache_quant_algo is not None
    recipe["quant_cfg"] += getattr(mtq, f"{quantization.kv_cache_quant_algo.value}_KV_CFG")["quant_cfg"]
    mtq.quantize(model, recipe, lambda m: m(torch.from_numpy(SAMPLES).long()))
    export_hf_checkpoint(model, torch.bfloat16, export_dir=str(tmp_path / "theirs"))
    found, wanted = quantized(mixtral, tmp_path / "ours", case, "hf"), load_file(tmp_path / "theirs/model.safetensors")
    assert sorted(found) == sorted(wanted)
    assert [
        n for n in wanted if found[n].dtype != wanted[n].dtype or not torch.equal(raw(found[n]), raw(wanted[n]))
    ] == []
    for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        ours, theirs = (json.loads((tmp_path / one / file).read_text())[section] for one in ("ours", "theirs"))
        assert ours == theirs


def test_fp8_experts_of_a_checkpoint(mixtral: Path, tmp_path: Path) -> None:
    """Re-derived from the source: one scale of an expert's up and gate, and one of the inputs of all experts."""
    scales = tmp_path / "scales.safetensors"
    found = quantized(mixtral, tmp_path / "out", "fp8-kv", "trtllm", scales_out=str(scales))
    source, inputs = load_file(mixtral / "model.safetensors"), load_file(scales)
    ours, theirs = "transformer.layers.1.mlp.", "model.layers.1.block_sparse_moe."
    fc = [torch.cat([source[f"{theirs}experts.{e}.{w}.weight"] for w in ("w3", "w1")]) for e in range(EXPERTS)]
    amax = torch.stack([weight.float().abs().amax() for weight in fc])[:, None] / 448
    assert torch.equal(found[f"{ours}fc.weights_scaling_factor"], amax)
    codes = torch.stack([(w.float() / s).to(torch.float8_e4m3fn) for w, s in zip(fc, amax, strict=True)])
    assert torch.equal(raw(found[f"{ours}fc.weight"]), raw(codes))
    assert found[f"{ours}proj.weights_scaling_factor"].shape == (EXPERTS, 1)
    largest = {name: inputs[f"{theirs}experts.{e}.{name}.input_amax"] for e in range(EXPERTS) for name in ("w1", "w2")}
    assert torch.equal(found[f"{ours}fc.activation_scaling_factor"], (largest["w1"] / 448).reshape(1))
    assert torch.equal(found[f"{ours}proj.activation_scaling_factor"], (largest["w2"] / 448).reshape(1))
    router = found[f"{ours}router.weight"]
    assert (router.dtype, torch.equal(router, source[f"{theirs}gate.weight"].float())) == (torch.float32, True)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization"]
    routers = [f"transformer.layers.{layer}.mlp.router" for layer in range(2)]
    assert config["exclude_modules"] == ["lm_head", *routers]
    # The second of two groups of experts has the second half of the stacks, and the same scale of the inputs.
    mapping = {"tp_size": 2, "pp_size": 2, "moe_ep_size": 2}
    quantized(mixtral, tmp_path / "cut", "fp8-kv", "trtllm", scales_in=str(scales), mapping=mapping)
    rank, prefix = load_file(tmp_path / "cut/rank3.safetensors"), "transformer.layers.0.mlp."
    for name in ("fc", "proj"):
        for part in ("weight", "weights_scaling_factor"):
            assert torch.equal(raw(rank[f"{prefix}{name}.{part}"]), raw(found[f"{ours}{name}.{part}"][2:]))
        factor = "activation_scaling_factor"
        assert torch.equal(rank[f"{prefix}{name}.{factor}"], found[f"{ours}{name}.{factor}"])


def test_awq_experts_have_one_vector(mixtral: Path, tmp_path: Path) -> None:
    found = quantized(mixtral, tmp_path / "out", "int4-awq", "trtllm")
    shapes = {name.rpartition("mlp.")[2]: tuple(t.shape) for name, t in found.items() if "layers.0.mlp" in name}
    assert shapes == {
        "fc.weight": (4, 192, 128), "fc.weights_scaling_factor": (4, 384, 2), "fc.prequant_scaling_factor": (4, 128),
        "proj.weight": (4, 64, 192), "proj.weights_scaling_factor": (4, 128, 3),
        "proj.prequant_scaling_factor": (4, 192), "router.weight": (4, 128),
    }  # fmt: skip
    for name in ("fc", "proj"):
        vectors = found[f"transformer.layers.0.mlp.{name}.prequant_scaling_factor"]
        assert bool((vectors == vectors[0]).all())
        assert bool((vectors != 1).any())


@pytest.mark.parametrize(
    ("case", "form", "most"),
    [
        ("fp8-kv", "trtllm", 0.15), ("fp8-kv", "hf", 0.15), ("fp8-kv", "compressed-tensors", 0.15),
        ("int8-wo", "trtllm", 0.05),
        ("int4-awq", "trtllm", 0.3), ("int4-awq", "compressed-tensors", 0.3), ("nvfp4", "hf", 0.4),
    ],
)  # fmt: skip
def test_each_format_computes_the_layer(mixtral: Path, tmp_path: Path, case: str, form: str, most: float) -> None:
    quantized(mixtral, tmp_path / "out", case, form)
    assert inspect(tmp_path / "out").problems == ()
    plain, coded = open_model(mixtral, CPU), open_model(tmp_path / "out", CPU)
    hidden = torch.nn.functional.embedding(torch.from_numpy(SAMPLES[:2]).long(), plain.embedding()[0])
    tables = rotary_tables(plain.config, SAMPLES.shape[1])
    want, got = (run_layer(one.config, one.layer(0), hidden, *tables) for one in (plain, coded))
    error = ((got - want).float().norm() / (want - hidden).float().norm()).item()
    assert 0 < error < most


@pytest.fixture(scope="module")
def lopsided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral whose third expert no token ever reaches: its score is between those of the others."""
    folder = tmp_path_factory.mktemp("lopsided")
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 1, "num_hidden_layers": 1, "intermediate_size": 64}
    make("mixtral", folder, torch.bfloat16, **SIZES, **sizes)
    tensors = load_file(folder / "model.safetensors")
    gate = tensors["model.layers.0.block_sparse_moe.gate.weight"]
    gate[1], gate[2] = -gate[0], 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    np.save(folder / "samples.npy", SAMPLES)
    return folder


@pytest.mark.parametrize("case", ["fp8-kv", "int4-awq"])
def test_an_expert_that_no_sample_reaches_gets_the_others_scale(lopsided: Path, tmp_path: Path, case: str) -> None:
    scales = tmp_path / "scales.safetensors"
    quantized(lopsided, tmp_path / "out", case, "trtllm", scales_out=str(scales))
    assert json.loads((tmp_path / "out.json").read_text()) == {"unreached": {"0": [2]}, "other_weights": False}
    found = load_file(scales)
    for name in ("w1", "w2", "w3"):
        first, second, third = (
            next(tensor for key, tensor in found.items() if f"experts.{e}.{name}." in key) for e in range(3)
        )
        if case == "fp8-kv":
            assert first == second == third > 0
        else:
            assert third.shape == first.shape
            assert bool((third > 0).all())
    assert inspect(tmp_path / "out").problems == ()


def test_an_unreached_expert_is_told(lopsided: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In this process: importing ModelOpt takes a new one longer than the rest.
    monkeypatch.setattr(job, "run_worker", lambda module, spec, log, *, what, progress: work(spec, progress))
    recipe = load_quant_recipes()["fp8"]
    (tmp_path / "out").mkdir()
    notices = job.quantize(lopsided, tmp_path / "out", recipe, samples=SAMPLES, device="cpu", log=tmp_path / "log")
    assert notices == [
        "no sample reached expert 2 of layer 0: the scale of its inputs is the other experts'; "
        "more samples would reach more: --samples of quantize, calibration.samples of build"
    ]


@pytest.mark.parametrize(
    ("name", "form", "line"),
    [
        ("w4a8-awq", "trtllm", "experts are not quantized with W4A8_AWQ in the format trtllm: no runtime computes "
         "them so; choose one of FP8, W8A16, W4A16_AWQ"),
        ("int8-sq", "trtllm", "experts are not quantized with W8A8_SQ_PER_CHANNEL in the format trtllm"),
        ("int8-sq", "compressed-tensors", "experts are not quantized with W8A8_SQ_PER_CHANNEL"),
        ("fp8-pc-pt", "trtllm", "experts are not quantized with FP8_PER_CHANNEL_PER_TOKEN in the format trtllm: "
         "no runtime computes them so; choose one of FP8, W8A16, W4A16_AWQ, or --format compressed-tensors"),
        ("nvfp4", "trtllm", "experts are not quantized with NVFP4 in the format trtllm"),
        ("int4-awq", "hf", "experts are not quantized with W4A16_AWQ in the format hf"),
        ("fp8-pc-pt", "compressed-tensors", ""),
        ("int8-wo", "trtllm", ""),
        ("int8-wo", "compressed-tensors", "experts are not quantized with W8A16 in the format compressed-tensors"),
    ],
)  # fmt: skip
def test_what_experts_cannot_be(mixtral: Path, name: str, form: str, line: str) -> None:
    recipe = with_kv_cache(load_quant_recipes()[name], "none")
    layout = job.Layout(form=form, mapping=Mapping())
    if not line:
        job.check(mixtral, recipe, layout)
        return
    with pytest.raises(UsageError) as error:
        job.check(mixtral, recipe, layout)
    assert str(error.value).startswith(line)


def test_weight_only_kernels_want_whole_tiles_of_a_rank_s_expert(mixtral: Path) -> None:
    # 192 features of an expert: three tiles of 64, which two ranks cannot share, but each can have whole experts.
    recipe = load_quant_recipes()["int8-wo"]
    with pytest.raises(UsageError, match="intermediate_size of an expert of a rank is 96 at tp_size 2"):
        job.check(mixtral, recipe, job.Layout(mapping=Mapping(tp_size=2)))
    job.check(mixtral, recipe, job.Layout(mapping=Mapping(tp_size=2, moe_ep_size=2)))
