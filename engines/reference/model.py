"""Forward pass over the tokens of one in-flight batch, computed from the stored shards.

All tokens of a step are flattened into [T, hidden] and go through every matrix together; only attention separates
requests. The layers of all pipeline stages run in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from trtpipe.engines.model_config import CheckpointConfig, EmbeddingSharding
from trtpipe.engines.reference.attention import ANY_LENGTH, Attention, Span, Step
from trtpipe.engines.reference.cuda.graphs import Decode, Graphs
from trtpipe.engines.reference.fused import rms_norm
from trtpipe.engines.reference.layer import apply_layer
from trtpipe.engines.reference.lora import Adapters, StepAdapters
from trtpipe.engines.reference.matmul import multiply
from trtpipe.engines.reference.ranks import Ranks, Together
from trtpipe.engines.reference.weights import Weights


class Model:
    """Model with weights, rotary tables up to `max_positions` and a KV pool of `num_blocks` blocks.

    Everything is on the weights' device and in their type. `ranks` combines the results with those of other ranks.
    On a GPU a step that only decodes is recorded once per size as a CUDA graph and then replayed.

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
        self._adapters = Adapters(config, self._ranks.held, self.dtype, self.device)
        self._attention = Attention(
            config,
            self.dtype,
            self.device,
            shards=sum(len(layer) for layer in weights.layers),
            max_positions=max_positions,
            num_blocks=num_blocks,
            tokens_per_block=tokens_per_block,
        )
        self._graphs = None
        # The tokens of an expert are counted on the host, which no graph can record.
        if self.device.type == "cuda" and config.experts is None:
            self._graphs = Graphs(self.decode, tokens_per_block, num_blocks)
            # One row and several rows have different kernels, which must not be compiled while a request waits.
            for rows in (1, 2):
                self._graphs.replay([0] * rows, [0] * rows, [[num_blocks]] * rows)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits of the requested tokens, [sum of span.logits, vocab_size] in the compute type, in span order.

        Writes the keys and values of every token into the pool. Spans of one token must come first: they attend
        in one batch. The logits may be overwritten by the next call.
        """
        self._attention.clear(spans)
        adapters = self._adapters.plan([(span.adapter, len(span.tokens)) for span in spans])
        # A graph has the products of no adapter.
        graphs = self._graphs if adapters is None else None
        if graphs is not None and all(len(span.tokens) == 1 == span.logits for span in spans):
            return graphs.replay(*zip(*[(span.tokens[0], span.start, span.blocks) for span in spans], strict=True))
        tokens = torch.tensor([token for span in spans for token in span.tokens], device=self.device)
        with sdpa_kernel(ANY_LENGTH):
            hidden = self._run(tokens, self._attention.plan(spans), adapters)
        rows: list[int] = []
        end = 0
        for span in spans:
            end += len(span.tokens)
            rows.extend(range(end - span.logits, end))
        return self._logits(hidden if len(rows) == end else hidden[rows])

    @torch.inference_mode()
    def decode(self, step: Decode) -> torch.Tensor:
        """Logits [n, vocab_size] of n spans of one token each, in a way that a CUDA graph can record."""
        return self._logits(self._run(step.ids, self._attention.plan_decode(step)))

    def load_adapter(self, number: int, folder: Path) -> None:
        """Load the adapter in `folder`; raises as `Adapters.load` does."""
        self._adapters.load(number, folder)

    def drop_adapter(self, number: int) -> None:
        """Forget an adapter that no request uses."""
        self._adapters.drop(number)

    def close(self) -> None:
        """Delete the recorded steps: NCCL ends a communicator only after all graphs that call it are deleted."""
        if self._graphs is not None:
            torch.cuda.synchronize(self.device)
            self._graphs.forget()

    def _run(self, ids: torch.Tensor, step: Step, adapters: StepAdapters | None = None) -> torch.Tensor:
        hidden, update = self._embed(ids), None
        first = 0
        for number, layer in enumerate(self._weights.layers):
            attend = partial(self._attention.attend, step, first, layer)
            hidden, update = apply_layer(
                self._ranks, layer, hidden, update, self.config.norm_epsilon, attend, adapters, number
            )
            first += len(layer)
        return hidden if update is None else hidden + update

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        parts = self._weights.embedding
        if self.config.embedding is EmbeddingSharding.NONE:
            return functional.embedding(ids, parts[0])
        if self.config.embedding is EmbeddingSharding.HIDDEN:
            return self._ranks.join([functional.embedding(ids, part) for part in parts])
        # Each rank looks up the rows that it has and zeros for the others, and the ranks' results are summed.
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
        # The last ranks are padded with rows of zeros.
        return logits[:, : self.config.vocab_size]
