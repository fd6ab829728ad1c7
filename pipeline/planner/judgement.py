"""Judgement of an engine by its model's config: what `plan` calls impossible, `settings` and `build` refuse."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.backends.base import Target, longest_sequence, require_nodes
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.split import check_expert_format, check_mapping, check_stages
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import HOST_GPUS, GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.trtllm_options import check_architecture
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.memory import SHARE, Limits, memory, smallest_tp
from trtpipe.triton_repo.serving import ServingConfig

# Remedy for a load that is too long for a model.
SHORTER_LOAD = "choose another --load, or set max_total_tokens in the work of a file of your own"


def require_length(model: ModelConfig, name: str, longest: int, runtime: str, asked_by: str, remedy: str) -> None:
    """Raises UsageError when sequences of `longest` tokens are more than `runtime` takes of the model `name`."""
    most, why = longest_sequence(model, runtime), ""
    if longest > most:
        if longest <= model.longest_sequence:
            kind = model.rotary_kind
            stated = load_backend(runtime).LENGTH_AS_STATED[kind or ""]
            why = f"with the rotary scaling {kind} {runtime} takes no more than {stated}"
            if kind == "yarn":  # its angles do not depend on that number
                remedy += f", or another {stated} in config.json"
        raise UsageError(
            f"{asked_by} asks for sequences of {longest} tokens, {name} takes {most}", why=why, remedy=remedy
        )


def require_rotary(model: ModelConfig, name: str, runtime: str) -> None:
    """Raises UsageError for a rotary scaling that `runtime` does not compute, naming the runtimes that do."""
    kind = model.rotary_kind
    if kind is None or kind in load_backend(runtime).ROTARY:
        return
    others = [other for other in BACKENDS if kind in load_backend(other).ROTARY]
    raise UsageError(
        f"the {runtime} runtime does not compute the rotary scaling '{kind}' of {name}",
        why=f"it computes {', '.join(load_backend(runtime).ROTARY)}",
        remedy=f"use --runtime {' or '.join(others)}" if others else "choose another model",
    )


def require_hosts(runtime: str, ranks: int, gpu: GpuSpec) -> None:
    """Raises UsageError for ranks that cannot be on as many hosts of `gpu`, or on as many MIG slices."""
    gpu.require_ranks(ranks)
    if not gpu.is_cpu:
        nodes = -(-ranks // gpu.ranks_of_host)
        require_nodes(runtime, ranks, nodes, more=f", or write host_gpus into gpus/{gpu.name}.yaml of TRTPIPE_HOME")


def judge(
    model: ModelConfig, name: str, target: Target, dtype: DataType, build: BuildConfig, serving: ServingConfig, *,
    runtime: str, form: str,
) -> None:  # fmt: skip
    """Raises UsageError for a mapping, a length, a setting, a rotary scaling or, in the checkpoint format `form`, a
    quantization that the model `name` cannot have with `runtime`, and for a GPU that does not hold the weights and one
    sequence of `build.max_seq_len` tokens, unless `runtime` needs none."""
    backend = load_backend(runtime)
    check_architecture(build, model.architecture)
    require_hosts(runtime, target.mapping.world_size, target.gpu)
    require_rotary(model, name, runtime)
    check_expert_format(model, target.quantization, form, target.stored, on_cpu=target.gpu.is_cpu)
    if model.experts is not None and target.gpu.is_cpu and form != "trtllm" and target.quantization.quant_algo:
        raise UsageError(
            "vLLM does not execute quantized experts on a CPU",
            why="it has kernels for them on GPUs alone",
            remedy="start from the unquantized model" if target.stored else "use --runtime reference, or --dtype bf16",
        )
    check_mapping(model, target.mapping, quantization=target.quantization, stored=bool(target.stored))
    if not backend.ALL_STAGES:
        check_stages(model, target.mapping)
    if not build.streamingllm:
        remedy = f"set build.max_seq_len={longest_sequence(model, runtime)} or less"
        require_length(model, name, build.max_seq_len, runtime, "build.max_seq_len", remedy)
    if backend.ANYWHERE or target.gpu.memory_bytes is None or build.weight_streaming:
        return
    limits = Limits(
        max_batch_size=build.max_batch_size, max_num_tokens=build.max_num_tokens,
        tokens_per_block=build.tokens_per_block,
        kv_cache_free_gpu_mem_fraction=serving.kv_cache_free_gpu_mem_fraction,
    )  # fmt: skip
    how, mapping = load_efficiency().of(runtime), target.mapping
    found = memory(model, dtype, mapping, target.quantization, target.gpu, limits, how)
    longest = min(build.max_seq_len, serving.max_attention_window_size or build.max_seq_len)
    if shortage := found.shortage(longest, mapping.world_size, limits):
        smallest = partial(
            smallest_tp, model, dtype, target.quantization, target.gpu, limits, how, longest,
            moe_ep=mapping.moe_ep_size if mapping.moe_ep_size > 1 else None,
        )  # fmt: skip
        fewest, wider, joined = smallest(pp=mapping.pp_size), "use ", ""
        if fewest is not None and backend.ONE_NODE and fewest * mapping.pp_size > target.gpu.ranks_of_host:
            fewest = None
        if fewest is not None and fewest > mapping.tp_size:
            wider = f"use --tp {fewest} or more, or "
        elif fewest is None and mapping.pp_size == 1 and not target.gpu.mig and not backend.ONE_NODE:
            of_two = smallest(pp=2) if backend.ALL_STAGES or _has_stages(model) else None
            hosts = " on two hosts" if of_two == target.gpu.ranks_of_host else ""
            wider = "use " if of_two is None else f"use --tp {of_two} --pp 2{hosts}, or "
        if fewest is None and not target.gpu.mig and target.gpu.ranks_of_host < HOST_GPUS:
            joined = f", or write host_gpus into gpus/{target.gpu.name}.yaml of TRTPIPE_HOME"
        usual = ServingConfig().kv_cache_free_gpu_mem_fraction
        raised = replace(limits, kv_cache_free_gpu_mem_fraction=max(usual, limits.kv_cache_free_gpu_mem_fraction))
        if not memory(model, dtype, mapping, target.quantization, target.gpu, raised, how).shortage(
            longest, mapping.world_size, raised
        ):
            wider = f"raise {SHARE}, or {wider}"
        raise UsageError(
            f"{name} on {target.gpu.name} {shortage}", remedy=f"{wider}a smaller --dtype or a larger GPU{joined}"
        )


def _has_stages(model: ModelConfig) -> bool:
    """Whether TensorRT-LLM divides the model's layers over pipeline stages."""
    try:
        check_stages(model, Mapping(pp_size=2))
    except UsageError:
        return False
    return True
