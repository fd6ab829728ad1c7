"""Contents of a written Hugging Face folder: config.json, companions of the weights, shards, names of linears."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.families import names_of
from trtpipe.engines.files import copy_files, place, write_json
from trtpipe.engines.hf.folder import INDEX_NAME, SINGLE_NAME, TOKENIZER_FILES, read_config_json
from trtpipe.engines.hf.safetensors_file import ITEMSIZE
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import ModelConfig

SHARD_BYTES = 5_000_000_000
# Files that a served model needs besides its weights.
COMPANIONS = (
    *TOKENIZER_FILES, "tokenizer.model", "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip


def config_in(source: Path, dtype: DataType) -> dict[str, Any]:
    """The source's config.json with `dtype` under the keys that the source uses for its type, also by older names."""
    config = read_json(source / "config.json", "model config")
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype.value
    return with_older_names(config)


def with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with what transformers 5 renamed, rotary settings and type, under the older names too.

    Other readers, such as TensorRT-LLM's, know only these: without `rope_theta` they compute with 10000.
    """
    out, rope = dict(config), config.get("rope_parameters")
    if isinstance(rope, dict) and rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "rope_theta" in rope:
            out["rope_theta"] = rope["rope_theta"]
        out["rope_scaling"] = None if scaling.get("rope_type", scaling.get("type", "default")) == "default" else scaling
    if config.get("dtype") is not None:
        out["torch_dtype"] = config["dtype"]
    return out


def place_config(source: Path, target: Path) -> None:
    """Copy a config.json; one of transformers 5 gets the older names too. Raises InputDataError."""
    config = read_config_json(source, "model config")
    named = with_older_names(config)
    if named == config:
        place(source, target)
    else:
        write_json(target, named)


def copy_companions(source: Path, out: Path) -> None:
    copy_files(source, out, COMPANIONS)


def lay_out(out: Path, plans: Sequence[TensorPlan], dtype: str) -> list[tuple[Path, list[TensorPlan]]]:
    """Assign tensors to files of at most SHARD_BYTES each; write an index when there are several files.

    dtype  safetensors type of tensors whose plan has none
    """
    sizes = {plan.name: prod(plan.shape) * ITEMSIZE[plan.dtype or dtype] for plan in plans}
    parts: list[list[TensorPlan]] = [[]]
    filled = 0
    for plan in plans:
        if parts[-1] and filled + sizes[plan.name] > SHARD_BYTES:
            parts.append([])
            filled = 0
        parts[-1].append(plan)
        filled += sizes[plan.name]
    if len(parts) == 1:
        return [(out / SINGLE_NAME, parts[0])]
    files = [
        (out / f"model-{number:05d}-of-{len(parts):05d}.safetensors", part)
        for number, part in enumerate(parts, start=1)
    ]
    weight_map = {plan.name: path.name for path, part in files for plan in part}
    write_json(out / INDEX_NAME, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    return files


def linear_names(model: ModelConfig) -> dict[str, str]:
    """Full name of each linear's weight -> the linear's name within its layer."""
    names = names_of(model)
    return {
        f"{names.layer(layer)}{linear}.weight": linear
        for layer in range(model.num_hidden_layers)
        for linear in names.linears
    }


def router_names(model: ModelConfig) -> list[str]:
    """Full names of the routers, which are not quantized; none for a dense model."""
    names = names_of(model)
    return [names.layer(layer) + names.router for layer in range(model.num_hidden_layers) if model.experts]


def whole(name: str, shape: tuple[int, ...], dtype: str | None) -> TensorPlan:
    """Plan of a tensor that is a copy of one source tensor."""
    return TensorPlan(name, shape, (Piece(name, (0, shape[0] if shape else 1)),), dtype=dtype)
