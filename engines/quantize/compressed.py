"""llm-compressor's Hugging Face folder (compressed-tensors), which vLLM reads for INT8, FP8 and weight-only integers.

It has the model's config.json with `quantization_config`, codes and scales under the linears' names, and no smoothing:
see `engines.quantize.folding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtpipe.engines.base import DataType
from trtpipe.engines.checkpoint.layout import source_shapes
from trtpipe.engines.checkpoint.plan import TensorPlan
from trtpipe.engines.families import names_of
from trtpipe.engines.files import write_json
from trtpipe.engines.hf import compressed_tensors
from trtpipe.engines.hf.layout import config_in, copy_companions, linear_names, router_names, whole
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization


def plan(model: ModelConfig, quantization: Quantization) -> Iterator[TensorPlan]:
    """Plans of all tensors of the folder; each is a copy of one source tensor."""
    names, algo, linears = names_of(model), quantization.quant_algo, linear_names(model)
    assert algo is not None
    for name, shape in source_shapes(model).items():
        if name in linears:
            yield from _linear(name.removesuffix("weight"), shape, algo, quantization.group_size)
        else:
            yield whole(name, shape, None)
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8:
        for layer in range(model.num_hidden_layers):
            for cache in ("k_scale", "v_scale"):
                yield whole(f"{names.layer(layer)}{names.attention}{cache}", (1,), None)


def _linear(stem: str, shape: tuple[int, ...], algo: QuantAlgo, group_size: int) -> Iterator[TensorPlan]:
    row, (out, width) = algo.row, shape
    if compressed_tensors.storage(row) == compressed_tensors.PACKED:
        yield whole(stem + "weight_packed", (out, -(-width * compressed_tensors.bits(row) // 32)), "I32")
        yield whole(stem + "weight_shape", (2,), "I64")
    else:
        yield whole(stem + "weight", shape, row.codes)
    scales = {"tensor": (1,), "row": (out, 1), "group": (out, width // group_size)}
    yield whole(stem + "weight_scale", scales[row.scale], None)
    if row.static_input:
        yield whole(stem + "input_scale", (1,), None)


def write_settings(source: Path, out: Path, dtype: DataType, quantization: Quantization, model: ModelConfig) -> None:
    """Write config.json, and copy the tokenizer."""
    method = compressed_tensors.make(quantization, [names_of(model).head, *router_names(model)])
    write_json(out / "config.json", {**config_in(source, dtype), "quantization_config": method})
    copy_companions(source, out)
