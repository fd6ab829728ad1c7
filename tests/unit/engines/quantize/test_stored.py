"""A folder that came quantized becomes the TensorRT-LLM checkpoint that our own quantization writes from its scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.factories import MIXTRAL, PHI3, QWEN2, QWEN3, QWEN3_MOE, hf_folder
from tests.support.stored_folders import SIZES, stored_folder
from tests.unit.engines.hf.test_inspection import quantized
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.hf.stored import Stored, read_stored
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize import stored
from trtpipe.engines.quantize.stored_worker import work

KV = KvCacheQuantAlgo.FP8


@pytest.fixture(scope="module", params=[{}, QWEN2, QWEN3, PHI3], ids=["llama", "qwen2", "qwen3", "phi3"])
def exact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose linears are FP8 numbers with one scale, a power of two: every way of rounding them is the same."""
    folder = hf_folder(tmp_path_factory.mktemp("exact") / "hf", **SIZES, **request.param)
    torch.manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            codes = (torch.randn(tensor.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            codes[0, 0] = 448
            tensors[name] = (codes * 2.0**-10).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def converted(source: Path, out: Path, **mapping: int) -> int:
    """Convert in this process; return how many matrices were rounded anew."""
    model, found = read_model_config(source, quantized=True), read_stored(source)
    assert found is not None
    stored.require_convertible(found, model.architecture)
    out.mkdir()
    notes = out.with_suffix(".notes")
    spec: dict[str, Any] = {
        "source": str(source), "out": str(out), "mapping": {"tp_size": 1, "pp_size": 1, **mapping}, "toolchain": None,
        "notes": str(notes),
    }  # fmt: skip
    work(spec, lambda done, total: None)
    return int(json.loads(notes.read_text())["rounded"])


@pytest.mark.parametrize(
    ("quantization", "mapping"),
    [
        (Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KV), {"tp_size": 2, "pp_size": 2}),
        (Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN), {}),
        (Quantization(quant_algo=QuantAlgo.W8A8_SQ_PER_CHANNEL), {"tp_size": 2}),
        (Quantization(quant_algo=QuantAlgo.W4A16_AWQ, group_size=64, kv_cache_quant_algo=KV), {"pp_size": 2}),
    ],
    ids=["FP8", "FP8 rows", "INT8", "INT4"],
)
def test_the_checkpoint_is_the_one_of_our_own_quantization(
    exact: Path, tmp_path: Path, quantization: Quantization, mapping: dict[str, int]
) -> None:
    ours = quantized(exact, tmp_path / "ours", quantization, "trtllm", **mapping)
    folder = quantized(exact, tmp_path / "folder", quantization)
    assert converted(folder, tmp_path / "made", **mapping) == 0
    assert inspect(tmp_path / "made").problems == ()
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "made").iterdir())
    for name in names:
        assert (ours / name).read_bytes() == (tmp_path / "made" / name).read_bytes(), name


def test_the_scales_of_an_nvfp4_cache_are_those_of_our_own_quantization(exact: Path, tmp_path: Path) -> None:
    quantization = Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.NVFP4)
    ours = quantized(exact, tmp_path / "ours", quantization, "trtllm")
    folder = quantized(exact, tmp_path / "folder", quantization)
    assert converted(folder, tmp_path / "made") == 0
    assert inspect(tmp_path / "made").problems == ()
    wanted, made = (load_file(place / "rank0.safetensors") for place in (ours, tmp_path / "made"))
    assert wanted.keys() == made.keys()
    # The largest key or value is 1 in calibration: 1 / (6 * 448), where the folder has 1 / 448 for FP8.
    caches = [name for name in made if name.endswith("_cache_scaling_factor")]
    assert len(caches) == 2 * 3
    assert [made.pop(name).item() for name in caches] == pytest.approx([1 / 2688] * 6)
    assert [wanted.pop(name).item() for name in caches] == pytest.approx([1 / 2688] * 6)
    assert all(torch.equal(made[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in made)


@pytest.mark.parametrize("family", [MIXTRAL, QWEN3_MOE], ids=["mixtral", "qwen3_moe"])
def test_experts_become_the_checkpoint_of_our_own_quantization(tmp_path: Path, family: dict[str, Any]) -> None:
    source = hf_folder(tmp_path / "source", **SIZES, **family)
    torch.manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if "experts" in name or "proj" in name:
            codes = (torch.randn(tensor.shape) * 100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            codes[0, 0] = 448
            tensors[name] = (codes * 2.0**-10).bfloat16()
    save_file(tensors, source / "model.safetensors")
    quantization, mapping = Quantization(quant_algo=QuantAlgo.FP8), {"tp_size": 2, "moe_ep_size": 2}
    ours = quantized(source, tmp_path / "ours", quantization, "trtllm", **mapping)
    for form in ("hf", "compressed-tensors"):
        folder, made = quantized(source, tmp_path / form, quantization, form), tmp_path / f"{form}-made"
        # llm-compressor's names of a Mixtral's experts, and another scale of the inputs of one expert.
        stored = load_file(folder / "model.safetensors")
        usual = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
        for ours_name, theirs in usual.items() if form == "compressed-tensors" else ():
            stored = {name.replace(ours_name, theirs): tensor for name, tensor in stored.items()}
        first = next(name for name in stored if "experts.0." in name and name.endswith("input_scale"))
        stored[first] = stored[first] / 4
        save_file(stored, folder / "model.safetensors")
        assert inspect(folder).problems == ()
        assert converted(folder, made, **mapping) == 0
        for rank in ("rank0.safetensors", "rank1.safetensors"):
            found, wanted = load_file(made / rank), load_file(ours / rank)
            assert found.keys() == wanted.keys()
            for name in wanted:
                near = torch.allclose(found[name].float(), wanted[name].float(), rtol=0.004)
                assert near if name.endswith("factor") else torch.equal(found[name].float(), wanted[name].float()), name


def test_experts_of_no_engine_are_refused(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", **SIZES, **MIXTRAL)
    rows = Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN)
    folder = quantized(source, tmp_path / "folder", rows, "compressed-tensors")
    (out := tmp_path / "out").mkdir()
    with pytest.raises(
        UsageError, match="experts are not quantized with FP8_PER_CHANNEL_PER_TOKEN in the format trtllm"
    ):
        stored.convert_stored(folder, out, mapping=Mapping(), log=tmp_path / "log")
    assert list(out.iterdir()) == []


def test_matrices_of_one_input_get_the_largest_of_their_scales(tmp_path: Path) -> None:
    stored_folder(tmp_path / "folder", "ct fp8")
    # q, k and v, and fc and gate of both layers, less those with the largest scale.
    assert converted(tmp_path / "folder", tmp_path / "made") == 2 * (2 + 1)
    theirs, made = load_file(tmp_path / "folder" / "model.safetensors"), load_file(tmp_path / "made/rank0.safetensors")
    linears = [f"model.layers.0.self_attn.{letter}_proj." for letter in "qkv"]
    scale = torch.stack([theirs[name + "weight_scale"].float() for name in linears]).amax()
    assert made["transformer.layers.0.attention.qkv.weights_scaling_factor"].tolist() == [float(scale)]
    assert made["transformer.layers.0.attention.qkv.activation_scaling_factor"].item() == pytest.approx(0.01, rel=0.01)
    exact = torch.cat([theirs[name + "weight"].float() * theirs[name + "weight_scale"].float() for name in linears])
    codes = made["transformer.layers.0.attention.qkv.weight"].float()
    # Half a step of e4m3, of a normal number and of the smallest.
    assert bool(((codes * scale - exact).abs() <= exact.abs() / 16 + scale * 2.0**-10).all())


@pytest.mark.parametrize("case", ["ct int4", "modelopt awq"])
def test_four_bit_groups_without_smoothing_get_factors_of_one(tmp_path: Path, case: str) -> None:
    exact = stored_folder(tmp_path / "folder", case)
    converted(tmp_path / "folder", tmp_path / "made")
    made = load_file(tmp_path / "made" / "rank0.safetensors")
    prefix = "transformer.layers.0.mlp.fc."
    assert made[prefix + "prequant_scaling_factor"].unique().tolist() == [1.0]
    both = made[prefix + "weight"]
    codes = torch.stack(((both << 4) >> 4, both >> 4), dim=1).flatten(0, 1).float()
    weight = codes * made[prefix + "weights_scaling_factor"].repeat_interleave(64, dim=1)
    assert torch.equal(weight, exact["model.layers.0.mlp.gate_proj.weight"])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_not_a_number_is_named(tmp_path: Path, code: int) -> None:
    stored_folder(tmp_path / "folder", "modelopt fp8")
    tensors, name = load_file(tmp_path / "folder" / "model.safetensors"), "model.layers.1.self_attn.o_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = code
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(InputDataError, match=f"^tensor '{name}' holds a value that is infinite or not a number: "):
        converted(tmp_path / "folder", tmp_path / "made")


def test_a_qwen3_with_as_many_key_value_heads_as_heads_is_refused(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", **SIZES, **{**QWEN3, "num_key_value_heads": 4})
    config = json.loads((source / "config.json").read_text())
    method = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    with pytest.raises(InputDataError, match="as many key/value heads as attention heads"):
        stored.convert_stored(source, tmp_path / "made", mapping=Mapping(), log=tmp_path / "log")


def test_what_no_checkpoint_computes_is_refused(tmp_path: Path) -> None:
    stored_folder(tmp_path / "folder", "ct int8")
    with pytest.raises(UsageError) as error:
        stored.convert_stored(tmp_path / "folder", tmp_path / "made", mapping=Mapping(), log=tmp_path / "log")
    assert "quantized with INT8_PER_CHANNEL_PER_TOKEN, cannot become a TensorRT-LLM checkpoint: " in str(error.value)
    assert str(error.value).endswith("; use --runtime vllm, or start from the unquantized model")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("method", "algo", "remedy"),
    [
        ("modelopt", QuantAlgo.W4A8_AWQ, "use --runtime trtllm_pytorch, or start from the unquantized model"),
        ("modelopt", QuantAlgo.NVFP4, "use --runtime trtllm_pytorch or vllm, or start from the unquantized model"),
        ("modelopt", QuantAlgo.INT8_PER_CHANNEL_PER_TOKEN, "start from the unquantized model"),
    ],
)
def test_only_runtimes_that_read_the_folder_are_named(method: str, algo: QuantAlgo, remedy: str) -> None:
    found = Stored(method=method, quantization=Quantization(quant_algo=algo), dtype=DataType.BFLOAT16)
    with pytest.raises(UsageError) as error:
        stored.require_convertible(found, "m")
    assert error.value.remedy == remedy
