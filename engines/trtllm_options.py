"""Arguments of trtllm-build from a BuildConfig: resolves open choices for model and GPU, refuses conflicts.

Upstream turns off an unsupported feature with only a line in the log, and a server that is configured to use the
feature then fails. This module never drops a requested feature: it raises UsageError with the reason.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trtpipe.engines.backends.base import Target
from trtpipe.engines.build_config import BuildConfig, changed
from trtpipe.engines.errors import UsageError
from trtpipe.engines.families import families
from trtpipe.engines.quantization import KvCacheQuantAlgo, QuantAlgo

# Its modes of speculation have no model of their own.
SETTINGS = tuple(one.name for one in fields(BuildConfig) if one.name != "speculative_model")
# Boolean flags without a value; all other boolean flags take enable or disable.
BARE = (
    "gather_context_logits", "gather_generation_logits", "strip_plan", "weight_streaming", "weight_sparsity",
    "fast_build", "monitor_memory",
)  # fmt: skip
_HOPPER_FP8 = ("gemm_swiglu_plugin", "low_latency_gemm_plugin", "low_latency_gemm_swiglu_plugin")
_SEVERAL_RANKS = ("reduce_fusion", "gemm_allreduce_plugin")


def resolve(build: BuildConfig, target: Target) -> tuple[BuildConfig, dict[str, str]]:
    """See EngineBackend.resolve. Raises UsageError."""
    _check_toolchain(build, target)
    _check_target(build, target)
    chosen: dict[str, tuple[Any, str]] = {}
    possible, why = _paged_fmha(build, target)
    if build.use_paged_context_fmha is None:
        chosen["use_paged_context_fmha"] = possible, why
    elif build.use_paged_context_fmha and not possible:
        raise UsageError("build.use_paged_context_fmha is not possible here", why=why, remedy="leave it out")
    paged = chosen.get("use_paged_context_fmha", (build.use_paged_context_fmha, ""))[0]
    possible, why = _fp8_fmha(build, target, paged=bool(paged))
    if build.use_fp8_context_fmha is None:
        chosen["use_fp8_context_fmha"] = possible, why
    elif build.use_fp8_context_fmha and not possible:
        raise UsageError("build.use_fp8_context_fmha is not possible here", why=why, remedy="leave it out")
    elif not build.use_fp8_context_fmha and possible and paged:
        raise UsageError(
            "build.use_fp8_context_fmha=false does not go with an FP8 KV cache",
            why="prompt attention on a paged cache in FP8 computes in FP8, and trtllm-build would turn it on",
            remedy="leave it out, or set build.use_paged_context_fmha=false too",
        )
    algo = target.quantization.quant_algo
    fp8 = algo is not None and algo.row.fp8_tensors
    if build.gemm_plugin is None:
        chosen["gemm_plugin"] = (
            ("disable", "TensorRT's own FP8 products are faster but for small batches")
            if fp8
            else ("auto", "the plugin is faster for what is not FP8")
        )
    fusable = algo is None or fp8
    if build.use_fused_mlp is None:
        chosen["use_fused_mlp"] = fusable, "for weights that are FP8 or not quantized"
    elif build.use_fused_mlp and not fusable:
        raise UsageError(
            "build.use_fused_mlp is not possible here",
            why=f"{_named(algo)} weights are not fused",
            remedy="leave it out",
        )
    most = build.max_batch_size * build.max_seq_len
    if build.max_num_tokens > most:
        if "max_num_tokens" in changed(build):
            raise UsageError(
                f"build.max_num_tokens {build.max_num_tokens} exceeds the {most} tokens of a full batch",
                why=f"trtllm-build would lower it to {build.max_batch_size} requests of {build.max_seq_len} tokens",
                remedy=f"pass --set build.max_num_tokens={most}, or raise build.max_batch_size or build.max_seq_len",
            )
        chosen["max_num_tokens"] = most, "max_batch_size x max_seq_len: trtllm-build lowers a larger number to it"
    made = replace(build, **{name: value for name, (value, _) in chosen.items()})
    return made, {name: reason for name, (_, reason) in chosen.items()}


def arguments(checkpoint: Path, out: Path, build: BuildConfig, flags: dict[str, Any]) -> list[str]:
    """trtllm-build's arguments for a resolved BuildConfig; `flags` are the flags that the release has.

    All settings are passed, since defaults differ between releases, except None and unset flags without a value.
    """
    out_cache = out / "model.cache"  # the default is a file in the current directory
    words = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(out), "--output_timing_cache", str(out_cache)]
    for one in fields(build):
        value = getattr(build, one.name)
        if one.name not in flags or value is None or value == ():
            continue
        if one.name in BARE:
            words += [f"--{one.name}"] if value else []
        elif isinstance(value, bool):
            words += [f"--{one.name}", "enable" if value else "disable"]
        elif isinstance(value, tuple):
            words += [f"--{one.name}", *value]
        else:
            words += [f"--{one.name}", str(value)]
    return words


def _check_toolchain(build: BuildConfig, target: Target) -> None:
    toolchain = target.toolchain
    for name in changed(build):
        if name not in toolchain.flags:
            raise UsageError(
                f"build.{name} is not for toolchain {toolchain.name}",
                why=f"its trtllm-build has no --{name}",
                remedy="see `trtpipe toolchains`",
            )
        for defect in toolchain.defects:
            if defect.setting == name:
                raise UsageError(
                    f"build.{name} is not for toolchain {toolchain.name}",
                    why=f"{defect.what} ({defect.source})",
                    remedy=defect.instead,
                )


def _check_target(build: BuildConfig, target: Target) -> None:
    algo, sm = target.quantization.quant_algo, target.gpu.sm
    fp8 = algo is not None and algo.row.fp8_tensors
    for name in _HOPPER_FP8:
        if getattr(build, name) == "fp8" and not (fp8 and sm == 90):
            raise UsageError(
                f"build.{name} is not possible here",
                why=f"it is a kernel for FP8 weights on SM90, not {_named(algo)} on {target.gpu.describe()}",
                remedy="leave it out",
            )
    if build.gemm_plugin == "fp8" and not fp8:
        raise UsageError(
            "build.gemm_plugin=fp8 is for FP8 weights", why=f"these are {_named(algo)}", remedy="leave it out"
        )
    if target.mapping.tp_size == 1:
        for name in _SEVERAL_RANKS:
            if name in changed(build):
                raise UsageError(
                    f"build.{name} needs --tp above 1", why="with one rank nothing is reduced", remedy="leave it out"
                )
    if build.user_buffer and not fp8:
        raise UsageError("build.user_buffer is for FP8 weights", why=f"these are {_named(algo)}", remedy="leave it out")


def check_architecture(build: BuildConfig, architecture: str) -> None:
    """Raises UsageError for a setting that trtllm-build turns off for the architecture."""
    if build.reduce_fusion and not families()[architecture].reduce_fusion:
        raise UsageError(
            f"build.reduce_fusion is not for a {architecture}",
            why="trtllm-build would turn it off with only a line in its log",
            remedy="leave it out",
        )


def _paged_fmha(build: BuildConfig, target: Target) -> tuple[bool, str]:
    """Whether prompt attention can read the paged cache, and why."""
    cache = target.quantization.kv_cache_quant_algo
    if not build.context_fmha or build.kv_cache_type != "paged":
        return False, "it needs build.context_fmha and a paged KV cache"
    if build.streamingllm:
        return False, "attention sinks rule it out"
    if cache is KvCacheQuantAlgo.INT8:
        return False, "prompt attention cannot read an INT8 KV cache"
    if cache is KvCacheQuantAlgo.FP8 and not _fp8_inputs(target):
        return False, "prompt attention reads an FP8 KV cache only beside FP8 weights, on SM89 and above"
    return True, "chunked context and KV-cache reuse need it"


def _fp8_fmha(build: BuildConfig, target: Target, *, paged: bool) -> tuple[bool, str]:
    """Whether prompt attention can compute in FP8, and why."""
    cache, algo = target.quantization.kv_cache_quant_algo, target.quantization.quant_algo
    if not _fp8_inputs(target):
        return (
            False,
            f"for FP8, W4A8_AWQ or NVFP4 weights on SM89 and above, not {_named(algo)} on {target.gpu.describe()}",
        )
    if not build.context_fmha:
        return False, "it needs build.context_fmha"
    if paged and cache is not KvCacheQuantAlgo.FP8:
        return False, "on a paged cache it needs an FP8 KV cache"
    return True, "weights and KV cache are FP8"


def _fp8_inputs(target: Target) -> bool:
    """Whether the target's linears take FP8 or FP4 inputs, on a GPU that computes FP8."""
    algo = target.quantization.quant_algo
    return algo is not None and algo.row.fp8_attention and (target.gpu.sm or 0) >= 89


def _named(algo: QuantAlgo | None) -> str:
    return algo.value if algo else "unquantized"
