"""One forward pass over the tokens of one in-flight batch, from the shards as they are stored.

All tokens of a step are flattened into [T, hidden] and go through every matrix together; only attention tells
requests apart. Tensor-parallel shards run one after another and their partial sums are added, which is what the
all-reduce does; pipeline stages are simply all the layers in order.

Keys and values live in one pool per layer and shard, [blocks * tokens_per_block, 2 * kv_heads, head_size], keys
in the first half of the heads: a token is written at its slot in one go, and a block is gathered as one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from engines.reference.rope import rotary_tables
from engines.reference.weights import Weights, rank_heads
from engines.tensorrt_llm.checkpoint import CheckpointConfig, EmbeddingSharding


class Span(NamedTuple):
    """Consecutive tokens of one request to run in this step.

    tokens  the token ids
    start   position of the first one; those before it are in the cache
    blocks  the request's blocks, enough for start + len(tokens) positions
    logits  for how many of the last tokens logits are wanted
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int


class _Prompt(NamedTuple):
    """A span of several tokens: rows [first, last) of the step, and how they see the cache."""

    first: int
    last: int
    # Blocks and length of everything up to the span's end; None when the span is all there is.
    blocks: torch.Tensor | None
    length: int
    mask: torch.Tensor | None


class _Step(NamedTuple):
    """What attention needs to know, computed once and used by every layer."""

    cos: torch.Tensor  # [T, 1, head_size]
    sin: torch.Tensor
    slots: torch.Tensor  # [T]
    # Blocks begun but not filled in this step, whose rest must not keep what others left there.
    begun: torch.Tensor | None
    decodes: int
    # Blocks of the decoding spans, flattened [decodes * width], and the additive mask [decodes, 1, 1, length].
    tables: torch.Tensor
    length: int
    mask: torch.Tensor | None
    prompts: list[_Prompt]


class Model:
    """The weights, the rotary tables up to `max_positions` and the KV pool of `num_blocks` blocks.

    Raises CheckpointError for a rotary scaling that cannot be computed.
    """

    def __init__(
        self, config: CheckpointConfig, weights: Weights, *, max_positions: int, num_blocks: int, tokens_per_block: int
    ) -> None:
        self.config = config
        self.dtype = weights.final_norm.dtype
        self._weights = weights
        self._heads, self._kv_heads = rank_heads(config)
        self._block = tokens_per_block
        cos, sin = rotary_tables(config, max_positions)
        self._cos, self._sin = cos.to(self.dtype), sin.to(self.dtype)
        # Zeros, not empty: a masked slot still takes part in a product, where a NaN survives.
        shape = (num_blocks * tokens_per_block, 2 * self._kv_heads, config.head_size)
        self._pools = [[torch.zeros(shape, dtype=self.dtype) for _ in layer] for layer in weights.layers]
        self._scratch = torch.empty(0, dtype=self.dtype)
        # Weights as the left factor are up to twice as fast in 16 bits, and slower in 32.
        self._linear = functional.linear if self.dtype == torch.float32 else _linear_transposed

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits of the wanted tokens, [sum of span.logits, vocab_size] in the compute type, in span order.

        Writes the keys and values of every token into the pool. Spans of one token must come first: they attend
        in one batch.
        """
        ids = torch.tensor([token for span in spans for token in span.tokens])
        step = self._plan(spans)
        hidden = self._embed(ids)
        for layer, pools in zip(self._weights.layers, self._pools, strict=True):
            normed = self._norm(hidden, layer[0].input_norm)
            if layer[0].dense_bias is not None:
                hidden = hidden + layer[0].dense_bias
            for shard, pool in zip(layer, pools, strict=True):
                qkv = self._linear(normed, shard.qkv)
                if shard.qkv_bias is not None:
                    qkv = qkv + shard.qkv_bias
                hidden = hidden + self._linear(self._attend(qkv.contiguous(), pool, step), shard.dense)
            normed = self._norm(hidden, layer[0].post_norm)
            for shard in layer:
                act = functional.silu(self._linear(normed, shard.fc), inplace=True)
                act *= self._linear(normed, shard.gate)
                hidden = hidden + self._linear(act, shard.proj)
        return self._logits(hidden, spans)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self._weights.embedding
        if len(parts) == 1:
            return functional.embedding(ids, parts[0])
        if self.config.embedding is EmbeddingSharding.HIDDEN:
            return torch.cat([functional.embedding(ids, part) for part in parts], dim=-1)
        # Each rank looks up the rows it has, gives zeros for the others, and the ranks are summed.
        rows = parts[0].shape[0]
        found = [
            functional.embedding((ids - rank * rows).clamp(0, rows - 1), part) * (ids // rows == rank)[:, None]
            for rank, part in enumerate(parts)
        ]
        return torch.stack(found).sum(dim=0)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # The kernel computes in float32 whatever the type of x.
        return functional.rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def _logits(self, hidden: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        rows: list[int] = []
        end = 0
        for span in spans:
            end += len(span.tokens)
            rows.extend(range(end - span.logits, end))
        if len(rows) < end:
            hidden = hidden[rows]
        hidden = self._norm(hidden, self._weights.final_norm)
        parts = [self._linear(hidden, part) for part in self._weights.head]
        logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        # The last ranks are filled up with rows of zeros.
        return logits[:, : self.config.vocab_size]

    def _plan(self, spans: Sequence[Span]) -> _Step:
        size = self._block
        decodes = 0
        while decodes < len(spans) and len(spans[decodes].tokens) == 1:
            decodes += 1
        positions = [span.start for span in spans[:decodes]]
        slots = [s.blocks[s.start // size] * size + s.start % size for s in spans[:decodes]]
        tables, length, mask = torch.empty(0, dtype=torch.long), 0, None
        if decodes:
            length = max(positions) + 1
            width = -(-length // size)
            tables = torch.tensor([block for s in spans[:decodes] for block in _fit(s.blocks, width)])
            if min(positions) + 1 < length:
                hidden = torch.arange(length) > torch.tensor(positions)[:, None]
                mask = torch.zeros(decodes, 1, 1, length, dtype=self.dtype)
                mask.masked_fill_(hidden[:, None, None], -torch.inf)
        parts = [torch.tensor(slots, dtype=torch.long)]
        where = [torch.tensor(positions, dtype=torch.long)]
        prompts: list[_Prompt] = []
        row = decodes
        for span in spans[decodes:]:
            count = len(span.tokens)
            prompts.append(self._plan_prompt(span, row))
            at = np.arange(span.start, span.start + count)
            blocks = np.asarray(span.blocks)
            parts.append(torch.from_numpy(blocks[at // size] * size + at % size))
            where.append(torch.from_numpy(at))
            row += count
        begun: list[int] = []
        for span in spans:
            stop = span.start + len(span.tokens)
            if 0 < stop % size <= len(span.tokens):
                begun.append(span.blocks[stop // size])
        position = torch.cat(where)
        cos, sin = self._cos[position].unsqueeze(1), self._sin[position].unsqueeze(1)
        return _Step(
            cos, sin, torch.cat(parts), torch.tensor(begun) if begun else None, decodes, tables, length, mask, prompts
        )

    def _plan_prompt(self, span: Span, row: int) -> _Prompt:
        count = len(span.tokens)
        length = span.start + count
        if span.start == 0:
            return _Prompt(row, row + count, None, length, None)
        blocks = torch.tensor(span.blocks[: -(-length // self._block)])
        mask = torch.full((count, length), -torch.inf, dtype=self.dtype).triu_(span.start + 1)
        return _Prompt(row, row + count, blocks, length, mask)

    def _attend(self, qkv: torch.Tensor, pool: torch.Tensor, step: _Step) -> torch.Tensor:
        """[T, features of q, k and v] -> [T, features of q], for the heads of one shard."""
        heads, kv, size = self._heads, self._kv_heads, self.config.head_size
        x = qkv.view(len(qkv), heads + 2 * kv, size)
        # Keys lie right behind the queries, so both are rotated at once.
        turned = x[:, : heads + kv]
        torch.addcmul(turned * step.cos, turned.roll(size // 2, -1), step.sin, out=turned)
        if step.begun is not None:
            pool.view(-1, self._block * 2 * kv * size).index_fill_(0, step.begun, 0.0)
        pool.index_copy_(0, step.slots, x[:, heads:])
        parts: list[torch.Tensor] = []
        if step.decodes:
            n = step.decodes
            cached = self._gather(pool, step.tables, n, step.length)
            # The query heads that share a key head take the place of the query's length: no key is repeated.
            out = functional.scaled_dot_product_attention(
                x[:n, :heads].view(n, kv, heads // kv, size),
                cached[:, :, :kv].transpose(1, 2),
                cached[:, :, kv:].transpose(1, 2),
                attn_mask=step.mask,
            )
            parts.append(out.reshape(n, heads * size))
        for first, last, blocks, length, mask in step.prompts:
            own = x[first:last].unsqueeze(0)
            seen = own[:, :, heads:] if blocks is None else self._gather(pool, blocks, 1, length)
            out = functional.scaled_dot_product_attention(
                own[:, :, :heads].transpose(1, 2),
                seen[:, :, :kv].transpose(1, 2),
                seen[:, :, kv:].transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            parts.append(out.transpose(1, 2).reshape(last - first, heads * size))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor, rows: int, length: int) -> torch.Tensor:
        """Cached tokens of `rows` requests, [rows, length, 2 * kv_heads, head_size]; valid until the next call."""
        per_token = 2 * self._kv_heads * self.config.head_size
        wanted = len(blocks) * self._block * per_token
        if self._scratch.numel() < wanted:
            # A fresh buffer each time would cost more in page faults than the copy itself.
            self._scratch = torch.empty(wanted + wanted // 2, dtype=self.dtype)
        out = self._scratch[:wanted].view(len(blocks), self._block * per_token)
        torch.index_select(pool.view(-1, self._block * per_token), 0, blocks, out=out)
        return out.view(rows, -1, 2 * self._kv_heads, self.config.head_size)[:, :length]


def _linear_transposed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T with the weight as the left factor; the result's columns are contiguous, not its rows."""
    if len(x) == 1:
        return torch.mv(weight, x[0]).unsqueeze(0)
    return torch.mm(weight, x.t()).t()


def _fit(blocks: Sequence[int], width: int) -> list[int]:
    """The first `width` blocks. A shorter row repeats a block of its own, hidden by the mask: a NaN in another
    request's block would come through."""
    return [*blocks[:width], *[blocks[0]] * (width - len(blocks))]
