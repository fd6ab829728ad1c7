"""Folders that came quantized compute what their codes stand for, and are refused in words when they are not sound."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.stored_folders import CASES, GROUP, change_tensors, modelopt, stored_folder, write_config
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.hf.inspection import inspect
from trtpipe.engines.hf.stored import Stored, read_stored
from trtpipe.engines.reference.hf_weights import QuantizedFolder
from trtpipe.engines.reference.mlp import Each, GatedMlp, OneInput

# Case -> algorithm, and the relative error that the rounding of inputs in [-2, 2] may cause.
READ = {
    "modelopt fp8": ("FP8", 0.04),
    "modelopt rows": ("FP8_PER_CHANNEL_PER_TOKEN", 0.04),
    "modelopt awq": ("W4A16_AWQ", 1e-6),
    "ct fp8": ("FP8", 0.04),
    "ct fp8 rows": ("FP8_PER_CHANNEL_PER_TOKEN", 0.04),
    "ct int8": ("INT8_PER_CHANNEL_PER_TOKEN", 0.01),
    "ct int4": ("W4A16_AWQ", 1e-6),
    "fp8 static": ("FP8", 0.04),
    "fp8 blocks": ("FP8_BLOCK_SCALES", 0.04),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, torch.Tensor]]]:
    """The folder of a case, not to be changed, and the weights that its codes stand for."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def make(case: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if case not in made:
            folder = tmp_path_factory.mktemp("stored") / case.replace(" ", "-")
            cache = None if case.startswith("fp8") else 0.02
            made[case] = folder, stored_folder(folder, case, cache=cache)
        return made[case]

    return make


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_folder_computes_what_its_codes_stand_for(
    folders: Callable[[str], tuple[Path, dict[str, torch.Tensor]]], case: str
) -> None:
    folder, exact = folders(case)
    algo, rounding = READ[case]
    found = inspect(folder)
    assert (found.quantization["quant_algo"], found.problems) == (algo, ())
    source = QuantizedFolder(folder, torch.float32)
    (shard,) = source.layer(1)
    x, down = torch.rand(9, 128) * 4 - 2, torch.rand(9, 192) * 4 - 2
    assert isinstance(shard.mlp, GatedMlp)
    assert isinstance(shard.mlp.branches, (Each, OneInput))
    prefix = "model.layers.1."
    for linear, name, inputs in (
        (shard.dense, "self_attn.o_proj", x), (shard.mlp.proj, "mlp.down_proj", down),
        (shard.mlp.branches.first, "mlp.gate_proj", x), (shard.mlp.branches.second, "mlp.up_proj", x),
    ):  # fmt: skip
        assert distance(linear(inputs), inputs @ exact[f"{prefix}{name}.weight"].T) < rounding, name
    fused = torch.cat([exact[f"{prefix}self_attn.{letter}_proj.weight"] for letter in "qkv"])
    assert distance(shard.qkv(x), x @ fused.T) < rounding
    assert torch.equal(source.embedding()[0], exact["model.embed_tokens.weight"].float())
    if not case.startswith("fp8"):
        assert shard.kv_codec is not None
        assert shard.kv_codec.scale.unique().tolist() == [pytest.approx(0.02)]


def test_a_kv_cache_without_scales_has_the_scale_1(tmp_path: Path) -> None:
    stored_folder(tmp_path / "cache", "modelopt fp8")
    write_config(
        tmp_path / "cache", quantization_config=modelopt("FP8", kv_cache_scheme={"type": "float", "num_bits": 8})
    )
    codec = QuantizedFolder(tmp_path / "cache", torch.float32).layer(0)[0].kv_codec
    assert codec is not None
    assert codec.scale.unique().tolist() == [1.0]


def test_the_group_size_may_stand_in_modelopts_own_file_alone(tmp_path: Path) -> None:
    folder = tmp_path / "awq"
    stored_folder(folder, "modelopt awq")
    write_config(folder, quantization_config=modelopt("W4A16_AWQ"))
    details = {"quant_algo": "W4A16_AWQ", "group_size": GROUP, "has_zero_point": False, "exclude_modules": ["lm_head"]}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": details}))
    stored = read_stored(folder)
    assert stored is not None
    assert stored.describe() == "W4A16_AWQ weights in groups of 64, stored by modelopt"
    assert inspect(folder).problems == ()
    assert Stored.from_json(json.loads(json.dumps(stored.to_json()))) == stored


def method(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def scheme(folder: Path, **changes: Any) -> None:
    """Change the one scheme of a compressed-tensors folder."""
    whole = method(folder)
    (group,) = whole["config_groups"].values()
    group.update(changes)
    write_config(folder, quantization_config=whole)


def config(folder: Path, **changes: Any) -> None:
    write_config(folder, quantization_config={**method(folder), **changes})


GATE = "model.layers.0.mlp.gate_proj."


@pytest.mark.parametrize(
    ("case", "damage", "telling"),
    [
        (
            "ct fp8",
            lambda f: write_config(f, quantization_config={"quant_method": "gptq"}),
            "is quantized by gptq: the ",
        ),
        (
            "ct fp8",
            lambda f: write_config(f, quantization_config={"bits": 4, "group_size": 128, "desc_act": False}),
            "is quantized by a method that it does not name, such as GPTQ or AWQ: the methods read here are modelopt, ",
        ),
        ("ct fp8", lambda f: config(f, quant_method="modelopt", quant_algo="W4A16_AWQ"), "q_proj.weight' has shape"),
        ("ct fp8", lambda f: config(f, ignore=["lm_head", GATE[:-1]]), "layers of mixed precision are not read here"),
        ("ct int8", lambda f: change_tensors(f, **{GATE + "weight_scale": None}), "gate_proj.weight_scale' is missing"),
        (
            "ct int8",
            lambda f: change_tensors(f, **{GATE + "weight_scale": torch.ones(1)}),
            "gate_proj.weight_scale' has shape [1], config.json implies [192, 1]",
        ),
        (
            "ct int4",
            lambda f: change_tensors(f, **{GATE + "weight_zero_point": torch.ones(1)}),
            "gate_proj.weight_zero_point' has no place in this model",
        ),
        ("modelopt fp8", lambda f: config(f, quant_algo="MIXED_PRECISION"), "mixed precision are not read here"),
        *(
            (
                "modelopt fp8",
                lambda f, name=name: config(f, quant_algo=name),
                f"is quantized with {name}: the algorithms",
            )
            for name in ("NVFP4_AWQ", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "NVFP4_SVD", "MXFP8", "W4A8_MXFP4_FP8", "X" * 60)
        ),
        (
            "modelopt fp8",
            lambda f: write_config(f, quantization_config={"quant_method": "mxfp4"}),
            "quantized by mxfp4",
        ),
        (
            "modelopt fp8",
            lambda f: config(f, kv_cache_scheme="NVFP4_AFFINE"),
            "the KV cache is quantized with the scheme NVFP4_AFFINE: the types read here are FP8, INT8, NVFP4; start",
        ),
        (
            "modelopt fp8",
            lambda f: config(f, ignore=["lm_head", "model.layers.0.*"]),
            "exclude_modules has 'model.layers.0.*'",
        ),
        (
            "ct fp8",
            lambda f: (f / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}'),
            "describes two quantizations: quantization_config says compressed-tensors",
        ),
        ("fp8 static", lambda f: config(f, activation_scheme="dynamic"), "dynamic inputs, which each runtime scales"),
        ("fp8 static", lambda f: config(f, ignored_layers=["model.layers.1.mlp"]), "it has 'model.layers.1.mlp'"),
        ("fp8 blocks", lambda f: config(f, weight_block_size=[64, 64]), "other blocks than 128x128 are not read here"),
        ("fp8 blocks", lambda f: config(f, scale_fmt="ue8m0"), "its scale_fmt is 'ue8m0'"),
        (
            "fp8 blocks",
            lambda f: change_tensors(f, **{GATE + "weight_scale_inv": torch.ones(1, 1)}),
            "gate_proj.weight_scale_inv' has shape [1, 1], config.json implies [2, 1]",
        ),
        ("fp8 blocks", lambda f: config(f, modules_to_not_convert=["model.layers.0.mlp.up_proj"]), "mixed precision"),
    ],
)
def test_what_is_not_what_it_says_is_one_line(
    folders: Callable[[str], tuple[Path, dict[str, torch.Tensor]]],
    tmp_path: Path,
    case: str,
    damage: Callable[[Path], None],
    telling: str,
) -> None:
    shutil.copytree(folders(case)[0], tmp_path / "folder")
    damage(tmp_path / "folder")
    with pytest.raises(InputDataError) as error:
        QuantizedFolder(tmp_path / "folder", torch.float32)
    assert telling in str(error.value)
    assert "\n" not in str(error.value)
    assert any(telling in problem for problem in inspect(tmp_path / "folder").problems)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_no_input_can_be_divided_by_is_refused(
    folders: Callable[[str], tuple[Path, dict[str, torch.Tensor]]], tmp_path: Path, value: float
) -> None:
    shutil.copytree(folders("ct fp8")[0], tmp_path / "folder")
    change_tensors(tmp_path / "folder", **{GATE + "input_scale": torch.tensor([value])})
    with pytest.raises(InputDataError, match=r"gate_proj\.input_scale' holds a scale that is not a positive number"):
        QuantizedFolder(tmp_path / "folder", torch.float32).layer(0)


def test_packed_codes_of_another_shape_than_stands_beside_them_are_refused(
    folders: Callable[[str], tuple[Path, dict[str, torch.Tensor]]], tmp_path: Path
) -> None:
    shutil.copytree(folders("ct int4")[0], tmp_path / "folder")
    change_tensors(tmp_path / "folder", **{GATE + "weight_shape": torch.tensor([192, 64])})
    with pytest.raises(InputDataError, match=r"gate_proj\.weight_shape is \[192, 64\]"):
        QuantizedFolder(tmp_path / "folder", torch.float32).layer(0)
