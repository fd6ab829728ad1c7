"""Attention over a paged KV cache, with the pool that stores keys and values.

The pool is [layers * shards, blocks, tokens_per_block * 2 * kv_heads * head_size], each token's keys before its values:
a token is one contiguous write at its slot, and a block is gathered as one row. A quantized cache stores codes; an
NVFP4 one has fewer bytes than numbers. A prompt's tokens read keys and values of their own step unquantized, like
TensorRT-LLM's context attention; a decoding token reads all of them, its own included, from the cache, like
TensorRT-LLM's XQA kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from trtpipe.engines.model_config import CheckpointConfig
from trtpipe.engines.quantization import KvCacheQuantAlgo
from trtpipe.engines.reference.cuda.graphs import Decode
from trtpipe.engines.reference.fused import can_compile, rotate_and_keep
from trtpipe.engines.reference.kv_codec import KvCodec
from trtpipe.engines.reference.masks import decode_mask, prompt_mask
from trtpipe.engines.reference.rope import rotary_tables
from trtpipe.engines.reference.weights import LayerShard, rank_heads

# Backends for steps of any length, without cuDNN's attention, the default on a GPU: it takes 50 ms for each new length.
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Span(NamedTuple):
    """Consecutive tokens of one request to run in this step.

    tokens  token ids
    start   position of the first token; the tokens before it are in the cache
    blocks  the request's blocks, enough for start + len(tokens) positions
    logits  number of last tokens whose logits are requested
    adapter number of the request's adapter; 0 for none
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    logits: int
    adapter: int = 0


# Window in tokens -> mask of the layers with that window, or None without a mask.
Masks = dict[int, torch.Tensor | None]


class _Prompt(NamedTuple):
    """A span of several tokens, or whole sequences one after another: rows [first, last) of the step, and their view
    of the cache."""

    first: int
    last: int
    # Blocks and length of the sequence up to the span's end; None when the span is the whole sequence.
    blocks: torch.Tensor | None
    length: int
    masks: Masks
    # Of n sequences: [n + 1] int32, rows where each begins, counted from `first`, and the end; `length` is the longest.
    bounds: torch.Tensor | None = None


class _Decodes(NamedTuple):
    """Spans of one token; they are the first rows of the step."""

    positions: torch.Tensor  # [n]
    tables: torch.Tensor  # [n * width], blocks of the spans
    length: int  # at least the length of the longest sequence
    masks: Masks  # [n, 1, 1, length]; None where nothing is masked


class Step(NamedTuple):
    """Inputs of attention in a step, computed once and used by every layer."""

    cos: torch.Tensor  # [T, 1, head_size]
    sin: torch.Tensor
    slots: torch.Tensor  # [T, 1]
    decodes: _Decodes | None
    prompts: list[_Prompt]


class Attention:
    """Attention of all layers, which have `shards` shards together, in `dtype`, up to `max_positions`.

    The pool has `num_blocks` blocks and a spare one, which belongs to no request.

    Raises CheckpointError for a rotary scaling that cannot be computed.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        shards: int,
        max_positions: int,
        num_blocks: int,
        tokens_per_block: int,
    ) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._heads, self._kv_heads = rank_heads(config)
        self._block = tokens_per_block
        self._longest = max_positions
        self._windows = sorted({self._window(config.window(layer)) for layer in range(config.num_hidden_layers)})
        cache = config.quantization.kv_cache_quant_algo
        # Elements that store a key or a value of one head.
        self._stored = config.head_size if cache is None else cache.row_bytes(config.head_size)
        self._per_token = 2 * self._kv_heads * self._stored
        self._cos, self._sin = (table.to(device, dtype) for table in rotary_tables(config, max_positions))
        held = dtype if cache is None else torch.int8
        # Zeros, not empty: a masked slot still takes part in a product, where a NaN would survive. The spare block
        # takes the writes of a replayed step's padding rows.
        shape = (shards, num_blocks + 1, tokens_per_block * self._per_token)
        self._pool = torch.zeros(shape, dtype=held, device=device)
        self._scratch = torch.empty(0, dtype=held, device=device)
        self._paged = self._has_paged_attention()
        self._joins = self._has_joined_attention()

    def clear(self, spans: Sequence[Span]) -> None:
        """Zero the blocks that this step begins but does not fill, so that no values of earlier requests remain."""
        begun: list[int] = []
        for span in spans:
            stop = span.start + len(span.tokens)
            if 0 < stop % self._block <= len(span.tokens):
                begun.append(span.blocks[stop // self._block])
        if begun:
            self._pool.index_fill_(1, torch.tensor(begun, device=self._device), 0)

    def plan(self, spans: Sequence[Span]) -> Step:
        """Plan any step; spans of one token come first."""
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
        for joined, group in itertools.groupby(spans[decodes:], key=lambda span: self._joins and span.start == 0):
            run = list(group)
            prompts += [self._plan_joined(run, row)] if joined else self._plan_apart(run, row)
            row = prompts[-1].last
        for span in spans[decodes:]:
            at = np.arange(span.start, span.start + len(span.tokens))
            blocks = np.asarray(span.blocks)
            parts.append(torch.from_numpy(blocks[at // size] * size + at % size))
            where.append(torch.from_numpy(at))
        position = torch.cat(where).to(self._device)
        seen = None
        if decodes:
            length = max(positions) + 1
            tables = [block for s in spans[:decodes] for block in _fit(s.blocks, -(-length // size))]
            places = position[:decodes]
            masks = self._decode_masks(places, length, padded=min(positions) + 1 < length)
            seen = _Decodes(places, torch.tensor(tables, device=self._device), length, masks)
        return Step(
            cos=self._cos[position].unsqueeze(1),
            sin=self._sin[position].unsqueeze(1),
            slots=torch.cat(parts).to(self._device)[:, None],
            decodes=seen,
            prompts=prompts,
        )

    def plan_decode(self, step: Decode) -> Step:
        """Plan a step that only decodes, in a way that a CUDA graph can record."""
        length = len(step.tables) // len(step.ids) * self._block
        masks = self._decode_masks(step.positions, length, padded=True)
        decodes = _Decodes(step.positions, step.tables, length, masks)
        cos, sin = (table[step.positions].unsqueeze(1) for table in (self._cos, self._sin))
        return Step(cos, sin, step.slots[:, None], decodes, prompts=[])

    def _has_paged_attention(self) -> bool:
        """Whether a kernel reads the cache in place for decoding tokens; otherwise the cache is gathered first."""
        # The kernel does not support windows.
        if self._device.type != "cuda" or not can_compile() or self._windows != [self._longest]:
            return False
        cache = self._config.quantization.kv_cache_quant_algo
        if cache is KvCacheQuantAlgo.NVFP4:
            return False
        return cache is not KvCacheQuantAlgo.FP8 or torch.cuda.get_device_capability(self._device) >= (8, 9)

    def _window(self, window: int | None) -> int:
        """Most tokens that a token attends to: `window`, at most the longest sequence; None means all."""
        return self._longest if window is None else min(window, self._longest)

    def _decode_masks(self, positions: torch.Tensor, length: int, *, padded: bool) -> Masks:
        """Masks of single tokens at `positions` [n] over `length` cached tokens; `padded`: some of them see fewer."""
        if self._paged:
            return {}
        return {
            window: decode_mask(positions, length, window, self._dtype) if padded or window < length else None
            for window in self._windows
        }

    def _has_joined_attention(self) -> bool:
        """Whether one kernel computes the attention of many whole prompts: a launch for each would leave GPUs idle."""
        if self._device.type != "cuda" or self._dtype == torch.float32 or self._config.head_size % 8:
            return False
        if self._windows != [self._longest]:
            return False
        return self._config.head_size <= 256 and torch.cuda.get_device_capability(self._device) >= (8, 0)

    def _plan_joined(self, spans: Sequence[Span], row: int) -> _Prompt:
        lengths = [len(span.tokens) for span in spans]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=self._device)
        return _Prompt(row, row + sum(lengths), None, max(lengths), {}, bounds)

    def _plan_apart(self, spans: Sequence[Span], row: int) -> list[_Prompt]:
        rows = itertools.accumulate((len(span.tokens) for span in spans), initial=row)
        return [self._plan_prompt(span, first) for span, first in zip(spans, rows, strict=False)]

    def _plan_prompt(self, span: Span, row: int) -> _Prompt:
        count = len(span.tokens)
        length = span.start + count
        masks = {window: prompt_mask(span.start, count, window, self._dtype, self._device) for window in self._windows}
        if span.start == 0:
            return _Prompt(row, row + count, None, length, masks)
        blocks = torch.tensor(span.blocks[: -(-length // self._block)], device=self._device)
        return _Prompt(row, row + count, blocks, length, masks)

    def attend(
        self, step: Step, first_shard: int, layer: Sequence[LayerShard], place: int, qkv: torch.Tensor
    ) -> torch.Tensor:
        """[T, features of q, k and v] -> [T, features of q], for the heads of shard `place` of a layer.

        first_shard  number of shards of the layers before it
        """
        heads, kv, size = self._heads, self._kv_heads, self._config.head_size
        pool, codec = self._pool[first_shard + place], layer[place].kv_codec
        # Keys follow the queries in memory, so both are rotated at once.
        x = rotate_and_keep(
            qkv.reshape(len(qkv), heads + 2 * kv, size), heads + kv, layer[place].head_norms, step.cos, step.sin,
            None if codec is None else codec.encode, step.slots, pool.view(-1, 2 * kv, self._stored),
        )  # fmt: skip
        parts: list[torch.Tensor] = []
        window = self._window(layer[place].window)
        if step.decodes is not None:
            query = x[: len(step.decodes.positions), :heads]
            parts.append(self._attend_cached(query, pool, codec, step.decodes, window))
        parts += [self._attend_prompt(x[one.first : one.last], pool, codec, one, window) for one in step.prompts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_prompt(
        self, own: torch.Tensor, pool: torch.Tensor, codec: KvCodec | None, prompt: _Prompt, window: int
    ) -> torch.Tensor:
        """[n, heads of queries, keys and values, head_size] -> [n, heads * head_size]."""
        n, heads, kv = len(own), self._heads, self._kv_heads
        if prompt.bounds is not None:
            query, key, value = own.split([heads, kv, kv], dim=1)
            # torch's flash attention: torch.nn.attention.varlen calls it, but has no grouped query heads before 2.13.
            joined: torch.Tensor = torch.ops.aten._flash_attention_forward(
                query, key, value, prompt.bounds, prompt.bounds, prompt.length, prompt.length, 0.0, True, False
            )[0]
            return joined.reshape(n, -1)
        own = own.unsqueeze(0)
        seen = own[:, :, heads:]
        if prompt.blocks is not None:
            cached = self._gather(pool, codec, prompt.blocks, 1, prompt.length)
            if codec is not None:
                cached[:, -n:] = seen
            seen = cached
        mask = prompt.masks[window]
        out = functional.scaled_dot_product_attention(
            own[:, :, :heads].transpose(1, 2),
            seen[:, :, :kv].transpose(1, 2),
            seen[:, :, kv:].transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out.transpose(1, 2).reshape(n, -1)

    def _attend_cached(
        self, query: torch.Tensor, pool: torch.Tensor, codec: KvCodec | None, decodes: _Decodes, window: int
    ) -> torch.Tensor:
        """[n, heads, head_size] -> [n, heads * head_size]."""
        positions, tables, length, masks = decodes
        if self._paged:
            from trtpipe.engines.reference.cuda.kernels import paged_attention

            return paged_attention(query, pool, codec, tables, positions, self._kv_heads, self._block)
        n, heads, size = query.shape
        kv = self._kv_heads
        cached = self._gather(pool, codec, tables, n, length)
        # The query heads that share a key head become the query's length dimension, so that no key is repeated.
        out = functional.scaled_dot_product_attention(
            query.reshape(n, kv, heads // kv, size),
            cached[:, :, :kv].transpose(1, 2),
            cached[:, :, kv:].transpose(1, 2),
            attn_mask=masks[window],
        )
        return out.reshape(n, heads * size)

    def _gather(
        self, pool: torch.Tensor, codec: KvCodec | None, blocks: torch.Tensor, rows: int, length: int
    ) -> torch.Tensor:
        """Cached tokens of `rows` requests, [rows, length, 2 * kv_heads, head_size]; valid until the next call."""
        if pool.is_cuda:
            # Indexing, because index_select takes three times as long for few blocks.
            out = pool[blocks]
        else:
            wanted = len(blocks) * self._block * self._per_token
            if self._scratch.numel() < wanted:
                # The buffer is kept: page faults of a fresh one would cost more than the copy.
                self._scratch = self._scratch.new_empty(wanted + wanted // 2)
            out = self._scratch[:wanted].view(len(blocks), -1)
            torch.index_select(pool, 0, blocks, out=out)
        tokens = out.view(rows, -1, 2 * self._kv_heads, self._stored)[:, :length]
        return tokens if codec is None else codec.decode(tokens, self._dtype)


def _fit(blocks: Sequence[int], width: int) -> list[int]:
    """The first `width` blocks. A shorter row repeats one of its own blocks, which the mask hides: a NaN in a block of
    another request would survive the mask."""
    return [*blocks[:width], *[blocks[0]] * (width - len(blocks))]
