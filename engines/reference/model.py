"""One forward pass over the tokens of one in-flight batch, from the shards as they are stored.

All tokens of a step are flattened into [T, hidden] and go through every matrix together; only attention tells
requests apart. Pipeline stages are simply all the layers in order.

Keys and values live in one pool, [layers * shards, blocks, tokens_per_block * 2 * kv_heads * head_size], each token's
keys in front of its values: a token is written at its slot in one go, and a block is gathered as one row. A quantized
cache holds codes. The tokens of a prompt see those of their own step as they are, like TensorRT-LLM's context
attention; a decoding token sees everything through the cache, itself included, like its XQA kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines.quant import KvCacheQuantAlgo
from engines.reference.fused import can_compile, rms_norm, rotate_and_keep
from engines.reference.graphs import Decode, Graphs
from engines.reference.kv_codec import KvCodec
from engines.reference.layer import apply_layer
from engines.reference.products import multiply
from engines.reference.ranks import Ranks, Together
from engines.reference.rope import rotary_tables
from engines.reference.weights import LayerShard, Weights, rank_heads
from engines.tensorrt_llm.checkpoint import CheckpointConfig, EmbeddingSharding

# cuDNN's attention, which a GPU would take, spends 50 ms on every length of a prompt that it has not met.
_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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


class _Decodes(NamedTuple):
    """The spans of one token: the first rows of the step."""

    positions: torch.Tensor  # [n]
    tables: torch.Tensor  # [n * width], their blocks
    length: int  # of the longest of them, or more
    mask: torch.Tensor | None  # additive [n, 1, 1, length]; None where nothing is to be hidden


class _Step(NamedTuple):
    """What attention needs to know, computed once and used by every layer."""

    cos: torch.Tensor  # [T, 1, head_size]
    sin: torch.Tensor
    slots: torch.Tensor  # [T, 1]
    decodes: _Decodes | None
    prompts: list[_Prompt]


class Model:
    """The weights, the rotary tables up to `max_positions` and the KV pool of `num_blocks` blocks.

    Everything is on the device of the weights, and in their type. `ranks` joins these weights to those of others.
    On a GPU a step that only decodes is recorded once for its size and then replayed.

    Raises CheckpointError for a rotary scaling that cannot be computed.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        weights: Weights,
        *,
        max_positions: int,
        num_blocks: int,
        tokens_per_block: int,
        ranks: Ranks | None = None,
    ) -> None:
        self.config = config
        self.dtype = weights.head.final_norm.dtype
        self.device = weights.head.final_norm.device
        self.num_blocks = num_blocks
        self._weights = weights
        self._ranks = ranks or Together(config.mapping.tp_size)
        self._heads, self._kv_heads = rank_heads(config)
        self._block = tokens_per_block
        self._per_token = 2 * self._kv_heads * config.head_size
        cos, sin = rotary_tables(config, max_positions)
        self._cos, self._sin = (table.to(self.device, self.dtype) for table in (cos, sin))
        held = self.dtype if config.quantization.kv_cache_quant_algo is None else torch.int8
        shards = sum(len(layer) for layer in weights.layers)
        # Zeros, not empty: a masked slot still takes part in a product, where a NaN survives. The block behind the
        # last is where a replayed step writes what nobody asked for.
        shape = (shards, num_blocks + 1, tokens_per_block * self._per_token)
        self._pool = torch.zeros(shape, dtype=held, device=self.device)
        self._scratch = torch.empty(0, dtype=held, device=self.device)
        self._paged = self._has_paged_attention()
        self._graphs = None
        if self.device.type == "cuda":
            self._graphs = Graphs(self.decode, tokens_per_block, num_blocks)
            # One row and several have kernels of their own, which must not be made while a request waits.
            for rows in (1, 2):
                self._graphs.replay([0] * rows, [0] * rows, [[num_blocks]] * rows)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits of the wanted tokens, [sum of span.logits, vocab_size] in the compute type, in span order.

        Writes the keys and values of every token into the pool. Spans of one token must come first: they attend
        in one batch. The logits may be overwritten by the next call.
        """
        self._clear(spans)
        if self._graphs is not None and all(len(span.tokens) == 1 == span.logits for span in spans):
            return self._graphs.replay(
                *zip(*[(span.tokens[0], span.start, span.blocks) for span in spans], strict=True)
            )
        tokens = torch.tensor([token for span in spans for token in span.tokens], device=self.device)
        with sdpa_kernel(_ANY_LENGTH):
            hidden = self._run(tokens, self._plan(spans))
        rows: list[int] = []
        end = 0
        for span in spans:
            end += len(span.tokens)
            rows.extend(range(end - span.logits, end))
        return self._logits(hidden if len(rows) == end else hidden[rows])

    @torch.inference_mode()
    def decode(self, step: Decode) -> torch.Tensor:
        """Logits [n, vocab_size] of n spans of one token each, in a way that may be recorded."""
        length = len(step.tables) // len(step.ids) * self._block
        decodes = _Decodes(step.positions, step.tables, length, self._mask(step.positions, length))
        cos, sin = self._cos[step.positions].unsqueeze(1), self._sin[step.positions].unsqueeze(1)
        return self._logits(self._run(step.ids, _Step(cos, sin, step.slots[:, None], decodes, prompts=[])))

    def _has_paged_attention(self) -> bool:
        """Whether decoding tokens see the cache where it lies. Elsewhere it is gathered for them first."""
        if self.device.type != "cuda" or not can_compile():
            return False
        e4m3 = self.config.quantization.kv_cache_quant_algo is KvCacheQuantAlgo.FP8
        return not e4m3 or torch.cuda.get_device_capability(self.device) >= (8, 9)

    def _mask(self, positions: torch.Tensor, length: int) -> torch.Tensor | None:
        """What hides from tokens at `positions` [n] what is behind them, [n, 1, 1, length]."""
        if self._paged:
            return None
        beyond = torch.arange(length, device=self.device) > positions[:, None]
        mask = torch.zeros(len(positions), 1, 1, length, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(beyond[:, None, None], -torch.inf)

    def _clear(self, spans: Sequence[Span]) -> None:
        """Zero the blocks begun but not filled in this step: their rest must not keep what others left there."""
        begun: list[int] = []
        for span in spans:
            stop = span.start + len(span.tokens)
            if 0 < stop % self._block <= len(span.tokens):
                begun.append(span.blocks[stop // self._block])
        if begun:
            self._pool.index_fill_(1, torch.tensor(begun, device=self.device), 0)

    def _run(self, ids: torch.Tensor, step: _Step) -> torch.Tensor:
        hidden, update = self._embed(ids), None
        place = 0
        for layer in self._weights.layers:
            pools = self._pool[place : place + len(layer)]
            attend = partial(self._attend, step, layer, pools)
            hidden, update = apply_layer(self._ranks, layer, hidden, update, self.config.norm_epsilon, attend)
            place += len(layer)
        return hidden if update is None else hidden + update

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self._weights.embedding
        if self.config.embedding is EmbeddingSharding.NONE:
            return functional.embedding(ids, parts[0])
        if self.config.embedding is EmbeddingSharding.HIDDEN:
            return self._ranks.join([functional.embedding(ids, part) for part in parts])
        # Each rank looks up the rows it has, gives zeros for the others, and the ranks are summed.
        rows = parts[0].shape[0]
        return self._ranks.sum(
            [
                functional.embedding((ids - rank * rows).clamp(0, rows - 1), part) * (ids // rows == rank)[:, None]
                for rank, part in zip(self._ranks.held, parts, strict=True)
            ]
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._weights.head
        hidden = rms_norm(hidden, head.final_norm, self.config.norm_epsilon)
        parts = [multiply(hidden, part) for part in head.parts]
        logits = self._ranks.join(parts) if head.sharded else parts[0]
        # The last ranks are filled up with rows of zeros.
        return logits[:, : self.config.vocab_size]

    def _plan(self, spans: Sequence[Span]) -> _Step:
        size = self._block
        decodes = 0
        while decodes < len(spans) and len(spans[decodes].tokens) == 1:
            decodes += 1
        positions = [span.start for span in spans[:decodes]]
        slots = [s.blocks[s.start // size] * size + s.start % size for s in spans[:decodes]]
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
        position = torch.cat(where).to(self.device)
        seen = None
        if decodes:
            length = max(positions) + 1
            tables = [block for s in spans[:decodes] for block in _fit(s.blocks, -(-length // size))]
            places = position[:decodes]
            mask = self._mask(places, length) if min(positions) + 1 < length else None
            seen = _Decodes(places, torch.tensor(tables, device=self.device), length, mask)
        return _Step(
            cos=self._cos[position].unsqueeze(1),
            sin=self._sin[position].unsqueeze(1),
            slots=torch.cat(parts).to(self.device)[:, None],
            decodes=seen,
            prompts=prompts,
        )

    def _plan_prompt(self, span: Span, row: int) -> _Prompt:
        count = len(span.tokens)
        length = span.start + count
        if span.start == 0:
            return _Prompt(row, row + count, None, length, None)
        blocks = torch.tensor(span.blocks[: -(-length // self._block)], device=self.device)
        mask = torch.full((count, length), -torch.inf, dtype=self.dtype, device=self.device).triu_(span.start + 1)
        return _Prompt(row, row + count, blocks, length, mask)

    def _attend(
        self, step: _Step, layer: Sequence[LayerShard], pools: torch.Tensor, place: int, qkv: torch.Tensor
    ) -> torch.Tensor:
        """[T, features of q, k and v] -> [T, features of q], for the heads of one shard."""
        heads, kv, size = self._heads, self._kv_heads, self.config.head_size
        pool, codec = pools[place], layer[place].kv_codec
        # Keys lie right behind the queries, so both are rotated at once.
        x = rotate_and_keep(
            qkv.reshape(len(qkv), heads + 2 * kv, size), heads + kv, step.cos, step.sin,
            None if codec is None else codec.encode, step.slots, pool.view(-1, 2 * kv, size),
        )  # fmt: skip
        parts: list[torch.Tensor] = []
        if step.decodes is not None:
            parts.append(self._attend_cached(x[: len(step.decodes.positions), :heads], pool, codec, step.decodes))
        for first, last, blocks, length, mask in step.prompts:
            own = x[first:last].unsqueeze(0)
            seen = own[:, :, heads:]
            if blocks is not None:
                cached = self._gather(pool, codec, blocks, 1, length)
                if codec is not None:
                    cached[:, first - last :] = seen
                seen = cached
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

    def _attend_cached(
        self, query: torch.Tensor, pool: torch.Tensor, codec: KvCodec | None, decodes: _Decodes
    ) -> torch.Tensor:
        """[n, heads, head_size] -> [n, heads * head_size]."""
        positions, tables, length, mask = decodes
        if self._paged:
            from engines.reference.kernels import paged_attention

            return paged_attention(query, pool, codec, tables, positions, self._kv_heads, self._block)
        n, heads, size = query.shape
        kv = self._kv_heads
        cached = self._gather(pool, codec, tables, n, length)
        # The query heads that share a key head take the place of the query's length: no key is repeated.
        out = functional.scaled_dot_product_attention(
            query.reshape(n, kv, heads // kv, size),
            cached[:, :, :kv].transpose(1, 2),
            cached[:, :, kv:].transpose(1, 2),
            attn_mask=mask,
        )
        return out.reshape(n, heads * size)

    def _gather(
        self, pool: torch.Tensor, codec: KvCodec | None, blocks: torch.Tensor, rows: int, length: int
    ) -> torch.Tensor:
        """Cached tokens of `rows` requests, [rows, length, 2 * kv_heads, head_size]; valid until the next call."""
        if pool.is_cuda:
            # index_select takes three times as long for few blocks.
            out = pool[blocks]
        else:
            wanted = len(blocks) * self._block * self._per_token
            if self._scratch.numel() < wanted:
                # A fresh buffer each time would cost more in page faults than the copy itself.
                self._scratch = self._scratch.new_empty(wanted + wanted // 2)
            out = self._scratch[:wanted].view(len(blocks), -1)
            torch.index_select(pool, 0, blocks, out=out)
        tokens = out.view(rows, -1, 2 * self._kv_heads, self.config.head_size)[:, :length]
        return tokens if codec is None else codec.decode(tokens, self.dtype)


def _fit(blocks: Sequence[int], width: int) -> list[int]:
    """The first `width` blocks. A shorter row repeats a block of its own, hidden by the mask: a NaN in another
    request's block would come through."""
    return [*blocks[:width], *[blocks[0]] * (width - len(blocks))]
