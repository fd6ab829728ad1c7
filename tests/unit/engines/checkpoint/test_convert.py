"""Converting tiny models: all ranks together are the HF tensors, bit for bit; nothing is lost, added or guessed."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tests.support.factories import MIXTRAL, QWEN2, QWEN3, cast_by_torch, hf_folder, read_tensors, write_safetensors
from tests.support.strategies import models
from trtpipe.engines import files as writing
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint import convert as module
from trtpipe.engines.checkpoint.convert import convert
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.errors import InputDataError, UsageError
from trtpipe.engines.hf import folder as reader
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.safetensors_file import read_header
from trtpipe.pipeline.cli import app as cli

Tensors = dict[str, np.ndarray[Any, Any]]


def converted(
    source: Path, out: Path, *, tp: int = 1, pp: int = 1, ep: int = 1, dtype: DataType | None = None, **options: Any
) -> list[Tensors]:
    """The tensors of every rank, as raw bits."""
    out.mkdir()
    mapping = Mapping(tp_size=tp, pp_size=pp, moe_ep_size=ep)
    assert convert(source, out, dtype=dtype, mapping=mapping, **options).path == out
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["config.json", *(f"rank{rank}.safetensors" for rank in range(tp * pp))]
    )
    return [read_tensors(out / f"rank{rank}.safetensors") for rank in range(tp * pp)]


def refusal(source: Path, out: Path, **options: Any) -> str:
    with pytest.raises(InputDataError) as error:
        converted(source, out, **options)
    assert error.value.exit_code == 3
    return str(error.value)


def reassembled(ranks: list[Tensors], source: Path, *, tp: int, pp: int, ep: int = 1) -> Tensors:
    """The HF tensors out of all rank files. Written against the format's description, not with our planner."""
    model = read_model_config(source)
    d, n, k = model.head_size, model.num_attention_heads, model.num_key_value_heads
    base, extra = divmod(model.num_hidden_layers, pp)
    out: Tensors = {"model.embed_tokens.weight": ranks[0]["transformer.vocab_embedding.weight"]}
    head = np.concatenate([rank["lm_head.weight"] for rank in ranks[-tp:]])
    assert not head[model.vocab_size :].any()
    out["lm_head.weight"] = head[: model.vocab_size]
    out["model.norm.weight"] = ranks[-1]["transformer.ln_f.weight"]
    layer = 0
    for stage in range(pp):
        group = ranks[stage * tp : (stage + 1) * tp]
        for local in range(base + (stage < extra)):
            ours, theirs = f"transformer.layers.{local}.", f"model.layers.{layer}."
            layer += 1
            for a, b in (("input_layernorm", "input_layernorm"), ("post_layernorm", "post_attention_layernorm")):
                assert all(np.array_equal(rank[f"{ours}{a}.weight"], group[0][f"{ours}{a}.weight"]) for rank in group)
                out[f"{theirs}{b}.weight"] = group[0][f"{ours}{a}.weight"]
            for kind in ("weight", "bias") if model.attn_bias else ("weight",):
                q, keys, values = [], [], []
                for rank in group:
                    qkv = rank[f"{ours}attention.qkv.{kind}"]
                    rows = (n // tp) * d
                    kv = max(k // tp, 1) * d
                    assert len(qkv) == rows + 2 * kv
                    q.append(qkv[:rows])
                    keys.append(qkv[rows : rows + kv])
                    values.append(qkv[rows + kv :])
                repeat = max(tp // k, 1)
                for name, parts in (("q", q), ("k", keys), ("v", values)):
                    if name != "q":
                        copies = [np.array_equal(part, parts[i - i % repeat]) for i, part in enumerate(parts)]
                        assert all(copies)
                        parts = parts[::repeat]
                    out[f"{theirs}self_attn.{name}_proj.{kind}"] = np.concatenate(parts)
            out[f"{theirs}self_attn.o_proj.weight"] = np.concatenate(
                [rank[ours + "attention.dense.weight"] for rank in group], axis=1
            )
            for name in ("q", "k") if model.architecture.startswith("Qwen3") else ():
                norms = [rank[f"{ours}attention.{name}_layernorm.weight"] for rank in group]
                assert all(np.array_equal(norm, norms[0]) for norm in norms)
                out[f"{theirs}self_attn.{name}_norm.weight"] = norms[0]
            if model.attn_bias and model.architecture != "Qwen2ForCausalLM":
                biases = [rank[ours + "attention.dense.bias"] for rank in group]
                assert all(np.array_equal(bias, biases[0]) for bias in biases)
                out[f"{theirs}self_attn.o_proj.bias"] = biases[0]
            if model.experts is not None:
                parts_of = [{name: rank[f"{ours}mlp.{name}.weight"] for name in MOE} for rank in group]
                out |= experts(parts_of, theirs, EXPERTS[model.architecture], ep)
                continue
            if model.architecture == "Phi3ForCausalLM":
                names = [f"{theirs}self_attn.{name}_proj.weight" for name in ("q", "k", "v")]
                out[f"{theirs}self_attn.qkv_proj.weight"] = np.concatenate([out.pop(name) for name in names])
                halves = [np.split(rank[f"{ours}mlp.fc.weight"], 2) for rank in group]
                up, gate = (np.concatenate(parts) for parts in zip(*halves, strict=True))
                out[f"{theirs}mlp.gate_up_proj.weight"] = np.concatenate([gate, up])
                parts = [rank[f"{ours}mlp.proj.weight"] for rank in group]
                out[f"{theirs}mlp.down_proj.weight"] = np.concatenate(parts, axis=1)
                continue
            for a, b, axis in (("fc", "gate_proj", 0), ("gate", "up_proj", 0), ("proj", "down_proj", 1)):
                parts = [rank[f"{ours}mlp.{a}.weight"] for rank in group]
                out[f"{theirs}mlp.{b}.weight"] = np.concatenate(parts, axis=axis)
    return out


MOE = ("fc", "proj", "router")
# Names of the router, of an expert, and of its linears: gate, up, down.
EXPERTS = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.experts.", ("w1", "w3", "w2")),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.experts.", ("gate_proj", "up_proj", "down_proj")),
}


def experts(ranks: list[Tensors], theirs: str, names: tuple[str, str, tuple[str, str, str]], ep: int) -> Tensors:
    """The HF tensors of a layer's experts: rank r holds block r % ep of them, and part r // ep of each's features."""
    out: Tensors = {}
    router = ranks[0]["router"]
    assert all(rank["router"].dtype == np.uint32 and np.array_equal(rank["router"], router) for rank in ranks)
    # Widened bfloat16: its lower half is empty.
    assert not (router & 0xFFFF).any()
    gate, place, linears = names
    out[f"{theirs}{gate}.weight"] = (router >> 16).astype(np.uint16)
    held = len(router) // ep
    for number in range(len(router)):
        own = ranks[number // held :: ep]
        fc, proj = ([rank[name][number % held] for rank in own] for name in ("fc", "proj"))
        half = len(fc[0]) // 2
        activated, up, down = (f"{theirs}{place}{number}.{linear}.weight" for linear in linears)
        out[up] = np.concatenate([part[:half] for part in fc])
        out[activated] = np.concatenate([part[half:] for part in fc])
        out[down] = np.concatenate(proj, axis=1)
    return out


def hf_tensors(folder: Path) -> Tensors:
    out: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        out.update(read_tensors(path))
    return out


@given(case=models(), shards=st.sampled_from([1, 3]), block=st.sampled_from([1, 64, 1 << 24]))
def test_all_ranks_together_are_the_source(case: tuple[dict[str, Any], Mapping], shards: int, block: int) -> None:
    overrides, mapping = case
    sizes = {"tp": mapping.tp_size, "pp": mapping.pp_size, "ep": mapping.moe_ep_size}
    with tempfile.TemporaryDirectory() as scratch, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block)
        source = hf_folder(Path(scratch, "hf"), shards=shards, tokenizer=False, **overrides)
        ranks = converted(source, Path(scratch, "out"), **sizes, dtype=DataType.BFLOAT16)
        found, wanted = reassembled(ranks, source, **sizes), hf_tensors(source)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not np.array_equal(found[name], wanted[name])] == []


def test_config_json_of_the_tiny_model(tmp_path: Path) -> None:
    converted(hf_folder(tmp_path / "hf"), tmp_path / "out", tp=2, pp=2)
    assert (
        (tmp_path / "out" / "config.json").read_text()
        == """\
{
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "logits_dtype": "float32",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_size": 8,
    "hidden_act": "silu",
    "norm_epsilon": 1e-05,
    "position_embedding_type": "rope_gpt_neox",
    "max_position_embeddings": 256,
    "rotary_base": 10000.0,
    "rotary_scaling": null,
    "rotary_embedding_dim": 8,
    "use_parallel_embedding": false,
    "embedding_sharding_dim": 0,
    "tie_word_embeddings": false,
    "qk_layernorm": false,
    "attn_bias": false,
    "mlp_bias": false,
    "mapping": {
        "world_size": 4,
        "tp_size": 2,
        "pp_size": 2,
        "cp_size": 1,
        "gpus_per_node": 8,
        "moe_tp_size": 2,
        "moe_ep_size": 1,
        "attn_tp_size": -1,
        "attn_cp_size": -1
    },
    "quantization": {
        "quant_algo": null,
        "kv_cache_quant_algo": null,
        "group_size": 128,
        "smoothquant_val": 0.5,
        "clamp_val": null,
        "use_meta_recipe": false,
        "has_zero_point": false,
        "pre_quant_scale": false,
        "exclude_modules": null,
        "mamba_ssm_cache_dtype": null
    }
}
"""
    )


def test_config_json_of_a_mixtral(tmp_path: Path) -> None:
    """As TensorRT-LLM 1.2's converter writes it: the values that a Llama's does not have."""
    converted(hf_folder(tmp_path / "hf", **MIXTRAL), tmp_path / "out", tp=4, ep=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["architecture"], config["hidden_act"], config["intermediate_size"]) == (
        "MixtralForCausalLM", "swiglu", 48,
    )  # fmt: skip
    assert config["moe"] == {
        "num_experts": 4, "top_k": 2, "normalization_mode": 1, "sparse_mixer_epsilon": 0.01, "tp_mode": 0,
        "shared_expert_intermediate_size": 0, "device_limited_n_group": 0, "device_limited_topk_group": 0,
        "device_limited_routed_scaling_factor": 1.0,
    }  # fmt: skip
    assert {key: config["mapping"][key] for key in ("tp_size", "moe_tp_size", "moe_ep_size")} == {
        "tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 exceeds num_local_experts 4"),
        (
            {"num_local_experts": 2_000_000},
            "num_local_experts is 2,000,000, and at most 1,024 are read; download the model again",
        ),
        ({"num_local_experts": "4"}, "num_local_experts is '4', not a positive whole number below 2^31"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is None, not a positive whole number below 2^31"),
    ],
)
def test_a_mixtral_without_sound_experts_is_refused(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    source = hf_folder(tmp_path / "hf", **MIXTRAL)
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert refusal(source, tmp_path / "out") == f"{path}: {line}"


def test_damaged_experts_are_named(tmp_path: Path) -> None:
    stem = "model.layers.1.block_sparse_moe."
    source = hf_folder(tmp_path / "hf", **MIXTRAL)
    sound = read_tensors(source / "model.safetensors")
    for change, line in (
        ({f"{stem}experts.3.w2.weight": None}, f"tensor '{stem}experts.3.w2.weight' is missing from {source}"),
        ({f"{stem}experts.0.w1.weight": np.zeros((32, 48), np.uint16)}, "has shape [32, 48]"),
        ({f"{stem}experts.4.w1.weight": np.zeros((48, 32), np.uint16)}, "has no place in a MixtralForCausalLM"),
        ({f"{stem}gate.weight": np.zeros((8, 32), np.uint16)}, "has shape [8, 32]"),
    ):
        tensors = {name: array for name, array in {**sound, **change}.items() if array is not None}
        write_safetensors(source / "model.safetensors", tensors, "BF16")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        assert line in refusal(source, out)
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("qwen", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_config_json_of_a_qwen_has_every_key_of_its_converter(tmp_path: Path, qwen: dict[str, Any]) -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64, "type": "yarn"}
    source = hf_folder(tmp_path / "hf", **qwen, rope_scaling=yarn, rope_theta=1000000.0, vocab_size=301)
    converted(source, tmp_path / "out", tp=2)
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert found.pop("mapping")["moe_tp_size"] == 2
    assert found.pop("quantization")["quant_algo"] is None
    size = 8 if qwen is QWEN2 else 16
    assert found == {
        "architecture": qwen["architectures"][0],
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 301,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_size": size,
        "hidden_act": "silu",
        "norm_epsilon": 1e-6,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": 256,
        "rotary_base": 1000000.0,
        "rotary_scaling": {**yarn, "rope_type": "yarn"},
        "rotary_embedding_dim": size,
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "tie_word_embeddings": False,
        # False although there are such norms: qwen_type alone says so.
        "qk_layernorm": False,
        "attn_bias": qwen is QWEN2,
        "mlp_bias": False,
        "qwen_type": qwen["model_type"],
        "seq_length": 8192,
        "use_logn_attn": False,
        "num_labels": 1,
        "moe": {
            "num_experts": 0,
            "shared_expert_intermediate_size": 0,
            "top_k": 0,
            "normalization_mode": 0,
            "sparse_mixer_epsilon": 0.01,
            "tp_mode": 0,
            "device_limited_n_group": 0,
            "device_limited_topk_group": 0,
            "device_limited_routed_scaling_factor": 1.0,
        },
        "moe_intermediate_size": 0,
        "moe_shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "disable_weight_only_quant_plugin": False,
        "runtime_defaults": None,
    }


def test_a_tied_head_is_written_as_a_copy_of_the_embedding(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    (rank,) = converted(source, tmp_path / "out")
    assert np.array_equal(rank["lm_head.weight"], hf_tensors(source)["model.embed_tokens.weight"])
    assert np.array_equal(rank["transformer.vocab_embedding.weight"], rank["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("family", [{}, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_a_tied_models_head_is_its_embedding_also_on_the_last_stage(tmp_path: Path, family: dict[str, Any]) -> None:
    source = hf_folder(tmp_path / "hf", **family, tie_word_embeddings=True)
    tensors = hf_tensors(source)
    # A copy of it besides, as some folders have it.
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    write_safetensors(source / "model.safetensors", tensors, "BF16")
    _, last = converted(source, tmp_path / "out", pp=2)
    assert np.array_equal(last["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_a_tied_models_other_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's merge of an adapter with modules_to_save leaves such a folder: transformers 5 does not tie its head."""
    # The last 100 of the embedding's 19,200 bytes are a block of their own.
    monkeypatch.setattr(reader, "COMPARED_BYTES", 19_100)
    source = hf_folder(tmp_path / "hf", tie_word_embeddings=True)
    tensors = hf_tensors(source)
    head = tensors["model.embed_tokens.weight"].copy()
    head[299, 31] += 1
    write_safetensors(source / "model.safetensors", {**tensors, "lm_head.weight": head}, "BF16")
    assert refusal(source, tmp_path / "out") == (
        f"tensor 'lm_head.weight' in {source}/model.safetensors is not the embedding, to which config.json ties it: "
        "with the embedding as its head the model would give other answers; "
        "in the model's folder, or a copy of it that --model names, "
        'set "tie_word_embeddings": false in config.json, '
        "or remove lm_head.weight if the model was not trained with it"
    )
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    (rank,) = converted(source, tmp_path / "untied")
    assert np.array_equal(rank["lm_head.weight"], head)


def test_sharded_input_gives_the_same_bytes(tmp_path: Path) -> None:
    one, three = hf_folder(tmp_path / "one"), hf_folder(tmp_path / "three", shards=3)
    converted(one, tmp_path / "a", tp=2)
    converted(three, tmp_path / "b", tp=2)
    for name in ("config.json", "rank0.safetensors", "rank1.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_official_library_reads_a_rank_file(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", dtype="F16", torch_dtype="float16")
    converted(source, tmp_path / "out", tp=2)
    with safetensors.safe_open(tmp_path / "out" / "rank1.safetensors", "numpy") as file:
        assert file.metadata() is None
        found = file.get_tensor("transformer.layers.1.mlp.fc.weight")
    whole = hf_tensors(source)["model.layers.1.mlp.gate_proj.weight"].view(np.float16)
    assert found.dtype == np.float16
    assert np.array_equal(found, whole[24:])


def test_a_rank_file_has_no_metadata_and_starts_its_data_aligned(tmp_path: Path) -> None:
    converted(hf_folder(tmp_path / "hf"), tmp_path / "out")
    raw = (tmp_path / "out" / "rank0.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert "__metadata__" not in json.loads(raw[8 : 8 + length])


@pytest.mark.parametrize(
    ("stored", "said", "wanted"),
    [
        ("BF16", "bfloat16", "BF16"),
        ("F16", "float16", "F16"),
        ("F32", "float32", "F16"),  # as upstream does
        ("BF16", None, "F16"),  # as upstream does when the config does not say
    ],
)
def test_the_type_when_none_is_asked_for(tmp_path: Path, stored: str, said: str | None, wanted: str) -> None:
    source = hf_folder(tmp_path / "hf", dtype=stored, torch_dtype=said)
    converted(source, tmp_path / "out")
    assert {t.dtype for t in read_header(tmp_path / "out" / "rank0.safetensors").tensors.values()} == {wanted}


def test_progress_ends_with_every_byte(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    converted(
        hf_folder(tmp_path / "hf"), tmp_path / "out", tp=2, progress=lambda done, total: seen.append((done, total))
    )
    # 2 ranks: embedding 300 x 32 each, head 150 x 32, 2 layers of 4160 numbers, ln_f 32; two bytes each.
    layer = 2 * 32 + 32 * 32 + 32 * 16 + 3 * 24 * 32
    total = 2 * 2 * (300 * 32 + 150 * 32 + 2 * layer + 32)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_small_blocks_and_small_writes_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_folder(tmp_path / "hf")
    converted(source, tmp_path / "a", tp=2)
    longest, real = 0, os.pwrite

    def pwrite(file: int, data: Any, position: int) -> int:
        nonlocal longest
        longest = max(longest, len(data))
        return real(file, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(writing, "WRITE_BYTES", 60)
    monkeypatch.setattr(module, "BLOCK_BYTES", 100)
    converted(source, tmp_path / "b", tp=2)
    assert longest == 60
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_the_tensor_that_overflows_is_named(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(source)
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].copy()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 0x4780
    write_safetensors(source / "model.safetensors", tensors, "BF16")
    line = refusal(source, tmp_path / "out", dtype=DataType.FLOAT16)
    assert line.startswith(
        f"tensor 'model.layers.1.mlp.up_proj.weight' in {source / 'model.safetensors'} holds 65536: "
    )


def test_an_older_loader_gets_no_key_it_would_crash_on(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    convert(source, tmp_path / "out", dtype=None, mapping=Mapping(), toolchain="0.21.0")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert "mamba_ssm_cache_dtype" not in config["quantization"]
    with pytest.raises(UsageError, match=r"unknown toolchain '0\.21'; did you mean '0\.21\.0'\?"):
        convert(source, tmp_path / "other", dtype=None, mapping=Mapping(), toolchain="0.21")


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0], ids=["infinity", "-infinity", "nan"])
def test_a_value_that_is_no_number_is_refused_with_its_tensor_and_file(tmp_path: Path, value: int) -> None:
    source = hf_folder(tmp_path / "hf")
    tensors = hf_tensors(source)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][-1] = value
    write_safetensors(source / "model.safetensors", tensors, "BF16")
    line = refusal(source, tmp_path / "out", dtype=DataType.BFLOAT16)
    assert line.startswith(
        f"tensor 'model.norm.weight' in {source / 'model.safetensors'} holds a value that is infinite"
    )


@pytest.mark.parametrize("target", list(DataType))
@pytest.mark.parametrize("stored", ["BF16", "F16", "F32"])
def test_a_folder_is_cast_whole(tmp_path: Path, stored: str, target: DataType) -> None:
    source = hf_folder(tmp_path / "hf", dtype=stored)
    ranks = converted(source, tmp_path / "out", tp=2, dtype=target)
    code = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[target.value]
    wanted = {name: cast_by_torch(bits, stored, code) for name, bits in hf_tensors(source).items()}
    found = reassembled(ranks, source, tp=2, pp=1)
    assert all(np.array_equal(found[name], bits) for name, bits in wanted.items())


# --- accounting for every tensor ---


def rewritten(folder: Path, change: Any) -> Path:
    """The folder with its tensors as `change` leaves them."""
    tensors = dict(hf_tensors(folder))
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors, "BF16")
    return folder


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    source = rewritten(hf_folder(tmp_path / "hf"), lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))
    line = refusal(source, tmp_path / "out")
    assert line == (
        f"tensor 'model.layers.1.self_attn.k_proj.weight' is missing from {source}; download the model again"
    )


def test_an_untied_model_needs_its_head(tmp_path: Path) -> None:
    source = rewritten(hf_folder(tmp_path / "hf"), lambda t: t.pop("lm_head.weight"))
    assert "tensor 'lm_head.weight' is missing" in refusal(source, tmp_path / "out")


@pytest.mark.parametrize(
    "name", ["model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "score.weight"]
)
def test_an_unexpected_tensor_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    source = rewritten(hf_folder(tmp_path / "hf"), lambda t: t.update({name: np.zeros(32, dtype=np.uint16)}))
    assert refusal(source, tmp_path / "out") == (
        f"tensor '{name}' in {source / 'model.safetensors'} has no place in a LlamaForCausalLM: "
        "converting without it would change the model"
    )


def test_a_misshapen_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    source = rewritten(hf_folder(tmp_path / "hf"), lambda t: t.update({name: t[name].T}))
    assert refusal(source, tmp_path / "out") == (
        f"tensor '{name}' in {source / 'model.safetensors'} has shape [48, 32]: config.json implies [32, 48]"
    )


def test_a_tensor_of_another_type_is_named_with_its_file(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf")
    shapes = source_shapes(read_model_config(source))
    write_safetensors(
        source / "model.safetensors", {n: np.zeros(s, dtype=np.int8) for n, s in shapes.items()}, "F8_E4M3"
    )
    line = refusal(source, tmp_path / "out")
    assert f"in {source / 'model.safetensors'} has dtype F8_E4M3: weights must be BF16, F16 or F32" in line


def test_a_derived_buffer_of_older_exports_is_left_out(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, dtype=np.uint16)}
    source = rewritten(hf_folder(tmp_path / "hf"), lambda t: t.update(buffer))
    (rank,) = converted(source, tmp_path / "out")
    assert len(rank) == 1 + 2 * 7 + 2


def test_feed_forward_biases_are_refused(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", mlp_bias=True)
    assert f"{source} has biases in its feed-forward layers (mlp_bias)" in refusal(source, tmp_path / "out")


def test_an_impossible_mapping_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="tp_size 3 does not divide the 4 attention heads"):
        convert(hf_folder(tmp_path / "hf"), tmp_path / "out", dtype=None, mapping=Mapping(tp_size=3))
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("dtype", [DataType.BFLOAT16, DataType.FLOAT16])
def test_a_source_that_shrinks_meanwhile_is_noticed(tmp_path: Path, dtype: DataType) -> None:
    source = hf_folder(tmp_path / "hf")
    weights = source / "model.safetensors"

    def shrink(done: int, total: int) -> None:
        os.truncate(weights, 2000)

    assert "became shorter while it was read" in refusal(source, tmp_path / "out", dtype=dtype, progress=shrink)


def test_the_source_is_left_as_it_was(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", shards=2)
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    converted(source, tmp_path / "out", tp=2)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert len(locate_tensors(source)) == 21


# --- a disk that fills up ---

COMMAND = ["convert", "hf", "out", "--tp", "2"]


def command(monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of `trtpipe convert`."""
    monkeypatch.setattr(sys, "argv", ["trtpipe", *COMMAND])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Two headers come first; in blocks of 256 bytes, which are four rows or fewer, some hundred writes follow.
@pytest.mark.parametrize("room", [0, 1, 2, 3, 200], ids="{} writes".format)
@pytest.mark.parametrize("short", [False, True], ids=["at-once", "after-a-part"])
def test_a_disk_that_is_full_halfway_leaves_nothing_and_the_next_run_is_whole(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], room: int, short: bool
) -> None:
    hf_folder(in_folder / "hf")
    monkeypatch.setattr(module, "BLOCK_BYTES", 256)
    real, done = os.pwrite, 0

    def pwrite(file: int, data: Any, position: int) -> int:
        nonlocal done
        done += 1
        if done == room + 1 and short:
            return real(file, data[: len(data) // 2], position)
        if done > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, position)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        assert command(full) == 4
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"error: the disk of {in_folder} is full: No space left on device; ")
    assert [path.name for path in in_folder.iterdir()] == ["hf"]
    assert done > room
    assert command(monkeypatch) == 0
    (in_folder / "undisturbed").mkdir()
    convert(in_folder / "hf", in_folder / "undisturbed", dtype=None, mapping=Mapping(tp_size=2))
    assert files(in_folder / "out") == files(in_folder / "undisturbed")


def test_writes_that_end_early_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = hf_folder(tmp_path / "hf")
    converted(source, tmp_path / "a", tp=2)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, position: real(file, data[:100], position))
    converted(source, tmp_path / "b", tp=2)
    assert files(tmp_path / "a") == files(tmp_path / "b")


@pytest.mark.process
def test_a_file_that_may_not_grow_so_large_is_refused_and_the_next_run_is_whole(in_folder: Path) -> None:
    hf_folder(in_folder / "hf")
    trtpipe = [sys.executable, "-m", "trtpipe", *COMMAND]
    # 20 kB: room for config.json, not for a rank file of 46 kB.
    limited = ["sh", "-c", 'ulimit -f 40; exec "$@"', "sh", *trtpipe]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (4, "error: File too large")
    assert [path.name for path in in_folder.iterdir()] == ["hf"]
    subprocess.run(trtpipe, check=True)
    (in_folder / "undisturbed").mkdir()
    convert(in_folder / "hf", in_folder / "undisturbed", dtype=None, mapping=Mapping(tp_size=2))
    assert files(in_folder / "out") == files(in_folder / "undisturbed")
