"""Reference runtime: executes requests on an engine folder, one in-flight batch per step.

It runs the files that trtllm-build would compile, with the same batching, cache and sampling rules, on any machine
with PyTorch.
"""

from __future__ import annotations

import time
from collections.abc import Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.base import DataType
from trtpipe.engines.build_config import SPECULATIVE, BuildConfig
from trtpipe.engines.checkpoint.config import parse_config
from trtpipe.engines.engine_process.request import Finish, FloatArray, IntArray, Output, Request, RequestRefused
from trtpipe.engines.errors import InputDataError, UsageError, suggestion
from trtpipe.engines.hf.folder import read_model_config
from trtpipe.engines.json_input import read_json
from trtpipe.engines.model_config import CheckpointConfig, ModelConfig
from trtpipe.engines.reference.attention import Span
from trtpipe.engines.reference.cache import BlockPool
from trtpipe.engines.reference.devices import find_device, named_memory_errors
from trtpipe.engines.reference.grammars import TOO_SLOW, Follower, Grammars, guide_refusal
from trtpipe.engines.reference.model import Model
from trtpipe.engines.reference.parallel import ParallelModel
from trtpipe.engines.reference.sampling import MAX_TOP_K, Sampler, choose, log_probs, prompt_log_probs
from trtpipe.engines.reference.scheduler import Chunk, Policy, Scheduler, Sequence
from trtpipe.engines.reference.speculation import Drafter, DraftModel, PromptLookup
from trtpipe.engines.reference.weights import TORCH_DTYPE, load_weights, rank_heads
from trtpipe.engines.speculation import DRAFT, DRAFT_MODEL, NGRAM

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

# Default size of the KV cache on a CPU, unless one sequence of max_seq_len alone needs more.
DEFAULT_KV_CACHE_BYTES = 1 << 30
# Default share of the GPU's free memory for the KV cache; the rest is for the activations of a step.
DEFAULT_FREE_FRACTION = 0.9
# How long a step waits for a grammar when there is nothing else to do.
COMPILING_SECONDS = 0.02
POLICIES = ("guaranteed_no_evict", "max_utilization")


class _Flight:
    """State of an unfinished request in the runtime, besides its Sequence in the scheduler."""

    def __init__(self, request: Request, follower: Follower | None = None) -> None:
        self.sampler = Sampler(request, follower)
        self.cum_log_prob = 0.0
        self.scheduled_ns = 0
        self.context_logits: FloatArray | None = None
        self.prompt_log_probs: FloatArray | None = None
        self.prompt_likeliest: IntArray | None = None


class _Drawn:
    """Tokens that a sequence gets in one step.

    row    row of the logits after its last token; those after its draft tokens follow
    draft  draft tokens that were computed after its last token
    """

    def __init__(self, sequence: Sequence, flight: _Flight, row: int, draft: list[int]) -> None:
        self.sequence, self.flight, self.row, self.draft = sequence, flight, row, draft
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.finish: Finish | None = None
        self.accepted = 0


class Runtime:
    """Runs the engine in `engine_dir`.

    device                  cpu, cuda, or auto: a GPU where there is one. A tensor-parallel engine uses as many GPUs
                            as it has ranks, or one GPU if the machine has fewer
    kv_cache_tokens         tokens in the KV cache, rounded up to blocks. Default: max_batch_size * max_seq_len, but at
                            most what fits `kv_cache_free_gpu_mem_fraction`, on a CPU 1 GiB, and at least max_seq_len
    kv_cache_free_gpu_mem_fraction  share of the GPU memory that is free after the weights are loaded
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
        path = engine_dir / "config.json"
        raw = read_json(path, "engine config")
        self.config = parse_config(_section(raw, "pretrained_config", path), f"{path}: pretrained_config")
        self.build = _build_config(_section(raw, "build_config", path), path)
        dtype = TORCH_DTYPE[self.config.dtype if compute_dtype is None else _data_type(compute_dtype)]
        self._chunked = enable_chunked_context
        where = find_device(device)
        if kv_cache_tokens is not None and kv_cache_tokens < 1:
            raise UsageError(f"kv_cache_tokens is {kv_cache_tokens}", remedy="give a positive number")
        ranks, block = self.config.mapping.tp_size, self.build.tokens_per_block
        if apart is None:
            apart = where.type == "cuda" and torch.cuda.device_count() >= ranks

        def num_blocks() -> int:
            """Number of blocks of the pool; called after the weights are on the device."""
            tokens = kv_cache_tokens
            if tokens is None:
                share = _bytes_for_cache(where, kv_cache_free_gpu_mem_fraction) * (ranks if apart else 1)
                tokens = _default_tokens(self.config, self.build, dtype, share, drafts)
            return -(-tokens // block)

        longest, mode = self.build.max_seq_len, self.build.speculative_decoding_mode
        drafts = read_model_config(engine_dir / DRAFT) if mode == DRAFT_MODEL else None
        remedy = "lower kv_cache_free_gpu_mem_fraction, build with smaller limits, or free the GPU"
        with named_memory_errors(where, ["the engine is loaded"], remedy):
            self._model: Model | ParallelModel
            if ranks > 1 and apart:
                self._model = ParallelModel(
                    engine_dir,
                    self.config,
                    dtype,
                    where,
                    max_positions=longest,
                    num_blocks=num_blocks,
                    tokens_per_block=block,
                )
            else:
                weights = load_weights(engine_dir, self.config, dtype, where)
                self._model = Model(
                    self.config, weights, max_positions=longest, num_blocks=num_blocks(), tokens_per_block=block
                )
            self._drafter: Drafter | None = PromptLookup() if mode == NGRAM else None
            if drafts is not None:
                self._drafter = DraftModel(
                    engine_dir / DRAFT, dtype, where, max_positions=longest, num_blocks=self._model.num_blocks,
                    tokens_per_block=block,
                )  # fmt: skip
        self._pool = BlockPool(self._model.num_blocks, block, enable_reuse=enable_kv_cache_reuse)
        self._scheduler = Scheduler(
            self._pool,
            max_batch_size=self.build.max_batch_size,
            max_num_tokens=self.build.max_num_tokens,
            policy=policy,
            enable_chunked_context=enable_chunked_context,
            max_draft_len=self.build.max_draft_len,
        )
        self._decode_steps = self._draft_tokens = self._accepted = 0
        self._adapters = AdapterFolder(None if adapters is None else Path(adapters))
        self._loaded: set[int] = set()
        self._flights: dict[Hashable, _Flight] = {}
        self._cancelled: list[Output] = []
        self._grammars = None
        if guided_decoding is not None:
            self._grammars = Grammars(Path(guided_decoding["tokenizer_info"]), self.config.vocab_size)
        self._compiling: dict[Hashable, tuple[Request, Future[CompiledGrammar]]] = {}
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
        reason = self._refusal(request)
        if reason:
            raise RequestRefused(reason)
        if request.adapter:
            self._load_adapter(request.adapter)
        if request.guide is not None and self._grammars is not None:
            self._compiling[request.id] = request, self._grammars.compile(request.guide)
        else:
            self._start(request, None)

    def _start(self, request: Request, follower: Follower | None) -> None:
        self._flights[request.id] = _Flight(request, follower)
        self._scheduler.submit(Sequence(request))

    def cancel(self, request_id: Hashable) -> None:
        """End a request; the next step() returns its last output. An unknown or finished request is ignored."""
        if self._compiling.pop(request_id, None) is not None:
            self._cancelled.append(Output(id=request_id, tokens=[], finish="cancelled"))
        sequence = self._scheduler.cancel(request_id)
        if sequence is not None:
            flight = self._flights.pop(request_id)
            self._cancelled.append(self._output(sequence, flight, [], finish="cancelled"))

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
        wanted = [self._logits_wanted(chunk) + len(draft) for chunk, draft in zip(chunks, drafts, strict=True)]
        spans: list[Span] = []
        for (sequence, start, stop, _), draft, rows in zip(chunks, drafts, wanted, strict=True):
            adapter, blocks = sequence.request.adapter, sequence.blocks
            spans.append(Span(sequence.tokens[start:stop], start, blocks, rows - len(draft), adapter))
            # A span for each, so that it is computed like the last token of a request: it reads those before it from
            # the cache, which may be quantized, and a CUDA graph can replay the step.
            spans += [Span([token], at, blocks, 1, adapter) for at, token in enumerate(draft, stop)]
        logits = self._model.forward(spans)
        drawing: list[_Drawn] = []
        end = 0
        for chunk, draft, count in zip(chunks, drafts, wanted, strict=True):
            end += count
            sequence = chunk.sequence
            if sequence.request.needs_whole_prompt and count:
                self._keep_prompt(chunk, logits[end - count : end])
            # Tested before the chunk counts as computed, because the sequence grows when its token is drawn.
            if chunk.draws:
                drawing.append(_Drawn(sequence, self._flights[sequence.request.id], end - 1 - len(draft), draft))
            self._scheduler.computed(sequence, chunk.stop)
        if drawing:
            outputs += self._draw(logits, drawing)
        return outputs

    def _take_compiled(self) -> list[Output]:
        """Queue the requests whose grammars are compiled; the last outputs of those whose grammars are none."""
        if self._compiling and not self._scheduler.has_work:
            wait([future for _, future in self._compiling.values()], COMPILING_SECONDS, FIRST_COMPLETED)
        refused: list[Output] = []
        for request, future in [entry for entry in self._compiling.values() if entry[1].done()]:
            del self._compiling[request.id]
            error = future.exception()
            if isinstance(error, RequestRefused):
                refused.append(Output(id=request.id, tokens=[], finish="refused", refusal=str(error)))
            else:
                self._start(request, Follower(future.result(), request))
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

    def _load_adapter(self, number: int) -> None:
        """Load an adapter, unless it is there, and drop those that are gone from the folder and in no request.

        Raises RequestRefused.
        """
        placed = self._adapters.numbered(number)
        if placed is None:
            raise RequestRefused(f"no adapter has the number {number}")
        if number in self._loaded:
            return
        try:
            self._model.load_adapter(number, placed.path)
        except (InputDataError, OSError) as error:
            raise RequestRefused(f"the adapter {placed.name} does not load: {error}") from None
        self._loaded.add(number)
        used = {one.request.adapter for one in (*self._scheduler.running, *self._scheduler.waiting)}
        used |= {request.adapter for request, _ in self._compiling.values()}
        there = {one.number for one in self._adapters.all()}
        for gone in self._loaded - used - there:
            self._model.drop_adapter(gone)
            self._loaded.remove(gone)

    def _refusal(self, request: Request) -> str:
        """Why the request can never run; "" if it can."""
        build, prompt, vocab = self.build, request.prompt, self.config.vocab_size
        length = len(prompt)
        if request.id in self._flights or request.id in self._compiling:
            return f"request {request.id!r} is still running"
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
        if length > build.max_num_tokens and not self._chunked:
            return (
                f"the prompt has {length} tokens, a step of this engine takes {build.max_num_tokens} "
                "(max_num_tokens) and chunked context is off"
            )
        blocks = self._scheduler.worst_case(request)
        if blocks > self._pool.num_blocks:
            return f"the request needs {blocks} blocks of KV cache, there are {self._pool.num_blocks}"
        words = (*request.stop_words, *request.bad_words)
        outside = next((t for t in (*prompt, *(t for w in words for t in w)) if not 0 <= t < vocab), None)
        if outside is not None:
            return f"token id {outside} is outside the vocabulary of {vocab}"
        if request.guide is not None:
            reason = "this engine is served without guided decoding"
            reason = guide_refusal(request.guide) if self._grammars is not None else f"guided_decoding_guide: {reason}"
            if reason:
                return reason
        return _sampling_refusal(request, vocab)

    def _logits_wanted(self, chunk: Chunk) -> int:
        request = chunk.sequence.request
        # Before the first output token, the caller may want every prompt position.
        if request.needs_whole_prompt and not chunk.sequence.generated:
            return chunk.stop - chunk.start
        return 1 if chunk.draws else 0

    def _keep_prompt(self, chunk: Chunk, logits: torch.Tensor) -> None:
        """Keep what the request wants of the logits [chunk tokens, vocab_size] of prompt positions."""
        if chunk.sequence.generated:
            return
        request, flight = chunk.sequence.request, self._flights[chunk.sequence.request.id]
        if request.return_context_logits:
            if flight.context_logits is None:
                flight.context_logits = np.empty((len(request.prompt), self.config.vocab_size), dtype=np.float32)
            flight.context_logits[chunk.start : chunk.stop] = logits.float().cpu().numpy()
        if request.return_prompt_log_probs:
            if flight.prompt_log_probs is None or flight.prompt_likeliest is None:
                flight.prompt_log_probs = np.empty((2, len(request.prompt) - 1), dtype=np.float32)
                flight.prompt_likeliest = np.empty(len(request.prompt) - 1, dtype=np.int32)
            # The logits of a position are those of the next token; the last position's are of no prompt token.
            following = request.prompt[chunk.start + 1 : chunk.stop + 1]
            place = slice(chunk.start, chunk.start + len(following))
            values, likeliest = prompt_log_probs(logits[: len(following)], following)
            flight.prompt_log_probs[:, place], flight.prompt_likeliest[place] = values, likeliest

    def _draw(self, logits: torch.Tensor, drawing: list[_Drawn]) -> list[Output]:
        """Draw the next token of every sequence, and another one as long as the token drawn is the draft's. Append
        them, or end the sequence."""
        going, place = drawing, 0
        while going:
            rows = [one.row + place for one in going]
            self._draw_one(logits if len(rows) == len(logits) else logits[rows], going)
            going = [
                one
                for one in going
                if one.finish is None and place < len(one.draft) and one.tokens[place] == one.draft[place]
            ]
            for one in going:
                one.accepted += 1
            place += 1
        outputs: list[Output] = []
        for one in drawing:
            sequence, new = one.sequence, one.tokens
            if sequence.generated:
                self._decode_steps += 1
                self._draft_tokens += len(one.draft)
                self._accepted += one.accepted
            else:
                self._reused_blocks += sequence.reused
            generation = None
            if sequence.request.return_generation_logits:
                generation = logits[one.row : one.row + len(new)].float().cpu().numpy()
            outputs.append(
                self._output(
                    sequence,
                    one.flight,
                    new,
                    finish=one.finish,
                    refusal=TOO_SLOW if one.finish == "refused" else "",
                    log_probs=one.log_probs,
                    generation_logits=generation,
                )
            )
            sequence.tokens += new
            if one.accepted:
                # All but the last new token were computed as drafts.
                self._scheduler.computed(sequence, max(sequence.computed, len(sequence.tokens) - 1))
            if one.finish is not None:
                self._scheduler.finish(sequence)
                del self._flights[sequence.request.id]
        return outputs

    def _draw_one(self, logits: torch.Tensor, drawing: list[_Drawn]) -> None:
        """Draw a token for each of `drawing` from its row of `logits`."""
        with torch.inference_mode():
            tokens = choose(logits, [one.flight.sampler for one in drawing])
            scored = [row for row, one in enumerate(drawing) if one.sequence.request.return_log_probs]
            scores: dict[int, float] = {}
            if scored:
                values = log_probs(logits[scored], [tokens[row] for row in scored])
                scores = dict(zip(scored, values, strict=True))
        for row, (one, token) in enumerate(zip(drawing, tokens, strict=True)):
            one.finish = one.flight.sampler.accept(token)
            follower = one.flight.sampler.follower
            if follower is not None and follower.too_slow and one.finish is None:
                one.finish = "refused"
            if one.finish in ("end_id", "refused"):
                continue
            one.tokens.append(token)
            if row in scores:
                one.flight.cum_log_prob += scores[row]
                one.log_probs.append(scores[row])

    def _output(self, sequence: Sequence, flight: _Flight, tokens: list[int], **rest: Any) -> Output:
        context, flight.context_logits = flight.context_logits, None
        scores, flight.prompt_log_probs = flight.prompt_log_probs, None
        if rest.get("finish") == "cancelled":
            context = scores = None
        return Output(
            id=sequence.request.id,
            tokens=tokens,
            cum_log_prob=flight.cum_log_prob,
            reused_blocks=sequence.reused,
            allocated_blocks=sequence.allocated,
            scheduled_ns=0 if sequence.generated else flight.scheduled_ns,
            context_logits=context,
            prompt_log_probs=scores,
            prompt_likeliest=None if scores is None else flight.prompt_likeliest,
            **rest,
        )


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
    bias = request.embedding_bias
    if bias is not None and (bias.shape != (vocab,) or bool(np.isnan(bias).any()) or bool((bias == np.inf).any())):
        return f"embedding_bias must be {vocab} numbers below infinity, one for each token"
    return ""


def _section(raw: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = raw.get(name)
    if not isinstance(value, dict):
        why = "this is not an engine folder"
        raise InputDataError(f"{path} has no {name}", why=why, remedy="build the engine again")
    return value


# Fields of an engine's build_config that this runtime enforces.
LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")


def _build_config(raw: dict[str, Any], path: Path) -> BuildConfig:
    plugins = raw.get("plugin_config")
    values: dict[str, Any] = {}
    for name in LIMITS:
        section = raw if name != "tokens_per_block" else plugins if isinstance(plugins, dict) else {}
        value = section.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise InputDataError(f"{path}: build_config has no usable {name}", remedy="build the engine again")
        values[name] = value
    if raw.get("speculative_decoding_mode"):
        values |= {name: raw.get(name) for name in SPECULATIVE}
    try:
        return BuildConfig(**values)
    except TypeError as error:
        raise InputDataError(f"{path}: build_config has an unusable value", why=str(error)) from None
    except UsageError as error:
        raise InputDataError(f"{path}: {error.what}", remedy="build the engine again") from None


def _data_type(value: DataType | str) -> DataType:
    try:
        return DataType(value)
    except ValueError:
        names = [kind.value for kind in DataType]
        raise UsageError(f"no compute type is called '{value}'", remedy=suggestion(str(value), names)) from None


def _bytes_for_cache(device: torch.device, fraction: float) -> int:
    """Most bytes of a rank's KV cache on its device."""
    return int(torch.cuda.mem_get_info(device)[0] * fraction) if device.type == "cuda" else DEFAULT_KV_CACHE_BYTES


def _default_tokens(
    config: CheckpointConfig, build: BuildConfig, dtype: torch.dtype, affordable: int, drafts: ModelConfig | None
) -> int:
    """Default number of tokens in the cache; all ranks together, and the model of drafts, have at most `affordable`
    bytes."""
    _, kv_heads = rank_heads(config)
    cache = config.quantization.kv_cache_quant_algo
    row = config.head_size * dtype.itemsize if cache is None else cache.row_bytes(config.head_size)
    per_layer = 2 * kv_heads * config.mapping.tp_size * row
    per_token = per_layer * config.num_hidden_layers
    if drafts is not None:
        per_token += 2 * drafts.num_key_value_heads * drafts.head_size * dtype.itemsize * drafts.num_hidden_layers
    tokens = affordable // per_token
    return max(build.max_seq_len, min(build.max_batch_size * build.max_seq_len, tokens))
