"""Candidates in the order of what the planner expects of them, and which need an engine that would not pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtpipe.engines import base
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.precision import Precision
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.planner.advice import highest_rate
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.efficiency import load_efficiency
from trtpipe.pipeline.planner.memory import Limits
from trtpipe.pipeline.planner.predict import Option, predicted
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.triton_repo.serving import ServingConfig

# A compiled engine is made anew where the planner expects this many times the rate of the target as it is.
PAYS = 1.05


def expected_rate(
    model: ModelConfig, gpu: GpuSpec, precision: Precision, mapping: base.Mapping, runtime: str, build: BuildConfig,
    serving: ServingConfig, demand: Demand, objectives: Sequence[Objective],
) -> float | None:  # fmt: skip
    """Clients/s that the planner expects within those of the objectives that it predicts, 0 for settings that do not
    fit; None for a runtime or a GPU that it does not predict."""
    if gpu.is_cpu:
        return None
    limits = Limits(
        max_batch_size=serving.triton_max_batch_size or build.max_batch_size, max_num_tokens=build.max_num_tokens,
        tokens_per_block=build.tokens_per_block, kv_cache_free_gpu_mem_fraction=serving.kv_cache_free_gpu_mem_fraction,
    )  # fmt: skip
    try:
        efficiency = load_efficiency().of(runtime)
    except UsageError:
        return None
    lengths = demand.lengths()
    try:
        option = Option.make(
            model, gpu, precision, mapping, lengths, efficiency, limits,
            chunked=bool(serving.enable_chunked_context),
        )  # fmt: skip
        option.require_fit(lengths.longest)
        found = highest_rate(option, demand, [one for one in objectives if predicted(one)])
    except UsageError:
        return 0.0
    return found[0] if found else 0.0


def worth_measuring(
    candidates: Sequence[Candidate], expected: Mapping[Candidate, float | None], *, compiled: bool
) -> tuple[list[Candidate], dict[str, str]]:
    """`candidates` in the order of what is expected of them, without those that need an engine to be compiled for
    nothing; and why those were left out, by name. Where the target as it is, an engine that was built, is expected to
    serve nothing, the planner is wrong about it, and leaves none out."""
    now, kept, left = expected.get(AS_IT_IS), [], {}
    for one in candidates:
        then = expected.get(one)
        if compiled and one.rebuilds and now != 0:
            if now is None or then is None:
                left[one.name] = "it needs another engine, and the planner does not say whether that pays"
                continue
            if then <= PAYS * now:
                why = f"the planner expects {then:.3g} instead of {now:.3g} clients/s"
                left[one.name] = f"it needs another engine, and {why}"
                continue
        kept.append(one)
    # Candidates of which the planner expects the same, or nothing, stay in their order.
    return sorted(kept, key=lambda one: -round(expected.get(one) or 0.0, 6)), left
