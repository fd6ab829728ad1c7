"""Our two formats beside ModelOpt's own exporters, tensor by tensor, from one calibration of a tiny model."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.random_models import random_model
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize.worker import work

# ModelOpt, and torch under it, warn of many things that are not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES = np.random.default_rng(0).integers(0, 128, (6, 32), dtype=np.int32)
CASES = {
    "fp8": ("FP8_DEFAULT_CFG", Quantization(quant_algo=QuantAlgo.FP8)),
    "fp8-kv": (
        "FP8_DEFAULT_CFG",
        Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8),
    ),
    "fp8-pc-pt": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)),
    "int8-sq": ("INT8_SMOOTHQUANT_CFG", Quantization(quant_algo=QuantAlgo.W8A8_SQ_PER_CHANNEL)),
    "int8-wo": ("INT8_WEIGHT_ONLY_CFG", Quantization(quant_algo=QuantAlgo.W8A16)),
    "int4-awq": ("INT4_AWQ_CFG", Quantization(quant_algo=QuantAlgo.W4A16_AWQ, group_size=64)),
    "nvfp4": (
        "NVFP4_DEFAULT_CFG",
        Quantization(quant_algo=QuantAlgo.NVFP4, kv_cache_quant_algo=KvCacheQuantAlgo.NVFP4),
    ),
    "fp8-block": (
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
        Quantization(quant_algo=QuantAlgo.FP8_BLOCK_SCALES, kv_cache_quant_algo=KvCacheQuantAlgo.FP8),
    ),
    "w4a8-awq": ("W4A8_AWQ_BETA_CFG", Quantization(quant_algo=QuantAlgo.W4A8_AWQ, group_size=64)),
}
# Of these ModelOpt's TensorRT-LLM form is one that TensorRT-LLM cannot load: of int8-wo ours is another, on purpose.
UNLOADABLE = ("int8-wo", "fp8-block")


def exported_for_trtllm() -> list[tuple[str, str]]:
    """The families and cases of which ModelOpt writes a checkpoint; it has none of a Phi-3."""
    return [(family, case) for family in ("", "qwen2", "qwen3") for case in CASES if case not in UNLOADABLE]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model, and in it others: for a case of its name, and of other families."""
    folder = tmp_path_factory.mktemp("llama")
    # Blocks of 128 want a wider one; of its 320 features they leave a part.
    for name, family, hidden, ffn, layers in (
        ("", "llama", 128, 256, 3), ("fp8-block", "llama", 256, 320, 1),
        ("qwen2", "qwen2", 128, 256, 1), ("qwen2/fp8-block", "qwen2", 256, 320, 1),
        ("qwen3", "qwen3", 128, 256, 1), ("qwen3/fp8-block", "qwen3", 256, 320, 1),
        ("phi3", "phi3", 128, 256, 1), ("phi3/fp8-block", "phi3", 256, 320, 1),
    ):  # fmt: skip
        # Heads as wide as a block, and more of them than hidden_size has room for.
        wide = {"head_dim": 128} if family == "qwen3" else {}
        model = random_model(
            family, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=128, max_position_embeddings=64, **wide,
        ).bfloat16()  # fmt: skip
        for layer in model.model.layers:
            # Random weights give activations without outliers, which no calibration would tell apart.
            layer.input_layernorm.weight.data *= torch.linspace(0.2, 4, hidden).bfloat16()
            layer.post_attention_layernorm.weight.data *= torch.linspace(3, 0.1, hidden).bfloat16()
        model.save_pretrained(folder / name)
    return folder


def of_case(model: Path, case: str) -> Path:
    return model / case if (model / case).is_dir() else model


def ours(model: Path, out: Path, case: str, form: str, **options: Any) -> dict[str, torch.Tensor]:
    """Quantize with our worker in this process; all tensors of a one-rank checkpoint or a unified folder."""
    modelopt, quantization = CASES[case]
    out.mkdir(parents=True)
    np.save(out.parent / f"{out.name}.npy", SAMPLES)
    spec = {
        "source": str(of_case(model, case)), "out": str(out), "format": form, "dtype": "bfloat16", "device": "cpu",
        "quantization": {
            "quant_algo": quantization.quant_algo, "kv_cache_quant_algo": quantization.kv_cache_quant_algo,
            "group_size": quantization.group_size,
        },
        "modelopt": modelopt, "samples": str(out.parent / f"{out.name}.npy"), "batch_tokens": 10000,
        "scratch": str(out.parent), "hidden_bytes": 1 << 30, "mapping": {"tp_size": 1, "pp_size": 1},
        "embedding": "none", "toolchain": None, "scales_in": None, "scales_out": None, **options,
    }  # fmt: skip
    work(spec, lambda done, total: None)
    return load_file(out / ("rank0.safetensors" if form == "trtllm" else "model.safetensors"))


@pytest.fixture(scope="module")
def theirs(
    request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Path]:
    """(case, model, folder with `trtllm` and `hf` written by ModelOpt), calibrated with the whole model in memory."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint, export_tensorrt_llm_checkpoint
    from transformers import AutoModelForCausalLM

    family, case = request.param
    name, quantization = CASES[case]
    source = llama / family
    model = AutoModelForCausalLM.from_pretrained(of_case(source, case), dtype=torch.bfloat16)
    recipe = copy.deepcopy(getattr(mtq, name))
    for entry in recipe["quant_cfg"]:
        cfg = entry.get("cfg")
        for part in cfg if isinstance(cfg, list) else [cfg]:
            if part and "block_sizes" in part and quantization.packed:
                part["block_sizes"][-1] = quantization.group_size
    if quantization.kv_cache_quant_algo:
        caches = {KvCacheQuantAlgo.FP8: mtq.FP8_KV_CFG, KvCacheQuantAlgo.NVFP4: mtq.NVFP4_KV_CFG}
        recipe["quant_cfg"] += caches[quantization.kv_cache_quant_algo]["quant_cfg"]
    mtq.quantize(model, recipe, lambda m: m(torch.from_numpy(SAMPLES).long()))
    out = tmp_path_factory.mktemp("modelopt")
    if (family, case) in exported_for_trtllm():
        kind = "qwen" if family else "llama"
        export_tensorrt_llm_checkpoint(
            copy.deepcopy(model), kind, torch.bfloat16, export_dir=str(out / "trtllm"), inference_tensor_parallel=1
        )
    export_hf_checkpoint(model, torch.bfloat16, export_dir=str(out / "hf"))
    return case, source, out


# What differs from a Llama is the same in all cases, so that most of them are slow tests.
QUICK = [("qwen2", "fp8-kv"), ("qwen3", "int4-awq"), ("phi3", "fp8-kv")]


@pytest.mark.parametrize(
    ("theirs", "form"),
    [
        pytest.param((family, case), form, marks=[pytest.mark.slow] if family and (family, case) not in QUICK else [])
        for family in ("", "qwen2", "qwen3", "phi3")
        for case in CASES
        for form in ("trtllm", "hf")
        if form == "hf" or (family, case) in exported_for_trtllm()
    ],
    indirect=["theirs"],
    scope="module",
    ids=lambda value: "-".join(filter(None, value)) if isinstance(value, tuple) else value,
)
def test_every_tensor_is_modelopts(theirs: tuple[str, Path, Path], tmp_path: Path, form: str) -> None:
    case, source, folder = theirs
    expected = load_file(folder / form / ("rank0.safetensors" if form == "trtllm" else "model.safetensors"))
    # Both forms are of one calibration, as ModelOpt's are. Scales once found give the same bytes: see test_quantize.
    scales = str(folder / "scales.safetensors")
    known = scales if Path(scales).is_file() else None
    got = ours(source, tmp_path / form, case, form, scales_in=known, scales_out=scales)
    if form == "hf":
        for name in ("config.json", "hf_quant_config.json"):
            told, wanted_text = ((place / name).read_text() for place in (tmp_path / form, folder / form))
            assert json.loads(told).get("quantization_config") == json.loads(wanted_text).get("quantization_config")
            assert json.loads(told).get("quantization") == json.loads(wanted_text).get("quantization")
    assert sorted(got) == sorted(expected)
    for name, tensor in got.items():
        wanted = expected[name]
        assert (name, tensor.dtype, tensor.shape) == (name, wanted.dtype, wanted.shape)
        assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8)) if tensor.dim() else tensor == wanted, (
            name
        )
    if form == "hf":
        for file, section in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
            mine, upstream = (json.loads((one / file).read_text())[section] for one in (tmp_path / form, folder / form))
            assert mine == upstream, file
