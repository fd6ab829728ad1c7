"""ModelOpt's unified Hugging Face folder, which the LLM API reads, and vLLM reads for FP8.

It has the model's config.json with `quantization_config`, hf_quant_config.json, codes under the weights' names, and
scales beside them. transformers does not know the method: it loads the codes as weights, with only a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.config import parse_quantization
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import names_of
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.folder import DETAILS, read_config_json
from trtpipe.engines.hf.layout import config_in, copy_companions, linear_names, router_names, whole
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize.formats import HUGGING_FACE

_REMEDY = "download or export the model again"


def plan(model: ModelConfig, quantization: Quantization) -> Iterator[TensorPlan]:
    """Plans of all tensors of the folder; each is a copy of one source tensor."""
    names = names_of(model)
    # Scales of the KV cache are stored beside k and v. A linear that holds both stores them under both names.
    cached = {names.k: (names.k,), names.v: (names.v,), names.qkv: (names.k, names.v)}
    suffixes = {names.k: "k_scale", names.v: "v_scale"}
    cache = quantization.kv_cache_quant_algo is not None
    # Only linears that share their input have its smoothing folded into the norm before them.
    folded = [linear for group in names.matrices if len(group) > 1 for linear in group]
    linears = linear_names(model)
    for name, shape in source_shapes(model).items():
        linear = linears.get(name)
        if linear is None:
            yield whole(name, shape, None)
            continue
        yield from _linear(name, shape, quantization, folded=linear in folded)
        for one in cached.get(linear, ()) if cache else ():
            yield whole(f"{name.removesuffix(f'{linear}.weight')}{one}.{suffixes[one]}", (), "F32")


def _linear(name: str, shape: tuple[int, ...], quantization: Quantization, *, folded: bool) -> Iterator[TensorPlan]:
    algo, stem, (out, width) = quantization.quant_algo, name.removesuffix("weight"), shape
    if algo is None:
        yield whole(name, shape, None)
        return
    names = HUGGING_FACE.names(algo)
    group = quantization.group_size
    codes: dict[str, tuple[int, ...]] = {"group": (out // 2, width), "vector": (out, width // 2)}
    scales: dict[str, tuple[int, ...]] = {
        "tensor": (),
        "row": (out,),
        "group": (out, width // group),
        "vector": (out, width // group),
        # ModelOpt keeps the dimensions over which it took the maximum.
        "block": (-(-out // group), 1, -(-width // group), 1),
    }
    kind = algo.row.scale
    yield whole(name, codes.get(kind, shape), "U8" if kind in codes else algo.row.codes)
    yield whole(stem + names["scale"], scales[kind], "F8_E4M3" if kind == "vector" else "F32")
    if algo.row.second_scale:
        yield whole(stem + names["second_scale"], (), "F32")
    if algo.row.static_input:
        yield whole(stem + names["input_scale"], (), "F32")
    if algo.row.smoothed and not (quantization.packed and folded):
        yield whole(stem + names["smooth"], (width,), None)


def write_settings(
    source: Path, out: Path, dtype: DataType, quantization: Quantization, model: ModelConfig, producer_version: str
) -> None:
    """Write config.json and hf_quant_config.json, and copy the tokenizer."""
    algo, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    named = algo and (algo.row.modelopt_name or algo.value)
    facts: dict[str, Any] = {"quant_algo": named, "kv_cache_quant_algo": cache and cache.value}
    if algo is not None and algo.row.scale == "vector":
        facts["group_size"] = quantization.group_size
    if quantization.packed:
        facts |= {"group_size": quantization.group_size, "has_zero_point": False, "pre_quant_scale": True}
    names = names_of(model)
    excluded = [names.head, names.embedding, *router_names(model)]
    producer = {"name": "modelopt", "version": producer_version}
    write_json(out / DETAILS, {"producer": producer, "quantization": {**facts, "exclude_modules": excluded}})
    eight_bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    method: dict[str, Any] = {}
    if algo is not None and algo.row.fp8_tensors:
        group = {"input_activations": eight_bits, "weights": eight_bits, "targets": ["Linear"]}
        method["config_groups"] = {"group_0": group}
    elif algo is QuantAlgo.NVFP4:
        four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": quantization.group_size}
        group = {"input_activations": four_bits, "weights": four_bits, "targets": ["Linear"]}
        method["config_groups"] = {"group_0": group}
    method |= {"ignore": excluded, "quant_algo": facts["quant_algo"], "producer": producer, "quant_method": "modelopt"}
    if cache is not None:
        method["kv_cache_scheme"] = eight_bits if cache is KvCacheQuantAlgo.FP8 else cache.value
    write_json(out / "config.json", {**config_in(source, dtype), "quantization_config": method})
    copy_companions(source, out)


def read_details(folder: Path) -> dict[str, Any] | None:
    """Read hf_quant_config.json; None when there is none. Raises InputDataError."""
    path = folder / DETAILS
    if not path.is_file():
        return None
    details = read_config_json(path, "quantization config").get("quantization")
    if not isinstance(details, dict):
        raise InputDataError(f"{path} has no quantization section", remedy="export the model again")
    return details


def parse_settings(
    method: dict[str, Any] | None, details: dict[str, Any] | None, path: Path, names: SourceNames
) -> Quantization:
    """Parse the quantization_config of the config.json `path`, the quantization of hf_quant_config.json, or both.

    Raises InputDataError when they disagree, and for a value that ModelOpt does not write.
    """
    folder, found = path.parent, {}
    if method is not None:
        # ModelOpt writes these two into its own file only.
        own = {key: (details or {}).get(key) for key in ("group_size", "has_zero_point")}
        found["quantization_config"] = {**own, **method, "exclude_modules": method.get("ignore"), **_cache(method)}
    if details is not None:
        found[DETAILS] = details
    for place, facts in found.items():
        _refuse_mixed(facts.get("exclude_modules"), f"{folder}: {place}", names)
    names_of = {algo.row.modelopt_name: algo.value for algo in QuantAlgo if algo.row.modelopt_name}
    for facts in found.values():
        facts["quant_algo"] = names_of.get(str(facts.get("quant_algo")).lower(), facts.get("quant_algo"))
    # The same keys as in a checkpoint's config.
    parsed = {place: parse_quantization(facts, f"{folder}: {place}", names.head) for place, facts in found.items()}
    first, *others = parsed.values()
    if first.quant_algo is None and first.kv_cache_quant_algo is None:
        raise InputDataError(
            f"{folder} names no quantization", why=f"{' and '.join(parsed)} is without a quant_algo", remedy=_REMEDY
        )
    if any(other != first for other in others):
        said = (
            f"{place} says {' '.join(f'{name} {value}' for name, value in summary(one).items())}"
            for place, one in parsed.items()
        )
        raise InputDataError(f"{folder} describes two quantizations", why=", ".join(said), remedy=_REMEDY)
    if first.kv_cache_quant_algo is KvCacheQuantAlgo.INT8:
        raise InputDataError(
            f"{folder} has its KV cache quantized with INT8",
            why="ModelOpt's format has no place for its scales",
            remedy="use a TensorRT-LLM checkpoint for that",
        )
    return first


def _refuse_mixed(excluded: Any, where: str, names: SourceNames) -> None:
    """Raises InputDataError for a pattern of modules without quantization that a linear of a layer matches."""
    for pattern in excluded if isinstance(excluded, list) else []:
        layers = {0, *map(int, re.findall(rf"{re.escape(names.layers)}(\d{{1,4}})", str(pattern)))}
        if any(fnmatchcase(names.layer(n) + linear, str(pattern)) for n in layers for linear in names.linears):
            raise InputDataError(
                f"{where}: exclude_modules has {pattern!r}", why="layers of mixed precision are not read here"
            )


def summary(quantization: Quantization) -> dict[str, Any]:
    """The fields that identify a quantization, under their names in a config."""
    algo, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    return {
        "quant_algo": algo and algo.value,
        "kv_cache_quant_algo": cache and cache.value,
        "group_size": quantization.group_size if quantization.packed else None,
    }


def _cache(method: dict[str, Any]) -> dict[str, Any]:
    """The KV-cache scheme of config.json as {"kv_cache_quant_algo": name}."""
    scheme = method.get("kv_cache_scheme")
    if scheme is None:
        return {}
    if scheme == KvCacheQuantAlgo.NVFP4.value:
        return {"kv_cache_quant_algo": scheme}
    float8 = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
    return {"kv_cache_quant_algo": KvCacheQuantAlgo.FP8.value if float8 else f"the scheme {scheme}"}
