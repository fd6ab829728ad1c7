"""vLLM as a runtime of the engine process, with the reference runtime's requests and outputs, one step at a time.

It runs in an environment with vLLM, which may differ from the server's environment: `python -m
trtpipe.engines.engine_process.server --runtime trtpipe.engines.engine_process.vllm_runtime`. A request option that
vLLM does not handle as TensorRT-LLM does is refused, never ignored.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.backends.vllm import FILE, MEMORY_FRACTION, cache_size, environment, speculation
from trtpipe.engines.engine_process.request import (
    DEAD_END,
    Finish,
    FloatArray,
    IntArray,
    Output,
    Request,
    RequestRefused,
    adapter_fault,
    bias_refusal,
)
from trtpipe.engines.sampling import Guide
from trtpipe.engines.yaml_input import load_yaml

# On a CPU the engine runs in this process: another would import vLLM once more, which takes most of a start.
CPU_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


class Runtime:
    """Runs an engine folder of the vllm runtime.

    device                         cpu for an engine made for a CPU; else vLLM takes what it was installed for
    policy                         admission policy; vLLM has only its own, which pauses and recomputes
    enable_kv_cache_reuse          share the blocks of equal prompt starts
    enable_chunked_context         always on in vLLM
    kv_cache_free_gpu_mem_fraction share of the GPU's memory for weights, activations and cache together
    kv_cache_host_memory_bytes     bytes of the host's memory for blocks that the GPU has no room for
    guided_decoding                paths of what it needs, by name: the folder `tokenizer_dir`. None: requests have no
                                   guides
    kv_cache_tokens                tokens in the KV cache, rounded up to blocks. Default: on a GPU what its share of the
                                   memory holds, on a CPU max_num_seqs * max_model_len, but at most 1 GiB of them
    adapters                       folder of LoRA adapters, see `engines.adapters`; None for an engine that takes none
    """

    def __init__(
        self,
        engine: Path,
        *,
        device: str = "auto",
        policy: str = "guaranteed_no_evict",
        enable_kv_cache_reuse: bool = True,
        enable_chunked_context: bool = True,
        kv_cache_free_gpu_mem_fraction: float = MEMORY_FRACTION,
        kv_cache_tokens: int | None = None,
        kv_cache_host_memory_bytes: int = 0,
        guided_decoding: dict[str, str] | None = None,
        adapters: str | None = None,
    ) -> None:
        for name, value in (environment() | (CPU_ENVIRONMENT if device == "cpu" else {})).items():
            os.environ.setdefault(name, value)
        from vllm import EngineArgs  # type: ignore[import-not-found,unused-ignore]
        from vllm.v1.engine.llm_engine import LLMEngine  # type: ignore[import-not-found,unused-ignore]

        given = load_yaml(engine / FILE)
        arguments = {name.replace("-", "_"): value for name, value in given.items()}
        self._max_seq_len = int(arguments["max_model_len"])
        self._block = int(arguments["block_size"])
        self._max_batch = int(arguments["max_num_seqs"])
        speculates = speculation(engine, arguments.pop("speculative_config", None))
        if device == "cpu" or kv_cache_tokens is not None:
            arguments |= cache_size(engine, arguments, kv_cache_tokens)
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(engine),
                skip_tokenizer_init=guided_decoding is None,
                tokenizer=None if guided_decoding is None else guided_decoding["tokenizer_dir"],
                enable_prefix_caching=enable_kv_cache_reuse,
                gpu_memory_utilization=kv_cache_free_gpu_mem_fraction,
                # Only statistics tell of drafts.
                disable_log_stats=speculates is None,
                speculative_config=speculates,
                # In GiB, by vLLM's own OffloadingConnector.
                kv_offloading_size=kv_cache_host_memory_bytes / 2**30 or None,
                **arguments,
            )
        )
        self._adapters = AdapterFolder(None if adapters is None else Path(adapters))
        self._running: dict[str, _Running] = {}
        self._ended: list[Output] = []
        # vLLM's grammars end in the tokenizer's own end token.
        self._guided = guided_decoding is not None
        self._grammar_end = self._engine.get_tokenizer().eos_token_id if self._guided else None
        self._vocab_size = int(self._engine.model_config.get_vocab_size())
        blocks = self._engine.vllm_config.cache_config.num_gpu_blocks or 0
        self._blocks = int(blocks)
        self._steps = self._decode_steps = 0
        self._speculates = speculates is not None

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._ended)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused for one that this engine can never run."""
        name = _name(request.id)
        with _refusals():
            sampling = self._sampling(request)
        adapter = self._adapter(request.adapter) if request.adapter else None
        with _refusals("" if request.guide is None else "guided_decoding_guide: "):
            self._engine.add_request(name, {"prompt_token_ids": list(request.prompt)}, sampling, lora_request=adapter)
        self._running[name] = _Running(request, self._ends(request))

    def cancel(self, identity: Any) -> None:
        name = _name(identity)
        running = self._running.pop(name, None)
        if running is None:
            return
        self._engine.abort_request([name])
        self._ended.append(Output(id=identity, tokens=[], finish="cancelled"))

    def step(self) -> list[Output]:
        out, self._ended = self._ended, []
        if not self._running:
            return out
        self._steps += 1
        for reply in self._engine.step():
            running = self._running.get(reply.request_id)
            if running is None:
                continue  # cancelled while the step ran
            self._decode_steps += not running.waiting and bool(reply.outputs[0].token_ids)
            output = running.take(reply)
            if reply.prompt_logprobs:
                output.prompt_log_probs, output.prompt_likeliest = running.prompt(reply.prompt_logprobs)
            if output.finish:
                del self._running[reply.request_id]
                if running.stopped:
                    self._engine.abort_request([reply.request_id])
            if output.tokens or output.finish or output.prompt_log_probs is not None:
                out.append(output)
        return out

    def stats(self) -> dict[str, int]:
        """Values of TensorRT-LLM's metrics for the backend; those that vLLM does not report are counted here or 0."""
        active = len(self._running)
        scheduled = min(active, self._max_batch)
        used = min(self._blocks, sum(-(-running.length // self._block) for running in self._running.values()))
        return {
            "iteration": self._steps,
            "active_requests": active,
            "max_requests": self._max_batch,
            "scheduled_requests": scheduled,
            "context_requests": sum(running.waiting for running in self._running.values()),
            "generation_requests": sum(not running.waiting for running in self._running.values()),
            "total_context_tokens": 0,
            "waiting_requests": active - scheduled,
            "paused_requests": 0,
            "kv_max_blocks": self._blocks,
            "kv_free_blocks": self._blocks - used,
            "kv_used_blocks": used,
            "kv_reused_blocks": 0,
            "tokens_per_block": self._block,
            **(self._speculation() if self._speculates else {}),
        }

    def _speculation(self) -> dict[str, int]:
        found = {metric.name: getattr(metric, "value", 0) for metric in self._engine.get_metrics()}
        return {
            "decode_steps": self._decode_steps,
            "draft_tokens": int(found.get("vllm:spec_decode_num_draft_tokens", 0)),
            "accepted_draft_tokens": int(found.get("vllm:spec_decode_num_accepted_tokens", 0)),
        }

    def _ends(self, request: Request) -> list[int]:
        """Tokens that end the request and are not output."""
        ends = [] if request.end_id is None or request.end_id < 0 else [request.end_id]
        if request.guide is not None and self._grammar_end is not None:
            ends.append(self._grammar_end)
        return ends

    def _adapter(self, number: int) -> Any:
        """The adapter of that number, loaded now: where loading fails in a step, the engine ends.

        Raises RequestRefused.
        """
        from vllm.lora.request import LoRARequest  # type: ignore[import-not-found,unused-ignore]

        placed = self._adapters.numbered(number)
        if placed is None:
            raise RequestRefused(f"no adapter has the number {number}")
        # The files, not the link to them, which may be removed while vLLM would read them again. vLLM takes adapters of
        # equal names for one.
        adapter = LoRARequest(f"{placed.name}-{number}", number, str(placed.path.resolve()))
        if number not in self._engine.list_loras():
            try:
                self._engine.add_lora(adapter)
            except Exception as error:
                raise adapter_fault(placed.name) from error
        return adapter

    def _sampling(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

        refused = {
            "bad_words": bool(request.bad_words),
            "return_context_logits": request.return_context_logits,
            "return_generation_logits": request.return_generation_logits,
            "beam_width": request.beam_width != 1,
        }
        for name, wanted in refused.items():
            if wanted:
                raise RequestRefused(f"{name} is not supported by the vllm runtime")
        if len(request.prompt) + request.max_tokens > self._max_seq_len:
            raise RequestRefused(
                f"{len(request.prompt)} prompt tokens and max_tokens {request.max_tokens} exceed max_seq_len "
                f"{self._max_seq_len}"
            )
        asked = request.sampling
        greedy = not asked.top_k and not asked.top_p
        if reason := bias_refusal(request.embedding_bias, self._vocab_size):
            raise RequestRefused(reason)
        bias = None
        if request.embedding_bias is not None:
            bias = {int(i): float(request.embedding_bias[i]) for i in np.flatnonzero(request.embedding_bias)}
        if request.guide is not None and not self._guided:
            raise RequestRefused("guided_decoding_guide: this engine is served without guided decoding")
        # A guide may allow the end alone.
        min_tokens = 0 if request.guide is not None else asked.min_tokens or 0
        stops = self._ends(request)
        if min_tokens:  # vLLM draws none of these before
            stops += [word[0] for word in request.stop_words if len(word) == 1]
            # It takes them for columns of the logits.
            stops = [token for token in stops if 0 <= token < self._vocab_size]
        return SamplingParams(
            max_tokens=request.max_tokens,
            temperature=0.0 if greedy or asked.top_k == 1 else 1.0 if asked.temperature is None else asked.temperature,
            top_k=asked.top_k or 0,
            top_p=asked.top_p if asked.top_p and asked.top_p < 1 else 1.0,
            repetition_penalty=asked.repetition_penalty or 1.0,
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            min_tokens=min_tokens,
            seed=(asked.seed or 0) % 2**63,  # vLLM keeps it in 64 bits with a sign, and fails in a step otherwise
            ignore_eos=True,  # the request's end_id ends generation, not the model's
            stop_token_ids=stops or None,
            structured_outputs=None if request.guide is None else _structured(request.guide),
            logit_bias=bias,
            logprobs=0 if request.return_log_probs else None,
            prompt_logprobs=1 if request.return_prompt_log_probs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


@contextlib.contextmanager
def _refusals(mark: str = "") -> Iterator[None]:
    """Turn vLLM's refusal of a request into RequestRefused, whose text begins with `mark`."""
    try:
        yield
    except Exception as error:
        # vLLM has an error of its own for parameters that it does not take, which is no ValueError in each version.
        if type(error).__name__ != "VLLMValidationError" and not isinstance(error, ValueError):
            raise
        raise RequestRefused(f"{mark}vLLM refuses it: {' '.join(str(error).split())}") from None


class _Running:
    """One request in vLLM, and the state of its output so far."""

    def __init__(self, request: Request, ends: list[int]) -> None:
        self._request = request
        self._ends = ends
        self._tokens: list[int] = []
        self._sum = 0.0
        # Whether each token needs more work: stop words or log probabilities.
        self._watched = bool(request.stop_words or request.return_log_probs)
        self.stopped = False

    @property
    def waiting(self) -> bool:
        """Whether the request has no output token yet."""
        return not self._tokens

    @property
    def length(self) -> int:
        return len(self._request.prompt) + len(self._tokens)

    def take(self, reply: Any) -> Output:
        part = reply.outputs[0]
        tokens = list(part.token_ids)
        if part.finish_reason is None and not self._watched:
            self._tokens += tokens
            return Output(id=self._request.id, tokens=tokens)
        finish: Finish | None = None
        if part.finish_reason == "length":
            finish = "length"
        elif part.finish_reason == "error" and tokens and self._request.guide is not None:
            # vLLM draws a token where the grammar allows none, and then rejects it.
            return Output(id=self._request.id, tokens=[], finish="refused", refusal=DEAD_END)
        elif part.finish_reason not in (None, "stop"):
            refusal = f"vLLM ended the request with '{part.finish_reason}'; its log says more"
            return Output(id=self._request.id, tokens=[], finish="refused", refusal=refusal, failed=True)
        elif part.finish_reason is not None:
            finish = "end_id"
            if tokens and tokens[-1] in self._ends:
                tokens.pop()  # TensorRT-LLM does not output the end_id
        log_probs = []
        if self._request.return_log_probs:
            log_probs = [float(row[token].logprob) for row, token in zip(part.logprobs, tokens, strict=False)]
        for index, token in enumerate(tokens):
            self._tokens.append(token)
            if self._ends_in_a_stop_word():
                tokens, log_probs = tokens[: index + 1], log_probs[: index + 1]
                self.stopped, finish = finish is None, "stop_words"
                break
        self._sum += sum(log_probs)
        return Output(id=self._request.id, tokens=tokens, log_probs=log_probs, cum_log_prob=self._sum, finish=finish)

    def prompt(self, entries: list[dict[int, Any] | None]) -> tuple[FloatArray, IntArray]:
        """`prompt_log_probs` and `prompt_likeliest` of vLLM's entries, one for each prompt token, the first None."""
        rows = [(entry[token], entry) for token, entry in zip(self._request.prompt, entries, strict=True) if entry]
        best = [max(entry.items(), key=lambda item: float(item[1].logprob)) for _, entry in rows]
        values = [[given.logprob for given, _ in rows], [one.logprob for _, one in best]]
        return np.array(values, dtype=np.float32), np.array([token for token, _ in best], dtype=np.int32)

    def _ends_in_a_stop_word(self) -> bool:
        asked = self._request.sampling.min_tokens or 0
        if len(self._tokens) < asked:
            return False
        return any(word and tuple(self._tokens[-len(word) :]) == word for word in self._request.stop_words)


def _structured(guide: Guide) -> Any:
    """vLLM's parameters of a guide."""
    from vllm.sampling_params import StructuredOutputsParams

    names = {
        "json_schema": "json",
        "regex": "regex",
        "ebnf_grammar": "grammar",
        "structural_tag": "structural_tag",
    }
    if guide.kind == "json":
        return StructuredOutputsParams(json_object=True)
    return StructuredOutputsParams(**{names[guide.kind]: guide.text})


def _name(identity: Any) -> str:
    return "-".join(map(str, identity))
