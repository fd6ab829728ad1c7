"""Random LoRA adapters as PEFT saves them, for tiny models and real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.families import family_of, names_of
from trtpipe.engines.hf.adapter import CONFIG, ROLES, WEIGHTS
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.hf.safetensors_file import header_bytes


def write_adapter(
    folder: Path, model: Path, *, rank: int = 4, roles: Sequence[str] = ROLES, seed: int = 0, size: float = 0.5,
    dtype: str = "F32", **config: Any,
) -> Path:  # fmt: skip
    """Write an adapter of the Hugging Face folder `model`; products of its matrices are about `size` large."""
    facts = read_model_config(model)
    names, shapes = names_of(facts), family_of(facts).layer_shapes(facts)
    random = np.random.default_rng(seed)
    tensors: list[tuple[str, np.ndarray[Any, Any]]] = []
    for layer in range(facts.num_hidden_layers):
        for role in roles:
            linear = getattr(names, role)
            out, features = shapes[f"{linear}.weight"]
            for side, shape in (("A", (rank, features)), ("B", (out, rank))):
                matrix = random.standard_normal(shape) * (size / (rank * features) ** 0.5) ** 0.5
                name = f"base_model.model.{names.layer(layer)}{linear}.lora_{side}.weight"
                tensors.append((name, matrix.astype(np.float32)))
    folder.mkdir(parents=True, exist_ok=True)
    header, _ = header_bytes((name, dtype, matrix.shape) for name, matrix in tensors)
    (folder / WEIGHTS).write_bytes(header + b"".join(_stored(matrix, dtype) for _, matrix in tensors))
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": rank, "lora_alpha": 8,
        "target_modules": sorted({getattr(names, role).rpartition(".")[2] for role in roles}), "bias": "none",
        "inference_mode": True, **config,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(told), encoding="utf-8")
    return folder


def _stored(matrix: np.ndarray[Any, Any], dtype: str) -> bytes:
    if dtype == "BF16":  # cut, not rounded
        return (matrix.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return matrix.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def merged(model: Any, adapter: Path) -> Any:
    """A copy of a model of transformers with the products of an adapter added to its weights, in float64."""
    import copy

    import torch
    from safetensors.torch import load_file

    told = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    scale = told["lora_alpha"] / (told["r"] ** 0.5 if told.get("use_rslora") else told["r"])
    tensors, out = load_file(adapter / WEIGHTS), copy.deepcopy(model)
    with torch.no_grad():
        for name, a in tensors.items():
            if ".lora_A." in name:
                linear = out.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                b = tensors[name.replace("lora_A", "lora_B")]
                linear.weight += (scale * b.double() @ a.double()).float()
    return out
