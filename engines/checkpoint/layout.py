"""TensorRT-LLM checkpoint format of a dense Llama: tensor names, shapes and split rules, defined here only.

A checkpoint is config.json plus rank{N}.safetensors, N = pp_rank * tp_size + tp_rank. Weights are [out, in].
The names are misleading: TensorRT-LLM computes act(fc(x)) * gate(x), so `mlp.fc` is Hugging Face's gate_proj and
`mlp.gate` is its up_proj. Layer numbers start at 0 in every pipeline stage.

A quantized linear consists of several tensors: the codes under the weight's name, and the scales beside them. Their
pieces name a source that the quantizer makes, such as `model.layers.0.self_attn.q_proj.weights_scaling_factor`;
rows and columns count in the units of that source (AWQ packs two output rows in a byte).

Rotary tables (embed_positions, rotary_inv_freq) are not written: the loader computes them from config.json and
does not require them, and ModelOpt does not write them either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.hf.folder import ModelConfig, read_config_json
from trtpipe.engines.quantization import UNQUANTIZED, KvCacheQuantAlgo, QuantAlgo, Quantization
from trtpipe.engines.sizes import excess

SAFETENSORS_DTYPE = {DataType.BFLOAT16: "BF16", DataType.FLOAT16: "F16", DataType.FLOAT32: "F32"}

# Tables that TensorRT-LLM's own converter stores beside the weights; they are computed from the config.
ROTARY_TABLES = frozenset({"embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention"})

_T = TypeVar("_T")
_Range = tuple[int, int]


@dataclass(frozen=True)
class Loader:
    """Keys that a release's loader accepts in `mapping` and `quantization` beyond the common ones, with defaults.

    None in `mapping` stands for tp_size.
    """

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
            "moe_tp_size": None,  # tp_size: the loader checks the product even for a model without experts
            "moe_ep_size": 1,
            "attn_tp_size": -1,
            "attn_cp_size": -1,
        },
        quantization={**_QUANTIZATION, "mamba_ssm_cache_dtype": None},
    ),
    # It is not known which newer mapping keys these releases accept, and none is needed.
    **{release: Loader(mapping={}, quantization=_QUANTIZATION) for release in ("1.1.0", "1.0.0", "0.21.0")},
}
DEFAULT_LOADER = "1.2.1"
# Weight-only kernels work on tiles of this many rows and columns.
KERNEL_MULTIPLE = 64
_JSON_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", dict: "an object"}


class CheckpointError(InputDataError):
    """A TensorRT-LLM checkpoint whose config or tensors violate the format."""


class EmbeddingSharding(enum.Enum):
    """How tensor-parallel ranks store the embedding table: whole, by rows (vocabulary), or by columns (hidden).

    In config.json: use_parallel_embedding, and embedding_sharding_dim 0 or 1.
    """

    NONE = "none"
    VOCABULARY = 0
    HIDDEN = 1

    @classmethod
    def of(cls, parallel: bool, dim: int) -> EmbeddingSharding:
        """Value for TensorRT-LLM's two settings of the embedding. Raises UsageError for another dimension."""
        if dim not in (0, 1):
            raise UsageError(f"embedding_sharding_dim is {dim}", remedy="use 0 for the vocabulary, 1 for hidden size")
        return cls(dim) if parallel else cls.NONE


@dataclass(frozen=True)
class Piece:
    """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of one HF tensor; a vector has rows only."""

    source: str
    rows: tuple[int, int]
    cols: tuple[int, int] | None = None

    def elements(self, shape: tuple[int, ...]) -> int:
        """Number of elements in this piece's rows of a tensor of that shape, over all columns."""
        return (self.rows[1] - self.rows[0]) * (shape[1] if len(shape) > 1 else 1)


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a rank file: HF pieces stacked along dim 0, then `pad_rows` rows of zeros.

    dtype  safetensors type; None for the checkpoint's type
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    pad_rows: int = 0
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Content of a checkpoint's config.json, as the loaders read it."""

    architecture: str
    dtype: DataType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    norm_epsilon: float
    max_position_embeddings: int
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    attn_bias: bool
    mapping: Mapping
    embedding: EmbeddingSharding = EmbeddingSharding.NONE
    tie_word_embeddings: bool = False
    quantization: Quantization = UNQUANTIZED


class Geometry(Protocol):
    """Sizes that determine tensor names and shapes; both ModelConfig and CheckpointConfig have them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def attn_bias(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


def check_mapping(
    model: Geometry,
    mapping: Mapping,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    quantization: Quantization = UNQUANTIZED,
) -> None:
    """Raises UsageError, naming the tp sizes that fit, when the model cannot be split by `mapping`."""
    obstacle = _tp_obstacle(model, mapping.tp_size, quantization)
    if obstacle:
        sizes = range(1, model.num_attention_heads + 1)
        fitting = [str(tp) for tp in sizes if not _tp_obstacle(model, tp, quantization)]
        if fitting:
            raise UsageError(obstacle, remedy="tp sizes that fit: " + ", ".join(fitting))
        raise UsageError(obstacle, remedy=f"use --group-size 64, if it divides {_inputs(model, 1)}")
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


def _inputs(model: Geometry, tp: int) -> str:
    """Numbers of input features of a rank's linears, each number once, as text."""
    sizes = {model.hidden_size, model.num_attention_heads * model.head_size // tp, model.intermediate_size // tp}
    return " and ".join(str(size) for size in sorted(sizes))


def _rounding(model: Geometry, tp: int, quantization: Quantization) -> str:
    """Size that weight-only kernels would round up, or "": the loader would then expect padding that is not written."""
    algo = quantization.quant_algo
    if algo is not QuantAlgo.W8A16 and not quantization.packed:
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
            assert algo is not None
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
    return _rounding(model, tp, quantization)


def notices(model: ModelConfig) -> list[str]:
    """Notices for the user about a conversion that keeps all weights."""
    window = model.sliding_window
    if window is None or window >= model.max_position_embeddings:
        return []
    return [
        f"the model attends within a sliding window of {window} tokens, which a checkpoint cannot say: "
        f"set max_attention_window_size {window} when serving sequences longer than that"
    ]


def kv_head_rows(model: Geometry, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Rows of k_proj or v_proj that a rank stores; with more ranks than KV heads, several ranks store the same head."""
    if tp_size > model.num_key_value_heads:
        head = tp_rank * model.num_key_value_heads // tp_size
        return head * model.head_size, (head + 1) * model.head_size
    return _share(model.num_key_value_heads * model.head_size, tp_size, tp_rank)


def plan_rank(
    model: Geometry,
    mapping: Mapping,
    *,
    tp_rank: int,
    pp_rank: int,
    embedding: EmbeddingSharding = EmbeddingSharding.NONE,
    quantization: Quantization = UNQUANTIZED,
) -> Iterator[TensorPlan]:
    """Plans of all tensors of one rank file, in file order, each with its HF pieces."""
    hidden, vocab, tp = model.hidden_size, model.vocab_size, mapping.tp_size
    stages = mapping.layers(model.num_hidden_layers)
    if pp_rank == 0:
        embed = "model.embed_tokens.weight"
        name = "transformer.vocab_embedding.weight"
        if embedding is EmbeddingSharding.VOCABULARY:
            yield _vocab_rows(name, embed, vocab, hidden, tp, tp_rank)
        elif embedding is EmbeddingSharding.HIDDEN:
            yield TensorPlan(name, (vocab, hidden // tp), (Piece(embed, (0, vocab), _share(hidden, tp, tp_rank)),))
        else:
            yield TensorPlan(name, (vocab, hidden), (Piece(embed, (0, vocab)),))
    for local, layer in enumerate(stages[pp_rank]):
        ours, theirs = f"transformer.layers.{local}.", f"model.layers.{layer}."
        for plan in _plan_layer(model, tp, tp_rank, ours, theirs):
            yield from _quantized(plan, quantization)
        yield from _cache_scales(ours + "attention.", theirs + "self_attn.", quantization.kv_cache_quant_algo)
    if pp_rank == mapping.pp_size - 1:
        yield TensorPlan("transformer.ln_f.weight", (hidden,), (Piece("model.norm.weight", (0, hidden)),))
        # A tied model's checkpoint stores the head too, as a copy of the embedding: the build merges the two again.
        head = "model.embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
        yield _vocab_rows("lm_head.weight", head, vocab, hidden, tp, tp_rank)


def rank_layout(config: CheckpointConfig, *, pp_rank: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensors of a rank file, name -> (type, shape); the same for every rank of a pipeline stage."""
    plans = plan_rank(
        config,
        config.mapping,
        tp_rank=0,
        pp_rank=pp_rank,
        embedding=config.embedding,
        quantization=config.quantization,
    )
    return {plan.name: (plan.dtype or SAFETENSORS_DTYPE[config.dtype], plan.shape) for plan in plans}


_LINEARS = ("attention.qkv.weight", "attention.dense.weight", "mlp.fc.weight", "mlp.gate.weight", "mlp.proj.weight")
_CODES = {
    QuantAlgo.FP8: "F8_E4M3",
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: "F8_E4M3",
    QuantAlgo.W8A8_SQ_PER_CHANNEL: "I8",
    QuantAlgo.W4A16_AWQ: "I8",
    QuantAlgo.W4A8_AWQ: "I8",
}


def _quantized(plan: TensorPlan, quantization: Quantization) -> Iterator[TensorPlan]:
    """Tensors stored for one tensor of a layer: codes and scales for a linear's weight, otherwise the tensor."""
    algo = quantization.quant_algo
    # A W8A16 checkpoint stores float weights: the engine build quantizes them, in the layout of its GPU.
    if algo is None or algo is QuantAlgo.W8A16 or not plan.name.endswith(_LINEARS):
        yield plan
        return
    name, pieces = plan.name.removesuffix("weight"), plan.pieces
    out, width = plan.shape
    columns = pieces[0].cols or (0, width)

    def encoded(suffix: str, dtype: str | None, shape: tuple[int, ...], cut: list[tuple[Piece, _Range]]) -> TensorPlan:
        parts = (Piece(piece.source.removesuffix("weight") + suffix, rows) for piece, rows in cut)
        return TensorPlan(name + suffix, shape, tuple(parts), dtype=dtype)

    def scalar(suffix: str) -> TensorPlan:
        return encoded(suffix, "F32", (1,), [(pieces[0], (0, 1))])

    per_row = [(piece, piece.rows) for piece in pieces]
    if quantization.packed:
        group = quantization.group_size
        halves = tuple(Piece(p.source, (p.rows[0] // 2, p.rows[1] // 2), p.cols) for p in pieces)
        yield TensorPlan(plan.name, (out // 2, width), halves, dtype=_CODES[algo])
        groups = (columns[0] // group, columns[1] // group)
        stem = "weights_scaling_factor"
        scales = tuple(Piece(p.source.removesuffix("weight") + stem, p.rows, groups) for p in pieces)
        yield TensorPlan(name + stem, (out, width // group), scales, dtype="F32")
    else:
        yield TensorPlan(plan.name, plan.shape, pieces, dtype=_CODES[algo])
        if algo is QuantAlgo.FP8:
            yield scalar("weights_scaling_factor")
        elif algo is QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN:
            yield encoded("per_channel_scale", "F32", (out,), per_row)
        else:
            yield encoded("weights_scaling_factor", "F32", (out,), per_row)
    if algo is QuantAlgo.W4A8_AWQ:
        yield scalar("weights_scaling_factor_2")
    if algo in (QuantAlgo.FP8, QuantAlgo.W8A8_SQ_PER_CHANNEL, QuantAlgo.W4A8_AWQ):
        yield scalar("activation_scaling_factor")
    if quantization.pre_quant_scale:
        yield encoded("prequant_scaling_factor", None, (width,), [(pieces[0], columns)])


def _cache_scales(ours: str, theirs: str, algo: KvCacheQuantAlgo | None) -> Iterator[TensorPlan]:
    names = {
        None: (),
        KvCacheQuantAlgo.FP8: ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor"),
        KvCacheQuantAlgo.INT8: ("kv_cache_scaling_factor",),
    }[algo]
    for name in names:
        yield TensorPlan(ours + name, (1,), (Piece(theirs + name, (0, 1)),), dtype="F32")


def _plan_layer(model: Geometry, tp: int, tp_rank: int, ours: str, theirs: str) -> Iterator[TensorPlan]:
    hidden, ffn = model.hidden_size, model.intermediate_size
    q_rows = _share(model.num_attention_heads * model.head_size, tp, tp_rank)
    kv_rows = kv_head_rows(model, tp, tp_rank)
    ffn_rows = _share(ffn, tp, tp_rank)
    attn = theirs + "self_attn."
    qkv = ((attn + "q_proj", q_rows), (attn + "k_proj", kv_rows), (attn + "v_proj", kv_rows))
    qkv_out = sum(stop - start for _, (start, stop) in qkv)

    yield TensorPlan(
        ours + "input_layernorm.weight", (hidden,), (Piece(theirs + "input_layernorm.weight", (0, hidden)),)
    )
    yield TensorPlan(ours + "attention.qkv.weight", (qkv_out, hidden), tuple(Piece(s + ".weight", r) for s, r in qkv))
    if model.attn_bias:
        yield TensorPlan(ours + "attention.qkv.bias", (qkv_out,), tuple(Piece(s + ".bias", r) for s, r in qkv))
    dense = Piece(attn + "o_proj.weight", (0, hidden), q_rows)
    yield TensorPlan(ours + "attention.dense.weight", (hidden, q_rows[1] - q_rows[0]), (dense,))
    if model.attn_bias:
        # The bias of a row-parallel linear is whole on every rank and added once after the all-reduce.
        yield TensorPlan(ours + "attention.dense.bias", (hidden,), (Piece(attn + "o_proj.bias", (0, hidden)),))
    yield TensorPlan(
        ours + "post_layernorm.weight", (hidden,), (Piece(theirs + "post_attention_layernorm.weight", (0, hidden)),)
    )
    mlp = theirs + "mlp."
    yield TensorPlan(ours + "mlp.fc.weight", (ffn // tp, hidden), (Piece(mlp + "gate_proj.weight", ffn_rows),))
    yield TensorPlan(ours + "mlp.gate.weight", (ffn // tp, hidden), (Piece(mlp + "up_proj.weight", ffn_rows),))
    proj = Piece(mlp + "down_proj.weight", (0, hidden), ffn_rows)
    yield TensorPlan(ours + "mlp.proj.weight", (hidden, ffn // tp), (proj,))


def _vocab_rows(name: str, source: str, vocab: int, hidden: int, tp: int, tp_rank: int) -> TensorPlan:
    """Plan of a vocabulary-parallel matrix: ceil(V / tp) rows per rank, padded with zero rows at the end."""
    per_rank = -(-vocab // tp)
    start = min(vocab, tp_rank * per_rank)
    stop = min(vocab, start + per_rank)
    return TensorPlan(name, (per_rank, hidden), (Piece(source, (start, stop)),), pad_rows=per_rank - (stop - start))


def _share(total: int, parts: int, index: int) -> tuple[int, int]:
    size = total // parts
    return index * size, (index + 1) * size


def source_shapes(model: Geometry) -> dict[str, tuple[int, ...]]:
    """Tensors that the HF folder must hold, name -> shape. A tied model may also have lm_head.weight."""
    hidden, ffn, d = model.hidden_size, model.intermediate_size, model.head_size
    q_out, kv_out = model.num_attention_heads * d, model.num_key_value_heads * d
    out: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.tie_word_embeddings:
        out["lm_head.weight"] = (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attn = prefix + "self_attn."
        out[prefix + "input_layernorm.weight"] = (hidden,)
        out[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, cols in (("q_proj", q_out, hidden), ("k_proj", kv_out, hidden), ("v_proj", kv_out, hidden),
                                 ("o_proj", hidden, q_out)):  # fmt: skip
            out[f"{attn}{name}.weight"] = (rows, cols)
            if model.attn_bias:
                out[f"{attn}{name}.bias"] = (rows,)
        out[prefix + "mlp.gate_proj.weight"] = (ffn, hidden)
        out[prefix + "mlp.up_proj.weight"] = (ffn, hidden)
        out[prefix + "mlp.down_proj.weight"] = (hidden, ffn)
    return out


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
    parallel = embedding is not EmbeddingSharding.NONE
    return {
        "architecture": model.architecture,
        "dtype": dtype.value,
        "logits_dtype": "float32",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_size,
        "hidden_act": model.hidden_act,
        "norm_epsilon": model.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": model.max_position_embeddings,
        "rotary_base": model.rotary_base,
        "rotary_scaling": model.rotary_scaling,
        "rotary_embedding_dim": model.head_size,
        "use_parallel_embedding": parallel,
        "embedding_sharding_dim": embedding.value if parallel else 0,
        "tie_word_embeddings": model.tie_word_embeddings,
        "qk_layernorm": False,
        "attn_bias": model.attn_bias,
        "mlp_bias": False,
        "mapping": {
            "world_size": mapping.world_size,
            "tp_size": mapping.tp_size,
            "pp_size": mapping.pp_size,
            **{key: mapping.tp_size if value is None else value for key, value in LOADERS[release].mapping.items()},
        },
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            **LOADERS[release].quantization,
            **_quantization_json(quantization),
        },
    }


def _quantization_json(quantization: Quantization) -> dict[str, Any]:
    algo, cache = quantization.quant_algo, quantization.kv_cache_quant_algo
    return {
        "quant_algo": algo and algo.value,
        "kv_cache_quant_algo": cache and cache.value,
        "group_size": quantization.group_size,
        # Only AWQ loaders read this key; SmoothQuant's algorithm implies its scale.
        "pre_quant_scale": quantization.packed,
        "exclude_modules": _excluded(algo),
    }


def _excluded(algo: QuantAlgo | None) -> list[str] | None:
    """Modules that are not quantized. The list replaces the loader's default, so it must be complete."""
    if algo is None:
        return None
    # W8A16 is the only algorithm whose loader quantizes the embedding, and its scales are not written.
    return ["lm_head", "transformer.vocab_embedding"] if algo is QuantAlgo.W8A16 else ["lm_head"]


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
    if get("hidden_act", str, "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act is {raw['hidden_act']!r}, Llama's is silu")
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
    mapping = Mapping(tp_size=count("tp_size", 1, split), pp_size=count("pp_size", 1, split))
    if fault := excess("world_size", mapping.world_size):
        raise CheckpointError(f"{where}: {fault}", remedy="convert the model again")
    return CheckpointConfig(
        architecture=get("architecture", str),
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
        quantization=_parse_quantization(get("quantization", dict, {}), where),
    )


def _parse_quantization(raw: dict[str, Any], where: str) -> Quantization:
    algo, cache = raw.get("quant_algo"), raw.get("kv_cache_quant_algo")
    group, excluded = raw.get("group_size"), raw.get("exclude_modules")
    if algo is not None and algo not in list(QuantAlgo):
        known = ", ".join(QuantAlgo)
        raise CheckpointError(f"{where} is quantized with {algo}", why=f"the algorithms read here are {known}")
    if cache is not None and cache not in list(KvCacheQuantAlgo):
        raise CheckpointError(f"{where}: the KV cache is quantized with {cache}", why="FP8 and INT8 are read here")
    if raw.get("has_zero_point"):
        raise CheckpointError(f"{where}: has_zero_point is set", why="no zero points are read here")
    group = 128 if group is None else group
    if type(group) is not int or group < 1:
        raise CheckpointError(f"{where}: group_size is {group!r}, not a positive number")
    if excluded is not None and algo is not None:
        if not isinstance(excluded, list) or not all(isinstance(pattern, str) for pattern in excluded):
            raise CheckpointError(f"{where}: exclude_modules is not a list of names")
        partly = [p for p in excluded for linear in _LINEARS if _matches(p, "transformer.layers.0." + linear)]
        if partly:
            raise CheckpointError(
                f"{where}: exclude_modules has {partly[0]!r}", why="layers of mixed precision are not read here"
            )
        if not any(_matches(pattern, "lm_head.weight") for pattern in excluded):
            raise CheckpointError(
                f"{where}: exclude_modules does not name lm_head", why="a quantized head is not read here"
            )
    return Quantization(
        quant_algo=None if algo is None else QuantAlgo(algo),
        kv_cache_quant_algo=None if cache is None else KvCacheQuantAlgo(cache),
        group_size=group,
    )


def _matches(pattern: str, weight: str) -> bool:
    return fnmatchcase(weight.removesuffix(".weight"), pattern)


def read_config(folder: Path) -> CheckpointConfig:
    """Read a checkpoint folder's config.json. Raises CheckpointError."""
    path = folder / "config.json"
    return parse_config(read_config_json(path, "checkpoint config"), str(path))


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"
