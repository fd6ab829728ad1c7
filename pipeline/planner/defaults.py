"""Default build sizes from the plan. Light to import: `trtpipe settings` resolves them at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtpipe.engines.backends.base import longest_sequence
from trtpipe.engines.base import CalibrationConfig, DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.judgement import SHORTER_LOAD, require_length
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import SHARE, smallest_tp
from trtpipe.pipeline.planner.sizes import LEAST, MAX_NUM_TOKENS, sizes
from trtpipe.triton_repo.serving import ServingConfig


def planned_sizes(
    chosen: dict[str, tuple[Any, str]],
    name: str,
    model: ModelConfig,
    gpu: GpuSpec,
    dtype: DataType,
    quantization: Quantization,
    runtime: str,
) -> dict[str, tuple[Any, str]]:
    """tp, batch, lengths and tokens per step that the user has not set: dotted name -> (value, why).

    Lengths come from a load if one is given, else from BuildConfig, within what the model takes: sequences are then
    expected to use half of them. A GPU of unknown memory, such as the CPU, gets lengths only.
    Raises UsageError for a load that does not exist or is too long for the model, and for an impossible mapping.
    """
    usual, most = BuildConfig(), longest_sequence(model, runtime)
    out: dict[str, tuple[Any, str]] = {}
    if "load" in chosen:
        wanted = _of_load(str(chosen["load"][0]))
        require_length(model, name, wanted.longest, runtime, "the load", SHORTER_LOAD)
        why, longest = f"the plan, for the load {chosen['load'][0]}", min(_blocks(wanted.longest), most)
        out["build.max_seq_len"] = (longest, why)
        out["build.max_input_len"] = (min(_blocks(wanted.longest_input), longest - 1), why)
    else:
        longest = _given(chosen, "build.max_seq_len", usual.max_seq_len)
        if "build.max_seq_len" not in chosen and longest > most:
            longest = most
            out["build.max_seq_len"] = (longest, f"the most that {name} takes")
            if longest <= usual.max_input_len:
                out["build.max_input_len"] = (longest // 2, f"half of what {name} takes")
        wanted = Lengths(mean_input=longest / 4, mean_output=longest / 4, longest_input=longest // 2, longest=longest)
    short = CalibrationConfig().seq_len > model.longest_sequence
    if quantization.calibrated and short and "calibration.seq_len" not in chosen:
        out["calibration.seq_len"] = (model.longest_sequence, f"the most that {name} takes")
    window = _given(chosen, "serving.max_attention_window_size", wanted.longest)
    if window < wanted.longest:  # all that the KV cache of a sequence holds
        half = min(wanted.mean, window) / 2
        wanted = Lengths(mean_input=half, mean_output=half, longest_input=window // 2, longest=window)
    weights_elsewhere = chosen.get("build.weight_streaming", (False, ""))[0]
    if gpu.memory_bytes is None or weights_elsewhere:
        return out
    how, tp = load_efficiency().of(runtime), _given(chosen, "tp", 1)
    moe_tp = moe_ep = None
    if model.experts is not None:  # else they are refused where they are read
        moe_tp, moe_ep = (_given(chosen, name, 0) or None for name in ("moe_tp", "moe_ep"))
    least = replace(
        LEAST, tokens_per_block=_given(chosen, "build.tokens_per_block", usual.tokens_per_block),
        kv_cache_free_gpu_mem_fraction=_share(chosen),
    )  # fmt: skip
    if "tp" not in chosen and "pp" not in chosen:
        few = replace(least, max_batch_size=8)
        fewest = smallest_tp(
            model, dtype, quantization, gpu, few, how, wanted.longest, moe_tp=moe_tp, moe_ep=moe_ep
        )  # fmt: skip
        why = f"the plan: the fewest {gpu.name} that it fits"
        if moe_tp or moe_ep:
            why += ", with its experts shared so"
            shared = (moe_tp or 1) * (moe_ep or 1)
            if fewest is None and shared <= gpu.ranks_of_host:
                fewest = shared  # the judgement says what does not fit
        if fewest is not None and fewest > 1:
            tp = fewest
            out["tp"] = (tp, why)
    mapping = Mapping.of(tp, _given(chosen, "pp", 1), moe_tp, moe_ep)
    given = _given(chosen, "build.max_num_tokens", 0) or None
    rows = (1 + _given(chosen, "build.max_draft_len", 0)) * _given(chosen, "build.max_beam_width", 1)
    found = sizes(
        model, dtype, mapping, quantization, gpu, wanted, how, least=least, max_num_tokens=given, rows=rows,
        max_batch_size=_given(chosen, "build.max_batch_size", 0) or None,
    )  # fmt: skip
    held = f"what {gpu.name} holds of sequences of {wanted.mean} tokens"
    if given is not None and found.max_batch_size == given // rows:
        held = f"what a step of {given} tokens has room for"
    fast = found.max_num_tokens >= MAX_NUM_TOKENS
    why = "large enough to compute at full speed" if fast else "all tokens of a full batch"
    out["build.max_batch_size"] = (found.max_batch_size, f"the plan: {held}")
    out["build.max_num_tokens"] = (found.max_num_tokens, f"the plan: {why}")
    return out


def _of_load(name: str) -> Lengths:
    from trtpipe.pipeline.bench.load.files import find_load
    from trtpipe.pipeline.planner.demand import Demand

    return Demand(find_load(name).work).lengths()


def _given(chosen: dict[str, tuple[Any, str]], name: str, otherwise: int) -> int:
    """A value set by the user, unchecked: errors in it are reported where it is read."""
    value, _ = chosen.get(name, (otherwise, ""))
    return value if isinstance(value, int) and value > 0 else otherwise


def _share(chosen: dict[str, tuple[Any, str]]) -> float:
    """Share of the memory for the KV cache, likewise."""
    usual = ServingConfig().kv_cache_free_gpu_mem_fraction
    value, _ = chosen.get(SHARE, (usual, ""))
    return value if isinstance(value, float) and 0 < value < 1 else usual


def _blocks(tokens: int) -> int:
    return -(-tokens // 64) * 64
