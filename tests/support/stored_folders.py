"""Tiny Hugging Face folders that are quantized already, by each method, from the facts of its format.

Codes and scales are made here in plain torch, not by the code that reads or writes them elsewhere.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.factories import hf_folder

# Sizes that groups of 64 and blocks of 128 divide, or leave a rest of.
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4}
GROUP, BLOCK = 64, 128
Tensors = dict[str, torch.Tensor]


def e4m3(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def int8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).round().clamp(-128, 127).to(torch.int8)


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    return {"weight": e4m3(weight, scale), "weight_scale": scale, "input_scale": torch.tensor(0.01)}, scale


def modelopt_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored, scale = fp8_tensor(weight)
    return stored, stored["weight"].float() * scale


def modelopt_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax(dim=1) / 448
    codes = e4m3(weight, scale[:, None])
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale[:, None]


def modelopt_awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scale = grouped(weight)
    packed = (codes[0::2] & 15) | ((codes[1::2] & 15) << 4)
    stored = {"weight": packed.to(torch.uint8), "weight_scale": scale}
    return stored, codes.float() * scale.repeat_interleave(GROUP, dim=1)


def grouped(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int32 codes in -8 to 7, scale of each group)"""
    scale = weight.unflatten(1, (-1, GROUP)).abs().amax(dim=2) / 7
    return (weight / scale.repeat_interleave(GROUP, dim=1)).round().clamp(-8, 7).to(torch.int32), scale


def ct_fp8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax() / 448).bfloat16().reshape(1)
    codes = e4m3(weight, scale.float())
    stored = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor([0.01]).bfloat16()}
    return stored, codes.float() * scale.float()


def ct_rows(encode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], largest: float) -> Any:
    def made(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = (weight.abs().amax(dim=1, keepdim=True) / largest).bfloat16()
        codes = encode(weight, scale.float())
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return made


def ct_packed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, exact = grouped(weight)
    scale = exact.bfloat16()
    # Eight codes of four bits in a word, 8 added to each, the first in the lowest bits.
    parts = (codes + 8).unflatten(1, (-1, 8)).to(torch.int64)
    words = sum(parts[:, :, i] << (4 * i) for i in range(8))
    assert isinstance(words, torch.Tensor)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    stored = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    return stored, codes.float() * scale.float().repeat_interleave(GROUP, dim=1)


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    down, across = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.stack(
        [
            torch.stack(
                [
                    weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK].abs().amax() / 448
                    for j in range(across)
                ]
            )
            for i in range(down)
        ]
    )
    spread = scale.repeat_interleave(BLOCK, dim=0).repeat_interleave(BLOCK, dim=1)[: weight.shape[0], : weight.shape[1]]
    codes = e4m3(weight, spread)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * spread


def args(kind: str, bits: int, strategy: str, *, dynamic: bool = False, group: int | None = None) -> dict[str, Any]:
    return {
        "actorder": None, "block_structure": None, "dynamic": dynamic, "group_size": group, "num_bits": bits,
        "observer": None if dynamic else "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True,
        "type": kind,
    }  # fmt: skip


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    scheme = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "config_groups": {"group_0": scheme}, "format": form, "global_compression_ratio": 1.5, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
    }  # fmt: skip


def modelopt(algo: str, **more: Any) -> dict[str, Any]:
    return {
        "ignore": ["lm_head"],
        "quant_algo": algo,
        "producer": {"name": "modelopt"},
        "quant_method": "modelopt",
    } | more


TOKENS = args("float", 8, "token", dynamic=True)
# Case -> (quantization_config, encoder of a linear's weight: tensors stored, and the weight that they stand for).
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "modelopt fp8": (modelopt("FP8"), modelopt_fp8),
    "modelopt rows": (modelopt("FP8_PER_CHANNEL_PER_TOKEN"), modelopt_rows),
    "modelopt awq": (modelopt("W4A16_AWQ", group_size=GROUP), modelopt_awq),
    "ct fp8": (
        compressed("float-quantized", args("float", 8, "tensor"), args("float", 8, "tensor")), ct_fp8,
    ),
    "ct fp8 rows": (compressed("float-quantized", args("float", 8, "channel"), TOKENS), ct_rows(e4m3, 448)),
    "ct int8": (
        compressed("int-quantized", args("int", 8, "channel"), args("int", 8, "token", dynamic=True)),
        ct_rows(int8, 127),
    ),
    "ct int4": (compressed("pack-quantized", args("int", 4, "group", group=GROUP), None), ct_packed),
    "fp8 static": ({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, modelopt_fp8),
    "fp8 blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]},
        fp8_blocks,
    ),
}  # fmt: skip


def stored_folder(path: Path, case: str, *, cache: float | None = None, **overrides: Any) -> dict[str, torch.Tensor]:
    """Write a quantized folder to `path`; return the weights that its codes stand for, in float32, by their names.

    cache  scale of keys and values of an FP8 KV cache
    """
    plain = hf_folder(path.with_name(path.name + ".plain"), **{**SIZES, **overrides})
    method, encode = CASES[case]
    tensors, exact = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "proj" not in name or not name.endswith("weight"):
            tensors[name] = exact[name] = tensor
            continue
        smooth = torch.ones(tensor.shape[1])
        if case == "modelopt awq" and ("o_proj" in name or "down_proj" in name):
            # Of these the inputs come from no norm that could take the factors up.
            smooth = torch.linspace(0.5, 2, tensor.shape[1]).bfloat16().float()
        stored, dequantized = encode(tensor.float() / smooth)
        exact[name] = dequantized * smooth
        if not bool((smooth == 1).all()):
            stored["pre_quant_scale"] = smooth.bfloat16()
        tensors.update({name.removesuffix("weight") + part: one.contiguous() for part, one in stored.items()})
        if cache is not None:
            for letter in "kv":
                of_linear = (
                    f"{letter}_proj.{letter}_scale" if method["quant_method"] == "modelopt" else f"{letter}_scale"
                )
                if f"{letter}_proj" in name:
                    tensors[name.split(f"{letter}_proj")[0] + of_linear] = torch.tensor(cache)
    path.mkdir()
    for one in plain.iterdir():
        if one.name != "model.safetensors":
            shutil.copyfile(one, path / one.name)
    save_file(tensors, path / "model.safetensors")
    if cache is not None:
        method = {**method, "kv_cache_scheme": args("float", 8, "tensor")}
    write_config(path, quantization_config=method)
    return exact


def write_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or, with None, remove tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)
