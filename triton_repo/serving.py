"""Serving options of a model repository, with their defaults, and their check against an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import ServedBy
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError, suggestion
from trtpipe.engines.toolchain import Toolchain
from trtpipe.triton_repo.llm_args import require_arguments

POLICIES = ("guaranteed_no_evict", "max_utilization")
ENSEMBLES = ("graph", "script")


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Serving options. Names are those of Triton's TensorRT-LLM backend where it has one.

    triton_max_batch_size          requests Triton may put into one call; None takes the engine's max_batch_size
    decoupled                      allow several responses per request, which streaming needs
    batch_scheduler_policy         guaranteed_no_evict, or max_utilization (admit more, pause and recompute)
    kv_cache_free_gpu_mem_fraction share of the GPU memory left after loading that becomes KV cache
    max_tokens_in_paged_kv_cache   upper bound of the KV cache in tokens; None for no bound
    kv_cache_host_memory_bytes     bytes of the host's memory for KV blocks beyond the GPU's, so that a prompt
                                   start is found again instead of computed; None or 0 for none
    enable_kv_cache_reuse          share the KV blocks of equal prompt starts; None enables it if the engine can
    enable_chunked_context         split long prompts into chunks that share steps with decoding requests; None enables
                                   it if the engine can
    multi_block_mode               spread the attention of one decoding request over several blocks of threads: faster
                                   for long contexts at small batches
    max_attention_window_size      number of last tokens that a new token attends to; None for all. It bounds the KV
                                   cache of a sequence, and changes the model's output
    sink_token_length              number of first tokens that a window keeps attending to; None for none
    exclude_input_in_output        answer with the new tokens only
    normalize_log_probs            divide the cumulative log probability of a beam by its length
    max_queue_delay_microseconds   how long Triton waits to form a batch
    max_queue_size                 requests that may wait beside a full batch; further requests get UNAVAILABLE. 0 for
                                   no bound
    ensemble                       kind of the model `ensemble`: Triton's graph of the three models, or the script of
                                   tensorrt_llm_bls. Only the script ends a request in the engine when a client without
                                   a request id disconnects, or any client before the first token
    cancellation_check_period_ms   how often the backend checks for clients that disconnected
    stats_check_period_ms          how often the backend updates its metrics
    engine_instance_count          stub processes that share an engine in Python (reference, vllm); None for one stub
                                   per 64 sequences of a vllm batch, else one
    preprocessing_instance_count   tokenizer processes
    bls_instance_count             concurrent requests of tensorrt_llm_bls, and of the ensemble as a script: each takes
                                   a process with a tokenizer, further requests wait in Triton's queue. None for 4, and
                                   for the engine's max_batch_size in case of the ensemble
    add_special_tokens             let the tokenizer add its beginning-of-sequence token
    skip_special_tokens            leave special tokens out of the text
    accumulate_tokens              tensorrt_llm_bls: each streamed response carries the whole text so far
    llm_args                       trtllm_pytorch: further arguments of TensorRT-LLM's LLM API, as a file of
                                   `trtllm-serve --config` has them
    repository_root                prefix of the paths in config.pbtxt; empty for paths relative to the repository,
                                   which can then be moved: start tritonserver in its folder
    """

    triton_max_batch_size: int | None = None
    decoupled: bool = True
    batch_scheduler_policy: str = "guaranteed_no_evict"
    kv_cache_free_gpu_mem_fraction: float = 0.9
    max_tokens_in_paged_kv_cache: int | None = None
    kv_cache_host_memory_bytes: int | None = None
    enable_kv_cache_reuse: bool | None = None
    enable_chunked_context: bool | None = None
    multi_block_mode: bool = True
    max_attention_window_size: int | None = None
    sink_token_length: int | None = None
    exclude_input_in_output: bool = True
    normalize_log_probs: bool = True
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 0
    ensemble: str = "graph"
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100
    engine_instance_count: int | None = None
    preprocessing_instance_count: int = 1
    bls_instance_count: int | None = None
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False
    llm_args: dict[str, Any] | None = None
    repository_root: str = ""

    def __post_init__(self) -> None:
        for name, words in (
            ("batch_scheduler_policy", POLICIES),
            ("ensemble", ENSEMBLES),
        ):
            word = getattr(self, name)
            if word is not None and word not in words:
                raise UsageError(f"unknown serving.{name} '{word}'", remedy=suggestion(word, words))
        if self.sink_token_length is not None and self.max_attention_window_size is None:
            raise UsageError(
                "serving.sink_token_length needs serving.max_attention_window_size",
                why="without a window every token stays in sight",
                remedy="give both",
            )
        if not 0 < self.kv_cache_free_gpu_mem_fraction < 1:
            raise UsageError(
                f"serving.kv_cache_free_gpu_mem_fraction is {self.kv_cache_free_gpu_mem_fraction}",
                remedy="give a number between 0 and 1",
            )
        at_least = {
            "triton_max_batch_size": 1,
            "max_tokens_in_paged_kv_cache": 1,
            "kv_cache_host_memory_bytes": 0,
            "max_attention_window_size": 1,
            "sink_token_length": 1,
            "max_queue_delay_microseconds": 0,
            "max_queue_size": 0,
            "cancellation_check_period_ms": 1,
            "stats_check_period_ms": 1,
            "engine_instance_count": 1,
            "preprocessing_instance_count": 1,
            "bls_instance_count": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"serving.{name} is {value}", remedy=f"give at least {least}")


def resolve_serving(
    serving: ServingConfig, build: BuildConfig, runtime: str = "tensorrt_llm", toolchain: Toolchain | None = None
) -> tuple[ServingConfig, dict[str, str]]:
    """Return `serving` with every None resolved for an engine of the resolved `build`, and a reason for each choice.

    toolchain  the release that will serve, where the runtime is of one

    Raises UsageError for options with which the server would fail, or which it would silently ignore.
    """
    paged = bool(build.use_paged_context_fmha)
    why = "" if paged else "the engine's prompt attention does not read a paged KV cache"
    chosen: dict[str, tuple[object, str]] = {}
    reuse, no_reuse = paged, why
    if serving.sink_token_length is not None:
        reuse, no_reuse = False, "attention sinks rule it out"
    for name, possible, reason in (
        ("enable_kv_cache_reuse", reuse, no_reuse),
        ("enable_chunked_context", paged, why),
    ):
        asked = getattr(serving, name)
        if asked and not possible:
            raise UsageError(f"serving.{name} is not possible here", why=reason, remedy="leave it out")
        if asked is None:
            chosen[name] = possible, reason or "the engine can do it"
    if (
        serving.kv_cache_host_memory_bytes
        and not chosen.get("enable_kv_cache_reuse", (serving.enable_kv_cache_reuse,))[0]
    ):
        raise UsageError(
            "serving.kv_cache_host_memory_bytes needs serving.enable_kv_cache_reuse",
            why="the host's memory keeps blocks for reuse alone",
            remedy="leave one of the two out",
        )
    backend = load_backend(runtime)
    if backend.SERVED_BY is not ServedBy.ENGINE_PROCESS:
        if serving.engine_instance_count not in (None, 1):
            raise UsageError(
                f"serving.engine_instance_count is not for the runtime {runtime}",
                why="each instance of its backend would load the engine again",
                remedy="leave it out",
            )
    elif serving.engine_instance_count is None:
        each = backend.SEQUENCES_PER_STUB
        count = 1 if each is None else -(-build.max_batch_size // each)
        chosen["engine_instance_count"] = count, f"for {build.max_batch_size} sequences on {runtime}"
    if serving.llm_args is not None:
        if backend.SERVED_BY is not ServedBy.LLM_API or toolchain is None:
            raise UsageError(
                f"serving.llm_args is not for the runtime {runtime}",
                why="they are arguments of TensorRT-LLM's LLM API",
                remedy="leave it out, or build with --runtime trtllm_pytorch",
            )
        require_arguments(serving.llm_args, toolchain.name)
    if not build.in_flight_batching:
        raise UsageError(
            "an engine without in-flight batching cannot be served",
            why="since 0.20 TensorRT-LLM's executor refuses static batching, and in-flight batching needs a paged KV "
            "cache, packed prompts and the attention plugin",
            remedy="leave build.kv_cache_type, build.remove_input_padding and build.gpt_attention_plugin as they are",
        )
    if build.streamingllm and serving.sink_token_length is None:
        raise UsageError(
            "build.streamingllm needs serving.sink_token_length and serving.max_attention_window_size",
            why="they say how many first and last tokens stay in sight",
            remedy="give both, such as 4 and 2048",
        )
    if serving.sink_token_length is not None and not build.streamingllm:
        raise UsageError("serving.sink_token_length needs build.streamingllm", remedy="set it, or leave the sinks out")
    if serving.triton_max_batch_size is not None and serving.triton_max_batch_size > build.max_batch_size:
        raise UsageError(
            f"serving.triton_max_batch_size {serving.triton_max_batch_size} exceeds "
            f"build.max_batch_size {build.max_batch_size}"
        )
    made = replace(serving, **{name: value for name, (value, _) in chosen.items()})  # type: ignore[arg-type]
    if not made.enable_chunked_context and build.max_input_len > build.max_num_tokens:
        raise UsageError(
            f"build.max_input_len {build.max_input_len} exceeds build.max_num_tokens "
            f"{build.max_num_tokens}, and serving.enable_chunked_context is off",
            why=why,
            remedy="raise build.max_num_tokens" if why else "turn it on, or raise build.max_num_tokens",
        )
    return made, {name: reason for name, (_, reason) in chosen.items()}
