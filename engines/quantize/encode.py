"""Encoding of weights into codes and scales, with the arithmetic of ModelOpt's two exporters and of llm-compressor.

`for_tensorrt_llm`, `for_hugging_face` and `for_compressed_tensors` take the tensors of a layer by the family's names
(`self_attn.q_proj.weight`) and return the tensors to write, under the source names in `checkpoint.plan_rank`,
`unified.plan` and `compressed.plan`. TensorRT-LLM fuses q, k and v (and fc and gate in FP8), so the linears of such a
group share scales in its format; in the Hugging Face formats each linear has its own scales.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.quantization import KvCacheQuantAlgo, Quantization
from trtpipe.engines.quantize.algorithms import Tensors, Unencoded, load_arithmetic
from trtpipe.engines.quantize.folding import fold
from trtpipe.engines.quantize.formats import COMPRESSED_TENSORS, HUGGING_FACE, TENSORRT_LLM, Format
from trtpipe.engines.quantize.packing import pack
from trtpipe.engines.quantize.scales import LayerScales
from trtpipe.engines.reference.linear import INT8_MAX
from trtpipe.engines.reference.number_formats import E2M1_MAX, E4M3_MAX


def for_tensorrt_llm(
    weights: Mapping[str, torch.Tensor], scales: LayerScales, quantization: Quantization, source: SourceNames
) -> Tensors:
    """Encode a layer's tensors for `plan_rank`; each linear is whole, and the plan splits it over ranks.

    Raises InputDataError for a weight or input that is all zeros.
    """
    algo = quantization.quant_algo
    # FP8 and NVFP4 also run fc and gate as one matrix; the other algorithms run them separately.
    fused = source.matrices if algo is not None and algo.row.scale in ("tensor", "vector") else source.matrices[:1]
    out = _others(weights, source)
    if algo is None or algo.row.engine_encodes:
        out.update(weights)
    else:
        smoothed = _smoothed(weights, scales, quantization, source, (source.attention_inputs, *_of_experts(source)))
        for name in source.linears:
            group = _group(name, fused)
            made = _linear(name, group, smoothed, scales, quantization, TENSORRT_LLM)
            if quantization.packed:
                made["weight"] = made["weight"].view(torch.int8)
            out.update(_named(name, made, TENSORRT_LLM.names(algo)))
    out.update(_tensorrt_llm_cache(scales, quantization.kv_cache_quant_algo, source.attention))
    return out


def for_hugging_face(
    weights: Mapping[str, torch.Tensor], scales: LayerScales, quantization: Quantization, source: SourceNames
) -> Tensors:
    """Encode a layer's tensors for ModelOpt's unified folder. Raises InputDataError as `for_tensorrt_llm` does."""
    algo = quantization.quant_algo
    assert algo is not None
    out = _others(weights, source)
    smoothed = _smoothed(weights, scales, quantization, source, source.matrices)
    for name in source.linears:
        group = _group(name, source.matrices)
        fused = source.experts != "" and name in source.mlp_inputs
        made = _linear(name, group, smoothed, scales, quantization, HUGGING_FACE, fused=fused)
        if quantization.packed and len(group) > 1:
            # The group's smoothing vector is folded into the norm before it, so the linear needs none.
            before = f"{source.norm_before(name)}.weight"
            out[before] = weights[before] * made.pop("smooth")
        out.update(_named(name, made, HUGGING_FACE.names(algo)))
    if quantization.kv_cache_quant_algo is not None:
        assert scales.k_amax is not None
        assert scales.v_amax is not None
        # Of an NVFP4 cache too: attention computes with FP8.
        out[f"{source.k}.k_scale"] = scales.k_amax / E4M3_MAX
        out[f"{source.v}.v_scale"] = scales.v_amax / E4M3_MAX
    return out


def for_compressed_tensors(
    weights: Mapping[str, torch.Tensor],
    scales: LayerScales,
    quantization: Quantization,
    source: SourceNames,
    head_size: int,
) -> Tensors:
    """Encode a layer's tensors for llm-compressor's folder. Raises InputDataError as `for_tensorrt_llm` does."""
    algo = quantization.quant_algo
    assert algo is not None
    out = _others(weights, source)
    dtype = weights[f"{source.o}.weight"].dtype
    # A vector is folded into what makes the input: one norm for all experts, but up's rows of each for its down.
    groups = (source.attention_inputs, source.mlp_inputs)
    smoothed = _smoothed(weights, scales, quantization, source, groups)
    values = 1.0
    if quantization.pre_quant_scale:
        smoothed, values = fold(smoothed, out, source, head_size)
    for name in source.linears:
        group = _group(name, source.matrices)
        made = _linear(name, group, smoothed, scales, quantization, COMPRESSED_TENSORS, scale_type=dtype)
        out.update({f"{name}.{part}": tensor for part, tensor in pack(made, algo, dtype).items()})
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8:
        assert scales.k_amax is not None
        assert scales.v_amax is not None
        out[f"{source.attention}k_scale"] = (scales.k_amax / E4M3_MAX).reshape(1).to(dtype)
        out[f"{source.attention}v_scale"] = (scales.v_amax * values / E4M3_MAX).reshape(1).to(dtype)
    return out


def _group(name: str, groups: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """The linears of `groups` that share `name`'s input, itself included."""
    return next((names for names in groups if name in names), (name,))


def _of_experts(source: SourceNames) -> tuple[tuple[str, ...], ...]:
    """Linears for which engines have one smoothing vector: those of all experts that stand in one stack."""
    return (source.mlp_inputs, tuple(down for _, _, down in source.mlps)) if source.experts else ()


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
    form: Format,
    scale_type: torch.dtype = torch.float32,
    *,
    fused: bool = False,
) -> Tensors:
    """Codes and scales of one linear, by their roles; `group` are the linears with the same input.

    fused  whether they share the scale of a tensor also where the format's linears do not
    """
    algo = quantization.quant_algo
    assert algo is not None
    weight, smooth = smoothed[name]
    if not torch.any(weight):
        raise InputDataError(f"{name} has only zeros for weights", why="no scale can be found for it")

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

    weights = [smoothed[one][0] for one in group]
    made = load_arithmetic(algo).encode(
        Unencoded(
            weight=weight,
            # Only TensorRT-LLM fuses the matrices; in the Hugging Face formats each weight has its own scale, but
            # ModelOpt gives gate and up of an expert one, as readers want it.
            matrix=weights if form.fuses or fused else [weight],
            group=weights,
            input_amax=lambda: torch.stack([input_amax(one).to(weight.device) for one in group]).amax(),
            group_size=quantization.group_size,
            scalar=algo.row.scalar if form.fuses else form.scalar_shape,
            int8_max=form.int8_max,
            int4_max=form.int4_max,
            scale_type=scale_type,
        )
    )
    if smooth is not None:
        made["smooth"] = smooth
    return made


def _named(name: str, made: Tensors, names: Mapping[str, str]) -> Tensors:
    return {f"{name}.{names[role]}": tensor for role, tensor in made.items()}


def _tensorrt_llm_cache(scales: LayerScales, algo: KvCacheQuantAlgo | None, prefix: str) -> Tensors:
    if algo in (KvCacheQuantAlgo.FP8, KvCacheQuantAlgo.NVFP4):
        assert scales.k_amax is not None
        assert scales.v_amax is not None
        if algo is KvCacheQuantAlgo.NVFP4:
            k, v = (amax / (E2M1_MAX * E4M3_MAX) for amax in (scales.k_amax, scales.v_amax))
        else:
            # A scale below one would gain more of the type's range than it loses, but upstream never uses one.
            k, v = ((amax / E4M3_MAX).clamp(min=1.0).reshape(1) for amax in (scales.k_amax, scales.v_amax))
        both = torch.maximum(k, v)
        names = ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor")
        return {prefix + name: value for name, value in zip(names, (k, v, both), strict=True)}
    if algo is KvCacheQuantAlgo.INT8:
        assert scales.qkv_amax is not None
        return {prefix + "kv_cache_scaling_factor": (scales.qkv_amax / INT8_MAX).reshape(1)}
    return {}
