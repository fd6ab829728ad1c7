"""Tensors that a checkpoint stores for a quantized linear, and the scales of a quantized KV cache.

A quantized linear consists of several tensors: the codes under the weight's name, and the scales beside them. Their
pieces name a source that the quantizer makes, such as `model.layers.0.self_attn.q_proj.weights_scaling_factor`;
rows and columns count in the units of that source (AWQ packs two output rows in a byte).
"""

from __future__ import annotations

from collections.abc import Iterator

from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo, Quantization

# The linears of a layer, which are quantized.
LINEARS = ("attention.qkv.weight", "attention.dense.weight", "mlp.fc.weight", "mlp.gate.weight", "mlp.proj.weight")
_CODES = {
    QuantAlgo.FP8: "F8_E4M3",
    QuantAlgo.FP8_PER_CHANNEL_PER_TOKEN: "F8_E4M3",
    QuantAlgo.W8A8_SQ_PER_CHANNEL: "I8",
    QuantAlgo.W4A16_AWQ: "I8",
    QuantAlgo.W4A8_AWQ: "I8",
}


def quantized(plan: TensorPlan, quantization: Quantization) -> Iterator[TensorPlan]:
    """Tensors stored for one tensor of a layer: codes and scales for a linear's weight, otherwise the tensor."""
    algo = quantization.quant_algo
    # A W8A16 checkpoint stores float weights: the engine build quantizes them, in the layout of its GPU.
    if algo is None or algo is QuantAlgo.W8A16 or not plan.name.endswith(LINEARS):
        yield plan
        return
    name, pieces = plan.name.removesuffix("weight"), plan.pieces
    out, width = plan.shape
    columns = pieces[0].cols or (0, width)

    def encoded(
        suffix: str, dtype: str | None, shape: tuple[int, ...], cut: list[tuple[Piece, tuple[int, int]]]
    ) -> TensorPlan:
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


def cache_scales(ours: str, theirs: str, algo: KvCacheQuantAlgo | None) -> Iterator[TensorPlan]:
    names = {
        None: (),
        KvCacheQuantAlgo.FP8: ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor"),
        KvCacheQuantAlgo.INT8: ("kv_cache_scaling_factor",),
    }[algo]
    for name in names:
        yield TensorPlan(ours + name, (1,), (Piece(theirs + name, (0, 1)),), dtype="F32")
