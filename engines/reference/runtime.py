"""Reference runtime: executes requests on an engine folder, one in-flight batch per step.

It runs the files that trtllm-build would compile, with the same batching, cache and sampling rules, on any machine
with PyTorch. A request passes through `admission`, `scheduler`, the model and `drawing`.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trtpipe.engines.base import DataType
from trtpipe.engines.engine_process.request import Output, Request, RequestRefused
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.reference.admission import Admission
from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.cache import BlockPool
from trtpipe.engines.reference.devices import find_device
from trtpipe.engines.reference.drawing import Drawn, draw
from trtpipe.engines.reference.engine_config import compute_type, read_engine_config
from trtpipe.engines.reference.flight import Flight
from trtpipe.engines.reference.grammars import NOT_COMPILED, Follower, Grammars
from trtpipe.engines.reference.loading import load_models
from trtpipe.engines.reference.scheduler import Chunk, Policy, Scheduler, Sequence
from trtpipe.engines.reference.served_adapters import ServedAdapters

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

# Default share of the GPU's free memory for the KV cache; the rest is for the activations of a step.
DEFAULT_FREE_FRACTION = 0.9
# How long a step waits for a grammar when there is nothing else to do.
COMPILING_SECONDS = 0.02
POLICIES = ("guaranteed_no_evict", "max_utilization")


class Runtime:
    """Runs the engine in `engine_dir`.

    device                  cpu, cuda, or auto: a GPU where there is one. A tensor-parallel engine uses as many GPUs
                            as it has ranks, or one GPU if the machine has fewer
    kv_cache_tokens         tokens in the KV cache, rounded up to blocks. Default: max_batch_size * max_seq_len, but at
                            most what fits `kv_cache_free_gpu_mem_fraction`, on a CPU 1 GiB, and at least max_seq_len
    kv_cache_free_gpu_mem_fraction  share of the GPU memory that is free after the weights are loaded, without that
                            of the adapters that are there
    policy                  guaranteed_no_evict or max_utilization
    enable_kv_cache_reuse   share the blocks of equal prompt starts, also with finished requests
    enable_chunked_context  split prompts over steps; without it a prompt must fit max_num_tokens
    compute_dtype           bfloat16, float16 or float32; default: the checkpoint's type
    guided_decoding         paths of what it needs, by name: the `tokenizer_info` file. None: requests have no guides
    apart                   whether each tensor-parallel rank has a process; default: on a GPU yes, on a CPU no
    adapters                folder of LoRA adapters, see `engines.adapters`; None for an engine that takes none. An
                            adapter is loaded at its first request, and kept until it is gone from the folder

    Raises InputDataError for an engine folder that is damaged or of another kind, UsageError for an impossible
    option, HostError when the device is missing or has too little memory.
    """

    def __init__(
        self,
        engine_dir: Path,
        *,
        device: str = "auto",
        kv_cache_tokens: int | None = None,
        kv_cache_free_gpu_mem_fraction: float = DEFAULT_FREE_FRACTION,
        policy: Policy = "guaranteed_no_evict",
        enable_kv_cache_reuse: bool = True,
        enable_chunked_context: bool = False,
        compute_dtype: DataType | str | None = None,
        guided_decoding: dict[str, str] | None = None,
        apart: bool | None = None,
        adapters: Path | str | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(f"no batch scheduler policy is called '{policy}'", remedy=suggestion(policy, POLICIES))
        self.config, self.build = read_engine_config(engine_dir)
        dtype, where = compute_type(self.config, compute_dtype), find_device(device)
        if kv_cache_tokens is not None and kv_cache_tokens < 1:
            raise UsageError(f"kv_cache_tokens is {kv_cache_tokens}", remedy="give a positive number")
        folder = None if adapters is None else Path(adapters)
        self._model, self._drafter = load_models(
            engine_dir, self.config, self.build, dtype, where, kv_cache_tokens=kv_cache_tokens,
            free_fraction=kv_cache_free_gpu_mem_fraction, apart=apart, adapters=folder,
        )  # fmt: skip
        self._pool = BlockPool(self._model.num_blocks, self.build.tokens_per_block, enable_reuse=enable_kv_cache_reuse)
        self._scheduler = Scheduler(
            self._pool,
            max_batch_size=self.build.max_batch_size,
            max_num_tokens=self.build.max_num_tokens,
            policy=policy,
            enable_chunked_context=enable_chunked_context,
            max_draft_len=self.build.max_draft_len,
        )
        vocab = self.config.vocab_size
        self._grammars = None
        if guided_decoding is not None:
            self._grammars = Grammars(Path(guided_decoding["tokenizer_info"]), vocab)
        self._admission = Admission(
            self.build, self._scheduler, vocab, enable_chunked_context, guided_decoding is not None
        )
        self._adapters = ServedAdapters(folder, self._model, self._used_adapters)
        self._flights: dict[Hashable, Flight] = {}
        self._cancelled: list[Output] = []
        self._compiling: dict[Hashable, tuple[Request, Future[CompiledGrammar]]] = {}
        self._decode_steps = self._draft_tokens = self._accepted = 0
        self._iteration = 0
        self._reused_blocks = 0
        self._last_step: list[Chunk] = []
        self._last_context: list[Chunk] = []

    @property
    def has_work(self) -> bool:
        """Whether step() has work to do or outputs to return."""
        return bool(self._cancelled or self._compiling) or self._scheduler.has_work

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused, with the reason, for one that can never run."""
        if request.id in self._flights or request.id in self._compiling:
            raise RequestRefused(f"request {request.id!r} is still running")
        if reason := self._admission.refusal(request):
            raise RequestRefused(reason)
        if request.adapter:
            self._adapters.require(request.adapter)
        if request.guide is not None and self._grammars is not None:
            self._compiling[request.id] = request, self._grammars.compile(request.guide)
        else:
            self._start(request, None)

    def _start(self, request: Request, follower: Follower | None) -> None:
        self._flights[request.id] = Flight(request, follower)
        self._scheduler.submit(Sequence(request))

    def cancel(self, request_id: Hashable) -> None:
        """End a request; the next step() returns its last output. An unknown or finished request is ignored."""
        if self._compiling.pop(request_id, None) is not None:
            self._cancelled.append(Output(id=request_id, tokens=[], finish="cancelled"))
        sequence = self._scheduler.cancel(request_id)
        if sequence is not None:
            flight = self._flights.pop(request_id)
            self._cancelled.append(flight.output(sequence, [], finish="cancelled"))

    def step(self) -> list[Output]:
        """Run one in-flight batch; at most one output per request, none for prompts still in progress."""
        outputs, self._cancelled = self._cancelled, []
        outputs += self._take_compiled()
        chunks = self._scheduler.schedule()
        self._last_step = chunks
        self._last_context = [chunk for chunk in chunks if chunk.start < len(chunk.sequence.request.prompt)]
        if not chunks:
            return outputs
        self._iteration += 1
        now = time.monotonic_ns()
        for chunk in self._last_context:
            flight = self._flights[chunk.sequence.request.id]
            flight.scheduled_ns = flight.scheduled_ns or now
        drafts: list[list[int]] = [[] for _ in chunks] if self._drafter is None else self._drafter.propose(chunks)
        wanted = [_logits_wanted(chunk) + len(draft) for chunk, draft in zip(chunks, drafts, strict=True)]
        spans: list[Span] = []
        for (sequence, start, stop, _), draft, rows in zip(chunks, drafts, wanted, strict=True):
            adapter, blocks = sequence.request.adapter, sequence.blocks
            spans.append(Span(sequence.tokens[start:stop], start, blocks, rows - len(draft), adapter))
            # A span for each, so that it is computed like the last token of a request: it reads those before it from
            # the cache, which may be quantized, and a CUDA graph can replay the step.
            spans += [Span([token], at, blocks, 1, adapter) for at, token in enumerate(draft, stop)]
        logits = self._model.forward(spans)
        drawing: list[Drawn] = []
        end = 0
        for chunk, draft, count in zip(chunks, drafts, wanted, strict=True):
            end += count
            flight = self._flights[chunk.sequence.request.id]
            if count:
                flight.keep_prompt(chunk, logits[end - count : end])
            # Tested before the chunk counts as computed, because the sequence grows when its token is drawn.
            if chunk.draws:
                drawing.append(Drawn(chunk.sequence, flight, end - 1 - len(draft), draft))
            self._scheduler.computed(chunk.sequence, chunk.stop)
        if drawing:
            draw(logits, drawing)
            outputs += [self._take(one, logits) for one in drawing]
        return outputs

    def _take(self, one: Drawn, logits: torch.Tensor) -> Output:
        """Append the tokens drawn to their sequence, or end it; its output."""
        sequence = one.sequence
        if sequence.generated:
            self._decode_steps += 1
            self._draft_tokens += len(one.draft)
            self._accepted += one.accepted
        else:
            self._reused_blocks += sequence.reused
        output = one.output(logits)
        sequence.tokens += one.tokens
        if one.accepted:
            # All but the last new token were computed as drafts.
            self._scheduler.computed(sequence, max(sequence.computed, len(sequence.tokens) - 1))
        if one.finish is not None:
            self._scheduler.finish(sequence)
            del self._flights[sequence.request.id]
        return output

    def _take_compiled(self) -> list[Output]:
        """Queue the requests whose grammars are compiled; the last outputs of those whose grammars cannot be."""
        if self._compiling and not self._scheduler.has_work:
            wait([future for _, future in self._compiling.values()], COMPILING_SECONDS, FIRST_COMPLETED)
        refused: list[Output] = []
        for request, future in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.id]
            try:
                self._start(request, Follower(future.result(), request))
            except RequestRefused as error:
                refused.append(Output(id=request.id, tokens=[], finish="refused", refusal=str(error)))
            except Exception as error:  # one request's grammar must not end the engine
                fault = Output(
                    id=request.id, tokens=[], finish="refused", refusal=NOT_COMPILED, failed=True, cause=error
                )
                refused.append(fault)
        return refused

    def close(self) -> None:
        """End the processes of other ranks and of grammars. The runtime must not be used afterwards."""
        if self._grammars is not None:
            self._grammars.close()
        if self._drafter is not None:
            self._drafter.close()
        self._model.close()

    def stats(self) -> dict[str, int]:
        """Counters of the last step and the state after it.

        active_requests      in flight                    iteration            steps run so far
        max_requests         max_batch_size               kv_max_blocks        size of the pool
        scheduled_requests   took part in the last step   kv_free_blocks       held by nobody
        context_requests     of these with prompt tokens  kv_used_blocks       held by requests
        generation_requests  of these without             kv_reused_blocks     served from the cache so far
        total_context_tokens prompt tokens in that step   tokens_per_block
        waiting_requests     not in flight yet            paused_requests      of these preempted ones

        With speculation also, so far: decode_steps, the steps of each request after its first token, all together;
        draft_tokens that were computed; accepted_draft_tokens, after each of which a further token was drawn.
        """
        waiting = self._scheduler.waiting
        return {
            "iteration": self._iteration,
            "active_requests": len(self._scheduler.running),
            "max_requests": self.build.max_batch_size,
            "scheduled_requests": len(self._last_step),
            "context_requests": len(self._last_context),
            "generation_requests": len(self._last_step) - len(self._last_context),
            "total_context_tokens": sum(chunk.stop - chunk.start for chunk in self._last_context),
            "waiting_requests": len(waiting),
            "paused_requests": sum(sequence.paused for sequence in waiting),
            "kv_max_blocks": self._pool.num_blocks,
            "kv_free_blocks": self._pool.free,
            "kv_used_blocks": self._pool.used,
            "kv_reused_blocks": self._reused_blocks,
            "tokens_per_block": self._pool.tokens_per_block,
            **(self._speculation() if self._drafter is not None else {}),
        }

    def _speculation(self) -> dict[str, int]:
        return {
            "decode_steps": self._decode_steps,
            "draft_tokens": self._draft_tokens,
            "accepted_draft_tokens": self._accepted,
        }

    def _used_adapters(self) -> Iterator[int]:
        """Numbers of the adapters of unfinished requests."""
        yield from (one.request.adapter for one in (*self._scheduler.running, *self._scheduler.waiting))
        yield from (request.adapter for request, _ in self._compiling.values())


def _logits_wanted(chunk: Chunk) -> int:
    request = chunk.sequence.request
    # Before the first output token, the caller may want every prompt position.
    if request.needs_whole_prompt and not chunk.sequence.generated:
        return chunk.stop - chunk.start
    return 1 if chunk.draws else 0
