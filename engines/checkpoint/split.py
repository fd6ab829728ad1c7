"""Check that a model can be split over ranks: heads, features and layers, and the tiles of quantized kernels."""

from __future__ import annotations

from dataclasses import replace

from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.model_config import EmbeddingSharding, Geometry
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, Quantization

# Weight-only kernels work on tiles of this many rows and columns.
KERNEL_MULTIPLE = 64
# Numbers of a head that share a scale in an NVFP4 KV cache.
NVFP4_VECTOR = 16
# Smallest group of input features that share a scale.
SMALL_GROUP = 64


def check_mapping(
    model: Geometry,
    mapping: Mapping,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    quantization: Quantization = UNQUANTIZED,
) -> None:
    """Raises UsageError, naming the tp sizes that fit, when the model cannot be split by `mapping`."""
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4 and model.head_size % NVFP4_VECTOR:
        raise UsageError(
            f"an NVFP4 KV cache is not for heads of {model.head_size}",
            why=f"{NVFP4_VECTOR} numbers of a head share a scale",
            remedy="use --kv-cache fp8 or none",
        )
    obstacle = _tp_obstacle(model, mapping.tp_size, quantization)
    if obstacle:
        raise UsageError(obstacle, remedy=_remedy(model, mapping.tp_size, quantization))
    if embedding is EmbeddingSharding.HIDDEN and model.hidden_size % mapping.tp_size:
        raise UsageError(
            f"tp_size {mapping.tp_size} does not divide hidden_size {model.hidden_size}",
            why="--embedding-sharding-dim 1 cuts the embedding table along it",
            remedy="use --embedding-sharding-dim 0",
        )
    if mapping.pp_size > model.num_hidden_layers:
        raise UsageError(
            f"pp_size {mapping.pp_size} exceeds the {model.num_hidden_layers} layers",
            remedy=f"use at most --pp {model.num_hidden_layers}",
        )


def _remedy(model: Geometry, tp: int, quantization: Quantization) -> str:
    """A group size or tp sizes that the model can be split by, with another precision if there is none."""

    def fitting(way: Quantization) -> str:
        return ", ".join(str(n) for n in range(1, model.num_attention_heads + 1) if not _tp_obstacle(model, n, way))

    algo = quantization.quant_algo
    grouped = algo is not None and SMALL_GROUP in algo.row.group_sizes
    smaller = replace(quantization, group_size=SMALL_GROUP) if grouped else quantization
    if sizes := fitting(quantization):
        instead = "" if _tp_obstacle(model, tp, smaller) else f"use --group-size {SMALL_GROUP}, or "
        return f"{instead}tp sizes that fit: {sizes}"
    if sizes := fitting(smaller):
        return f"with --group-size {SMALL_GROUP} tp sizes that fit: {sizes}"
    return f"with a --dtype without groups or tiles, such as bf16, tp sizes that fit: {fitting(UNQUANTIZED)}"


def _inputs(model: Geometry, tp: int) -> str:
    """Numbers of input features of a rank's linears, each number once, as text."""
    sizes = {model.hidden_size, model.num_attention_heads * model.head_size // tp, model.intermediate_size // tp}
    return " and ".join(str(size) for size in sorted(sizes))


def _rounding(model: Geometry, tp: int, quantization: Quantization) -> str:
    """Size that weight-only kernels would round up, or "": the loader would then expect padding that is not written."""
    algo = quantization.quant_algo
    if algo is None or not algo.row.tiled:
        return ""
    unit = max(KERNEL_MULTIPLE, quantization.group_size if quantization.packed else 0)
    heads, kv = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    sizes = {
        "hidden_size": (model.hidden_size, unit * tp),
        "attention heads": (heads * model.head_size, unit),
        "queries, keys and values": ((heads + 2 * kv) * model.head_size, unit),
        "intermediate_size": (model.intermediate_size // tp, unit),
    }
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            return f"{algo.value} needs a multiple of {multiple}, and {name} of a rank is {size} at tp_size {tp}"
    return ""


def _tp_obstacle(model: Geometry, tp: int, quantization: Quantization) -> str:
    """Why the model cannot be split into `tp` ranks; "" when it can."""
    kv = model.num_key_value_heads
    if model.num_attention_heads % tp:
        return f"tp_size {tp} does not divide the {model.num_attention_heads} attention heads"
    if kv % tp and tp % kv:
        return f"tp_size {tp} neither divides nor is a multiple of the {kv} key/value heads, which ranks hold whole"
    if model.intermediate_size % tp:
        return f"tp_size {tp} does not divide intermediate_size {model.intermediate_size}"
    if quantization.packed:
        group, ffn = quantization.group_size, model.intermediate_size // tp
        if any(n % group for n in (model.hidden_size, model.num_attention_heads * model.head_size // tp, ffn)):
            return f"groups of {group} do not divide the {_inputs(model, tp)} input features at tp_size {tp}"
        if ffn % 2 or model.head_size % 2 or model.hidden_size % 2:
            return f"an odd number of output features at tp_size {tp} cannot be packed two to a byte"
    return _partial_block(model, tp, quantization) or _rounding(model, tp, quantization)


def _partial_block(model: Geometry, tp: int, quantization: Quantization) -> str:
    """Sizes that blocks of a fixed size do not divide, or "": runtimes join q, k and v, where a partial block would
    leave the next one out of step."""
    algo = quantization.quant_algo
    if algo is None or not algo.row.block:
        return ""
    block, kv = algo.row.block, max(1, model.num_key_value_heads // tp) * model.head_size
    if any(int(size) % block for size in _inputs(model, tp).split(" and ")):
        return f"blocks of {block} do not divide the {_inputs(model, tp)} input features at tp_size {tp}"
    if algo.row.scale == "block" and kv % block:
        return f"blocks of {block} do not divide the {kv} features of keys at tp_size {tp}"
    return ""
