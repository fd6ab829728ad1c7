"""Typed reading of a Hugging Face config.json: a value of a wrong type raises an error that names file and key.

Both forms of the rotary settings are read: `rope_theta` and `rope_scaling` (transformers 4), and
`rope_parameters` (transformers 5). TensorRT-LLM's own converter reads only the first form and silently writes
rotary_base 10000 for the second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.model_config import Experts
from trtpipe.engines.sizes import excess

# Values of the rotary settings that set angles, and tables of such values.
SCALING_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow",
)  # fmt: skip
SCALING_LISTS = ("short_factor", "long_factor")


class ConfigFields:
    """Fields of the config.json `raw`; messages name its `path`. Every method raises InputDataError."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def count(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise InputDataError(f"{self.path}: {key} is {value!r}, not a positive whole number below 2^31")
        if fault := excess(key, value):
            raise InputDataError(f"{self.path}: {fault}", remedy="download the model again")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.raw.get(key)
        return _positive(self.path, key, default if value is None else value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool) and value is not None:
            raise InputDataError(f"{self.path}: {key} is {value!r}, not true or false")
        return bool(value)

    def dtype(self) -> DataType | None:
        """Element type of the weights; None when it is not stated."""
        value = self.raw.get("torch_dtype")
        value = self.raw.get("dtype") if value is None else value
        if value is None:
            return None
        try:
            return DataType(value)
        except ValueError:
            raise InputDataError(f"{self.path}: dtype {value!r} is none of bfloat16, float16, float32") from None

    def experts(self, counts: tuple[str, ...], size: str, *, normalize: bool) -> Experts:
        """The experts of every layer; `counts` are keys of their number, any will do, `size` that of their features.

        transformers 5 writes num_local_experts for families whose published configs say num_experts.
        """
        stated = {key: self.count(key) for key in counts if self.raw.get(key) is not None}
        _require_one(self.path, stated)
        count = next(iter(stated), counts[0])
        number, top_k = self.count(count), self.count("num_experts_per_tok")
        if top_k > number:
            raise InputDataError(f"{self.path}: num_experts_per_tok {top_k} exceeds {count} {number}")
        return Experts(count=number, top_k=top_k, normalize=normalize, intermediate_size=self.count(size))

    def rotary(self) -> tuple[float, dict[str, Any] | None]:
        """(rotary_base, rotary_scaling) from either form, for whole heads. Also raises if the two forms contradict."""
        path, raw = self.path, self.raw
        bases: dict[str, float] = {}
        scalings: dict[str, dict[str, Any] | None] = {}
        if raw.get("rope_theta") is not None:
            bases["rope_theta"] = self.number("rope_theta", 0.0)
        for key in ("rope_scaling", "rope_parameters"):
            value = raw.get(key)
            if value is not None and not isinstance(value, dict):
                raise InputDataError(f"{path}: {key} is not an object")
            if not value:
                continue
            if value.get("rope_theta") is not None:
                bases[f"{key}.rope_theta"] = ConfigFields(path, value).number("rope_theta", 0.0)
            scalings[key] = _scaling(path, key, {name: entry for name, entry in value.items() if name != "rope_theta"})
        for place in (raw, *(raw[key] for key in scalings)):
            if place.get("partial_rotary_factor") not in (None, 1):
                raise InputDataError(
                    f"{path}: partial_rotary_factor is {place['partial_rotary_factor']!r}",
                    why="models that rotate a part of each head are not read here",
                )
        _require_one(path, bases)
        _require_one(path, {key: scaling and _spelt_anew(scaling) for key, scaling in scalings.items()})
        return next(iter(bases.values()), 10000.0), next(iter(scalings.values()), None)


def _kind(scaling: dict[str, Any]) -> Any:
    return scaling.get("rope_type", scaling.get("type"))


def _spelt_anew(scaling: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in scaling.items() if name not in ("type", "rope_type")}
    return {"rope_type": _kind(scaling), **rest}


def _scaling(path: Path, key: str, scaling: dict[str, Any]) -> dict[str, Any] | None:
    """Return `scaling` unchanged, or None when it has no effect.

    Raises InputDataError if its type is unclear, or a value that sets angles is not a positive number.
    """
    kind = _kind(scaling)
    if scaling.get("type", kind) != kind:
        raise InputDataError(f"{path}: {key} has type {scaling['type']!r} and rope_type {kind!r}")
    if kind is None and scaling:
        raise InputDataError(f"{path}: {key} names no rope_type, so its {', '.join(scaling)} cannot be applied")
    if kind is not None and not isinstance(kind, str):
        raise InputDataError(f"{path}: {key} has the rope_type {kind!r}, not a name")
    if kind in (None, "default"):
        return None
    for name in SCALING_NUMBERS:
        if scaling.get(name) is not None:
            _positive(path, f"{key}.{name}", scaling[name])
    for name in SCALING_LISTS:
        table = scaling.get(name)
        if table is not None and not isinstance(table, list):
            raise InputDataError(f"{path}: {key}.{name} is {table!r}, not a list of numbers")
        for place, value in enumerate(table or []):
            _positive(path, f"{key}.{name}[{place}]", value)
    return scaling


def _positive(path: Path, key: str, value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
        raise InputDataError(f"{path}: {key} is {value!r}, not a positive number")
    return float(value)


def _require_one(path: Path, values: dict[str, Any]) -> None:
    first, *others = values or {"": None}
    for other in others:
        if values[other] != values[first]:
            raise InputDataError(f"{path}: {first} {values[first]} contradicts {other} {values[other]}")
