"""In-flight batching: selects the tokens of requests for the next step.

Requests join and leave between steps. First come, first served: `running` and `waiting` are both in order of
arrival, and all running requests arrived before all waiting ones, so no request starves; but for a prompt whose start
another is computing, which waits for that. In a step, requests that decode come first (one token each), then prompts in
progress, then new prompts while budget and blocks suffice. What is left of the budget is for drafts: tokens that are
guessed to follow a decoding request's last one, and computed in the same step.

A request's tokens are its prompt and its output; `computed` of them are in the KV cache. Preemption only sets
`computed` to 0: the tokens stay and are computed again like a longer prompt, and the next token is the same as
without preemption.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Literal, NamedTuple

from trtpipe.engines.engine_process.request import Request
from trtpipe.engines.reference.cache import BlockPool, chain_digest, root

Policy = Literal["guaranteed_no_evict", "max_utilization"]


class Sequence:
    """State of an unfinished request: its tokens so far, and the blocks of the computed tokens."""

    __slots__ = (
        "__weakref__", "allocated", "blocks", "computed", "digests", "paused", "published", "request", "reused",
        "tokens",
    )  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = list(request.prompt)
        self.computed = 0
        self.blocks: list[int] = []
        # Digests of the full blocks of `tokens`, computed when first needed.
        self.digests: list[bytes] = []
        # Number of leading blocks that are published.
        self.published = 0
        self.reused = 0
        self.allocated = 0
        self.paused = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next token can be drawn."""
        return len(self.tokens) - self.computed


class Chunk(NamedTuple):
    """Tokens [start, stop) of a sequence, computed in one step.

    room  number of draft tokens after `stop` that may be computed too; the sequence has blocks for them
    """

    sequence: Sequence
    start: int
    stop: int
    room: int = 0

    @property
    def draws(self) -> bool:
        """Whether the chunk reaches the sequence's end, so that a new token is drawn after it."""
        return self.stop == len(self.sequence.tokens)


class Scheduler:
    """Chooses the chunks of each step, and allocates and frees blocks of `pool`.

    guaranteed_no_evict  a request starts only when enough blocks are free for its longest output and for the longest
                         outputs of all running requests
    max_utilization      a request starts when enough blocks are free for its present tokens; when no block is free for
                         the next token of a running request, the youngest request is preempted
    max_draft_len        most draft tokens of a request in a step
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        policy: Policy = "guaranteed_no_evict",
        enable_chunked_context: bool = False,
        max_draft_len: int = 0,
    ) -> None:
        self.pool = pool
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._no_evict = policy == "guaranteed_no_evict"
        self._chunked = enable_chunked_context
        self._max_draft_len = max_draft_len

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def worst_case(self, request: Request) -> int:
        """Blocks of the request if it runs to max_tokens; its last token is never computed and needs no slot."""
        return self.pool.blocks_for(len(request.prompt) + request.max_tokens - 1)

    def submit(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step, those of one token first. `computed` must be called
        for each afterwards."""
        chunks: list[Chunk] = []
        for sequence in list(self.running):
            # A sequence that was preempted in this step has at least its prompt and a drawn token to compute.
            if sequence.remaining != 1:
                continue
            wanted = self.pool.blocks_for(len(sequence.tokens))
            while len(sequence.blocks) < wanted and self.pool.free == 0 and not sequence.paused:
                self._preempt(self.running[-1])
            if not sequence.paused:
                self._grow(sequence, wanted)
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1))
        decoding = len(chunks)
        budget = self._max_num_tokens - decoding
        for sequence in self.running:
            if sequence.remaining > 1 and budget > 0:
                count = min(sequence.remaining, budget)
                chunks.append(Chunk(sequence, sequence.computed, sequence.computed + count))
                budget -= count
        budget = self._admit(chunks, budget)
        for index in range(decoding if self._max_draft_len else 0):
            chunks[index] = self._with_drafts(chunks[index], budget)
            budget -= chunks[index].room
        return chunks

    def computed(self, sequence: Sequence, stop: int) -> None:
        """Note that the tokens up to `stop` are in the KV cache, and publish the blocks that they fill."""
        pool = self.pool
        sequence.computed = stop
        if pool.enable_reuse:
            full = sequence.computed // pool.tokens_per_block
            self._make_digests(sequence, full)
            for index in range(sequence.published, full):
                pool.publish(sequence.blocks[index], sequence.digests[index])
            sequence.published = full

    def finish(self, sequence: Sequence) -> None:
        """Remove a running sequence and free its blocks."""
        self.running.remove(sequence)
        self._free(sequence)

    def cancel(self, request_id: Hashable) -> Sequence | None:
        """Remove a running or waiting sequence and return it; None when there is none."""
        for sequence in self.running:
            if sequence.request.id == request_id:
                self.finish(sequence)
                return sequence
        for sequence in self.waiting:
            if sequence.request.id == request_id:
                self.waiting.remove(sequence)
                return sequence
        return None

    def _with_drafts(self, chunk: Chunk, budget: int) -> Chunk:
        """The chunk of a decoding request with room for as many drafts as budget and free blocks suffice for."""
        sequence, request = chunk.sequence, chunk.sequence.request
        # The request's last token is never computed, so that drafts need no blocks beyond those of `worst_case`.
        room = min(self._max_draft_len, budget, request.max_tokens - sequence.generated - 1)
        if not self._no_evict:
            held = len(sequence.blocks) + self.pool.free
            room = min(room, held * self.pool.tokens_per_block - len(sequence.tokens))
        if room < 1 or not sequence.generated:
            return chunk
        self._grow(sequence, self.pool.blocks_for(len(sequence.tokens) + room))
        return chunk._replace(room=room)

    def _admit(self, chunks: list[Chunk], budget: int) -> int:
        """Start waiting requests; what is left of the budget."""
        # Blocks that the running sequences may still allocate.
        promised = 0
        if self._no_evict:
            promised = sum(self.worst_case(s.request) - len(s.blocks) for s in self.running)
        coming, held = self._coming(), []
        while self.waiting and budget > 0 and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            shared = self._reusable(sequence)
            if self._missing(sequence, len(shared)) in coming:
                held.append(self.waiting.popleft())
                continue
            start = len(shared) * self.pool.tokens_per_block
            remaining = len(sequence.tokens) - start
            # Without chunking, only a resumed sequence can exceed max_num_tokens; it is computed in parts.
            if remaining > budget and not (self._chunked or remaining > self._max_num_tokens):
                break
            present = self.pool.blocks_for(len(sequence.tokens))
            lasting = self.worst_case(sequence.request) if self._no_evict else present
            # A shared block that no request holds counts as free now, but not after it is shared.
            needed = lasting - sum(1 for block in shared if self.pool.holders(block))
            if needed > self.pool.free - promised:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            self.pool.share(shared)
            sequence.blocks = shared
            sequence.computed = start
            sequence.published = len(shared)
            if not sequence.paused:
                sequence.reused = len(shared)
            sequence.paused = False
            self._grow(sequence, present)
            promised += lasting - present
            count = min(remaining, budget)
            chunks.append(Chunk(sequence, start, start + count))
            budget -= count
            coming.update(self._unpublished(sequence))
        self.waiting.extendleft(reversed(held))
        return budget

    def _coming(self) -> set[bytes]:
        """Digests of the blocks that running prompts will publish. A prompt that starts with them waits, as in
        TensorRT-LLM, instead of being computed beside: the answers of a request for several have one prompt."""
        if not self.pool.enable_reuse or not self.waiting:
            return set()
        return {digest for one in self.running if one.remaining > 1 for digest in self._unpublished(one)}

    def _unpublished(self, sequence: Sequence) -> list[bytes]:
        if not self.pool.enable_reuse:
            return []
        self._make_digests(sequence, len(sequence.tokens) // self.pool.tokens_per_block)
        return sequence.digests[sequence.published :]

    def _missing(self, sequence: Sequence, shared: int) -> bytes | None:
        """Digest of the first block that the sequence could share and that is not there; None for none."""
        full = (len(sequence.tokens) - 1) // self.pool.tokens_per_block
        if not self.pool.enable_reuse or sequence.request.needs_whole_prompt or shared >= full:
            return None
        return sequence.digests[shared]

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Cached blocks of the sequence's start; at least its last token remains to be computed."""
        # Reused tokens are not computed, so that their logits could not be returned.
        if not self.pool.enable_reuse or (sequence.request.needs_whole_prompt and not sequence.generated):
            return []
        full = (len(sequence.tokens) - 1) // self.pool.tokens_per_block
        self._make_digests(sequence, full)
        return self.pool.match(sequence.digests[:full])

    def _make_digests(self, sequence: Sequence, count: int) -> None:
        digests, size = sequence.digests, self.pool.tokens_per_block
        for index in range(len(digests), count):
            parent = digests[-1] if digests else root(sequence.request.adapter)
            digests.append(chain_digest(parent, sequence.tokens[index * size : (index + 1) * size]))

    def _grow(self, sequence: Sequence, wanted: int) -> None:
        while len(sequence.blocks) < wanted:
            sequence.blocks.append(self.pool.allocate())
            sequence.allocated += 1

    def _preempt(self, sequence: Sequence) -> None:
        self.finish(sequence)
        sequence.computed = 0
        sequence.paused = True
        self.waiting.appendleft(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
