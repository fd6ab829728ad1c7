"""Quantized checkpoints end to end: written here tensor by tensor, or by ModelOpt, and run by the reference runtime."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.factories import CHECKPOINT, hf_folder
from tests.support.random_models import random_model
from tests.unit.engines.hf.test_inspection import quantized
from trtpipe.engines.accuracy.models import open_model
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.config import CheckpointError
from trtpipe.engines.checkpoint.layout import plan_rank, rank_file, rank_layout, source_shapes
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.safetensors_file import header_bytes
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.quantization import FORMATS, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.reference import loading
from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.fused import rms_norm
from trtpipe.engines.reference.hf_weights import HfFolder, QuantizedFolder
from trtpipe.engines.reference.layer import run_layer
from trtpipe.engines.reference.matmul import multiply
from trtpipe.engines.reference.mlp import GatedMlp
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.number_formats import in_nvfp4_units, nvfp4_scales, pack_e2m1
from trtpipe.engines.reference.rope import rotary_tables
from trtpipe.engines.reference.runtime import Runtime
from trtpipe.engines.reference.weights import CPU, RankFiles, WeightSource, load_all

BUILD: dict[str, Any] = {
    "max_batch_size": 4,
    "max_input_len": 32,
    "max_seq_len": 48,
    "max_num_tokens": 32,
    "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 4},
}
pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tuple((7 * i + 3) % 50 for i in range(30))
GROUP = 16
# How far logits may be from the float model's, relative to their norm: algorithms that a checkpoint can have.
ERROR = {
    QuantAlgo.FP8: 0.1,
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: 0.1,
    QuantAlgo.W8A8_SQ_PER_CHANNEL: 0.1,
    QuantAlgo.W8A16: 0.02,
    QuantAlgo.W4A16_AWQ: 0.3,
    QuantAlgo.W4A8_AWQ: 0.3,
    QuantAlgo.NVFP4: 0.4,
}
# Same arithmetic on every rank: no scale depends on the slice.
SHARED_SCALES = [QuantAlgo.FP8, QuantAlgo.W8A8_SQ_PER_CHANNEL, QuantAlgo.W4A16_AWQ, QuantAlgo.W4A8_AWQ, QuantAlgo.NVFP4]
# Of types whose codes have a byte.
KV_SCALE = {KvCacheQuantAlgo.FP8: 0.25, KvCacheQuantAlgo.INT8: 5 / 127}


def float_tensors(config: CheckpointConfig) -> dict[str, torch.Tensor]:
    """An HF model's tensors; norms are uneven, so that smoothing has something to do."""
    torch.manual_seed(0)
    out = {name: torch.randn(shape) * 0.12 for name, shape in source_shapes(config).items()}
    return {name: value + torch.linspace(0.5, 1.5, 32) if value.dim() == 1 else value for name, value in out.items()}


def encoded(name: str, weight: torch.Tensor, algo: QuantAlgo) -> dict[str, torch.Tensor]:
    """A linear as a checkpoint stores it, by the names that `plan_rank` cuts. One scale fits the inputs of all."""
    stem = name.removesuffix("weight")
    # Floats lose nothing by room to spare.
    amax = 4.0 if algo is QuantAlgo.W8A8_SQ_PER_CHANNEL else 30.0
    smooth = torch.ones(weight.shape[1])
    if algo in (QuantAlgo.W4A16_AWQ, QuantAlgo.W4A8_AWQ, QuantAlgo.W8A8_SQ_PER_CHANNEL):
        smooth[::2] = 2.0
    weight = weight / smooth
    out: dict[str, torch.Tensor] = {"prequant_scaling_factor": smooth}
    if algo is QuantAlgo.W8A16:
        return {name: weight}
    if algo is QuantAlgo.FP8:
        out["weights_scaling_factor"] = scale = torch.tensor([1.5 / 448])
        out["activation_scaling_factor"] = torch.tensor([amax / 448])
        out["weight"] = (weight / scale).to(torch.float8_e4m3fn)
    elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
        out["per_channel_scale"] = scale = weight.abs().amax(1) / 448
        out["weight"] = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    elif algo is QuantAlgo.W8A8_SQ_PER_CHANNEL:
        out["weights_scaling_factor"] = scale = weight.abs().amax(1) / 127
        out["activation_scaling_factor"] = torch.tensor([2 * amax / 127])
        out["weight"] = (weight / scale[:, None]).round().to(torch.int8)
    elif algo is QuantAlgo.NVFP4:
        second = torch.tensor([1.0 / 2688])
        out["weights_scaling_factor"] = scale = nvfp4_scales(weight, second)
        out["weight"] = pack_e2m1(in_nvfp4_units(weight, scale, second))
        out["weights_scaling_factor_2"] = second
        out["activation_scaling_factor"] = torch.tensor([amax / 2688])
    else:
        scale = weight.view(len(weight), -1, GROUP).abs().amax(2) / 7
        codes = (weight / scale.repeat_interleave(GROUP, 1)).round().to(torch.int8)
        out["weight"] = (codes[0::2] & 15) | (codes[1::2] << 4)
        out["weights_scaling_factor"] = scale
        out["weights_scaling_factor_2"] = torch.tensor([1.5 / 448])
        out["activation_scaling_factor"] = torch.tensor([2 * amax / 448])
    return {stem + suffix: tensor for suffix, tensor in out.items()}


def write_engine(
    folder: Path, quantization: Quantization, mapping: Mapping = CHECKPOINT.mapping, heads: int = 4, **limits: Any
) -> CheckpointConfig:
    """An engine folder of the float model, quantized."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2, "head_size": 32 // heads}
    config = replace(CHECKPOINT, quantization=quantization, mapping=mapping, **shape)  # type: ignore[arg-type]
    tensors = float_tensors(config)
    if quantization.quant_algo is not None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors |= encoded(name, tensors[name], quantization.quant_algo)
    for layer in range(config.num_hidden_layers if quantization.kv_cache_quant_algo else 0):
        for name in ("k_cache", "v_cache", "kv_cache"):
            scale = torch.tensor([KV_SCALE.get(quantization.kv_cache_quant_algo, 5 / 2688)])  # type: ignore[arg-type]
            tensors[f"model.layers.{layer}.self_attn.{name}_scaling_factor"] = scale
    for pp_rank in range(mapping.pp_size):
        layout = rank_layout(config, pp_rank=pp_rank)
        for tp_rank in range(mapping.tp_size):
            plans = list(plan_rank(config, mapping, tp_rank=tp_rank, pp_rank=pp_rank, quantization=quantization))
            head, _ = header_bytes((name, dtype, shape) for name, (dtype, shape) in layout.items())
            data = b"".join(cut(plan, tensors).view(torch.uint8).numpy().tobytes() for plan in plans)
            rank_file(folder, mapping.rank(tp_rank=tp_rank, pp_rank=pp_rank)).write_bytes(head + data)
    raw = {
        "architecture": config.architecture, "dtype": "float32", "vocab_size": 50, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, **shape,
        "norm_epsilon": 1e-5, "max_position_embeddings": 64, "position_embedding_type": "rope_gpt_neox",
        "mapping": {"tp_size": mapping.tp_size, "pp_size": mapping.pp_size},
        "quantization": {
            "quant_algo": quantization.quant_algo, "kv_cache_quant_algo": quantization.kv_cache_quant_algo,
            "group_size": quantization.group_size, "exclude_modules": ["lm_head"],
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"pretrained_config": raw, "build_config": {**BUILD, **limits}}))
    return config


def cut(plan: TensorPlan, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    pieces = [tensors[piece.source][slice(*piece.rows)] for piece in plan.pieces]
    pieces = [p if q.cols is None else p[:, slice(*q.cols)] for p, q in zip(pieces, plan.pieces, strict=True)]
    out = torch.cat([piece.view(torch.uint8) for piece in pieces]).contiguous()
    # Both ranks have half of the 50 rows: nothing is padded here.
    assert plan.pad_rows == 0
    return out


def context_logits(runtime: Runtime) -> torch.Tensor:
    """Of the prompt, then greedy tokens' own."""
    runtime.submit(
        Request(id=0, prompt=PROMPT, max_tokens=8, return_context_logits=True, return_generation_logits=True)
    )
    parts = []
    while runtime.has_work:
        for output in runtime.step():
            parts += [part for part in (output.context_logits, output.generation_logits) if part is not None]
    return torch.cat([torch.from_numpy(part) for part in parts])


def prompt_logits(runtime: Runtime) -> torch.Tensor:
    return context_logits(runtime)[: len(PROMPT)]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.fixture(scope="module")
def float_logits(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("float")
    write_engine(folder, Quantization())
    return prompt_logits(Runtime(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("algo", [algo for algo in QuantAlgo if "trtllm" in algo.row.formats])
def test_a_quantized_model_is_near_the_float_model(
    tmp_path: Path, float_logits: torch.Tensor, algo: QuantAlgo, dtype: str
) -> None:
    write_engine(tmp_path, Quantization(quant_algo=algo, group_size=GROUP))
    error = distance(prompt_logits(Runtime(tmp_path, compute_dtype=dtype)), float_logits)
    assert ERROR[algo] / 20 < error < ERROR[algo]


@pytest.mark.parametrize("mapping", [Mapping(tp_size=2), Mapping(tp_size=2, pp_size=2)], ids=["tp2", "tp2pp2"])
@pytest.mark.parametrize("algo", [algo for algo in QuantAlgo if "trtllm" in algo.row.formats])
def test_ranks_add_up_to_the_whole(tmp_path: Path, algo: QuantAlgo, mapping: Mapping) -> None:
    quantization = Quantization(quant_algo=algo, kv_cache_quant_algo=KvCacheQuantAlgo.FP8, group_size=GROUP)
    logits = []
    for name, ranks in (("one", Mapping()), ("many", mapping)):
        (tmp_path / name).mkdir()
        write_engine(tmp_path / name, quantization, ranks)
        logits.append(prompt_logits(Runtime(tmp_path / name)))
    # A sum in another order tips a code over here and there; scales of a rank's own slice are others.
    assert distance(logits[1], logits[0]) < (0.02 if algo in SHARED_SCALES else ERROR[algo])


@pytest.mark.parametrize("cache", KV_SCALE)
def test_only_what_went_through_the_cache_is_rounded(
    tmp_path: Path, float_logits: torch.Tensor, cache: KvCacheQuantAlgo
) -> None:
    write_engine(tmp_path, Quantization(kv_cache_quant_algo=cache), max_num_tokens=20)
    whole = tmp_path / "whole"
    whole.mkdir()
    write_engine(whole, Quantization(kv_cache_quant_algo=cache))
    assert torch.equal(prompt_logits(Runtime(whole)), float_logits)
    chunked = prompt_logits(Runtime(tmp_path, enable_chunked_context=True))
    torch.testing.assert_close(chunked[:20], float_logits[:20])
    assert 1e-4 < distance(chunked[20:], float_logits[20:]) < 0.05


@pytest.mark.parametrize("cache", KV_SCALE)
def test_generation_reads_the_quantized_cache(tmp_path: Path, cache: KvCacheQuantAlgo) -> None:
    logits = []
    for name, quantization in (("plain", Quantization()), ("cache", Quantization(kv_cache_quant_algo=cache))):
        (tmp_path / name).mkdir()
        write_engine(tmp_path / name, quantization)
        logits.append(context_logits(Runtime(tmp_path / name)))
    # The first drawn token comes from the prompt's step; compare the one computed from the cache.
    at = len(PROMPT) + 1
    assert 1e-4 < distance(logits[1][at], logits[0][at]) < 0.05


def test_an_nvfp4_cache_has_vectors_of_16_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 layers of 2 heads of 16: 64 numbers a token, 32 bytes of codes and 4 of scales.
    monkeypatch.setattr(loading, "DEFAULT_KV_CACHE_BYTES", 36 * 60)
    logits = []
    for name, cache in (("plain", None), ("cache", KvCacheQuantAlgo.NVFP4)):
        (tmp_path / name).mkdir()
        write_engine(tmp_path / name, Quantization(kv_cache_quant_algo=cache), heads=2)
        runtime = Runtime(tmp_path / name, compute_dtype="float32")
        logits.append(context_logits(runtime))
    assert runtime.stats()["kv_max_blocks"] == 15
    at = len(PROMPT) + 1
    assert torch.equal(logits[1][: len(PROMPT)], logits[0][: len(PROMPT)])
    assert 1e-3 < distance(logits[1][at], logits[0][at]) < 0.2


def test_a_quantized_cache_holds_a_byte_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 layers of 2 * 2 heads of 8: 64 numbers a token.
    monkeypatch.setattr(loading, "DEFAULT_KV_CACHE_BYTES", 64 * 60 * 2)
    blocks = {}
    for cache in (None, *KV_SCALE):
        folder = tmp_path / str(cache)
        folder.mkdir()
        write_engine(folder, Quantization(kv_cache_quant_algo=cache))
        blocks[cache] = Runtime(folder, compute_dtype="bfloat16").stats()["kv_max_blocks"]
    assert blocks == {None: 15, KvCacheQuantAlgo.FP8: 30, KvCacheQuantAlgo.INT8: 30}


@pytest.mark.parametrize("algo", [None, QuantAlgo.FP8, QuantAlgo.W4A16_AWQ])
@pytest.mark.parametrize("tp", [1, 2])
def test_layers_run_alone_make_the_model(tmp_path: Path, algo: QuantAlgo | None, tp: int) -> None:
    config = write_engine(tmp_path, Quantization(quant_algo=algo, group_size=GROUP), Mapping(tp_size=tp))
    logits = by_layers(RankFiles(tmp_path, config, torch.float32), torch.tensor([PROMPT, PROMPT[::-1]]))
    assert distance(logits[0], prompt_logits(Runtime(tmp_path))) < (1e-5 if algo is None else 0.02)
    assert distance(logits[1], logits[0]) > 0.1


def test_a_layer_run_alone_shows_the_caches_error(tmp_path: Path, float_logits: torch.Tensor) -> None:
    config = write_engine(tmp_path, Quantization(kv_cache_quant_algo=KvCacheQuantAlgo.FP8))
    logits = by_layers(RankFiles(tmp_path, config, torch.float32), torch.tensor([PROMPT]))
    assert 1e-3 < distance(logits[0], float_logits) < 0.1


def by_layers(source: WeightSource, ids: torch.Tensor) -> torch.Tensor:
    """Logits of whole sequences, one layer resident at a time."""
    config = source.config
    (table,) = source.embedding()
    hidden = torch.nn.functional.embedding(ids, table)
    cos, sin = rotary_tables(config, ids.shape[1])
    for index in range(config.num_hidden_layers):
        hidden = run_layer(config, source.layer(index), hidden, cos, sin)
    norm, parts, _ = source.head()
    rows = rms_norm(hidden, norm, config.norm_epsilon).flatten(0, 1)
    flat = torch.cat([multiply(rows, part) for part in parts], -1)
    logits: torch.Tensor = flat.unflatten(0, ids.shape).float()
    return logits


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    write_engine(tmp_path, Quantization(quant_algo=QuantAlgo.FP8))
    tensors = load_file(rank_file(tmp_path, 0))
    lost = "transformer.layers.1.mlp.proj.activation_scaling_factor"
    del tensors[lost]
    save_file(tensors, rank_file(tmp_path, 0))
    with pytest.raises(CheckpointError, match=f"'{lost}' is missing"):
        Runtime(tmp_path)


def run(source: WeightSource, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt by the paged model, the whole of it in memory."""
    model = Model(source.config, load_all(source), max_positions=len(ids), num_blocks=8, tokens_per_block=8)
    return model.forward([Span(ids, 0, list(range(8)), len(ids))]).float()


@pytest.mark.parametrize("tied", [False, True])
def test_an_hf_folder_is_what_its_checkpoint_is(tmp_path: Path, tied: bool) -> None:
    from trtpipe.engines.checkpoint.convert import convert

    folder = hf_folder(tmp_path / "hf", tokenizer=False, shards=2, tie_word_embeddings=tied, attention_bias=True)
    (tmp_path / "trt").mkdir()
    convert(folder, tmp_path / "trt", dtype=DataType.BFLOAT16, mapping=Mapping())
    direct = HfFolder(folder, torch.float32)
    converted = RankFiles(tmp_path / "trt", replace(direct.config, dtype=DataType.BFLOAT16), torch.float32)
    assert torch.equal(run(direct, [5, 6, 7]), run(converted, [5, 6, 7]))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@torch.no_grad()
def test_a_quantized_qwen_keeps_its_biases_and_norms_in_every_format(tmp_path: Path, family: str, form: str) -> None:
    model = random_model(
        family, vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.15,
    ).bfloat16()  # fmt: skip
    model.save_pretrained(tmp_path / "hf")
    algo = QuantAlgo.W8A16
    source = open_model(quantized(tmp_path / "hf", tmp_path / "made", Quantization(quant_algo=algo), form), CPU)
    assert isinstance(source, RankFiles) == (form == "trtllm")
    ids = torch.tensor([IDS])
    want = model.float()(ids).logits[0]
    for got in (run(source, IDS), by_layers(source, ids)[0]):
        assert distance(got, want) < 0.05
    assert want.std() > 0.5


# ModelOpt's name of each algorithm, and how far a linear may be from its simulation, relative to the output's norm:
# the exporter rounds FP8 codes twice, and vectors and scales to bfloat16.
MODELOPT = {
    QuantAlgo.FP8: ("FP8_DEFAULT_CFG", 0.03),
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: ("FP8_PER_CHANNEL_PER_TOKEN_CFG", 0.01),
    QuantAlgo.W8A8_SQ_PER_CHANNEL: ("INT8_SMOOTHQUANT_CFG", 0.002),
    QuantAlgo.W8A16: ("INT8_WEIGHT_ONLY_CFG", 0.002),
    QuantAlgo.W4A16_AWQ: ("INT4_AWQ_CFG", 0.02),
    QuantAlgo.W4A8_AWQ: ("W4A8_AWQ_BETA_CFG", 0.02),
}
IDS = [(11 * i + 5) % 128 for i in range(48)]
# ModelOpt's folder, the model it simulated and the one before, both in float32.
Exported = tuple[Path, Any, Any]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[QuantAlgo], Exported]:
    """A tiny Llama quantized with each algorithm, made once each. FP8 comes with an FP8 KV cache."""
    mtq = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64, initializer_range=0.04, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    original = LlamaForCausalLM(config).bfloat16()
    made: dict[QuantAlgo, Exported] = {}

    def make(algo: QuantAlgo) -> Exported:
        if algo not in made:
            model = copy.deepcopy(original)
            recipe = copy.deepcopy(getattr(mtq, MODELOPT[algo][0]))
            if algo is QuantAlgo.FP8:
                recipe["quant_cfg"] += mtq.FP8_KV_CFG["quant_cfg"]
            mtq.quantize(model, recipe, lambda m: m(torch.tensor([IDS])))
            # In float32, so that what differs is the quantization. The export changes the model.
            simulated = copy.deepcopy(model).float()
            folder = tmp_path_factory.mktemp(algo.value)
            export_hf_checkpoint(model, torch.bfloat16, export_dir=str(folder))
            made[algo] = folder, simulated, copy.deepcopy(original).float()
        return made[algo]

    return make


# ModelOpt, and torch under it, warn of many things that are not ours.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algo", MODELOPT)
@torch.no_grad()
def test_modelopts_folder_computes_what_modelopt_simulated(
    exported: Callable[[QuantAlgo], Exported], algo: QuantAlgo
) -> None:
    folder, simulated, plain = exported(algo)
    source = QuantizedFolder(folder, torch.float32)
    assert source.config.quantization.quant_algo is algo
    (shard,), layer = source.layer(1), simulated.model.layers[1]
    assert isinstance(shard.mlp, GatedMlp)
    # Inputs of these two are not those of others, so that the exporter changes nothing about them.
    for linear, theirs in ((shard.dense, layer.self_attn.o_proj), (shard.mlp.proj, layer.mlp.down_proj)):
        x = torch.randn(7, theirs.in_features) * 0.5
        # Three dimensions: ModelOpt's scale of a token is one of a number when there are two.
        assert distance(linear(x), theirs(x[None])[0]) < MODELOPT[algo][1]
    ids = torch.tensor([IDS])
    want, unquantized = simulated(ids).logits[0], plain(ids).logits[0]
    got = run(source, IDS)
    # A code that tips over changes all that follow; the difference stays below that of quantization itself.
    assert distance(got, want) < distance(want, unquantized)
    assert distance(by_layers(source, ids)[0], want) < distance(want, unquantized)


@pytest.mark.filterwarnings("ignore")
def test_a_unified_folder_has_scales_of_keys_and_values(exported: Callable[[QuantAlgo], Exported]) -> None:
    source = QuantizedFolder(exported(QuantAlgo.FP8)[0], torch.float32)
    codec = source.layer(0)[0].kv_codec
    assert codec is not None
    # Two heads of keys, two of values.
    assert codec.scale.shape == (4, 1)
    assert len(codec.scale.unique()) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_config_alone_says_how_a_folder_is_quantized(
    tmp_path: Path, exported: Callable[[QuantAlgo], Exported]
) -> None:
    folder = exported(QuantAlgo.FP8)[0]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    quantization = QuantizedFolder(tmp_path, torch.float32).config.quantization
    assert quantization == Quantization(quant_algo=QuantAlgo.FP8, kv_cache_quant_algo=KvCacheQuantAlgo.FP8)


def break_settings(folder: Path, **changes: Any) -> None:
    """Change hf_quant_config.json, the only one left to say anything."""
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "hf_quant_config.json"
    raw = json.loads(path.read_text())
    raw["quantization"].update(changes)
    path.write_text(json.dumps(raw))


def lose(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


def gain(folder: Path, name: str) -> None:
    save_file(load_file(folder / "model.safetensors") | {name: torch.zeros(2)}, folder / "model.safetensors")


LOST = "model.layers.1.mlp.up_proj.input_scale"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: lose(folder, LOST), f"'{LOST}' is missing: config.json says FP8 weights and an FP8 KV cache"),
        (lambda folder: gain(folder, "model.layers.0.zero"), "'model.layers.0.zero' has no place in this model"),
        (
            lambda folder: break_settings(folder, quant_algo="W8A16"),
            "q_proj.weight' is F8_E4M3, config.json implies I8",
        ),
        (
            lambda folder: break_settings(folder, quant_algo="W4A16_NVFP4"),
            "is quantized with W4A16_NVFP4: the algorithms read here",
        ),
        (lambda folder: break_settings(folder, kv_cache_quant_algo="INT8"), "KV cache quantized with INT8"),
        (lambda folder: break_settings(folder, kv_cache_quant_algo=None), "k_scale' has no place in this model"),
        (
            lambda folder: (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W8A16"}}'),
            "describes two quantizations: quantization_config says quant_algo FP8 .* says quant_algo W8A16",
        ),
        (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), "has no quantization section"),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused(
    tmp_path: Path, exported: Callable[[QuantAlgo], Exported], damage: Callable[[Path], None], message: str
) -> None:
    for path in exported(QuantAlgo.FP8)[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path)
    with pytest.raises(InputDataError, match=message):
        QuantizedFolder(tmp_path, torch.float32)


def test_a_folder_that_is_not_quantized_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tokenizer=False)
    with pytest.raises(InputDataError, match=r"is not quantized: it has no hf_quant_config\.json"):
        QuantizedFolder(folder, torch.float32)


def test_a_damaged_config_is_named_where_it_lies(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 0, "quantization_config": {"ignore": []}}))
    with pytest.raises(InputDataError) as error:
        QuantizedFolder(folder, torch.float32)
    assert str(error.value).startswith(f"{folder / 'config.json'}: hidden_size is 0")
