"""Quantizing a layer at a time: what it promises beyond ModelOpt's exporters, and what it refuses."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.factories import hf_folder
from tests.unit.engines.quantize.test_export import CASES, SAMPLES, llama, ours
from trtpipe.configs.facts import load_quant_recipes
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import read_config
from trtpipe.engines.checkpoint.layout import plan_rank
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.errors import HostError, InputDataError, UsageError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.hf import layout as hf_layout
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.precision import QuantRecipe, with_group_size, with_kv_cache
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize import job
from trtpipe.engines.quantize.encode import for_tensorrt_llm
from trtpipe.engines.quantize.scales import LayerScales, LinearScales, load_scales, save_scales
from trtpipe.engines.quantize.worker import work
from trtpipe.engines.quantize.writer import Writer
from trtpipe.engines.reference.mapped_tensors import STORED_DTYPE

__all__ = ["llama"]

pytestmark = pytest.mark.filterwarnings("ignore")

RECIPES = load_quant_recipes()
NAMES = SourceNames()


def rank(folder: Path, number: int = 0) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / f"rank{number}.safetensors")
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return sorted(a) == sorted(b) and all(torch.equal(raw(a[name]), raw(b[name])) for name in a)


# Any mapping and format from one calibration


@pytest.mark.parametrize("case", ["fp8-kv", "fp8-pc-pt", "int8-sq", "int4-awq", "w4a8-awq"])
def test_ranks_put_together_are_the_whole(llama: Path, tmp_path: Path, case: str) -> None:
    scales = str(tmp_path / "scales.safetensors")
    whole = ours(llama, tmp_path / "whole", case, "trtllm", scales_out=scales)
    ours(llama, tmp_path / "cut", case, "trtllm", scales_in=scales, mapping={"tp_size": 2, "pp_size": 2})
    model, (_, quantization) = read_model_config(llama), CASES[case]
    mapping = Mapping(tp_size=2, pp_size=2)
    found: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for pp_rank in range(2):
        for tp_rank in range(2):
            tensors = rank(tmp_path / "cut", mapping.rank(tp_rank=tp_rank, pp_rank=pp_rank))
            plans = list(plan_rank(model, mapping, tp_rank=tp_rank, pp_rank=pp_rank, quantization=quantization))
            assert sorted(plan.name for plan in plans) == sorted(tensors)
            for plan in plans:
                row = 0
                for piece in plan.pieces:
                    size = piece.rows[1] - piece.rows[0]
                    key = (piece.rows[0], (piece.cols or (0, 0))[0])
                    found.setdefault(piece.source, {})[key] = tensors[plan.name][row : row + size]
                    row += size
    for plan in plan_rank(model, Mapping(), tp_rank=0, pp_rank=0, quantization=quantization):
        row = 0
        for piece in plan.pieces:
            size = piece.rows[1] - piece.rows[0]
            expected, parts = whole[plan.name][row : row + size], found[piece.source]
            for (top, left), part in parts.items():
                held = expected[top : top + len(part)]
                if part.dim() > 1:
                    held = held[:, left : left + part.shape[1]]
                assert torch.equal(held.float(), part.float()), (plan.name, top, left)
            row += size


def test_known_scales_give_the_same_bytes_without_calibrating(llama: Path, tmp_path: Path) -> None:
    scales = str(tmp_path / "scales.safetensors")
    first = ours(llama, tmp_path / "a", "int8-sq", "trtllm", scales_out=scales)
    again = ours(llama, tmp_path / "b", "int8-sq", "trtllm", scales_in=scales, samples="/nowhere")
    assert same(first, again)


def test_weight_only_recipes_run_no_sample(llama: Path, tmp_path: Path) -> None:
    tensors = ours(llama, tmp_path / "wo", "int8-wo", "trtllm", samples="/nowhere")
    assert tensors["transformer.layers.0.mlp.fc.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "wo" / "config.json").read_text())["quantization"]
    assert (config["quant_algo"], config["exclude_modules"]) == ("W8A16", ["lm_head", "transformer.vocab_embedding"])


def test_more_ranks_than_key_value_heads_repeat_smoothquants_scales(llama: Path, tmp_path: Path) -> None:
    scales = str(tmp_path / "scales.safetensors")
    whole = ours(llama, tmp_path / "a", "int8-sq", "trtllm", scales_out=scales)
    ours(llama, tmp_path / "b", "int8-sq", "trtllm", scales_in=scales, mapping={"tp_size": 4, "pp_size": 1})
    name = "transformer.layers.0.attention.qkv.weights_scaling_factor"
    # 4 query heads and 2 key heads of 32: rank 1 has query head 1 and key and value head 0.
    expected = torch.cat([whole[name][32:64], whole[name][128:160], whole[name][192:224]])
    assert torch.equal(rank(tmp_path / "b", 1)[name], expected)


# Bounded memory


def test_hidden_states_in_a_file_change_nothing(llama: Path, tmp_path: Path) -> None:
    assert same(
        ours(llama, tmp_path / "a", "fp8-kv", "trtllm"), ours(llama, tmp_path / "b", "fp8-kv", "trtllm", hidden_bytes=0)
    )
    assert not list(tmp_path.glob("hidden*"))


def test_smaller_batches_move_scales_by_rounding_only(llama: Path, tmp_path: Path) -> None:
    a = ours(llama, tmp_path / "a", "fp8-kv", "trtllm")
    b = ours(llama, tmp_path / "b", "fp8-kv", "trtllm", batch_tokens=1)
    for name in a:
        if name.endswith("activation_scaling_factor"):
            assert torch.allclose(a[name], b[name], rtol=0.02), name


def anonymous() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1000


@pytest.mark.slow
def test_memory_follows_one_layer_and_not_the_model(llama: Path, tmp_path: Path) -> None:
    ours(llama, tmp_path / "warm", "fp8", "trtllm")
    config = json.loads((llama / "config.json").read_text())
    deep = tmp_path / "deep"
    deep.mkdir()
    config.update(hidden_size=512, intermediate_size=2048, num_hidden_layers=24, head_dim=128)
    (deep / "config.json").write_text(json.dumps(config))
    from trtpipe.engines.checkpoint.layout import source_shapes

    shapes = source_shapes(read_model_config(deep))
    noise = torch.randn(2048 * 512).mul(0.02).bfloat16()
    save_file(
        {name: noise[: int(np.prod(shape))].reshape(shape).clone() for name, shape in shapes.items()},
        deep / "model.safetensors",
    )
    size = (deep / "model.safetensors").stat().st_size
    assert size > 150e6
    peak, running = [0], True

    def watch() -> None:
        while running:
            peak[0] = max(peak[0], anonymous())
            time.sleep(0.002)

    before = anonymous()
    watcher = threading.Thread(target=watch)
    watcher.start()
    ours(deep, tmp_path / "out", "fp8", "trtllm")
    running = False
    watcher.join()
    assert peak[0] - before < size / 2


# INT8 KV cache: ModelOpt loses it, TensorRT-LLM's own converter counts q, k and v


def test_an_int8_cache_scale_is_the_largest_of_q_k_and_v(llama: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    tensors = ours(
        llama, tmp_path / "kv", "int8-sq", "trtllm",
        quantization={"quant_algo": QuantAlgo.W8A8_SQ_PER_CHANNEL, "kv_cache_quant_algo": "INT8", "group_size": 128},
    )  # fmt: skip
    model = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    seen: dict[int, float] = {}
    for index, layer in enumerate(model.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):

            def see(module: Any, inputs: Any, output: torch.Tensor, index: int = index) -> None:
                seen[index] = max(seen.get(index, 0.0), output.abs().max().item())

            getattr(layer.self_attn, name).register_forward_hook(see)
    with torch.no_grad():
        model(torch.from_numpy(SAMPLES).long())
    for index, largest in seen.items():
        scale = tensors[f"transformer.layers.{index}.attention.kv_cache_scaling_factor"]
        assert scale.shape == (1,)
        assert scale.item() == pytest.approx(largest / 127, rel=1e-6)
    assert read_config(tmp_path / "kv").quantization.kv_cache_quant_algo is KvCacheQuantAlgo.INT8


# The arithmetic of codes, on numbers one can check by hand


def layer(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    ones = torch.ones(2, 2, dtype=torch.bfloat16)
    names = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    return {f"{name}.weight": changed.get(name.partition(".")[2], ones) for name in names}


def input_scales(amax: float) -> LayerScales:
    return LayerScales(linears={name: LinearScales(input_amax=torch.tensor(amax)) for name in NAMES.linears})


def test_fp8_shares_the_scale_of_a_fused_matrix() -> None:
    q = torch.tensor([[448.0, 1.0], [2.0, -448.0]], dtype=torch.bfloat16)
    k = torch.tensor([[896.0, 0.5], [3.0, 7.0]], dtype=torch.bfloat16)
    out = for_tensorrt_llm(layer(q_proj=q, k_proj=k), input_scales(44.8), Quantization(quant_algo=QuantAlgo.FP8), NAMES)
    assert out["self_attn.q_proj.weights_scaling_factor"].tolist() == [2.0]
    assert out["self_attn.v_proj.weights_scaling_factor"].tolist() == [2.0]
    assert out["self_attn.q_proj.weight"].float().tolist() == [[224.0, 0.5], [1.0, -224.0]]
    assert out["self_attn.o_proj.weights_scaling_factor"].tolist() == [pytest.approx(1 / 448)]
    assert out["self_attn.o_proj.activation_scaling_factor"].tolist() == [pytest.approx(0.1)]


@given(
    st.lists(st.floats(-100, 100, width=16), min_size=8, max_size=8).filter(lambda values: any(values)),
)
@settings(suppress_health_check=[HealthCheck.filter_too_much])
def test_rowwise_fp8_is_within_a_sixteenth(values: list[float]) -> None:
    weight = torch.tensor(values, dtype=torch.bfloat16).reshape(4, 2)
    if not torch.any(weight):
        return
    out = for_tensorrt_llm(
        layer(o_proj=weight), LayerScales(), Quantization(quant_algo=QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN), NAMES
    )
    scale, codes = out["self_attn.o_proj.per_channel_scale"], out["self_attn.o_proj.weight"].float()
    error = (codes * scale[:, None] - weight.float()).abs()
    # Three bits of fraction: half a step of an eighth, or half the smallest step there is.
    assert torch.all(error <= weight.float().abs() / 16 + scale[:, None] * 2.0**-10 + 1e-30)


def test_scales_of_another_model_are_refused(tmp_path: Path) -> None:
    fp8 = Quantization(quant_algo=QuantAlgo.FP8)
    save_scales([input_scales(1.0), input_scales(2.0)], tmp_path / "s", fp8, NAMES)
    assert load_scales(tmp_path / "s", 2, fp8, NAMES)[1].linear("mlp.up_proj").input_amax == torch.tensor(2.0)
    with pytest.raises(InputDataError, match=r"model\.layers\.1\..* which this model has no place for"):
        load_scales(tmp_path / "s", 1, fp8, NAMES)


def test_a_file_of_scales_names_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "run_worker", lambda module, spec, log, *, what, progress: work(spec, progress))

    def written(model: Path, scales: Path, recipe: str = "fp8", save: Path | None = None) -> list[str]:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        return job.quantize(
            model, out, RECIPES[recipe], scales=scales, save_scales=save, device="cpu", log=tmp_path / "log"
        )

    model, other = hf_folder(tmp_path / "model"), hf_folder(tmp_path / "other", seed=1)
    larger = hf_folder(tmp_path / "larger", intermediate_size=64)
    old, new = tmp_path / "old", tmp_path / "new"
    save_scales([input_scales(1.0)] * 2, old, RECIPES["fp8"].quantization, NAMES)
    assert written(model, old, save=new) == []
    assert written(model, new) == []
    assert written(other, new) == [f"{new} was calibrated on other weights of a model of these sizes"]
    with pytest.raises(
        InputDataError, match="holds scales of another model, with intermediate_size 48: this model has intermediate_si"
    ):
        written(larger, new)
    # Files of earlier releases name no model: their vectors tell.
    smooth = [LayerScales(linears={name: LinearScales(input_amax=torch.ones(()), smooth=torch.ones(
        48 if name == NAMES.down else 32)) for name in NAMES.linears})] * 2  # fmt: skip
    save_scales(smooth, old, RECIPES["int8-sq"].quantization, NAMES)
    assert written(model, old, "int8-sq") == []
    with pytest.raises(InputDataError, match=r"another model, with 48 inputs of mlp.down_proj in layer 0: .* has 64"):
        written(larger, old, "int8-sq")


def test_float16_that_becomes_bfloat16_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "run_worker", lambda module, spec, log, *, what, progress: work(spec, progress))
    model = hf_folder(tmp_path / "model", dtype="F16", torch_dtype="float16")
    told = []
    for dtype in (None, DataType.BFLOAT16):
        out = tmp_path / str(dtype)
        out.mkdir()
        recipe = RECIPES["fp8-pc-pt"]
        told.append(job.quantize(model, out, recipe, dtype=dtype, device="cpu", log=tmp_path / "log"))
    assert told == [[], ["the float16 weights are rounded to bfloat16 before they are quantized"]]


def test_scales_of_another_recipe_are_refused(tmp_path: Path) -> None:
    save_scales([input_scales(1.0)], tmp_path / "s", RECIPES["int8-sq"].quantization, NAMES)
    with pytest.raises(
        InputDataError, match="holds scales for quant_algo W8A8_SQ_PER_CHANNEL: the recipe has quant_algo FP8"
    ):
        load_scales(tmp_path / "s", 1, RECIPES["fp8"].quantization, NAMES)
    save_scales([input_scales(1.0)], tmp_path / "s", RECIPES["fp8"].quantization, NAMES)
    with pytest.raises(InputDataError, match=r"holds scales for kv_cache_quant_algo None: the recipe has .* FP8"):
        load_scales(tmp_path / "s", 1, RECIPES["fp8-kv"].quantization, NAMES)
    (tmp_path / "s").write_bytes(b"no scales")
    with pytest.raises(InputDataError, match="cannot be read as scales"):
        load_scales(tmp_path / "s", 1, RECIPES["fp8"].quantization, NAMES)


def test_places_are_checked_before_the_work(llama: Path, tmp_path: Path) -> None:
    def refused(**options: Any) -> str:
        with pytest.raises(UsageError) as error:
            job.quantize(llama, None, RECIPES["fp8"], samples=SAMPLES, log=tmp_path / "log", **options)
        return str(error.value)

    assert refused(scales=tmp_path / "none").endswith("none is not a file of scales; make one with --save-scales")
    assert "is not a folder" in refused(save_scales=tmp_path / "nowhere" / "s")
    assert refused(device="cude") == "unknown device 'cude'; did you mean 'cuda'?"


def test_a_device_and_a_file_of_scales_are_checked_before_a_process_starts(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown device 'tpu'; known: auto, cpu, cuda"):
        job.check(llama, RECIPES["fp8"], job.Layout(), device="tpu")
    (tmp_path / "s").write_bytes(b"no scales")
    with pytest.raises(InputDataError, match=r"s cannot be read as scales: .*; make them again with --save-scales"):
        job.check(llama, RECIPES["fp8"], job.Layout(), scales=tmp_path / "s")


# What bad input gets


def changed(llama: Path, out: Path, name: str, value: torch.Tensor | float) -> Path:
    shutil.copytree(llama, out)
    tensors = load_file(out / "model.safetensors")
    tensors[name] = torch.full_like(tensors[name], value) if isinstance(value, float) else value
    save_file(tensors, out / "model.safetensors")
    return out


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", float("nan"), r"^layer 1 "),
        ("model.layers.2.input_layernorm.weight", float("inf"), r"^layer 2 "),
        ("model.layers.1.self_attn.o_proj.weight", 0.0, r"^layer 1: self_attn\.o_proj has only zeros for weights: "),
        ("model.layers.0.post_attention_layernorm.weight", 0.0, r"^layer 0: the input of mlp\.\w+_proj is zero "),
    ],
)  # fmt: skip
def test_a_layer_without_a_scale_is_named(llama: Path, tmp_path: Path, name: str, value: float, message: str) -> None:
    source = changed(llama, tmp_path / "source", name, value)
    with pytest.raises(InputDataError, match=message):
        ours(source, tmp_path / "out", "fp8", "trtllm")


@pytest.mark.parametrize(
    ("case", "form", "name", "value"),
    [
        ("int8-wo", "trtllm", "model.layers.1.mlp.down_proj.weight", float("nan")),
        ("fp8-pc-pt", "hf", "model.embed_tokens.weight", float("-inf")),
    ],
)
def test_a_tensor_that_is_not_finite_is_named(
    llama: Path, tmp_path: Path, case: str, form: str, name: str, value: float
) -> None:
    source = changed(llama, tmp_path / "source", name, value)
    with pytest.raises(InputDataError) as error:
        ours(source, tmp_path / "out", case, form)
    assert str(error.value) == (
        f"tensor '{name}' holds a value that is infinite or not a number: a model with it would answer nonsense; "
        "download the file again, or use another revision of the model"
    )


def test_a_scale_of_calibration_that_is_not_finite_has_another_remedy(llama: Path, tmp_path: Path) -> None:
    known, name = tmp_path / "scales.safetensors", "model.layers.1.self_attn.k_amax"
    ours(llama, tmp_path / "a", "fp8-kv", "hf", scales_out=str(known))
    with safe_open(known, "pt") as file:
        purpose = file.metadata()
    save_file({**load_file(known), name: torch.tensor(float("inf"))}, known, metadata=purpose)
    with pytest.raises(InputDataError) as error:
        ours(llama, tmp_path / "b", "fp8-kv", "hf", scales_in=str(known))
    assert str(error.value) == (
        "tensor 'model.layers.1.self_attn.k_proj.k_scale' holds a value that is infinite or not a number: a model with "
        "it would answer nonsense; calibrate with other samples, or download the model again"
    )


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_a_tensor_without_elements_is_written(tmp_path: Path, dtype: str) -> None:
    piece = Piece(source="a", rows=(0, 0))
    with Writer("BF16") as writer:
        writer.add_file(tmp_path / "made", [TensorPlan(name="a", shape=(0, 4), pieces=(piece,), dtype=dtype)])
        writer.write("a", torch.zeros(0, 4, dtype=STORED_DTYPE[dtype]))
    assert load_file(tmp_path / "made")["a"].shape == (0, 4)


def test_a_value_beyond_float16_is_named(llama: Path, tmp_path: Path) -> None:
    source = changed(llama, tmp_path / "source", "model.norm.weight", 70144.0)
    ours(source, tmp_path / "wide", "fp8-pc-pt", "hf")
    with pytest.raises(InputDataError, match=r"^tensor 'model\.norm\.weight' .* in float16: .*; use --dtype bfloat16,"):
        ours(source, tmp_path / "out", "fp8-pc-pt", "hf", dtype="float16")


def test_the_sample_that_overflows_is_named(llama: Path, tmp_path: Path) -> None:
    # Token 5 is so large that float16 cannot hold what the first layer makes of it.
    tensors = load_file(llama / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[5] = 3e38
    source = changed(llama, tmp_path / "source", "model.embed_tokens.weight", embedding)
    samples = np.where(SAMPLES == 5, 6, SAMPLES)
    samples[3, 7] = 5
    np.save(tmp_path / "samples.npy", samples)
    with pytest.raises(InputDataError, match="for calibration sample 3: no scale can be found"):
        ours(source, tmp_path / "out", "fp8", "trtllm", samples=str(tmp_path / "samples.npy"))


def check(llama: Path, name: str, *, kv_cache: str | None = None, **layout: Any) -> str:
    recipe: QuantRecipe = with_kv_cache(RECIPES[name], kv_cache)
    with pytest.raises(UsageError) as error:
        job.check(llama, recipe, job.Layout(**layout))
    return str(error.value)


def test_what_cannot_be_written_is_refused_before_the_work(llama: Path) -> None:
    assert check(llama, "fp8", form="onnx") == "unknown format 'onnx'; known: trtllm, hf, compressed-tensors"
    assert check(llama, "none").startswith("nothing is to be quantized; use `trtpipe convert`")
    assert check(llama, "fp8", form="hf", mapping=Mapping(tp_size=2)).startswith("a Hugging Face folder has no tp")
    assert check(llama, "fp8", kv_cache="int8", form="hf").startswith("an INT8 KV cache has no place")
    assert check(llama, "int4-awq", mapping=Mapping(tp_size=4)).startswith(
        "groups of 128 do not divide the 32 and 64 and 128 input features at tp_size 4"
    )
    assert check(llama, "fp8", mapping=Mapping(tp_size=3)).startswith("tp_size 3 does not divide the 4 attention heads")
    with pytest.raises(UsageError, match="int4-awq does not run with groups of 32: its kernel knows 64 and 128"):
        with_group_size(RECIPES["int4-awq"], 32)
    with pytest.raises(UsageError, match="fp8 has no groups"):
        with_group_size(RECIPES["fp8"], 64)


@pytest.mark.parametrize(
    ("error", "memory"),
    [(MemoryError(), "host"), (torch.OutOfMemoryError("CUDA out of memory. Tried"), "host")],
)
def test_a_lack_of_memory_says_where_and_what_helps(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, memory: str
) -> None:
    from trtpipe.engines.quantize.calibrate import Calibrator

    def fail(self: Calibrator, index: int, weights: dict[str, torch.Tensor]) -> LayerScales:
        if index == 1:
            raise error
        return input_scales(1.0)

    monkeypatch.setattr(Calibrator, "layer", fail)
    with pytest.raises(HostError, match=f"^{memory} memory ran out while calibrating layer 1.*lower --batch-tokens"):
        ours(llama, tmp_path / "out", "fp8", "trtllm")


def test_a_recipe_that_calibrates_wants_samples(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fp8 needs calibration samples; pass --calib"):
        job.quantize(llama, tmp_path, RECIPES["fp8"], log=tmp_path / "log")


def test_without_modelopt_the_extra_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelopt", None)
    with pytest.raises(HostError, match=r"pip install .*\[quantize\]"):
        job.quantize(llama, tmp_path, RECIPES["fp8"], samples=SAMPLES, log=tmp_path / "log")


def test_an_already_quantized_folder_is_no_source(llama: Path, tmp_path: Path) -> None:
    ours(llama, tmp_path / "hf", "fp8-pc-pt", "hf")
    with pytest.raises(InputDataError, match="describes an already quantized model"):
        job.check(tmp_path / "hf", RECIPES["fp8"], job.Layout())


# The unified folder


def test_a_unified_folder_says_what_it_is_and_keeps_the_tokenizer(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    (source / "tokenizer.json").write_text("{}")
    ours(source, tmp_path / "hf", "fp8-kv", "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    eight = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert config.pop("producer")["name"] == "modelopt"
    assert config == {
        "config_groups": {"group_0": {"input_activations": eight, "weights": eight, "targets": ["Linear"]}},
        "ignore": ["lm_head", "model.embed_tokens"],
        "quant_algo": "FP8",
        "kv_cache_scheme": eight,
        "quant_method": "modelopt",
    }
    told = json.loads((tmp_path / "hf" / "hf_quant_config.json").read_text())["quantization"]
    assert told == {
        "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.embed_tokens"],
    }  # fmt: skip
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "{}"


def test_a_large_folder_is_cut_into_shards(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_layout, "SHARD_BYTES", 200_000)
    one = tmp_path / "one"
    with pytest.raises(FileNotFoundError):
        ours(llama, one, "fp8-pc-pt", "hf")
    index = json.loads((one / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    tensors = {name: file for file in files for name in load_file(one / file)}
    assert tensors == index["weight_map"]


def test_float16_is_kept(llama: Path, tmp_path: Path) -> None:
    tensors = ours(llama, tmp_path / "half", "int8-sq", "trtllm", dtype=DataType.FLOAT16.value)
    assert tensors["transformer.layers.0.mlp.proj.prequant_scaling_factor"].dtype == torch.float16
