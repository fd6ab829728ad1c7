"""Request to a runtime, and its output of one step. Field names are TensorRT-LLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtpipe.engines.errors import UsageError
from trtpipe.engines.sampling import Guide, SamplingParams

# Why a request is over: end_id was drawn, a stop word was completed or the output's form is complete, max_tokens was
# reached, cancel() was called, or it turned out that the request cannot be run.
Finish = Literal["end_id", "stop_words", "length", "cancelled", "refused"]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]
# Refusal of a guide that allows no token, not even the end.
DEAD_END = "guided_decoding_guide: its grammar allows no token here, so no answer can be complete"


class RequestRefused(UsageError):
    """A request that this engine can never run, at any load.

    The client gets the message. The exception that caused it, if any, is for the log alone: it may name files here.
    """


def adapter_fault(name: str) -> RequestRefused:
    """The refusal of a request whose adapter does not load."""
    return RequestRefused(f"the adapter {name} does not load", remedy="see the server's log")


def bias_refusal(bias: FloatArray | None, vocab_size: int) -> str:
    """Why a request's embedding_bias is refused; "" where it is not."""
    if bias is None or (bias.shape == (vocab_size,) and bool((bias < np.inf).all())):
        return ""
    return f"embedding_bias must be {vocab_size} numbers below infinity, one for each token"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to continue.

    id              hashable; unique among the unfinished requests
    prompt          token ids
    max_tokens      most tokens to generate
    end_id          token that ends generation and is not output; None or -1: no token does
    stop_words      token sequences that end generation when the output ends in one; they stay in the output
    bad_words       token sequences that must not be completed; they may begin in the prompt
    embedding_bias  [vocab_size] float32, added to the logits first
    beam_width      1; the runtime has no beam search
    guide           constraint on the output, with precedence over min_tokens, bad_words and embedding_bias
    adapter         number of the LoRA adapter, of `engines.adapters`; 0 for none
    """

    id: Any
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_id: int | None = None
    stop_words: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    # compare=False: the comparison of arrays has no truth value.
    embedding_bias: FloatArray | None = field(default=None, compare=False)
    beam_width: int = 1
    guide: Guide | None = None
    adapter: int = 0
    return_log_probs: bool = False
    return_context_logits: bool = False
    return_generation_logits: bool = False
    return_prompt_log_probs: bool = False

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the logits of every prompt position are wanted, so that none may come from the cache."""
        return self.return_context_logits or self.return_prompt_log_probs


# Not frozen: an Output is created for every token, and freezing would more than double the cost of that.
@dataclass(kw_only=True, slots=True)
class Output:
    """Output of one step for one request.

    tokens             new token ids of this step; empty when end_id came up or the request was cancelled
    log_probs          log softmax of each token under the model's raw logits, before bias, temperature and
                       penalties; empty unless asked for
    cum_log_prob       sum of the log_probs of all tokens output so far; 0 unless requested
    finish             why the request is over, or None while it continues
    refusal            the reason, with the finish "refused"
    failed             with the finish "refused": the runtime is at fault, not the request
    cause              with the finish "refused": the exception behind it, for the log alone, as of RequestRefused
    reused_blocks      KV-cache blocks that already held the start of this prompt
    allocated_blocks   blocks allocated for this request so far, without the reused ones
    scheduled_ns       on the first output: time.monotonic_ns() when work on the prompt began; 0 where it is not known
    context_logits     [prompt tokens, vocab_size] float32, on the first output only and if requested
    generation_logits  [len(tokens), vocab_size] float32 raw logits, if requested
    prompt_log_probs   [2, prompt tokens - 1], on the first output only and if requested: log softmax of each prompt
                       token but the first, and of the likeliest token in its place
    prompt_likeliest   [prompt tokens - 1], with prompt_log_probs: the likeliest token in place of each
    """

    id: Any
    tokens: list[int]
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finish: Finish | None = None
    refusal: str = ""
    failed: bool = False
    cause: Exception | None = None
    reused_blocks: int = 0
    allocated_blocks: int = 0
    scheduled_ns: int = field(default=0, compare=False)
    context_logits: FloatArray | None = None
    generation_logits: FloatArray | None = None
    prompt_log_probs: FloatArray | None = None
    prompt_likeliest: IntArray | None = None

    @property
    def only_tokens(self) -> bool:
        """Whether the output has neither log_probs nor logits, and is not the first."""
        arrays = (self.context_logits, self.generation_logits, self.prompt_log_probs)
        return not self.scheduled_ns and not self.log_probs and all(array is None for array in arrays)
