"""A contract double of TensorRT-LLM's LLM API (PyTorch, 1.3): its arguments, requests, results and statistics.

It computes no model: an answer repeats its prompt, or its guide, token by token, and then ends with its end id.
Arguments are those of TorchLlmArgs and SamplingParams, and any other is refused as they refuse it. At most
`max_batch_size` requests are active, the others wait; a step gives each active request a token, and statistics if they
are asked for. One file of the standard library: it is copied beside a model's script, which imports it under the name
of the real package.

A request with the seed 13 is one on which the engine breaks. One with an adapter repeats its prompt backwards.

TRTLLM_DOUBLE_STEP  seconds of a step, 0.002
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

# TorchLlmArgs of TensorRT-LLM 1.3 (llm_args.py), as far as a repository of this project may give them.
ARGUMENTS = {
    "model": str, "backend": str, "tensor_parallel_size": int, "pipeline_parallel_size": int, "max_batch_size": int,
    "max_input_len": int, "max_seq_len": int, "max_num_tokens": int, "max_beam_width": int, "kv_cache_config": dict,
    "enable_chunked_prefill": bool, "scheduler_config": dict, "enable_iter_perf_stats": bool, "cuda_graph_config": dict,
    "disable_overlap_scheduler": bool, "stream_interval": int, "guided_decoding_backend": str, "enable_lora": bool,
    "lora_config": dict, "sampler_type": str,
}  # fmt: skip
CACHE = {
    "dtype": str, "tokens_per_block": int, "free_gpu_memory_fraction": float, "enable_block_reuse": bool,
    "max_tokens": int, "max_attention_window": list,
}  # fmt: skip
ADAPTERS = {"lora_target_modules": list, "max_lora_rank": int, "max_loras": int, "max_cpu_loras": int}
SCHEDULER = {"capacity_scheduler_policy": str}
POLICIES = ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")
BLOCKS = 64


@dataclasses.dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


# The real package has it in a module of its own.
sys.modules[f"{__name__}.llmapi"] = sys.modules[__name__]


@dataclasses.dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The fields that a model's script may give, with their defaults."""

    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int = 1
    best_of: int | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    exclude_input_from_output: bool = True
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        self.best_of = self.best_of or self.n
        greedy = self.top_k in (None, 1) and self.top_p in (None, 0.0)
        if self.best_of > 1 and greedy:
            raise ValueError(f"Greedy decoding in the LLM API does not allow multiple returns, got {self.best_of}.")


@dataclasses.dataclass(slots=True)
class LoRARequest:
    """An adapter of a request; upstream has it in `tensorrt_llm.executor.request`."""

    name: str
    adapter_id: int
    path: str = ""

    def __post_init__(self) -> None:
        if not Path(self.path).exists():
            raise ValueError(f"lora_path ({self.path}) does not exist.")


@dataclasses.dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclasses.dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    _last_text_len: int = 0
    _last_token_ids_len: int = 0

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        return self.logprobs[self._last_token_ids_len :]


class RequestOutput:
    """One request: the same object at every step, as upstream's."""

    def __init__(self, prompt: list[int], sampling: SamplingParams, tokenizer: Any) -> None:
        self.prompt_token_ids = prompt
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.made = 0
        self.stopped = False
        self._sampling = sampling
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[list[int], str | None]] = asyncio.Queue()
        self._ends = set(sampling.stop_token_ids or ())
        guide = sampling.guided_decoding
        given = [] if guide is None else [value for value in dataclasses.astuple(guide) if value]
        self._says = tokenizer.encode(str(given[0])) if given else prompt

    def abort(self) -> None:
        self.stopped = True

    def step(self) -> bool:
        """Make a token; whether it was the last. Called by the engine's thread."""
        self.made += 1
        token = self._says[(self.made - 1) % len(self._says)]
        reason = None
        end = self._sampling.end_id if self._sampling.end_id is not None else self._tokenizer.end
        if not self._sampling.ignore_eos and self.made > len(self._says):
            token, reason = end, "stop"
        elif token in self._ends:
            reason = "stop"
        elif self.made == self._sampling.max_tokens:
            reason = "length"
        made = ([], "cancelled") if self.stopped else ([token], reason)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, made)
        return made[1] is not None

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        tokens, reason = await self._queue.get()
        output = self.outputs[0]
        output._last_text_len, output._last_token_ids_len = len(output.text), len(output.token_ids)
        output.token_ids = output.token_ids + tokens
        if reason == "stop" and tokens and tokens[0] in self._ends:  # a stop word is taken out of the output
            output.token_ids, output.stop_reason = output.token_ids[:-1], tokens[0]
        if self._sampling.logprobs is not None:
            output.logprobs = output.logprobs + [{token: Logprob(-0.25 * (token % 4))} for token in tokens]
        if self._sampling.detokenize:
            output.text = self._tokenizer.decode(output.token_ids)
        self.finished, output.finish_reason = reason is not None, reason
        return self


class LLM:
    """The engine: a thread that makes a step at a time."""

    def __init__(self, **arguments: Any) -> None:
        _check("TorchLlmArgs", arguments, ARGUMENTS)
        cache, scheduler = arguments.get("kv_cache_config", {}), arguments.get("scheduler_config", {})
        _check("KvCacheConfig", cache, CACHE)
        _check("SchedulerConfig", scheduler, SCHEDULER)
        if arguments.get("backend", "pytorch") != "pytorch":
            raise ValueError(
                f"1 validation error for TorchLlmArgs\nbackend\n  Input should be 'pytorch', got {arguments}"
            )
        if scheduler.get("capacity_scheduler_policy", POLICIES[0]) not in POLICIES:
            raise ValueError(f"1 validation error for SchedulerConfig\ncapacity_scheduler_policy\n  {scheduler}")
        self._tokenizer = _Tokenizer(arguments["model"])
        self._guided = "guided_decoding_backend" in arguments
        self._most = arguments.get("max_batch_size", 2048)
        self._longest = arguments.get("max_seq_len", 1 << 30)
        adapters = arguments.get("lora_config")
        if adapters is not None:
            _check("LoraConfig", adapters, ADAPTERS)
        self._rank = adapters["max_lora_rank"] if adapters and arguments.get("enable_lora") else 0
        self._tells = arguments.get("enable_iter_perf_stats", False)
        self._block = cache.get("tokens_per_block", 32)
        self._step = float(os.environ.get("TRTLLM_DOUBLE_STEP", "0.002"))
        self._requests: list[RequestOutput] = []
        self._statistics: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def generate_async(
        self, inputs: str | list[int], sampling_params: SamplingParams | None = None, *,
        lora_request: LoRARequest | None = None, streaming: bool = False,
    ) -> RequestOutput:  # fmt: skip
        sampling = sampling_params or SamplingParams()
        special = sampling.add_special_tokens
        prompt = self._tokenizer.encode(inputs, special) if isinstance(inputs, str) else inputs
        if not prompt or not all(type(token) is int for token in prompt):
            raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")
        if len(prompt) + 1 > self._longest:
            raise ValueError(f"The prompt length ({len(prompt)}) exceeds max_seq_len ({self._longest})")
        if sampling.guided_decoding is not None and not self._guided:
            raise ValueError("Guided decoding is not enabled. Please set `guided_decoding_backend`.")
        if sampling.seed == 13:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if lora_request is not None:
            prompt = self._adapted(prompt, lora_request)
        request = RequestOutput(prompt, sampling, self._tokenizer)
        with self._lock:
            self._requests.append(request)
        return request

    def _adapted(self, prompt: list[int], adapter: LoRARequest) -> list[int]:
        """The prompt backwards: what an adapter makes of it here."""
        rank = json.loads((Path(adapter.path) / "adapter_config.json").read_text(encoding="utf-8"))["r"]
        if not self._rank:
            raise RuntimeError("Executor failed: LoRA is not enabled for this model")
        if rank > self._rank:
            raise RuntimeError(f"Executor failed: rank {rank} exceeds max_lora_rank {self._rank}")
        return prompt[::-1]

    async def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        until = time.monotonic() + (timeout or 0)
        while time.monotonic() < until:
            with self._lock:
                found, self._statistics = self._statistics, []
            for one in found:
                yield one
            await asyncio.sleep(0.01)

    def shutdown(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._closing.wait(self._step):
            with self._lock:
                active, queued = self._requests[: self._most], len(self._requests[self._most :])
            if not active:
                continue
            number += 1
            ended = [request for request in active if request.step()]
            with self._lock:
                self._requests = [request for request in self._requests if request not in ended]
                if self._tells:
                    self._statistics = [*self._statistics[-999:], self._tell(number, active, queued)]

    def _tell(self, number: int, active: list[RequestOutput], queued: int) -> dict[str, Any]:
        fresh = [request for request in active if request.made == 1]
        used = sum(-(-(len(request.prompt_token_ids) + request.made) // self._block) for request in active)
        return {
            "iter": number,
            "numActiveRequests": len(active),
            "maxNumActiveRequests": self._most,
            "numQueuedRequests": queued,
            "gpuMemUsage": 1 << 30,
            "cpuMemUsage": 1 << 20,
            "pinnedMemUsage": 1 << 10,
            "inflightBatchingStats": {
                "numScheduledRequests": len(active),
                "numContextRequests": len(fresh),
                "numGenRequests": len(active) - len(fresh),
                "numCtxTokens": sum(len(request.prompt_token_ids) for request in fresh),
                "numPausedRequests": 0,
            },
            "kvCacheStats": {
                "maxNumBlocks": BLOCKS,
                "freeNumBlocks": BLOCKS - used,
                "usedNumBlocks": used,
                "tokensPerBlock": self._block,
                "reusedBlocks": 0,
            },
        }


class _Tokenizer:
    def __init__(self, folder: str) -> None:
        import json
        from pathlib import Path

        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        ends = json.loads((Path(folder) / "generation_config.json").read_text())["eos_token_id"]
        self.end = ends[0] if isinstance(ends, list) else ends

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


def _check(name: str, given: dict[str, Any], known: Mapping[str, type]) -> None:
    """Raises ValueError as pydantic does for a strict model."""
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"1 validation error for {name}\n{key}\n  Extra inputs are not permitted")
        kind = (int, float) if known[key] is float else known[key]
        if not isinstance(value, kind):
            raise ValueError(f"1 validation error for {name}\n{key}\n  Input should be a valid {known[key].__name__}")
