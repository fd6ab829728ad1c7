"""Admission of requests to an engine: the reason why one can never run there."""

from __future__ import annotations

from typing import NamedTuple

from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.engine_process.request import Request, bias_refusal
from trtpipe.engines.files import size_text
from trtpipe.engines.reference.grammars import guide_refusal
from trtpipe.engines.reference.sampling import MAX_TOP_K
from trtpipe.engines.reference.scheduler import Scheduler

# Most bytes of logits in an answer: a gRPC message holds no more.
MOST_LOGITS_BYTES = 2**31 - 1


class Admission(NamedTuple):
    """What a request must fit.

    build    limits of the engine
    vocab    size of the vocabulary
    chunked  whether prompts are split over steps
    guided   whether the engine is served with guided decoding
    """

    build: BuildConfig
    scheduler: Scheduler
    vocab: int
    chunked: bool
    guided: bool

    def refusal(self, request: Request) -> str:
        """Why the request can never run; "" if it can."""
        build, prompt, vocab = self.build, request.prompt, self.vocab
        length = len(prompt)
        if not prompt:
            return "the prompt is empty"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}, at least 1 is needed"
        if request.beam_width != 1:
            return f"beam width {request.beam_width} is not possible, the reference runtime has no beam search"
        if length > build.max_input_len:
            return f"the prompt has {length} tokens, this engine takes {build.max_input_len} (max_input_len)"
        if length + request.max_tokens > build.max_seq_len:
            return (
                f"{length} prompt tokens and max_tokens {request.max_tokens} make {length + request.max_tokens}, "
                f"this engine takes {build.max_seq_len} (max_seq_len)"
            )
        if length > build.max_num_tokens and not self.chunked:
            return (
                f"the prompt has {length} tokens, a step of this engine takes {build.max_num_tokens} "
                "(max_num_tokens) and chunked context is off"
            )
        blocks, there = self.scheduler.worst_case(request), self.scheduler.pool.num_blocks
        if blocks > there:
            return f"the request needs {blocks} blocks of KV cache, there are {there}"
        words = (*request.stop_words, *request.bad_words)
        outside = next((t for t in (*prompt, *(t for w in words for t in w)) if not 0 <= t < vocab), None)
        if outside is not None:
            return f"token id {outside} is outside the vocabulary of {vocab}"
        if request.guide is not None:
            if not self.guided:
                return "guided_decoding_guide: this engine is served without guided decoding"
            if reason := guide_refusal(request.guide):
                return reason
        rows = length * request.return_context_logits + request.max_tokens * request.return_generation_logits
        if 4 * rows * vocab > MOST_LOGITS_BYTES:
            took, most = size_text(4 * rows * vocab), size_text(MOST_LOGITS_BYTES)
            return f"logits of {rows} tokens take {took}, and an answer holds {most}"
        return _sampling_refusal(request, vocab)


def _sampling_refusal(request: Request, vocab: int) -> str:
    params = request.sampling
    if params.top_k is not None and not 0 <= params.top_k <= MAX_TOP_K:
        return f"top_k is {params.top_k}, it must be within 0 and {MAX_TOP_K}"
    if params.temperature is not None and not 0 <= params.temperature < float("inf"):
        return f"temperature is {params.temperature}, it must not be negative"
    if params.repetition_penalty is not None and not 0 < params.repetition_penalty < float("inf"):
        return f"repetition_penalty is {params.repetition_penalty}, it must be positive"
    for name in ("top_p", "presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        if value is not None and not abs(value) < float("inf"):
            return f"{name} is {value}"
    if request.end_id is not None and not -1 <= request.end_id < vocab:
        return f"end_id {request.end_id} is outside the vocabulary of {vocab}"
    return bias_refusal(request.embedding_bias, vocab)
