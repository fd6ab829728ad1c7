"""What a caller asks of the reference runtime and what one step gives back. Field names are TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtpipe.engines.errors import UsageError

# Why a request is over: its end_id came up, a stop word was completed, max_tokens is reached, or cancel().
Finish = Literal["end_id", "stop_words", "length", "cancelled"]
FloatArray = npt.NDArray[np.float32]


class RequestRefused(UsageError):
    """A request that this engine can never run, whatever the load."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is chosen. None means unset everywhere.

    temperature         divides the logits, before the penalties as in TensorRT-LLM; 0 means greedy
    top_k               candidates, at most 1024; unset or 0 with top_p unset or 0 is greedy
    top_p               probability mass of the candidates; 1 or more leaves only top_k
    repetition_penalty  divides positive and multiplies negative logits of tokens in prompt or output
    presence_penalty    subtracted from the logits of tokens in the output
    frequency_penalty   subtracted once for each time a token is in the output
    min_tokens          neither end_id nor a stop word ends the request before so many tokens
    seed                unset is 0, TensorRT-LLM's default: equal requests get equal tokens
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    id              hashable; distinguishes the request among those not yet finished
    prompt          token ids
    max_tokens      tokens to generate at most
    end_id          the token that ends generation and is not put out; None or -1: none does
    stop_words      token sequences that end generation when the output ends in one; they stay in the output
    bad_words       token sequences that may not be completed, counting prompt and output
    embedding_bias  [vocab_size] float32, added to the logits before all else
    beam_width      1; the runtime searches no beams
    """

    id: Any
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    # Left out of comparison: arrays have no truth value.
    embedding_bias: FloatArray | None = field(default=None, compare=False)
    beam_width: int = 1
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False


# Not frozen: one is made for every token, and freezing it would cost more than the rest of it.
@dataclass(kw_only=True, slots=True)
class Output:
    """What one step produced for one request.

    tokens             token ids new in this step; empty when end_id came up or the request was cancelled
    log_probs          log softmax of each token under the model's raw logits, before bias, temperature and
                       penalties; empty unless asked for
    cum_log_prob       sum of the log_probs of all tokens put out so far; 0 unless asked for
    finish             why the request is over, or None while it goes on
    reused_blocks      blocks of the KV cache that held this prompt's start already
    allocated_blocks   blocks taken for this request so far, the reused ones not counted
    context_logits     [prompt tokens, vocab_size] float32, on the first output only and if asked for
    generation_logits  [len(tokens), vocab_size] float32 raw logits, if asked for
    """

    id: Any
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finish: Finish | None = None
    reused_blocks: int = 0
    allocated_blocks: int = 0
    context_logits: FloatArray | None = None
    generation_logits: FloatArray | None = None

    @property
    def only_tokens(self) -> bool:
        """Whether it holds neither log_probs nor logits."""
        return not self.log_probs and self.context_logits is None and self.generation_logits is None
