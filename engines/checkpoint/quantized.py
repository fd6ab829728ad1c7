"""Tensors that a checkpoint stores for a quantized linear, and the scales of a quantized KV cache.

A quantized linear consists of several tensors: the codes under the weight's name, and the scales beside them. Their
pieces name a source that the quantizer makes, such as `model.layers.0.self_attn.q_proj.weights_scaling_factor`;
rows and columns count in the units of that source (AWQ packs two output rows in a byte).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trtpipe.engines.checkpoint.plan import Piece, TensorPlan
from trtpipe.engines.quantization import KvCacheQuantAlgo, Quantization
from trtpipe.engines.quantize.formats import TENSORRT_LLM

# The linears of a layer, which are quantized.
LINEARS = ("attention.qkv.weight", "attention.dense.weight", "mlp.fc.weight", "mlp.gate.weight", "mlp.proj.weight")


def quantized(plan: TensorPlan, quantization: Quantization) -> Iterator[TensorPlan]:
    """Tensors stored for one tensor of a layer: codes and scales for a linear's weight, otherwise the tensor.

    A stack of experts has stacks of their codes and scales, but one scale of the input for all of them.
    """
    algo = quantization.quant_algo
    if algo is None or algo.row.engine_encodes or not plan.name.endswith(LINEARS):
        yield plan
        return
    row, names = algo.row, TENSORRT_LLM.names(algo)
    name, pieces = plan.name.removesuffix("weight"), plan.pieces
    *stack, out, width = plan.shape
    columns = pieces[0].cols or (0, width)
    # The first piece of each expert; the others share its scales of a tensor.
    firsts = pieces[:: len(pieces) // stack[0]] if stack else pieces[:1]

    def encoded(
        suffix: str, dtype: str | None, shape: tuple[int, ...], cut: Iterable[tuple[Piece, tuple[int, int]]]
    ) -> TensorPlan:
        parts = (
            Piece(piece.source.removesuffix("weight") + suffix, rows, stacked=len(shape) > 1) for piece, rows in cut
        )
        return TensorPlan(name + suffix, shape, tuple(parts), dtype=dtype)

    def scalar(suffix: str) -> TensorPlan:
        shape = (*stack, 1) if stack else row.scalar
        return encoded(suffix, "F32", shape, ((piece, (0, 1)) for piece in firsts))

    def narrowed(source: str, rows: int, features: int, dtype: str) -> TensorPlan:
        """Plan of a tensor of which an element stands for some rows and input features of the weight."""
        columns_of = (columns[0] // features, -(-columns[1] // features))
        parts = (
            Piece(p.source.removesuffix("weight") + source, (p.rows[0] // rows, -(-p.rows[1] // rows)), columns_of)
            for p in pieces
        )
        return TensorPlan(name + source, (*stack, -(-out // rows), -(-width // features)), tuple(parts), dtype=dtype)

    group = quantization.group_size
    if row.scale == "group":
        halves = tuple(Piece(p.source, (p.rows[0] // 2, p.rows[1] // 2), p.cols) for p in pieces)
        yield TensorPlan(plan.name, (*stack, out // 2, width), halves, dtype=row.codes)
        yield narrowed(names["scale"], 1, group, "F32")
    elif row.scale == "vector":
        yield narrowed("weight", 1, 2, row.codes)
        yield narrowed(names["scale"], 1, group, "F8_E4M3")
    elif row.scale == "block":
        yield TensorPlan(plan.name, plan.shape, pieces, dtype=row.codes)
        yield narrowed(names["scale"], group, group, "F32")
    else:
        yield TensorPlan(plan.name, plan.shape, pieces, dtype=row.codes)
        if row.scale == "tensor":
            yield scalar(names["scale"])
        else:
            yield encoded(names["scale"], "F32", (*stack, out), ((piece, piece.rows) for piece in pieces))
    if row.second_scale:
        yield scalar(names["second_scale"])
    if row.static_input:
        yield encoded(names["input_scale"], "F32", (1,) if stack else row.scalar, [(pieces[0], (0, 1))])
    if row.smoothed:
        yield encoded(names["smooth"], None, (*stack, width), ((piece, columns) for piece in firsts))


def cache_scales(ours: str, theirs: str, algo: KvCacheQuantAlgo | None) -> Iterator[TensorPlan]:
    names = {
        None: (),
        KvCacheQuantAlgo.FP8: ("k_cache_scaling_factor", "v_cache_scaling_factor", "kv_cache_scaling_factor"),
        KvCacheQuantAlgo.INT8: ("kv_cache_scaling_factor",),
    }
    names[KvCacheQuantAlgo.NVFP4] = names[KvCacheQuantAlgo.FP8]
    for name in names[algo]:
        shape = () if algo is KvCacheQuantAlgo.NVFP4 else (1,)
        yield TensorPlan(ours + name, shape, (Piece(theirs + name, (0, 1)),), dtype="F32")
