"""Scales that calibration finds, and their file: a few numbers per layer, sufficient to write any format and mapping.

The file is safetensors: `model.layers.{i}.self_attn.q_proj.input_amax` and so on. Weight maxima are not stored: they
are computed from the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import KvCacheQuantAlgo, Quantization


@dataclass(frozen=True, kw_only=True)
class LinearScales:
    """Scales of one linear; all float32 on the CPU.

    input_amax  [] largest magnitude of the input (after smoothing, if any); None when not calibrated
    smooth      [in] factors of the input, before rounding to the model's type; None without smoothing
    """

    input_amax: torch.Tensor | None = None
    smooth: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class LayerScales:
    """Scales of one decoder layer: its linears by name, and largest magnitudes for the KV cache, [] float32 or None.

    k_amax, v_amax  of keys (rotated) and values; for FP8
    qkv_amax        of the outputs of q, k and v; for INT8, where TensorRT-LLM includes the queries
    """

    linears: dict[str, LinearScales] = field(default_factory=dict)
    k_amax: torch.Tensor | None = None
    v_amax: torch.Tensor | None = None
    qkv_amax: torch.Tensor | None = None

    def linear(self, name: str) -> LinearScales:
        return self.linears.get(name, LinearScales())


# Sizes of a model that its scales depend on. A vocabulary may have grown: neither embedding nor head is quantized.
SIZES = (
    "architecture", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_size",
)  # fmt: skip


def identity(model: ModelConfig, weights: str) -> dict[str, str]:
    """The fields by which a file of scales names its model: its sizes, and as `weights` a digest of its weights."""
    sizes = {name: str(getattr(model, name)) for name in SIZES}
    return {**sizes, "experts": str(model.experts and model.experts.count), "weights": weights}


def save_scales(
    layers: Iterable[LayerScales], path: Path, quantization: Quantization, names: SourceNames,
    model: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write the scales of all layers, first to last, the quantization that they are for, and the `identity` of the
    model."""
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        prefix = names.layer(index)
        for name, linear in layer.linears.items():
            tensors[f"{prefix}{name}.input_amax"] = linear.input_amax  # type: ignore[assignment]
            tensors[f"{prefix}{name}.smooth"] = linear.smooth  # type: ignore[assignment]
        for cache in ("k_amax", "v_amax", "qkv_amax"):
            tensors[f"{prefix}{names.attention}{cache}"] = getattr(layer, cache)
    # A copy of each, since the file cannot hold one number under two names, as experts have it.
    known = {name: tensor.contiguous().clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(known, path, metadata={**_purpose(quantization), **(model or {})})


def _purpose(quantization: Quantization) -> dict[str, str]:
    # A linear's input is measured after smoothing, so scales of one algorithm are wrong for another.
    return {
        "quant_algo": str(quantization.quant_algo and quantization.quant_algo.value),
        "kv_cache_quant_algo": str(quantization.kv_cache_quant_algo and quantization.kv_cache_quant_algo.value),
        "group_size": str(quantization.group_size if quantization.packed else None),
    }


def load_scales(
    path: Path, num_layers: int, quantization: Quantization, names: SourceNames, model: Mapping[str, str] | None = None
) -> list[LayerScales]:
    """Read a file of `save_scales`, for a model of this `identity`, whose weights may be others.

    Raises InputDataError for a damaged or incomplete file, and for one of another recipe or model.
    """
    try:
        with safe_open(path, "pt") as file:
            purpose = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise InputDataError(f"{path} cannot be read as scales", why=str(error)) from None
    for name, wanted in _purpose(quantization).items():
        if purpose.get(name) != wanted:
            raise InputDataError(
                f"{path} holds scales for {name} {purpose.get(name)}",
                why=f"the recipe has {name} {wanted}",
                remedy="calibrate with this recipe",
            )
    for name, wanted in (model or {}).items():
        # Earlier releases, and the pipeline, wrote nothing of the model.
        if name != "weights" and purpose.get(name, wanted) != wanted:
            raise InputDataError(
                f"{path} holds scales of another model, with {name} {purpose[name]}",
                why=f"this model has {name} {wanted}",
                remedy="calibrate this model",
            )

    for index in range(num_layers):
        for name in _needed(quantization, names):
            if f"{names.layer(index)}{name}" not in tensors:
                raise InputDataError(
                    f"{path} lacks '{names.layer(index)}{name}'",
                    why="the recipe cannot be written without it",
                    remedy="calibrate this model with this recipe",
                )

    def layer(index: int) -> LayerScales:
        prefix = names.layer(index)
        return LayerScales(
            linears={
                name: LinearScales(
                    input_amax=tensors.pop(f"{prefix}{name}.input_amax", None),
                    smooth=tensors.pop(f"{prefix}{name}.smooth", None),
                )
                for name in names.linears
            },
            k_amax=tensors.pop(f"{prefix}{names.attention}k_amax", None),
            v_amax=tensors.pop(f"{prefix}{names.attention}v_amax", None),
            qkv_amax=tensors.pop(f"{prefix}{names.attention}qkv_amax", None),
        )

    layers = [layer(index) for index in range(num_layers)]
    if tensors:
        raise InputDataError(
            f"{path} holds '{min(tensors)}', which this model has no place for",
            why=f"the model has {num_layers} layers",
            remedy="calibrate this model",
        )
    return layers


def other_weights(path: Path, model: Mapping[str, str]) -> bool:
    """Whether a file of scales was made for a model of other weights than those of `model`."""
    with safe_open(path, "pt") as file:
        return bool((file.metadata() or {}).get("weights", model["weights"]) != model["weights"])


def check_widths(path: Path, index: int, scales: LayerScales, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises InputDataError for smoothing of other sizes than those of layer `index`, whose tensors are `weights`."""
    for name, linear in scales.linears.items():
        weight = weights.get(f"{name}.weight")
        if linear.smooth is not None and weight is not None and linear.smooth.shape != weight.shape[-1:]:
            raise InputDataError(
                f"{path} holds scales of another model, with {linear.smooth.numel()} inputs of {name} in layer {index}",
                why=f"this model has {weight.shape[-1]}",
                remedy="calibrate this model",
            )


def _needed(quantization: Quantization, names: SourceNames) -> list[str]:
    """Names of the scales that each layer must have, without the layer's prefix."""
    algo, parts = quantization.quant_algo, []
    if algo is not None:
        parts = [part for part, has in (("input_amax", algo.row.static_input), ("smooth", algo.row.smoothed)) if has]
    cache = {None: (), KvCacheQuantAlgo.INT8: ("qkv_amax",)}.get(quantization.kv_cache_quant_algo, ("k_amax", "v_amax"))
    return [*(f"{linear}.{part}" for linear in names.linears for part in parts), *(names.attention + c for c in cache)]
