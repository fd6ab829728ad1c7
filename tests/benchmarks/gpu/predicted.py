"""What the planner says of a load of `make gpu-e2e`, kept beside what is measured afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.benchmarks.gpu.loop import OUTPUT_TOKENS, PROMPT_TOKENS, WAVES
from trtpipe.configs import facts
from trtpipe.engines.base import Mapping
from trtpipe.engines.precision import resolve_precision
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.memory import Limits
from trtpipe.pipeline.planner.predict import Option

# As engines are built: place.SIZES, and the default of tokens in a step.
LIMITS = Limits(max_batch_size=512, max_num_tokens=8192)


def together(
    gpu: str,
    dtype: str,
    runtime: str,
    levels: Sequence[int],
    *,
    model: str = "llama3-8b",
    tp: int = 1,
    ep: int = 1,
) -> dict[str, Any]:
    """Output tokens a second and the median time to the first token, of what loop.waves measures."""
    _, shape = facts.find_shape(model)
    card = facts.find_gpu(gpu)
    precision = resolve_precision(dtype, card, facts.load_quant_recipes(), runtime=runtime)
    demand = Demand(Work(input_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS))
    option = Option.make(
        shape,
        card,
        precision,
        Mapping(tp_size=tp, moe_ep_size=ep),
        demand.lengths(),
        load_efficiency().of(runtime),
        LIMITS,
    )
    found = {str(level): option.waves(demand, level, WAVES) for level in levels}
    return {
        level: {"tokens_per_s": one.tokens_per_s, "ttft_p50_ms": float(np.median(one.ttft))}
        for level, one in found.items()
    }
