"""Further arguments of TensorRT-LLM's LLM API, as a user gives them: checked for a release, and merged with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.engines.errors import UsageError
from trtpipe.triton_repo.check import facts
from trtpipe.triton_repo.check.faults import ERROR, Report
from trtpipe.triton_repo.check.llmapi import check_rows
from trtpipe.triton_repo.check.release import Release

SETTING = "serving.llm_args"
# Arguments that follow from another setting.
ELSEWHERE = {
    "model": "--model",
    "backend": "--runtime",
    "tensor_parallel_size": "--tp",
    "pipeline_parallel_size": "--pp",
    "moe_tensor_parallel_size": "--moe-tp",
    "moe_expert_parallel_size": "--moe-ep",
    **{
        name: f"build.{name}"
        for name in ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width")
    },
    "kv_cache_config.dtype": "--kv-cache",
    "kv_cache_config.tokens_per_block": "build.tokens_per_block",
    "kv_cache_config.free_gpu_memory_fraction": "serving.kv_cache_free_gpu_mem_fraction",
    "kv_cache_config.enable_block_reuse": "serving.enable_kv_cache_reuse",
    "kv_cache_config.host_cache_size": "serving.kv_cache_host_memory_bytes",
    "kv_cache_config.max_tokens": "serving.max_tokens_in_paged_kv_cache",
    "kv_cache_config.max_attention_window": "serving.max_attention_window_size",
    "enable_chunked_prefill": "serving.enable_chunked_context",
    "scheduler_config.capacity_scheduler_policy": "serving.batch_scheduler_policy",
    "triton_config": "serving.decoupled and its like",
}
# Arguments that name code, or an environment in which other code would run: a target may come from elsewhere.
CODE = (
    "trust_remote_code",
    "custom_tokenizer",
    "post_processor_hook",
    "checkpoint_loader",
    "batched_logits_processor",
    "logits_post_processors",
    "kv_connector_config",
    "ray_worker_extension_cls",
    "env_overrides",
)


def require_arguments(given: dict[str, Any], release: str) -> None:
    """Raises UsageError for an argument that another setting gives, or that `LLM` of the release does not take."""
    for name, setting in ELSEWHERE.items():
        group, _, inner = name.partition(".")
        section = given.get(group)
        if group in given if not inner else isinstance(section, dict) and inner in section:
            raise UsageError(f"{SETTING}.{name} follows from {setting}", remedy=f"give {setting} instead")
    for name in CODE:
        if name in given:
            raise UsageError(
                f"{SETTING}.{name} is not taken",
                why="the engine would run code that is not TensorRT-LLM's own",
                remedy="leave it out",
            )
    report, served = Report(Path()), Release(name=release, source="--toolchain")
    known = facts.llm_arguments()
    check_rows(Path(SETTING), "", "", given, known.arguments, served, report)
    for name, rows in known.nested.items():
        if isinstance(given.get(name), dict):
            check_rows(Path(SETTING), "", f"{name}.", given[name], rows, served, report)
    for fault in report.faults:
        if fault.severity == ERROR:
            raise UsageError(f"{SETTING}.{fault.where} {fault.what}", why=fault.why, remedy=fault.remedy or "drop it")


def merged(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`settings` with the arguments `given`; those of a mapping that both have are put together."""
    out = dict(settings)
    for name, value in given.items():
        ours = out.get(name)
        out[name] = {**ours, **value} if isinstance(ours, dict) and isinstance(value, dict) else value
    return out
