"""How an already quantized Hugging Face folder stores its weights: method, algorithm, tensors that must be there.

A method (`quant_method` of config.json) says which tensors stand for the weight of a linear. Each of them has a role of
`engines.quantize.algorithms`, so that one arithmetic computes the folders of all methods.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.layout import DERIVED_SUFFIX, SAFETENSORS_DTYPE
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families import families, names_of
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.hf import compressed_tensors, fp8_method
from trtpipe.engines.hf.config_fields import ConfigFields
from trtpipe.engines.hf.folder import DETAILS, LocatedTensor, check_tied_head, read_config_json
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import COMPRESSED_TENSORS, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize import compressed, unified

MODELOPT = "modelopt"
# Keys of old folders of GPTQ and AWQ, which name no method. ModelOpt names none where it has a quant_algo.
BITS = {"bits", "w_bit"}
FLOATS = tuple(SAFETENSORS_DTYPE.values())
Shapes = tuple[tuple[int, ...], ...]
SCALAR: Shapes = ((), (1,))
# Tensor name -> types and shapes that it may have.
Layout = Mapping[str, tuple[tuple[str, ...], Shapes]]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The quantization of a folder, the method that stores it, and the type of what is not quantized."""

    method: str
    quantization: Quantization
    dtype: DataType

    def to_json(self) -> dict[str, Any]:
        return {"method": self.method, "dtype": self.dtype.value, **unified.summary(self.quantization)}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Stored:
        """Inverse of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        algo, cache, group = raw["quant_algo"], raw["kv_cache_quant_algo"], raw["group_size"]
        if raw["method"] not in METHODS or not isinstance(group, (int, type(None))):
            raise ValueError("it has a quantization of no kind that is known")
        quantization = Quantization(
            quant_algo=algo and QuantAlgo[algo],
            kv_cache_quant_algo=cache and KvCacheQuantAlgo(cache),
            group_size=group or 128,
        )
        return cls(method=raw["method"], dtype=DataType(raw["dtype"]), quantization=quantization)

    def cache_scales(self, names: SourceNames) -> tuple[str, str]:
        """Names within a layer of the scales of keys and of values."""
        return METHODS[self.method].cache(names)

    def faults(self, model: ModelConfig, found: Mapping[str, LocatedTensor]) -> Iterator[str]:
        """Differences between the tensors `found` and those that the config implies."""
        found = under_published_names(found, names_of(model))
        names, layout = names_of(model), _layout(METHODS[self.method].plan(model, self.quantization))
        scales = {names.layer(n) + s for n in range(model.num_hidden_layers) for s in self.cache_scales(names)}
        # Without any scale of keys and values the runtimes use 1.
        if not scales & found.keys():
            layout = {name: allowed for name, allowed in layout.items() if name not in scales}
        # Some folders store a copy of the embedding as the head of a tied model, and buffers of older exports; loaders
        # read neither.
        head = f"{names.head}.weight" if model.tie_word_embeddings else ""
        read = {name: tensor for name, tensor in found.items() if name != head and not name.endswith(DERIVED_SUFFIX)}
        return deviations(read, layout)

    def check(self, where: str, model: ModelConfig, located: Mapping[str, LocatedTensor]) -> None:
        """Raises InputDataError, naming `where`, for tensors that are not those that the config implies, and for a head
        that differs from the embedding to which it ties it."""
        fault = next(self.faults(model, located), None)
        if fault is not None:
            raise InputDataError(
                f"{where}: {fault}",
                why=f"config.json says {self.describe()}",
                remedy="download or export the model again",
            )
        check_tied_head(model, located)

    def describe(self) -> str:
        """The quantization in words: `FP8 weights and an FP8 KV cache, stored by modelopt`."""
        algo, cache = self.quantization.quant_algo, self.quantization.kv_cache_quant_algo
        weights = f"{algo.value if algo else 'unquantized'} weights"
        groups = f" in groups of {self.quantization.group_size}" if self.quantization.packed else ""
        return f"{weights}{groups}{f' and an {cache.value} KV cache' if cache else ''}, stored by {self.method}"


def under_published_names(located: Mapping[str, LocatedTensor], names: SourceNames) -> Mapping[str, LocatedTensor]:
    """The tensors under the names of the published models: llm-compressor calls a Mixtral's w1, w3 and w2 by the names
    that most families have."""
    usual = {"gate_proj": names.gate, "up_proj": names.up, "down_proj": names.down}
    if not names.experts or names.gate in usual:
        return located
    pattern = re.compile(rf"({re.escape(names.experts)}\d+\.)({'|'.join(usual)})\.")
    return {pattern.sub(lambda m: f"{m[1]}{usual[m[2]]}.", name): tensor for name, tensor in located.items()}


def deviations(found: Mapping[str, LocatedTensor], layout: Layout, within: str = "") -> Iterator[str]:
    """Differences between the tensors and `layout`; `within` is the prefix of a line on a missing tensor."""
    for name, (dtypes, shapes) in layout.items():
        if name not in found:
            yield f"{within}tensor '{name}' is missing"
            continue
        entry, where = found[name].entry, f"{found[name].path.name}: tensor '{name}'"
        if entry.shape not in shapes:
            implied = " or ".join(str(list(shape)) for shape in shapes)
            yield f"{where} has shape {list(entry.shape)}, config.json implies {implied}"
        elif entry.dtype not in dtypes:
            yield f"{where} is {entry.dtype}, config.json implies {' or '.join(dtypes)}"
    for name, tensor in found.items():
        if name not in layout:
            yield f"{tensor.path.name}: tensor '{name}' has no place in this model"


def _layout(plans: Iterator[TensorPlan]) -> dict[str, tuple[tuple[str, ...], Shapes]]:
    """The tensors planned; numbers may have any float type, and a single one a dimension or none."""
    out: dict[str, tuple[tuple[str, ...], Shapes]] = {}
    for plan in plans:
        stored = plan.dtype or FLOATS[0]
        dtypes = FLOATS if stored in FLOATS else ("I64", "I32") if stored == "I64" else (stored,)
        out[plan.name] = dtypes, SCALAR if plan.shape in SCALAR else (plan.shape,)
    return out


@dataclass(frozen=True, kw_only=True)
class _Method:
    """A way to store quantized weights.

    parse  quantization of (quantization_config or None, ModelOpt's own file or None, path of config.json, names)
    plan   all tensors of a folder
    cache  names within a layer of the scales of keys and of values
    """

    parse: Callable[[dict[str, Any] | None, dict[str, Any] | None, Path, SourceNames], Quantization]
    plan: Callable[[ModelConfig, Quantization], Iterator[TensorPlan]]
    cache: Callable[[SourceNames], tuple[str, str]]


def _of_attention(names: SourceNames) -> tuple[str, str]:
    return f"{names.attention}k_scale", f"{names.attention}v_scale"


def _alone(parse: Callable[[dict[str, Any], str, SourceNames], Quantization]) -> Callable[..., Quantization]:
    """Parser of a method that states itself in config.json alone."""

    def checked(
        raw: dict[str, Any] | None, details: dict[str, Any] | None, path: Path, names: SourceNames
    ) -> Quantization:
        raw = raw or {}
        if details is not None:
            raise InputDataError(
                f"{path.parent} describes two quantizations",
                why=f"quantization_config says {raw.get('quant_method')}, and {DETAILS} is modelopt's",
                remedy="download the model again",
            )
        return parse(raw, f"{path}: quantization_config", names)

    return checked


METHODS = {
    MODELOPT: _Method(
        parse=unified.parse_settings,
        plan=unified.plan,
        cache=lambda names: (f"{names.k}.k_scale", f"{names.v}.v_scale"),
    ),
    COMPRESSED_TENSORS: _Method(
        parse=_alone(
            lambda raw, where, names: compressed_tensors.parse(
                raw, where, names.head, names.router if names.experts else ""
            )
        ),
        plan=compressed.plan,
        cache=_of_attention,
    ),
    "fp8": _Method(parse=_alone(fp8_method.parse), plan=fp8_method.plan, cache=_of_attention),
}


def read_stored(folder: Path) -> Stored | None:
    """Read how `folder` is quantized, from config.json and hf_quant_config.json; None when it is not quantized.

    Raises InputDataError for a method or an algorithm that is not read here, and for two files that disagree.
    """
    path = folder / "config.json"
    return parse_stored(read_config_json(path, "model config"), path, unified.read_details(folder))


def parse_stored(raw: dict[str, Any], path: Path, details: dict[str, Any] | None = None) -> Stored | None:
    """Parse the content of a config.json and of hf_quant_config.json as `read_stored` does; messages name `path`."""
    method = raw.get("quantization_config")
    if method is None and details is None:
        return None
    if method is not None and not isinstance(method, dict):
        raise InputDataError(
            f"{path}: quantization_config is {str(method)[:60]!r}, not an object", remedy="download the model again"
        )
    said = MODELOPT if method is None else method.get("quant_method", MODELOPT)
    if method is not None and "quant_method" not in method and BITS & method.keys():
        said = "a method that it does not name, such as GPTQ or AWQ"
    if said not in list(METHODS):
        raise InputDataError(
            f"{path.parent} is quantized by {str(said)[:60]}",
            why=f"the methods read here are {', '.join(METHODS)}",
            remedy="start from the model's bf16 or fp16 folder, or from one quantized by such a method",
        )
    quantization = METHODS[said].parse(method, details, path, _names(raw))
    dtype = ConfigFields(path, raw).dtype()
    # A few numbers in float32 make no model that computes in float32.
    return Stored(
        method=said,
        quantization=quantization,
        dtype=DataType.BFLOAT16 if dtype in (None, DataType.FLOAT32) else dtype,
    )


def _names(raw: dict[str, Any]) -> SourceNames:
    """Names of the model's family, as if it had one expert; Llama's for a model of another, which is refused
    elsewhere."""
    named = raw.get("architectures")
    family = families().get(named[0]) if isinstance(named, list) and named and isinstance(named[0], str) else None
    return family.names.of_experts(1) if family else SourceNames()
