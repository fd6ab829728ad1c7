"""Files and tensors of a TensorRT-LLM checkpoint: names, shapes and order of a rank file.

A checkpoint is config.json plus rank{N}.safetensors, N = pp_rank * tp_size + tp_rank. Layer numbers start at 0 in
every pipeline stage. The tensors of a layer are the model family's.

Rotary tables (embed_positions, rotary_inv_freq) are not written: the loader computes them from config.json and
does not require them, and ModelOpt does not write them either.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.checkpoint.plan import Piece, TensorPlan, share, vocab_rows
from trtpipe.engines.checkpoint.quantized import cache_scales, quantized
from trtpipe.engines.families import family_of
from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding, Geometry
from trtpipe.engines.quantization import UNQUANTIZED, Quantization

SAFETENSORS_DTYPE = {DataType.BFLOAT16: "BF16", DataType.FLOAT16: "F16", DataType.FLOAT32: "F32"}

# Older exports store this buffer; it is computed from the config and is not a parameter.
DERIVED_SUFFIX = ".rotary_emb.inv_freq"
# Tables that TensorRT-LLM's own converter stores beside the weights; they are computed from the config.
ROTARY_TABLES = frozenset({"embed_positions", "rotary_inv_freq", "embed_positions_for_gpt_attention"})


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
    family, hidden, vocab, tp = family_of(model), model.hidden_size, model.vocab_size, mapping.tp_size
    names, stages = family.names, mapping.layers(model.num_hidden_layers)
    if pp_rank == 0:
        embed = f"{names.embedding}.weight"
        name = "transformer.vocab_embedding.weight"
        if embedding is EmbeddingSharding.VOCABULARY:
            yield vocab_rows(name, embed, vocab, hidden, tp, tp_rank)
        elif embedding is EmbeddingSharding.HIDDEN:
            yield TensorPlan(name, (vocab, hidden // tp), (Piece(embed, (0, vocab), share(hidden, tp, tp_rank)),))
        else:
            yield TensorPlan(name, (vocab, hidden), (Piece(embed, (0, vocab)),))
    for local, layer in enumerate(stages[pp_rank]):
        ours, theirs = f"transformer.layers.{local}.", names.layer(layer)
        for plan in family.plan_layer(model, mapping, tp_rank, ours, theirs):
            yield from quantized(plan, quantization)
        yield from cache_scales(ours + "attention.", theirs + names.attention, quantization.kv_cache_quant_algo)
    if pp_rank == mapping.pp_size - 1:
        yield TensorPlan("transformer.ln_f.weight", (hidden,), (Piece(f"{names.final_norm}.weight", (0, hidden)),))
        # A tied model's checkpoint stores the head too, as a copy of the embedding: the build merges the two again.
        head = names.embedding if model.tie_word_embeddings else names.head
        yield vocab_rows("lm_head.weight", f"{head}.weight", vocab, hidden, tp, tp_rank)


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


def source_shapes(model: Geometry) -> dict[str, tuple[int, ...]]:
    """Tensors that the HF folder must hold, name -> shape. A tied model may also have a head."""
    family = family_of(model)
    names, matrix = family.names, (model.vocab_size, model.hidden_size)
    out: dict[str, tuple[int, ...]] = {
        f"{names.embedding}.weight": matrix,
        f"{names.final_norm}.weight": (model.hidden_size,),
    }
    if not model.tie_word_embeddings:
        out[f"{names.head}.weight"] = matrix
    for layer in range(model.num_hidden_layers):
        out |= {names.layer(layer) + name: shape for name, shape in family.layer_shapes(model).items()}
    return out


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.safetensors"
