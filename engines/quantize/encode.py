"""Encoding of weights into codes and scales, with the arithmetic of ModelOpt's two exporters, one layer at a time.

`for_tensorrt_llm` and `for_hugging_face` take a layer's tensors by the family's names (`self_attn.q_proj.weight`)
and return the tensors to write, under the source names in `checkpoint.plan_rank` and `unified.plan`. TensorRT-LLM
fuses q, k and v (and fc and gate in FP8), so the linears of such a group share scales in its format; in the Hugging
Face format each linear has its own scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.quantize.scales import LayerScales

Tensors = dict[str, torch.Tensor]

E4M3_MAX = 448.0
INT8_MAX = 127.0
INT4_MAX = 7.0
# Smallest scale of a row of FP8 weights, which prevents a division by zero for a row of zeros.
MIN_ROW_SCALE = 1.0 / (448.0 * 512.0)


def for_tensorrt_llm(
    weights: Mapping[str, torch.Tensor], scales: LayerScales, quantization: Quantization, source: SourceNames
) -> Tensors:
    """Encode a layer's tensors for `plan_rank`; each linear is whole, and the plan splits it over ranks.

    Raises InputDataError for a weight or input that is all zeros.
    """
    algo = quantization.quant_algo
    # FP8 also runs fc and gate as one matrix; the other algorithms run them separately.
    fused = (source.attention_inputs, source.mlp_inputs) if algo is QuantAlgo.FP8 else (source.attention_inputs,)
    out = _others(weights, source)
    if algo is None or algo is QuantAlgo.W8A16:
        out.update(weights)
    else:
        smoothed = _smoothed(weights, scales, quantization, source, (source.attention_inputs,))
        for name in source.linears:
            group = next((names for names in fused if name in names), (name,))
            out.update(_linear(name, group, smoothed, scales, quantization, _TENSORRT_LLM))
    out.update(_tensorrt_llm_cache(scales, quantization.kv_cache_quant_algo, source.attention))
    return out


def for_hugging_face(
    weights: Mapping[str, torch.Tensor], scales: LayerScales, quantization: Quantization, source: SourceNames
) -> Tensors:
    """Encode a layer's tensors for ModelOpt's unified folder. Raises InputDataError as `for_tensorrt_llm` does."""
    groups = (source.attention_inputs, source.mlp_inputs)
    out = _others(weights, source)
    smoothed = _smoothed(weights, scales, quantization, source, groups)
    for name in source.linears:
        group = next((names for names in groups if name in names), (name,))
        tensors = _linear(name, group, smoothed, scales, quantization, _HUGGING_FACE)
        if quantization.packed and len(group) > 1:
            # The group's smoothing vector is folded into the norm before it, so the linear needs none.
            smooth = tensors.pop(f"{name}.pre_quant_scale")
            before = f"{source.norm_before(name)}.weight"
            norm = weights[before]
            out[before] = (norm * smooth).to(norm.dtype)
        out.update(tensors)
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8:
        assert scales.k_amax is not None
        assert scales.v_amax is not None
        out[f"{source.k}.k_scale"] = scales.k_amax / E4M3_MAX
        out[f"{source.v}.v_scale"] = scales.v_amax / E4M3_MAX
    return out


class _Names:
    """Names of a linear's scales in a format, and the number of dimensions of its scalars."""

    def __init__(self, weight: str, row: str, second: str, activation: str, smooth: str, *, scalar: int) -> None:
        self.weight, self.row, self.second, self.activation, self.smooth = weight, row, second, activation, smooth
        self.scalar = (1,) * scalar


_TENSORRT_LLM = _Names(
    "weights_scaling_factor", "per_channel_scale", "weights_scaling_factor_2", "activation_scaling_factor",
    "prequant_scaling_factor", scalar=1,
)  # fmt: skip
_HUGGING_FACE = _Names(
    "weight_scale", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", scalar=0,
)  # fmt: skip


def _others(weights: Mapping[str, torch.Tensor], source: SourceNames) -> Tensors:
    linears = {f"{name}.weight" for name in source.linears}
    return {name: tensor for name, tensor in weights.items() if name not in linears}


def _smoothed(
    weights: Mapping[str, torch.Tensor],
    scales: LayerScales,
    quantization: Quantization,
    source: SourceNames,
    groups: tuple[tuple[str, ...], ...],
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Each linear's weight with its smoothing folded in, and the factors of its input, in the weight's type.

    Linears of a group share an input; AWQ finds a vector for each linear, and the group uses their mean.
    """
    out: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for name in source.linears:
        weight = weights[f"{name}.weight"]
        if not quantization.pre_quant_scale:
            out[name] = (weight, None)
            continue
        smooth = scales.linear(name).smooth
        assert smooth is not None, name
        smooth = smooth.to(weight.device)
        folded = (weight * (1.0 / smooth)[None, :]).to(weight.dtype)
        out[name] = (folded, smooth.to(weight.dtype))
    for group in groups:
        vectors = [vector for name in group if (vector := out[name][1]) is not None]
        if not vectors:
            continue
        mean = torch.stack(vectors).mean(dim=0)
        for name in group:
            folded, own = out[name]
            assert own is not None
            if not torch.equal(own, mean):
                folded = (folded.float() * own.float() / mean.float()).to(folded.dtype)
            out[name] = (folded, mean)
    return out


def _linear(
    name: str,
    group: tuple[str, ...],
    smoothed: dict[str, tuple[torch.Tensor, torch.Tensor | None]],
    scales: LayerScales,
    quantization: Quantization,
    names: _Names,
) -> Tensors:
    """Codes and scales of one linear. Scalar scales are the maximum over its group; their shape is in `_Names`."""
    algo = quantization.quant_algo
    weight, smooth = smoothed[name]
    device = weight.device
    if not torch.any(weight):
        raise InputDataError(f"{name} has only zeros for weights", why="no scale can be found for it")
    out: Tensors = {}

    def largest(of: Callable[[str], torch.Tensor], among: tuple[str, ...]) -> torch.Tensor:
        return torch.stack([of(one).to(device) for one in among]).amax()

    def weight_amax(one: str) -> torch.Tensor:
        return smoothed[one][0].abs().amax().float()

    def input_amax(one: str) -> torch.Tensor:
        amax = scales.linear(one).input_amax
        if amax is None or not amax > 0:
            raise InputDataError(
                f"the input of {one} is zero for every calibration sample" if amax is not None
                else f"there is no calibration of the input of {one}",
                why="no scale can be found for it",
                remedy="calibrate with other samples",
            )  # fmt: skip
        return amax

    if algo is QuantAlgo.FP8:
        # Only TensorRT-LLM fuses the matrices; in the Hugging Face format each weight has its own scale.
        shared = group if names is _TENSORRT_LLM else (name,)
        scale = (largest(weight_amax, shared) / E4M3_MAX).reshape(names.scalar)
        # With a scale of no dimensions torch divides in the weight's type, which rounds twice, as in ModelOpt.
        out["weight"] = (weight / scale).to(torch.float8_e4m3fn)
        out[names.weight] = scale
    elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
        scale = (weight.abs().amax(dim=1).float() / E4M3_MAX).clamp(min=MIN_ROW_SCALE)
        out["weight"] = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        out[names.row] = scale
    elif algo in (QuantAlgo.W8A8_SQ_PER_CHANNEL, QuantAlgo.W8A16):
        scale = weight.abs().amax(dim=1).float() / INT8_MAX
        scale[scale == 0] = 1.0
        out["weight"] = (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
        out[names.weight] = scale
    else:
        out["weight"], out[names.weight] = _pack_int4(weight, quantization.group_size)
        if names is _TENSORRT_LLM:
            out["weight"] = out["weight"].view(torch.int8)
    if algo is QuantAlgo.W4A8_AWQ:
        out[names.second] = (largest(weight_amax, group) / E4M3_MAX).reshape(names.scalar)
    if algo in (QuantAlgo.FP8, QuantAlgo.W4A8_AWQ):
        out[names.activation] = (largest(input_amax, group) / E4M3_MAX).reshape(names.scalar)
    if algo is QuantAlgo.W8A8_SQ_PER_CHANNEL:
        out[names.activation] = (largest(input_amax, group) / INT8_MAX).reshape(names.scalar)
    if smooth is not None:
        out[names.smooth] = smooth
    return {f"{name}.{suffix}": tensor for suffix, tensor in out.items()}


def _pack_int4(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [out/2, in], scales float32 [out, in/group]); output row 2j is in the low nibble of byte row j."""
    rows, width = weight.shape
    scale = weight.view(rows, width // group, group).abs().amax(dim=2).float() / INT4_MAX
    scale[scale == 0] = 1.0
    codes = (weight / scale.repeat_interleave(group, dim=1)).round().clamp(-8, 7).to(torch.int8)
    low, high = codes[0::2] & 0x0F, codes[1::2] & 0x0F
    return (low | (high << 4)).view(torch.uint8), scale


def _tensorrt_llm_cache(scales: LayerScales, algo: KvCacheQuantAlgo | None, prefix: str) -> Tensors:
    if algo is KvCacheQuantAlgo.FP8:
        assert scales.k_amax is not None
        assert scales.v_amax is not None
        # A scale below one would gain more of the type's range than it loses, but upstream never uses one.
        k, v = ((amax / E4M3_MAX).clamp(min=1.0).reshape(1) for amax in (scales.k_amax, scales.v_amax))
        both = torch.maximum(k, v)
        names = ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor")
        return {prefix + name: value for name, value in zip(names, (k, v, both), strict=True)}
    if algo is KvCacheQuantAlgo.INT8:
        assert scales.qkv_amax is not None
        return {prefix + "kv_cache_scaling_factor": (scales.qkv_amax / INT8_MAX).reshape(1)}
    return {}
