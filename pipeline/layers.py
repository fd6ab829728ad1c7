"""Layers of settings: a recipe, command-line options, `--set`; merged, a later layer replaces the whole value."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trtpipe.configs import facts, read
from trtpipe.engines.base import CalibrationConfig
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import TrtpipeError, UsageError, nearest, suggestion
from trtpipe.triton_repo.serving import ServingConfig

# Settings that a recipe or `--set` may name; the two groups are mappings with the fields of their settings type.
SCALARS = (
    "model",
    "source",
    "revision",
    "gpu",
    "dtype",
    "kv_cache",
    "group_size",
    "runtime",
    "toolchain",
    "executor",
    "tp",
    "pp",
    "moe_tp",
    "moe_ep",
    "load",
    "accept_accuracy",
    "tasks",
)
# Setting whose fields are names of adapters, with their folders.
LORA = "lora"
# Keys of `BuildSpec.to_json`.
RECORDED = {"target", "model", "settings", "values"}
GROUPS: dict[str, type[Any]] = {"calibration": CalibrationConfig, "build": BuildConfig, "serving": ServingConfig}
Layer = tuple[str, dict[str, Any]]
# Labels of layers, beside recipes and the user's configuration: options, `trtpipe migrate`, exports, `trtpipe tune`.
LABELS = (
    "option", "--set", "--to", "the engine", "its repository", "its settings", "its passport", "export", "the target",
)  # fmt: skip
# Settings that no other value is derived from.
APART = {"executor", "accept_accuracy", "tasks"}


class Recorded(str):
    """Label of a file that records settings; `derived` has the source of each value that no layer gave, by its dotted
    name."""

    __slots__ = ("derived",)
    derived: dict[str, str]


def recipe_layer(path: str) -> Layer:
    """A recipe file as a layer; `path` is a path, or a name in configs/recipes. What `trtpipe settings --json` printed
    is a recipe too. Raises ConfigError, UsageError."""
    shipped = {file.stem: file for file in (facts.CONFIGS / "recipes").glob("*.yaml")}
    file = shipped.get(path) or Path(path)
    if not file.is_file():
        raise UsageError(
            f"no recipe '{path}'", why="it is neither a file nor a recipe we ship", remedy=suggestion(path, shipped)
        )
    raw, label = read.read_yaml(file), Recorded(f"recipe {file.name}")
    if raw.keys() != RECORDED:
        return str(label), raw
    rows = raw["values"] if isinstance(raw["values"], list) else []
    sources = {str(row.get("name")): str(row.get("source")) for row in rows if isinstance(row, dict)}
    label.derived = {name: source for name, source in sources.items() if not _gives(source)}
    return label, raw["settings"]


def _gives(source: str) -> bool:
    """Whether the source of a value is a layer."""
    return source in LABELS or source.startswith("recipe ") or source.endswith("/config.toml")


def below(recipe: Layer, others: Sequence[Layer]) -> Layer:
    """The layer of a recipe below `others`. Of a file that records settings, all values hold where `others` add none,
    so that it gives the same target again; else those that a layer gave, since the rest has to be derived anew."""
    label, layer = recipe
    added = {name for _, other in others for name, value in other.items() if value not in (None, {})} - APART
    if not isinstance(label, Recorded) or not added:
        return recipe
    own = {name: value for name, value in layer.items() if name not in label.derived}
    for group in own.keys() & GROUPS.keys():
        if isinstance(own[group], dict):
            own[group] = {key: value for key, value in own[group].items() if f"{group}.{key}" not in label.derived}
    return label, own


def set_layer(words: list[str]) -> Layer:
    """A layer from `--set build.max_batch_size=16` options. Raises UsageError."""
    return dotted_layer(assignments(words))


def assignments(words: list[str]) -> dict[str, Any]:
    """The values of `--set` options by dotted name, each given once. Raises UsageError."""
    texts = read.named_values(words, "--set ", example="build.max_batch_size=16")
    return {name: read.parse_yaml_value(text, f"--set {name}") for name, text in texts.items()}


def dotted_layer(values: dict[str, Any]) -> Layer:
    """A layer from values by dotted name: {"build.max_batch_size": 16}. Raises UsageError."""
    layer: dict[str, Any] = {}
    for name, value in values.items():
        group, dot, key = name.partition(".")
        if not dot:
            layer[group] = value
        elif isinstance(layer.get(group, {}), dict):
            layer[group] = {**layer.get(group, {}), key: value}
        else:
            raise UsageError(f"--set {name}={value} contradicts --set {group}={layer[group]}")
    return "--set", layer


def merge(layers: list[Layer]) -> dict[str, tuple[Any, str]]:
    """Dotted name -> (value, layer) of the strongest layer that has it. Raises ConfigError for unknown names."""
    out: dict[str, tuple[Any, str]] = {}
    for label, layer in layers:
        _check_keys(layer, "", label)
        for key, value in layer.items():
            if key == LORA and value is not None:
                if not isinstance(value, dict):
                    raise error_of(label)(f"{label}: {LORA} is not a mapping", remedy=f"name an adapter: {LORA}.NAME")
                out.update({f"{LORA}.{name}": (inner, label) for name, inner in value.items()})
                continue
            if key not in GROUPS:
                if value is not None:
                    out[key] = (value, label)
                continue
            if value is None:  # a group whose lines are all commented out
                continue
            if not isinstance(value, dict):
                remedy = f"name a setting, such as {key}.{_fields(key)[0]}"
                raise error_of(label)(f"{label}: {key} is not a mapping", remedy=remedy)
            _check_keys(value, key, label)
            out.update({f"{key}.{name}": (inner, label) for name, inner in value.items()})
    return out


def _fields(group: str) -> list[str]:
    """Settings of a group; of "" those outside of groups, and the groups."""
    return [field.name for field in dataclasses.fields(GROUPS[group])] if group else [*SCALARS, *GROUPS, LORA]


def _check_keys(keys: Iterable[str], group: str, label: str) -> None:
    """Raises ConfigError or UsageError for a key that `group` lacks; its remedy names the group that has such a key."""
    known, error = _fields(group), error_of(label)
    groups = {name: place for place in ("", *GROUPS) for name in _fields(place)}

    def spelled(name: str) -> str:
        place = groups[name]
        if place == group:
            return f"'{name}'"
        if error is read.ConfigError:
            return f"`{place}: {{{name}: ...}}`" if place else f"`{name}: ...` outside of {group}"
        return f"'{place}.{name}'" if place else f"'{name}' without '{group}.'"

    for key in (str(key) for key in keys if key not in known):
        remedy = suggestion(key, known)
        elsewhere = nearest(key.rpartition(".")[2], groups) if not nearest(key, known) else []
        if elsewhere:
            remedy = f"did you mean {' or '.join(map(spelled, elsewhere))}?"
        raise error(f"{label}: {f'{group}: ' * bool(group)}unknown key '{key}'", remedy=remedy)


def error_of(*labels: str) -> type[TrtpipeError]:
    """The error class for a mistake: ConfigError in a recipe, UsageError on the command line."""
    return read.ConfigError if any(label.startswith("recipe ") for label in labels) else UsageError
