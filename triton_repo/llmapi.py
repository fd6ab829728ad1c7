"""Model folder of TensorRT-LLM's LLM API, from an engine of the trtllm_pytorch runtime and a ServingConfig.

The model has the tensors of NVIDIA's `llmapi` template, which takes and returns text, and more: with token ids in and
out, the gateway serves it as it serves an engine. Batch size and transaction policy are also in config.pbtxt, because
upstream's launcher disables the hook that would read them from model.yaml.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from trtpipe.configs.read import read_yaml
from trtpipe.engines.backends.trtllm_pytorch import FILE
from trtpipe.engines.base import Engine
from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import place
from trtpipe.engines.hf.draft import place_draft
from trtpipe.engines.toolchain import Sampler
from trtpipe.triton_repo.llm_args import merged
from trtpipe.triton_repo.serving import ServingConfig
from trtpipe.triton_repo.tensors import ANY, Tensor

MODEL = "tensorrt_llm"
SETTINGS = "model.yaml"

INPUTS = (
    Tensor("text_input", "TYPE_STRING", (ANY,)),
    *(Tensor(name, "TYPE_BOOL") for name in ("streaming", "stop")),
    Tensor("sampling_param_max_tokens", "TYPE_INT32"),
    Tensor("sampling_param_temperature", "TYPE_FP32"),
    Tensor("sampling_param_top_k", "TYPE_INT32"),
    Tensor("sampling_param_top_p", "TYPE_FP32"),
    Tensor("sampling_param_frequency_penalty", "TYPE_FP32"),
    Tensor("sampling_param_presence_penalty", "TYPE_FP32"),
    Tensor("sampling_param_seed", "TYPE_UINT64"),
    Tensor("sampling_param_best_of", "TYPE_INT32"),
    Tensor("sampling_param_stop", "TYPE_STRING", (ANY,)),
    Tensor("sampling_param_exclude_input_from_output", "TYPE_BOOL"),
    *(
        Tensor(f"return_{name}", "TYPE_BOOL") for name in ("finish_reason", "stop_reason", "cumulative_logprob")
    ),
    # Not NVIDIA's.
    Tensor("input_ids", "TYPE_INT32", (ANY,)),
    Tensor("sampling_param_repetition_penalty", "TYPE_FP32"),
    Tensor("sampling_param_min_tokens", "TYPE_INT32"),
    Tensor("sampling_param_end_id", "TYPE_INT32"),
    Tensor("sampling_param_stop_token_ids", "TYPE_INT32", (ANY,)),
    Tensor("return_log_probs", "TYPE_BOOL"),
    # Named as the C++ backend's.
    Tensor("guided_decoding_guide_type", "TYPE_STRING"),
    Tensor("guided_decoding_guide", "TYPE_STRING"),
    Tensor("lora_name", "TYPE_STRING"),
)  # fmt: skip
OUTPUTS = (
    *(Tensor(name, "TYPE_STRING", (ANY,)) for name in ("text_output", "finish_reason", "stop_reason")),
    Tensor("cumulative_logprob", "TYPE_FP32", (ANY,)),
    # Not NVIDIA's.
    Tensor("output_ids", "TYPE_INT32", (ANY,)),
    Tensor("output_log_probs", "TYPE_FP32", (ANY,)),
)


def place_llmapi(
    engine: Engine, serving: ServingConfig, templates: Path, out: Path, sampler: Sampler
) -> dict[str, Any]:
    """Write the model's folder without config.pbtxt; return the values for the template of config.pbtxt.

    The model has no inputs for what the release's `sampler` ignores, nor for guides where it does not start with them,
    so that a request with such an option is refused.
    Where it never draws, the release's other sampler is chosen. A parameter tells the gateway that drawn tokens have
    no log-probabilities.
    """
    version = out / MODEL / "1"
    version.mkdir(parents=True, exist_ok=True)
    for source in sorted(engine.path.iterdir()):
        if source.is_file() and source.name != FILE:
            place(source, version / source.name)
    place_draft(engine.path, version)
    shutil.copyfile(templates / "llmapi" / "model.py", version / "model.py")
    settings = _settings(read_yaml(engine.path / FILE), serving, sampler)
    # The same for `trtllm-serve --config`, which is told of the model apart.
    alone = {name: value for name, value in settings.items() if name not in ("model", "triton_config")}
    for name, content in ((SETTINGS, settings), (FILE, alone)):
        (version / name).write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    by_default = _samples_by_default(settings, sampler)
    ignored = {f"sampling_param_{name}" for name in sampler.ignores} if by_default else set()
    if "guided_decoding_backend" not in settings:
        ignored |= {"guided_decoding_guide_type", "guided_decoding_guide"}
    return {
        "decoupled": serving.decoupled,
        "inputs": tuple(tensor for tensor in INPUTS if tensor.name not in ignored),
        "outputs": OUTPUTS,
        "parameters": {} if sampler.drawn_log_probs or not by_default else {"drawn_log_probs": "false"},
    }


def _samples_by_default(settings: dict[str, Any], sampler: Sampler) -> bool:
    """Whether the release's default sampler serves these arguments of `LLM`."""
    if settings.get("speculative_config"):
        return True
    # The LLM API chooses the other sampler itself for beams.
    beams = "sampler_type" in sampler.instead and settings.get("max_beam_width", 1) > 1
    if beams and settings.get("sampler_type", "auto") == "auto":
        return False
    return not sampler.instead or any(settings.get(name) != value for name, value in sampler.instead.items())


def _settings(engine: dict[str, Any], serving: ServingConfig, sampler: Sampler) -> dict[str, Any]:
    """Arguments of `LLM`: the engine's, those that the serving options set, and, without drafts, those that choose a
    sampler that draws. Raises InputDataError."""
    given = engine.pop("kv_cache_config", None)
    if not isinstance(given, dict):
        raise InputDataError(f"{FILE} of the engine has no kv_cache_config", remedy="build the engine again")
    cache = {
        **given,
        "free_gpu_memory_fraction": serving.kv_cache_free_gpu_mem_fraction,
        "enable_block_reuse": serving.enable_kv_cache_reuse is not False,
    }
    if serving.max_tokens_in_paged_kv_cache is not None:
        cache["max_tokens"] = serving.max_tokens_in_paged_kv_cache
    if serving.max_attention_window_size is not None:
        cache["max_attention_window"] = [serving.max_attention_window_size]
    if serving.kv_cache_host_memory_bytes:
        cache["host_cache_size"] = serving.kv_cache_host_memory_bytes
    prefix = serving.repository_root.rstrip("/") + "/" if serving.repository_root else ""
    model = f"{prefix}{MODEL}/1"
    arguments = serving.llm_args or {}
    drafts = engine.get("speculative_config")
    if isinstance(drafts, dict) and "speculative_model_dir" in drafts:
        drafts["speculative_model_dir"] = f"{model}/{drafts['speculative_model_dir']}"
    drafts = arguments.get("speculative_config", drafts)
    settings = {
        "model": model,
        **engine,
        "kv_cache_config": cache,
        "enable_chunked_prefill": serving.enable_chunked_context is not False,
        "scheduler_config": {"capacity_scheduler_policy": serving.batch_scheduler_policy.upper()},
        **({"guided_decoding_backend": "xgrammar"} if sampler.guided_drafts or not drafts else {}),
        # The model's metrics are made of the engine's statistics.
        "enable_iter_perf_stats": True,
        "triton_config": {
            "max_batch_size": 0,
            "decoupled": serving.decoupled,
            "cancellation_check_period_ms": serving.cancellation_check_period_ms,
            "stats_check_period_ms": serving.stats_check_period_ms,
            "max_queue_size": serving.max_queue_size,
        },
    }
    settings = merged(settings, arguments)
    if not sampler.draws and not settings.get("speculative_config"):
        settings = {**sampler.instead, **settings}
    return settings
