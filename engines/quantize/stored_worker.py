"""Worker process that writes an already quantized Hugging Face folder as a TensorRT-LLM checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trtpipe.engines.checkpoint.layout import SAFETENSORS_DTYPE
from trtpipe.engines.families import names_of
from trtpipe.engines.families.base import SourceNames
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.folder import locate_tensors, read_model_config
from trtpipe.engines.hf.stored import Stored, read_stored, under_published_names
from trtpipe.engines.process import Progress, serve_worker
from trtpipe.engines.quantization import Algorithm, KvCacheQuantAlgo
from trtpipe.engines.quantize.algorithms import Tensors
from trtpipe.engines.quantize.formats import TENSORRT_LLM
from trtpipe.engines.quantize.worker import TORCH_DTYPE, lay_out_checkpoint
from trtpipe.engines.quantize.writer import Writer
from trtpipe.engines.reference.mapped_tensors import MappedTensors
from trtpipe.engines.reference.number_formats import E2M1_MAX, to_e4m3
from trtpipe.engines.reference.stored_linear import cache_scale, read_linear


def work(spec: dict[str, Any], progress: Progress) -> None:
    """Run a job of `stored.convert_stored`; `spec` has its arguments as plain values. Writes spec["notes"]."""
    source, out = Path(spec["source"]), Path(spec["out"])
    model, stored = read_model_config(source, quantized=True), read_stored(source)
    assert stored is not None
    located, names = locate_tensors(source), names_of(model)
    stored.check(str(source), model, located)
    dtype = stored.dtype
    tensors = MappedTensors(under_published_names(located, names), torch.device("cpu"))
    total, rounded = sum(tensor.entry.nbytes for tensor in located.values()), 0
    with Writer(SAFETENSORS_DTYPE[dtype]) as writer, torch.no_grad():
        lay_out_checkpoint({**spec, "embedding": "none"}, model, dtype, stored.quantization, out, writer)
        for index in range(model.num_hidden_layers):
            made, count = _layer(tensors, names.layer(index), stored, names, TORCH_DTYPE[dtype])
            for name, tensor in made.items():
                writer.write(names.layer(index) + name, tensor)
            rounded += count
            progress((index + 1) * total // model.num_hidden_layers, total)
        for name in writer.missing:
            writer.write(name, tensors[name])
    write_json(Path(spec["notes"]), {"rounded": rounded})


def _layer(
    tensors: Mapping[str, torch.Tensor], prefix: str, stored: Stored, source: SourceNames, dtype: torch.dtype
) -> tuple[Tensors, int]:
    """A layer's quantized tensors and cache scales, under the names of `plan_rank`, and a count of rounded matrices."""
    out: Tensors = {}
    rounded, algo = 0, stored.quantization.quant_algo
    # An engine has one scale of the inputs for all experts.
    stacks = (source.mlp_inputs, tuple(down for _, _, down in source.mlps)) if source.experts else ()
    of_stack = {name: _input_scale(tensors, prefix, stack) for stack in stacks for name in stack[:1]}
    of_experts = {name: of_stack[stack[0]] for stack in stacks for name in stack}
    # FP8 also runs fc and gate as one matrix.
    fused = source.matrices if algo is not None and algo.row.fp8_tensors else source.matrices[:1]
    groups = [*fused, *((name,) for name in source.linears if not any(name in group for group in fused))]
    if algo is not None:
        names = TENSORRT_LLM.names(algo)
        for group in groups:
            linears = [read_linear(tensors, prefix + name, stored.quantization) for name in group]
            for name, linear in zip(group, linears, strict=True):
                if "input_scale" in linear and name in of_experts:
                    linear["input_scale"] = of_experts[name]
            rounded += _share(linears, algo.row)
            for name, linear in zip(group, linears, strict=True):
                if algo.row.smoothed:
                    # Where the vector is folded into the norm before the linear, the checkpoint's own changes nothing.
                    width = linear["weight"].shape[1]
                    linear["smooth"] = linear.get("smooth", torch.ones(width)).to(dtype)
                if stored.quantization.packed:
                    linear["weight"] = linear["weight"].view(torch.int8)
                for role, tensor in linear.items():
                    scalar = role != "weight" and tensor.dim() == 0
                    out[f"{name}.{names[role]}"] = tensor.reshape(TENSORRT_LLM.scalar_shape) if scalar else tensor
    if stored.quantization.kv_cache_quant_algo is not None:
        k, v = (cache_scale(tensors, prefix + name) for name in stored.cache_scales(source))
        if stored.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4:
            # A folder's are for FP8, which attention computes with; see `encode`.
            k, v = ((scale / E2M1_MAX).reshape(()) for scale in (k, v))
        else:
            # A checkpoint's scales are never below one, as in `encode`.
            k, v = (scale.clamp(min=1.0).reshape(TENSORRT_LLM.scalar_shape) for scale in (k, v))
        scales = {
            "k_cache_scaling_factor": k,
            "v_cache_scaling_factor": v,
            "kv_cache_scaling_factor": torch.maximum(k, v),
        }
        out.update({source.attention + name: scale for name, scale in scales.items()})
    return out, rounded


def _input_scale(tensors: Mapping[str, torch.Tensor], prefix: str, names: Sequence[str]) -> torch.Tensor:
    """The largest scale of the inputs of some linears, [] float32; 0 where they have none."""
    scales = [tensors[name] for one in names if (name := f"{prefix}{one}.input_scale") in tensors]
    return torch.stack([scale.reshape(()).float() for scale in scales]).amax() if scales else torch.zeros(())


def _share(linears: Sequence[Tensors], row: Algorithm) -> int:
    """Give linears that are one matrix in a checkpoint the scales that they share; return how many are rounded anew."""
    if row.static_input:
        largest = torch.stack([linear["input_scale"].reshape(()) for linear in linears]).amax()
        for linear in linears:
            linear["input_scale"] = largest
    if row.scale != "tensor":
        return 0
    shared, rounded = torch.stack([linear["scale"].reshape(()) for linear in linears]).amax(), 0
    for linear in linears:
        own, linear["scale"] = linear["scale"].reshape(()), shared
        if own != shared:
            linear["weight"] = to_e4m3(linear["weight"].float() * (own / shared))
            rounded += 1
    return rounded


if __name__ == "__main__":
    serve_worker(work)
