"""Plan of a rank file's tensors: each is made of rows and columns of Hugging Face tensors. Weights are [out, in]."""

from __future__ import annotations

from dataclasses import dataclass

from trtpipe.engines.model_config import Geometry


@dataclass(frozen=True)
class Piece:
    """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of one HF tensor; a vector has rows only.

    stacked  whether it is a vector in a stack of vectors
    """

    source: str
    rows: tuple[int, int]
    cols: tuple[int, int] | None = None
    stacked: bool = False

    def elements(self, shape: tuple[int, ...]) -> int:
        """Number of elements in this piece's rows of a tensor of that shape, over all columns."""
        return (self.rows[1] - self.rows[0]) * (shape[-1] if len(shape) > 1 and not self.stacked else 1)


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a rank file: HF pieces stacked along dim 0, then `pad_rows` rows of zeros.

    A tensor of experts, [experts, out, in], is a stack of their rows.

    dtype  safetensors type; None for the checkpoint's type
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    pad_rows: int = 0
    dtype: str | None = None


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Range of part `index` when `total` rows or columns are divided into equal parts."""
    size = total // parts
    return index * size, (index + 1) * size


def kv_head_rows(model: Geometry, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Rows of the keys' or values' linear that a rank stores; with more ranks than KV heads, several ranks store the
    same head."""
    if tp_size > model.num_key_value_heads:
        head = tp_rank * model.num_key_value_heads // tp_size
        return head * model.head_size, (head + 1) * model.head_size
    return share(model.num_key_value_heads * model.head_size, tp_size, tp_rank)


def vocab_rows(name: str, source: str, vocab: int, hidden: int, tp: int, tp_rank: int) -> TensorPlan:
    """Plan of a vocabulary-parallel matrix: ceil(V / tp) rows per rank, padded with zero rows at the end."""
    per_rank = -(-vocab // tp)
    start = min(vocab, tp_rank * per_rank)
    stop = min(vocab, start + per_rank)
    return TensorPlan(name, (per_rank, hidden), (Piece(source, (start, stop)),), pad_rows=per_rank - (stop - start))
