"""Default build sizes from the plan. Light to import: `trtpipe settings` resolves them at once."""

from __future__ import annotations

from typing import Any

from trtpipe.configs import facts
from trtpipe.engines.base import DataType, Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.quantization import Quantization
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Limits, smallest_tp
from trtpipe.pipeline.planner.sizes import MAX_NUM_TOKENS, sizes


def planned_sizes(
    chosen: dict[str, tuple[Any, str]], name: str, gpu: GpuSpec, dtype: DataType, quantization: Quantization
) -> dict[str, tuple[Any, str]]:
    """tp, batch, lengths and tokens per step that the user has not set: dotted name -> (value, why).

    Lengths come from a load if one is given, else from BuildConfig: sequences are then expected to use half of them.
    Empty where the model's shapes are unknown before its download. Raises UsageError for a load that does not exist.
    """
    try:
        _, model = facts.find_shape(name)
    except UsageError:
        if "load" in chosen:
            raise
        return {}
    how = load_efficiency()
    out: dict[str, tuple[Any, str]] = {}
    if "load" in chosen:
        wanted = _of_load(str(chosen["load"][0]))
        why = f"the plan, for the load {chosen['load'][0]}"
        out["build.max_seq_len"] = (_blocks(wanted.longest), why)
        out["build.max_input_len"] = (min(_blocks(wanted.longest_input), _blocks(wanted.longest) - 1), why)
    else:
        longest = _given(chosen, "build.max_seq_len", BuildConfig().max_seq_len)
        wanted = Lengths(mean_input=longest / 4, mean_output=longest / 4, longest_input=longest // 2, longest=longest)
    tp = _given(chosen, "tp", 1)
    least = Limits(max_batch_size=8, max_num_tokens=MAX_NUM_TOKENS)
    if "tp" not in chosen and "pp" not in chosen:
        fewest = smallest_tp(model, dtype, quantization, gpu, least, how, wanted.longest)
        if fewest is not None and fewest > 1:
            tp = fewest
            out["tp"] = (tp, f"the plan: the fewest {gpu.name} that it fits")
    mapping = Mapping(tp_size=tp, pp_size=_given(chosen, "pp", 1))
    try:
        found = sizes(model, dtype, mapping, quantization, gpu, wanted.mean, how)
    except UsageError:
        return out  # an impossible mapping is refused later, when the model is at hand
    held = f"the plan: what {gpu.name} holds of sequences of {wanted.mean} tokens"
    out["build.max_batch_size"] = (found.max_batch_size, held)
    out["build.max_num_tokens"] = (found.max_num_tokens, "the plan: large enough to compute at full speed")
    return out


def _of_load(name: str) -> Lengths:
    from trtpipe.pipeline.bench.load.files import find_load
    from trtpipe.pipeline.planner.demand import Demand

    return Demand(find_load(name).work).lengths()


def _given(chosen: dict[str, tuple[Any, str]], name: str, otherwise: int) -> int:
    """A value set by the user, unchecked: errors in it are reported where it is read."""
    value, _ = chosen.get(name, (otherwise, ""))
    return value if isinstance(value, int) and value > 0 else otherwise


def _blocks(tokens: int) -> int:
    return -(-tokens // 64) * 64
