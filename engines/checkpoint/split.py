"""Check that a model can be split over ranks: heads, features and layers, and the tiles of quantized kernels."""

from __future__ import annotations

from dataclasses import replace

from trtpipe.engines.backends.base import METHODS, form_of, readers
from trtpipe.engines.base import Mapping, divisors
from trtpipe.engines.errors import UsageError
from trtpipe.engines.families import family_of
from trtpipe.engines.model_config import EmbeddingSharding, Geometry
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization

# Weight-only kernels work on tiles of this many rows and columns.
KERNEL_MULTIPLE = 64
# Numbers of a head that share a scale in an NVFP4 KV cache.
NVFP4_VECTOR = 16
# Smallest group of input features that share a scale.
SMALL_GROUP = 64
# Some commands have the option, some `--set`, some both.
_GROUPS = f"groups of {SMALL_GROUP} (--group-size {SMALL_GROUP} or --set group_size={SMALL_GROUP})"


def check_mapping(
    model: Geometry,
    mapping: Mapping,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    quantization: Quantization = UNQUANTIZED,
    *,
    stored: bool = False,
) -> None:
    """Raises UsageError, naming the tp sizes that fit, when the model cannot be split by `mapping`.

    stored  whether the model came quantized, so that nobody can choose another precision for it
    """
    if quantization.kv_cache_quant_algo is KvCacheQuantAlgo.NVFP4 and model.head_size % NVFP4_VECTOR:
        raise UsageError(
            f"an NVFP4 KV cache is not for heads of {model.head_size}",
            why=f"{NVFP4_VECTOR} numbers of a head share a scale",
            remedy="use --kv-cache fp8 or none",
        )
    check_expert_groups(model, mapping.moe_ep_size)
    if obstacle := _tp_obstacle(model, mapping, quantization):
        raise UsageError(obstacle, remedy=_remedy(model, mapping, quantization, stored))
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


def check_expert_groups(model: Geometry, moe_ep: int) -> None:
    """Raises UsageError for a number of expert-parallel groups that the model cannot be split into. To be asked before
    a `Mapping` is made, which judges --tp and does not know the experts."""
    experts = model.experts
    if moe_ep <= 1:
        return
    if experts is None:
        raise UsageError(
            f"moe_ep_size {moe_ep} is for a model with experts, and this one has none",
            remedy="leave --moe-ep and --moe-tp out",
        )
    if experts.count % moe_ep:
        fitting = ", ".join(map(str, divisors(experts.count)))
        raise UsageError(
            f"moe_ep_size {moe_ep} does not divide the {experts.count} experts",
            remedy=f"--moe-ep values that fit: {fitting}; --tp is a multiple of it",
        )


def check_stages(model: Geometry, mapping: Mapping) -> None:
    """Raises UsageError for pipeline stages of a model that TensorRT-LLM does not divide into stages."""
    if mapping.pp_size > 1 and not family_of(model).stages:
        raise UsageError(
            f"pp_size {mapping.pp_size} is not for a {model.architecture}",
            why="TensorRT-LLM cannot divide its layers over pipeline stages",
            remedy="use --tp instead",
        )


def check_expert_format(
    model: Geometry, quantization: Quantization, form: str, stored: str = "", *, on_cpu: bool = False
) -> None:
    """Raises UsageError for a quantization in which no runtime computes experts from the checkpoint format `form`.

    stored  method by which the model came quantized, so that nobody can choose another precision for it; "" for none.
            What does not become a TensorRT-LLM checkpoint is then read in the format of that method
    on_cpu  whether it is for a CPU, on which no runtime that reads such folders computes quantized experts
    """
    algo = quantization.quant_algo
    if model.experts is None or algo is None:
        return
    if stored and form != "trtllm":
        # Runtimes also compute experts of folders that are not written here: of the method fp8, of FP8 blocks, and of
        # INT8 weights by ModelOpt (CutlassFusedMoE of TensorRT-LLM). The table judges what it has in another folder.
        known = form_of(stored)
        if known is None or not any(one in METHODS for one in algo.row.expert_formats):
            return
        form = known
    if form in algo.row.expert_formats:
        return
    works = ", ".join(one.value for one in QuantAlgo if form in one.row.expert_formats)
    others = [other for other in algo.row.expert_formats if other != form]
    remedy = f"choose one of {works}{f', or --format {others[0]}' if others else ''} (`trtpipe quants` lists them)"
    if stored:
        able = [] if on_cpu else readers(stored, algo, experts=True)
        instead = f"use --runtime {' or '.join(able)}, or " if able else ""
        remedy = f"{instead}start from the unquantized model"
    raise UsageError(
        f"experts are not quantized with {algo.value} in the format {form}",
        why="no runtime computes them so",
        remedy=remedy,
    )


def _remedy(model: Geometry, mapping: Mapping, quantization: Quantization, stored: bool) -> str:
    """A group size or tp sizes that the model can be split by, with another precision if there is none."""

    def fitting(way: Quantization) -> str:
        numbers = range(mapping.moe_ep_size, model.num_attention_heads + 1, mapping.moe_ep_size)
        sizes = [Mapping(tp_size=number, moe_ep_size=mapping.moe_ep_size) for number in numbers]
        return ", ".join(str(size.tp_size) for size in sizes if not _tp_obstacle(model, size, way))

    algo = quantization.quant_algo
    grouped = not stored and algo is not None and SMALL_GROUP in algo.row.group_sizes
    smaller = replace(quantization, group_size=SMALL_GROUP) if grouped else quantization
    if sizes := fitting(quantization):
        instead = "" if _tp_obstacle(model, mapping, smaller) else f"use {_GROUPS}, or "
        return f"{instead}tp sizes that fit: {sizes}"
    if stored:
        return "start from the model's bf16 or fp16 folder"
    if sizes := fitting(smaller):
        return f"with {_GROUPS} tp sizes that fit: {sizes}"
    # FP8 with a scale a tensor has no obstacle that unquantized weights do not have.
    sizes = fitting(UNQUANTIZED)
    return f"with a precision without groups, blocks or tiles, such as fp8 or bf16, tp sizes that fit: {sizes}"


def _mlp(model: Geometry, mapping: Mapping) -> tuple[str, int, int]:
    """(name, size, ranks that divide it) of the features of an MLP, or of one expert."""
    if model.experts is None:
        return "intermediate_size", model.intermediate_size, mapping.tp_size
    return "intermediate_size of an expert", model.experts.intermediate_size, mapping.moe_tp_size


def _inputs(model: Geometry, mapping: Mapping) -> tuple[int, ...]:
    """Numbers of input features of a rank's linears, each number once, ascending."""
    _, ffn, parts = _mlp(model, mapping)
    attended = model.num_attention_heads * model.head_size // mapping.tp_size
    return tuple(sorted({model.hidden_size, attended, ffn // parts}))


def _rounding(model: Geometry, mapping: Mapping, quantization: Quantization) -> str:
    """Size that weight-only kernels would round up, or "": the loader would then expect padding that is not written."""
    algo, tp = quantization.quant_algo, mapping.tp_size
    if algo is None or not algo.row.tiled:
        return ""
    unit = max(KERNEL_MULTIPLE, quantization.group_size if quantization.packed else 0)
    heads, kv = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    mlp, ffn, parts = _mlp(model, mapping)
    sizes = {
        "hidden_size": (model.hidden_size, unit * tp),
        "attention heads": (heads * model.head_size, unit),
        "queries, keys and values": ((heads + 2 * kv) * model.head_size, unit),
        mlp: (ffn // parts, unit),
    }
    for name, (size, multiple) in sizes.items():
        if size % multiple:
            return f"{algo.value} needs a multiple of {multiple}, and {name} of a rank is {size} at tp_size {tp}"
    return ""


def _tp_obstacle(model: Geometry, mapping: Mapping, quantization: Quantization) -> str:
    """Why the model cannot be split into `mapping.tp_size` ranks; "" when it can."""
    kv, tp = model.num_key_value_heads, mapping.tp_size
    if model.num_attention_heads % tp:
        return f"tp_size {tp} does not divide the {model.num_attention_heads} attention heads"
    if kv % tp and tp % kv:
        return f"tp_size {tp} neither divides nor is a multiple of the {kv} key/value heads, which ranks hold whole"
    mlp, ffn, parts = _mlp(model, mapping)
    if ffn % parts:
        return f"{'tp_size' if model.experts is None else 'moe_tp_size'} {parts} does not divide {mlp} {ffn}"
    inputs = _inputs(model, mapping)
    named = " and ".join(map(str, inputs))
    if quantization.packed:
        group = quantization.group_size
        if any(size % group for size in inputs):
            return f"groups of {group} do not divide the {named} input features at tp_size {tp}"
        if ffn // parts % 2 or model.head_size % 2 or model.hidden_size % 2:
            return f"an odd number of output features at tp_size {tp} cannot be packed two to a byte"
    return _partial_block(model, mapping, quantization) or _rounding(model, mapping, quantization)


def _partial_block(model: Geometry, mapping: Mapping, quantization: Quantization) -> str:
    """Sizes that blocks of a fixed size do not divide, or "": runtimes join q, k and v, where a partial block would
    leave the next one out of step."""
    algo, tp = quantization.quant_algo, mapping.tp_size
    if algo is None or not algo.row.block:
        return ""
    block, kv = algo.row.block, max(1, model.num_key_value_heads // tp) * model.head_size
    inputs = _inputs(model, mapping)
    if any(size % block for size in inputs):
        named = " and ".join(map(str, inputs))
        return f"blocks of {block} do not divide the {named} input features at tp_size {tp}"
    if algo.row.scale == "block" and kv % block:
        return f"blocks of {block} do not divide the {kv} features of keys at tp_size {tp}"
    return ""
