"""State of an unfinished request in the runtime, besides its Sequence in the scheduler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trtpipe.engines.engine_process.request import FloatArray, IntArray, Output, Request
from trtpipe.engines.reference.grammars import Follower
from trtpipe.engines.reference.sampling import Sampler, prompt_log_probs
from trtpipe.engines.reference.scheduler import Chunk, Sequence


class Flight:
    """Sampler of a request, and what its next output tells besides tokens."""

    def __init__(self, request: Request, follower: Follower | None = None) -> None:
        self.sampler = Sampler(request, follower)
        self.cum_log_prob = 0.0
        self.scheduled_ns = 0
        self.context_logits: FloatArray | None = None
        self.prompt_log_probs: FloatArray | None = None
        self.prompt_likeliest: IntArray | None = None

    def keep_prompt(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Keep what the request wants of the logits [chunk tokens, vocab_size] of prompt positions."""
        request = chunk.sequence.request
        if chunk.sequence.generated or not request.needs_whole_prompt:
            return
        if request.return_context_logits:
            if self.context_logits is None:
                self.context_logits = np.empty((len(request.prompt), logits.shape[1]), dtype=np.float32)
            self.context_logits[chunk.start : chunk.stop] = logits.float().cpu().numpy()
        if request.return_prompt_log_probs:
            if self.prompt_log_probs is None or self.prompt_likeliest is None:
                self.prompt_log_probs = np.empty((2, len(request.prompt) - 1), dtype=np.float32)
                self.prompt_likeliest = np.empty(len(request.prompt) - 1, dtype=np.int32)
            # The logits of a position are those of the next token; the last position's are of no prompt token.
            following = request.prompt[chunk.start + 1 : chunk.stop + 1]
            place = slice(chunk.start, chunk.start + len(following))
            values, likeliest = prompt_log_probs(logits[: len(following)], following)
            self.prompt_log_probs[:, place], self.prompt_likeliest[place] = values, likeliest

    def output(self, sequence: Sequence, tokens: list[int], **rest: Any) -> Output:
        """Output of one step; the first one takes along what was kept of the prompt."""
        context, self.context_logits = self.context_logits, None
        scores, self.prompt_log_probs = self.prompt_log_probs, None
        if rest.get("finish") == "cancelled":
            context = scores = None
        return Output(
            id=sequence.request.id,
            tokens=tokens,
            cum_log_prob=self.cum_log_prob,
            reused_blocks=sequence.reused,
            allocated_blocks=sequence.allocated,
            scheduled_ns=0 if sequence.generated else self.scheduled_ns,
            context_logits=context,
            prompt_log_probs=scores,
            prompt_likeliest=None if scores is None else self.prompt_likeliest,
            **rest,
        )
