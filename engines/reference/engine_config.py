"""Reader of an engine folder's config.json: the checkpoint's config, and the limits of the build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trtpipe.engines.base import DataType
from trtpipe.engines.build_config import SPECULATIVE, BuildConfig
from trtpipe.engines.checkpoint.config import parse_config
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.reference.weights import TORCH_DTYPE

# Fields of an engine's build_config that this runtime enforces.
LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")


def read_engine_config(engine_dir: Path) -> tuple[CheckpointConfig, BuildConfig]:
    """Both configs of the engine. Raises InputDataError."""
    path = engine_dir / "config.json"
    raw = read_json(path, "engine config")
    config = parse_config(_section(raw, "pretrained_config", path), f"{path}: pretrained_config")
    return config, _build_config(_section(raw, "build_config", path), path)


def compute_type(config: CheckpointConfig, asked: DataType | str | None) -> torch.dtype:
    """Type of activations: the checkpoint's, or the one that is asked for. Raises UsageError."""
    return TORCH_DTYPE[config.dtype if asked is None else _data_type(asked)]


def _section(raw: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        why = "this is not an engine folder"
        raise InputDataError(f"{path} has no {name}", why=why, remedy="build the engine again")
    return value


def _build_config(raw: dict[str, Any], path: Path) -> BuildConfig:
    plugins = raw.get("plugin_config")
    values: dict[str, Any] = {}
    for name in LIMITS:
        section = raw if name != "tokens_per_block" else plugins if isinstance(plugins, dict) else {}
        value = section.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputDataError(f"{path}: build_config has no usable {name}", remedy="build the engine again")
        values[name] = value
    if raw.get("speculative_decoding_mode"):
        values |= {name: raw.get(name) for name in SPECULATIVE}
    try:
        return BuildConfig(**values)
    except TypeError as error:
        raise InputDataError(f"{path}: build_config has an unusable value", why=str(error)) from None
    except UsageError as error:
        raise InputDataError(f"{path}: {error.what}", remedy="build the engine again") from None


def _data_type(value: DataType | str) -> DataType:
    try:
        return DataType(value)
    except ValueError:
        names = [kind.value for kind in DataType]
        raise UsageError(f"no compute type is called '{value}'", remedy=suggestion(str(value), names)) from None
