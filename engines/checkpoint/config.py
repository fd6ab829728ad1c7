"""config.json of a TensorRT-LLM checkpoint: written for the loader of a release, and read strictly."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.quantized import LINEARS
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.families import families, family_of
from trtpipe.engines.hf.folder import read_config_json
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Experts, ModelConfig
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.sizes import excess

_T = TypeVar("_T")


@dataclass(frozen=True)
class Loader:
    """Keys that a release's loader accepts in `mapping` and `quantization` beyond the common ones, with defaults."""

    mapping: dict[str, Any]
    quantization: dict[str, Any]


_QUANTIZATION = {
    "group_size": 128,
    "smoothquant_val": 0.5,
    "clamp_val": None,
    "use_meta_recipe": False,
    "has_zero_point": False,
    "pre_quant_scale": False,
    "exclude_modules": None,
}
LOADERS = {
    "1.2.1": Loader(
        mapping={
            "cp_size": 1,
            "gpus_per_node": 8,
            "moe_tp_size": 1,  # the loader checks the product of the two even for a model without experts
            "moe_ep_size": 1,
            "attn_tp_size": -1,
            "attn_cp_size": -1,
        },
        quantization={**_QUANTIZATION, "mamba_ssm_cache_dtype": None},
    ),
    # It is not known which newer mapping keys these releases accept, and none is needed; those of experts all know.
    **{release: Loader(mapping={}, quantization=_QUANTIZATION) for release in ("1.1.0", "1.0.0", "0.21.0")},
}
DEFAULT_LOADER = "1.2.1"
_MOE_SIZES = ("moe_tp_size", "moe_ep_size")
_JSON_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}


class CheckpointError(InputDataError):
    """A TensorRT-LLM checkpoint whose config or tensors violate the format."""


def config_json(
    model: ModelConfig,
    dtype: DataType,
    mapping: Mapping,
    *,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    quantization: Quantization = UNQUANTIZED,
    toolchain: str | None = None,
) -> dict[str, Any]:
    """Content of config.json for the loader of the release `toolchain`. Raises UsageError for an unknown release.

    The loader raises TypeError for an unknown key in `mapping` or `quantization`, so these two hold only keys that
    the release accepts; all loaders accept unknown top-level keys.
    """
    release = toolchain or DEFAULT_LOADER
    if release not in LOADERS:
        raise UsageError(f"unknown toolchain '{release}'", remedy=suggestion(release, LOADERS))
    return {
        "architecture": model.architecture,
        "dtype": dtype.value,
        "logits_dtype": "float32",
        **family_of(model).checkpoint_config(model, embedding),
        **_runtime_defaults(model),
        "mapping": {
            "world_size": mapping.world_size,
            "tp_size": mapping.tp_size,
            "pp_size": mapping.pp_size,
            **LOADERS[release].mapping,
            **(_moe_sizes(mapping) if model.experts or "moe_tp_size" in LOADERS[release].mapping else {}),
        },
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            **LOADERS[release].quantization,
            **_quantization_json(quantization, model),
        },
    }


def _runtime_defaults(model: ModelConfig) -> dict[str, Any]:
    """Defaults that serving may override: the attention window of each layer, in tokens; layers repeat the list."""
    windows = list(model.attention_windows)
    return {"runtime_defaults": {"max_attention_window": windows}} if windows else {}


def _moe_sizes(mapping: Mapping) -> dict[str, int]:
    return {key: getattr(mapping, key) for key in _MOE_SIZES}


def _quantization_json(quantization: Quantization, model: ModelConfig) -> dict[str, Any]:
    algo, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    # Layers are counted over all pipeline stages.
    routed = range(model.num_hidden_layers) if model.experts else ()
    routers = [f"transformer.layers.{layer}.mlp.router" for layer in routed]
    return {
        "quant_algo": algo and algo.value,
        "kv_cache_quant_algo": cache and cache.value,
        "group_size": quantization.group_size,
        # Only AWQ loaders read this key; SmoothQuant's algorithm implies its scale.
        "pre_quant_scale": quantization.packed,
        # The list replaces the loader's default, so it must be complete.
        "exclude_modules": algo and [*algo.row.exclude, *routers],
    }


def parse_config(raw: dict[str, Any], where: str) -> CheckpointConfig:
    """Parse a checkpoint's config (or an engine's `pretrained_config`). Raises CheckpointError naming `where`."""

    def get(key: str, kind: type[_T], default: Any = None, place: dict[str, Any] = raw) -> _T:
        value = place.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{where} lacks {key}", remedy="convert the model again")
        if kind is float and type(value) is int and abs(value) < 2**63:
            value = float(value)
        # Not isinstance: a bool is an int to Python.
        if type(value) is not kind:
            raise CheckpointError(f"{where}: {key} is {value!r}, not {_JSON_NAMES[kind]}")
        return value

    def count(key: str, default: int | None = None, place: dict[str, Any] = raw) -> int:
        value = get(key, int, default, place)
        if value < 1:
            raise CheckpointError(f"{where}: {key} is {value}, not a positive number")
        if fault := excess(key, value):
            raise CheckpointError(f"{where}: {fault}", remedy="convert the model again")
        return value

    if get("position_embedding_type", str) != "rope_gpt_neox":
        raise CheckpointError(f"{where}: position_embedding_type is not rope_gpt_neox, so no rotary embedding applies")
    architecture = get("architecture", str)
    family = families().get(architecture)
    if family is None:
        raise CheckpointError(
            f"{where} is of the architecture '{architecture}'", remedy=suggestion(architecture, families())
        )
    if fault := family.checkpoint_fault(raw):
        raise CheckpointError(f"{where}: {fault}")
    try:
        dtype = DataType(get("dtype", str))
    except ValueError:
        raise CheckpointError(f"{where}: dtype {raw['dtype']!r} is none of bfloat16, float16, float32") from None
    split = get("mapping", dict, {})
    dim = get("embedding_sharding_dim", int, 0)
    if dim not in (0, 1):
        raise CheckpointError(f"{where}: embedding_sharding_dim is {dim}, not 0 or 1")
    embedding = EmbeddingSharding(dim) if get("use_parallel_embedding", bool, False) else EmbeddingSharding.NONE
    heads, hidden = count("num_attention_heads"), count("hidden_size")
    tp, pp = count("tp_size", 1, split), count("pp_size", 1, split)
    experts = None
    if family.expert_size:
        moe = get("moe", dict)
        mode = get("normalization_mode", int, 1, moe)
        if mode not in (0, 1):
            raise CheckpointError(f"{where}: normalization_mode is {mode}", why="0 and 1 are read here")
        experts = Experts(
            count=count("num_experts", place=moe),
            top_k=count("top_k", place=moe),
            normalize=mode == 1,
            intermediate_size=count(family.expert_size),
        )
        if experts.top_k > experts.count:
            raise CheckpointError(f"{where}: top_k {experts.top_k} exceeds num_experts {experts.count}")
    windows = get("runtime_defaults", dict, {}).get("max_attention_window") or []
    if not isinstance(windows, list) or not all(type(window) is int and window > 0 for window in windows):
        raise CheckpointError(f"{where}: max_attention_window is {windows!r}, not a list of positive numbers")
    # Sizes that a producer does not know are left out, or -1.
    sizes = [place if (place := get(key, int, -1, split)) != -1 else None for key in _MOE_SIZES] if experts else []
    try:
        mapping = Mapping.of(tp, pp, *sizes)
    except UsageError as error:
        raise CheckpointError(f"{where}: {error.what}", why=error.why, remedy="convert the model again") from None
    if fault := excess("world_size", mapping.world_size):
        raise CheckpointError(f"{where}: {fault}", remedy="convert the model again")
    return CheckpointConfig(
        architecture=architecture,
        dtype=dtype,
        vocab_size=count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=count("intermediate_size"),
        num_hidden_layers=count("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=count("num_key_value_heads", heads),
        head_size=count("head_size", hidden // heads),
        norm_epsilon=get("norm_epsilon", float, 1e-5),
        max_position_embeddings=count("max_position_embeddings"),
        rotary_base=get("rotary_base", float, 10000.0),
        rotary_scaling=get("rotary_scaling", dict, {}) or None,
        attn_bias=get("attn_bias", bool, False),
        mapping=mapping,
        embedding=embedding,
        tie_word_embeddings=get("tie_word_embeddings", bool, False),
        experts=experts,
        attention_windows=tuple(windows),
        quantization=parse_quantization(get("quantization", dict, {}), where),
    )


_REMEDY = "start from the model's bf16 or fp16 folder, and quantize it with one that `trtpipe quants` lists"


def parse_quantization(raw: dict[str, Any], where: str, head: str = "lm_head") -> Quantization:
    """Parse the `quantization` of a checkpoint's config, or the same keys of another file. Raises CheckpointError.

    head  name of the head in the model that the file describes
    """
    algo, cache = raw.get("quant_algo"), raw.get("kv_cache_quant_algo")
    group, excluded = raw.get("group_size"), raw.get("exclude_modules")
    if algo == "MIXED_PRECISION":
        raise CheckpointError(f"{where}: quant_algo is {algo}", why="layers of mixed precision are not read here")
    if algo is not None and algo not in list(QuantAlgo):
        raise CheckpointError(
            f"{where} is quantized with {str(algo)[:60]}",
            why=f"the algorithms read here are {', '.join(QuantAlgo)}",
            remedy=_REMEDY,
        )
    if cache is not None and cache not in list(KvCacheQuantAlgo):
        raise CheckpointError(
            f"{where}: the KV cache is quantized with {str(cache)[:60]}",
            why=f"the types read here are {', '.join(KvCacheQuantAlgo)}",
            remedy=_REMEDY,
        )
    if raw.get("has_zero_point"):
        raise CheckpointError(f"{where}: has_zero_point is set", why="no zero points are read here")
    fixed = QuantAlgo[algo].row.block if algo is not None else 0
    group = fixed or 128 if group is None else group
    if type(group) is not int or group < 1:
        raise CheckpointError(f"{where}: group_size is {group!r}, not a positive number")
    if algo is not None and QuantAlgo[algo].row.scale == "vector" and group != fixed:
        raise CheckpointError(f"{where}: group_size is {group}", why=f"{algo} has a scale for {fixed} input features")
    if excluded is not None and algo is not None:
        if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
            raise CheckpointError(f"{where}: exclude_modules is not a list of names")
        partly = [
            p
            for p in excluded
            for linear in LINEARS
            if fnmatchcase("transformer.layers.0." + linear.removesuffix(".weight"), p)
        ]
        if partly:
            raise CheckpointError(
                f"{where}: exclude_modules has {partly[0]!r}", why="layers of mixed precision are not read here"
            )
        if not any(fnmatchcase(head, pattern) for pattern in excluded):
            raise CheckpointError(
                f"{where}: exclude_modules does not name {head}", why="a quantized head is not read here"
            )
    return Quantization(
        quant_algo=None if algo is None else QuantAlgo[algo],
        kv_cache_quant_algo=None if cache is None else KvCacheQuantAlgo(cache),
        group_size=group,
    )


def read_config(folder: Path) -> CheckpointConfig:
    """Read a checkpoint folder's config.json. Raises CheckpointError."""
    path = folder / "config.json"
    raw = read_config_json(path, "checkpoint config")
    if "architectures" in raw and "architecture" not in raw:
        raise CheckpointError(
            f"{folder} is a Hugging Face folder", remedy="give a TensorRT-LLM checkpoint, as `trtpipe convert` makes it"
        )
    return parse_config(raw, str(path))
