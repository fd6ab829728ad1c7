"""Tensors that the double of trtllm-build refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.tiny_builds import (
    AWQ,
    FP8,
    FP8_KV,
    FP8_KV_ALONE,
    INT8_KV,
    INT8_WEIGHTS,
    MODEL,
    ONE,
    ROWWISE,
    SMOOTH,
    TWO,
    W4A8,
    Change,
    Output,
    Tensors,
    build,
    checkpoint,
    engine_config,
    refusal,
    warnings,
)
from trtpipe.engines.base import Mapping
from trtpipe.engines.quantization import UNQUANTIZED, QuantAlgo, Quantization

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
