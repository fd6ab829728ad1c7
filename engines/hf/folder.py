"""Reader of a Hugging Face model folder: normalised config, locations of tensors, check of the tokenizer.

Both forms of the rotary settings are read: `rope_theta` and `rope_scaling` (transformers 4), and
`rope_parameters` (transformers 5). TensorRT-LLM's own converter reads only the first form and silently writes
rotary_base 10000 for the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.errors import InputDataError, suggestion
from trtpipe.engines.families import FAMILIES
from trtpipe.engines.hf.safetensors_file import SafetensorsError, TensorEntry, read_header
from trtpipe.engines.json_input import read_json
from trtpipe.engines.sizes import MOST_CONFIG_BYTES, MOST_CONFIG_VALUES, excess

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
# A dense Llama has some ten tensors per layer, and the index has one value for each tensor.
MOST_INDEX_BYTES, MOST_NAMES = 16 << 20, 200_000
# Bound for the length of a shard's file name; every file system accepts such names.
MOST_NAME_LENGTH = 200
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Files that serving reads; only tokenizer.json is required.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


class NotALlama(InputDataError):
    """A folder without a dense model of the Llama family."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Content of an HF config.json under TensorRT-LLM's field names.

    `rotary_scaling` is the unchanged HF dictionary without the base, or None. `dtype` is None when the
    folder does not state it. A TensorRT-LLM checkpoint has no field for `sliding_window`.
    """

    architecture: str
    dtype: DataType | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    hidden_act: str
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attn_bias: bool
    mlp_bias: bool
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class LocatedTensor:
    """A tensor and the shard that stores it."""

    path: Path
    entry: TensorEntry


def read_model_config(folder: Path, *, quantized: bool = False) -> ModelConfig:
    """Read and normalise `folder`/config.json; with `quantized` it may describe quantized weights.

    Raises InputDataError, and NotALlama for another architecture.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise NotALlama(
            f"{folder} is no Hugging Face model folder", why="it has no config.json", remedy="give the model's folder"
        )
    return parse_model_config(read_config_json(path, "model config"), path, quantized=quantized)


def read_config_json(path: Path, what: str) -> dict[str, Any]:
    """Read the JSON object in a config.json. Raises InputDataError naming the file for anything else."""
    return read_json(path, what, max_bytes=MOST_CONFIG_BYTES, max_values=MOST_CONFIG_VALUES)


def parse_model_config(raw: dict[str, Any], path: Path, *, quantized: bool = False) -> ModelConfig:
    """Normalise the content of a config.json as `read_model_config` does; messages name `path`."""
    names = raw.get("architectures")
    architecture = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if architecture is None:
        raise NotALlama(f"{path} names no architecture", remedy="give a folder whose config.json has `architectures`")
    if architecture not in FAMILIES:
        raise NotALlama(
            f"{path} describes a {architecture}",
            why="trtpipe converts dense Llama-family models",
            remedy=suggestion(architecture, FAMILIES),
        )
    field = _Fields(path, raw)
    heads = field.count("num_attention_heads")
    hidden = field.count("hidden_size")
    if raw.get("head_dim") is None and hidden % heads:
        raise InputDataError(
            f"{path}: hidden_size {hidden} is not divisible by num_attention_heads {heads}, and head_dim is absent"
        )
    kv_heads = field.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InputDataError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    base, scaling = _rotary(path, raw)
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise InputDataError(f"{path}: hidden_act is {act!r}", why="TensorRT-LLM's Llama computes silu")
    if raw.get("quantization_config") is not None and not quantized:
        raise InputDataError(
            f"{path} describes an already quantized model", remedy="start from the model's bf16 or fp16 folder"
        )
    return ModelConfig(
        architecture=architecture,
        dtype=_dtype(path, raw),
        vocab_size=field.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=field.count("intermediate_size"),
        num_hidden_layers=field.count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_size=field.count("head_dim", hidden // heads),
        hidden_act="silu",
        norm_epsilon=field.number("rms_norm_eps", 1e-6),
        max_position_embeddings=field.count("max_position_embeddings"),
        rotary_base=base,
        rotary_scaling=scaling,
        tie_word_embeddings=field.flag("tie_word_embeddings"),
        attn_bias=field.flag("attention_bias") or field.flag("bias"),
        mlp_bias=field.flag("mlp_bias"),
        sliding_window=None if raw.get("sliding_window") is None else field.count("sliding_window"),
    )


def locate_tensors(folder: Path) -> dict[str, LocatedTensor]:
    """Locate all tensors by name, in one safetensors file or in the shards that an index names.

    Raises SafetensorsError for a damaged shard and InputDataError for a missing or contradictory one.
    """
    index_path = folder / INDEX_NAME
    if index_path.is_file():
        return _from_index(folder, index_path)
    single = folder / SINGLE_NAME
    if single.is_file():
        return {name: LocatedTensor(path=single, entry=entry) for name, entry in read_header(single).tensors.items()}
    pickles = sorted(p.name for pattern in PICKLE_PATTERNS for p in folder.glob(pattern))
    if pickles:
        raise InputDataError(
            f"{folder} holds only pickle weights ({pickles[0]})",
            why="a pickle can run code when it is loaded",
            remedy="use the model's safetensors revision, or save it again with save_pretrained",
        )
    raise InputDataError(f"{folder} has no weights", why=f"neither {SINGLE_NAME} nor {INDEX_NAME} is there")


def require_tokenizer(folder: Path) -> None:
    """Raise InputDataError unless the folder has the fast tokenizer that serving loads."""
    if not (folder / "tokenizer.json").is_file():
        raise InputDataError(
            f"{folder} has no tokenizer.json",
            why="serving reads the fast tokenizer only, so that no code from a model folder ever runs",
            remedy="save it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained",
        )


def _from_index(folder: Path, index_path: Path) -> dict[str, LocatedTensor]:
    weight_map = read_json(index_path, "weight index", max_bytes=MOST_INDEX_BYTES, max_values=MOST_NAMES).get(
        "weight_map"
    )
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputDataError(f"{index_path} has no usable weight_map", remedy="download the model again")
    located: dict[str, LocatedTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", "..") or len(shard) > MOST_NAME_LENGTH:
            raise InputDataError(f"{index_path} names a shard outside its folder ({shard[:MOST_NAME_LENGTH]!r})")
        path = folder / shard
        if not path.is_file():
            raise InputDataError(
                f"{shard} is missing", why=f"{index_path} names it", remedy="download the model again to complete it"
            )
        for name, entry in read_header(path).tensors.items():
            if weight_map.get(name) != shard:
                raise InputDataError(f"tensor '{name}' is in {shard}, the index says {weight_map.get(name)}")
            located[name] = LocatedTensor(path=path, entry=entry)
    absent = sorted(weight_map.keys() - located.keys())
    if absent:
        raise SafetensorsError(
            f"tensor '{absent[0]}' is not in {weight_map[absent[0]]}",
            why=f"{index_path} says it is",
            remedy="download the model again",
        )
    return located


class _Fields:
    """Typed access to config.json: a value of a wrong type raises an error that names it."""

    def __init__(self, path: Path, raw: dict[str, Any]) -> None:
        self._path = path
        self._raw = raw

    def count(self, key: str, default: int | None = None) -> int:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise InputDataError(f"{self._path}: {key} is {value!r}, not a positive whole number")
        if fault := excess(key, value):
            raise InputDataError(f"{self._path}: {fault}", remedy="download the model again")
        return value

    def number(self, key: str, default: float) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e30:
            raise InputDataError(f"{self._path}: {key} is {value!r}, not a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._raw.get(key)
        if not isinstance(value, bool) and value is not None:
            raise InputDataError(f"{self._path}: {key} is {value!r}, not true or false")
        return bool(value)


def _dtype(path: Path, raw: dict[str, Any]) -> DataType | None:
    value = raw.get("torch_dtype")
    value = raw.get("dtype") if value is None else value
    if value is None:
        return None
    try:
        return DataType(value)
    except ValueError:
        raise InputDataError(f"{path}: dtype {value!r} is none of bfloat16, float16, float32") from None


def _rotary(path: Path, raw: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(rotary_base, rotary_scaling) from either form. Raises InputDataError if the two forms contradict."""
    bases: dict[str, float] = {}
    scalings: dict[str, dict[str, Any] | None] = {}
    if raw.get("rope_theta") is not None:
        bases["rope_theta"] = _Fields(path, raw).number("rope_theta", 0.0)
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise InputDataError(f"{path}: {key} is no object")
        if not value:
            continue
        if value.get("rope_theta") is not None:
            bases[f"{key}.rope_theta"] = _Fields(path, value).number("rope_theta", 0.0)
        scalings[key] = _scaling(path, key, {name: entry for name, entry in value.items() if name != "rope_theta"})
    for place in (raw, *(scaling for scaling in scalings.values() if scaling)):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise InputDataError(
                f"{path}: partial_rotary_factor is {place['partial_rotary_factor']!r}",
                why="TensorRT-LLM's Llama rotates whole heads",
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
    """Return `scaling` unchanged, or None when it has no effect. Raises InputDataError if its type is unclear."""
    kind = _kind(scaling)
    if scaling.get("type", kind) != kind:
        raise InputDataError(f"{path}: {key} has type {scaling['type']!r} and rope_type {kind!r}")
    if kind is None and scaling:
        raise InputDataError(f"{path}: {key} names no rope_type, so its {', '.join(scaling)} cannot be applied")
    if kind is not None and not isinstance(kind, str):
        raise InputDataError(f"{path}: {key} has the rope_type {kind!r}, not a name")
    return None if kind in (None, "default") else scaling


def _require_one(path: Path, values: dict[str, Any]) -> None:
    first, *others = values or {"": None}
    for other in others:
        if values[other] != values[first]:
            raise InputDataError(f"{path}: {first} {values[first]} contradicts {other} {values[other]}")
