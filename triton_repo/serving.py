"""What a model repository can be told, with every default."""

from __future__ import annotations

from dataclasses import dataclass

from engines.errors import UsageError, suggestion

POLICIES = ("guaranteed_no_evict", "max_utilization")


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Serving options. Names are those of Triton's TensorRT-LLM backend where it has one.

    triton_max_batch_size          requests Triton may put into one call; None takes the engine's max_batch_size
    decoupled                      allow several responses to a request, which streaming needs
    batch_scheduler_policy         guaranteed_no_evict, or max_utilization (admit more, pause and recompute)
    kv_cache_free_gpu_mem_fraction share of the GPU memory left after loading that becomes KV cache
    max_tokens_in_paged_kv_cache   upper bound of the KV cache in tokens; None for no bound
    enable_kv_cache_reuse          share the KV blocks of equal prompt beginnings
    enable_chunked_context         cut long prompts into chunks that share steps with decoding requests
    exclude_input_in_output        answer with the new tokens only
    normalize_log_probs            divide the cumulative log probability of a beam by its length
    max_queue_delay_microseconds   how long Triton waits to form a batch
    max_queue_size                 requests Triton queues before it answers UNAVAILABLE; 0 for no bound
    cancellation_check_period_ms   how often the backend looks for clients that went away
    stats_check_period_ms          how often the backend updates its metrics
    preprocessing_instance_count   tokenizer processes
    add_special_tokens             let the tokenizer add its beginning-of-sequence token
    skip_special_tokens            leave special tokens out of the text
    accumulate_tokens              tensorrt_llm_bls: each streamed response carries the whole text so far
    repository_root                put before the paths in config.pbtxt; empty leaves them relative to the
                                   repository, so that it may be moved: start tritonserver in its folder
    """

    triton_max_batch_size: int | None = None
    decoupled: bool = True
    batch_scheduler_policy: str = "guaranteed_no_evict"
    kv_cache_free_gpu_mem_fraction: float = 0.9
    max_tokens_in_paged_kv_cache: int | None = None
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True
    exclude_input_in_output: bool = True
    normalize_log_probs: bool = True
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 0
    cancellation_check_period_ms: int = 100
    stats_check_period_ms: int = 100
    preprocessing_instance_count: int = 1
    add_special_tokens: bool = True
    skip_special_tokens: bool = True
    accumulate_tokens: bool = False
    repository_root: str = ""

    def __post_init__(self) -> None:
        if self.batch_scheduler_policy not in POLICIES:
            raise UsageError(
                f"unknown serving.batch_scheduler_policy '{self.batch_scheduler_policy}'",
                remedy=suggestion(self.batch_scheduler_policy, POLICIES),
            )
        if not 0 < self.kv_cache_free_gpu_mem_fraction < 1:
            raise UsageError(
                f"serving.kv_cache_free_gpu_mem_fraction is {self.kv_cache_free_gpu_mem_fraction}",
                remedy="give a number between 0 and 1",
            )
        at_least = {
            "triton_max_batch_size": 1,
            "max_tokens_in_paged_kv_cache": 1,
            "max_queue_delay_microseconds": 0,
            "max_queue_size": 0,
            "cancellation_check_period_ms": 1,
            "stats_check_period_ms": 1,
            "preprocessing_instance_count": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"serving.{name} is {value}", remedy=f"give at least {least}")
