"""Advice on GPU, tensor parallelism and precision: each option's highest rate within the objectives, and its cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtpipe.configs import facts
from trtpipe.engines import load_backend
from trtpipe.engines.backends.base import Target
from trtpipe.engines.base import Mapping
from trtpipe.engines.build_config import BuildConfig
from trtpipe.engines.checkpoint.split import check_expert_groups
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.hf.stored import Stored
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.precision import Precision, resolve_precision
from trtpipe.engines.short_repr import short_repr
from trtpipe.pipeline.bench.load.loads import MOST_RATE
from trtpipe.pipeline.bench.results.metrics import judged
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.efficiency import Efficiency, load_efficiency
from trtpipe.pipeline.planner.judgement import require_hosts, require_length, require_rotary
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Adapters
from trtpipe.pipeline.planner.precision import planned_precision
from trtpipe.pipeline.planner.predict import Option, Prediction, quantization
from trtpipe.pipeline.planner.preparation import Preparation, Took, amount, preparation

TPS = (1, 2, 4, 8)
# A stand-in for any GPU: the CPU runtime supports every recipe.
ANYTHING = GpuSpec(name="anything", sm=None)
# Relative precision of the highest rate.
PRECISION = 0.02
# Share of an option's time from which its largest bound is named as the limit.
RULES = 0.35
BOUND = {
    "compute": "compute-bound",
    "weights": "bandwidth-bound: the weights are read for few tokens",
    "kv": "bandwidth-bound: the KV cache is read",
    "elementwise": "bandwidth-bound: activations are written and read between products",
    "all-reduce": "bound by the all-reduces between GPUs",
    "overhead": "bound by launches and the host",
}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Input of a plan. Raises UsageError.

    gpus        GPUs to compare, in the order of the output
    dtypes      values of `--dtype`, each tried on each GPU
    tps         GPUs of one engine; empty: every power of two up to 8, on MIG slices 1
    moe_tps, moe_eps  of a model with experts, as a build's: numbers of GPUs that divide each expert, and of groups of
                GPUs that divide the experts, each tried with each tp; empty: every GPU has its part of each expert
    rate        clients per second that the deployment must serve; None where only cost is compared
    objectives  SLOs; empty: throughput without limit
    prices      price of one GPU per hour, by GPU name; overrides the GPU's file
    stored      quantization that the model's files have already
    release     toolchain that is planned for; None: the default one, as fast as the newest release that is known
    took        stages that ran on this machine
    adapters    LoRA adapters that are in the GPU's memory at once
    shorter     remedy for lengths that are too long for the model, which names what the user gave
    """

    model: str
    shape: ModelConfig
    gpus: tuple[GpuSpec, ...]
    demand: Demand
    dtypes: tuple[str, ...] = ("auto",)
    kv_cache: str | None = None
    group_size: int | None = None
    tps: tuple[int, ...] = ()
    moe_tps: tuple[int, ...] = ()
    moe_eps: tuple[int, ...] = ()
    runtime: str = "tensorrt_llm"
    objectives: tuple[Objective, ...] = ()
    rate: float | None = None
    prices: dict[str, float] | None = None
    stored: Stored | None = None
    release: str | None = None
    took: tuple[Took, ...] = ()
    adapters: Adapters | None = None
    shorter: str = "lower the load's lengths"

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate <= MOST_RATE:
            remedy = f"give a positive number of requests a second, at most {MOST_RATE:,.0f}"
            raise UsageError(f"rate is {self.rate:g}", remedy=remedy)
        for name in ("gpus", "dtypes"):
            if not getattr(self, name):
                raise UsageError(f"no {name.removesuffix('s')} is named", remedy="give one, or several with commas")
        for dtype in self.dtypes:
            # An unknown dtype is refused; a dtype that one GPU does not support is reported for that GPU.
            resolve_precision(dtype, ANYTHING, facts.load_quant_recipes(), self.kv_cache, self.group_size)
        for name, sizes in (("tp", self.tps), ("moe_tp", self.moe_tps), ("moe_ep", self.moe_eps)):
            if any(size < 1 for size in sizes):
                raise UsageError(f"{name} is {min(sizes)}", remedy="give 1 or more")

    def price(self, gpu: GpuSpec) -> float | None:
        return (self.prices or {}).get(gpu.name, gpu.price_per_hour)

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Names of the GPUs without a price, of those that are planned at all."""
        planned = (gpu for gpu in self.gpus if not gpu.refused and not gpu.is_cpu)
        return tuple(sorted({gpu.name for gpu in planned if self.price(gpu) is None}))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One row of the advice. Without `best` the option cannot serve the demand, and `reason` says why.

    moe_ep            groups of GPUs that divide the experts
    rate              highest rate of clients per second within the objectives, for one engine
    best              prediction at that rate
    single            prediction for a single client
    cost              price of a million output tokens at `best`, where the price is known
    single_cost       likewise for a single client
    replicas          engines needed for the requested rate
    preparation       what getting to the first engine takes
    """

    gpu: GpuSpec
    dtype: str
    tp: int
    reason: str
    moe_ep: int = 1
    option: Option | None = None
    rate: float | None = None
    best: Prediction | None = None
    single: Prediction | None = None
    price: float | None = None
    replicas: int | None = None
    preparation: Preparation | None = None

    @property
    def name(self) -> str:
        return f"{self.tp} x {self.gpu.name} {self.dtype}" + (f" ep {self.moe_ep}" if self.moe_ep > 1 else "")

    @property
    def cost(self) -> float | None:
        return self._cost(self.best)

    @property
    def interval(self) -> dict[str, tuple[float, float]]:
        """Least and most at `best` by quantity, if this option is as far off as 8 of 10 held-out figures."""
        if self.best is None or self.option is None:
            return {}
        shares, _ = self.option.confidence
        values = {"output_tokens_per_s": self.best.tokens_per_s}
        values |= {"ttft_ms": float(self.best.ttft.mean())} if len(self.best.ttft) else {}
        values |= {"tpot_ms": float(self.best.tpot.mean())} if len(self.best.tpot) else {}
        return {key: _within(value, shares[key]) for key, value in values.items()}

    @property
    def single_cost(self) -> float | None:
        return self._cost(self.single)

    @property
    def hourly(self) -> float | None:
        """Price of one engine per hour."""
        return None if self.price is None else self.price * self.tp

    @property
    def per_gpu(self) -> float:
        """Output tokens per second per GPU, within the objectives."""
        return 0.0 if self.best is None else self.best.tokens_per_s / self.tp

    @property
    def gpus(self) -> int | None:
        """Number of GPUs for the requested rate."""
        return None if self.replicas is None else self.replicas * self.tp

    def _cost(self, at: Prediction | None) -> float | None:
        if self.hourly is None or at is None or not at.tokens_per_s:
            return None
        return self.hourly / (at.tokens_per_s * 3600) * 1e6

    def to_json(self) -> dict[str, Any]:
        option = self.option
        return {
            "gpu": self.gpu.name,
            "dtype": self.dtype,
            "tp": self.tp,
            "moe_ep": self.moe_ep,
            "reason": self.reason,
            "max_batch_size": option and option.limits.max_batch_size,
            "max_num_tokens": option and option.limits.max_num_tokens,
            "memory": option and memory_json(option),
            "max_rate": self.rate,
            "at_max_rate": self.best and self.best.to_json(),
            "one_client": self.single and self.single.to_json(),
            "interval": self.interval,
            "price_per_hour": self.price,
            "cost_per_million_output_tokens": self.cost,
            "cost_per_million_output_tokens_one_client": self.single_cost,
            "engines": self.replicas,
            "gpus": self.gpus,
            "preparation": self.preparation and self.preparation.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Candidates, the best first: by cost where every price is known, else by tokens per second per GPU."""

    __repr__ = short_repr("question.model", "question.runtime", "priced")

    question: Question
    lengths: Lengths
    candidates: tuple[Candidate, ...]
    priced: bool
    remarks: tuple[str, ...]

    @property
    def getting_there(self) -> tuple[str, ...]:
        """What the best option takes before it serves, in a sentence; nothing where no option can serve."""
        best = self.candidates[0]
        return () if best.preparation is None else (f"getting to {best.name} takes {best.preparation.describe()}",)

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.question.model,
            "runtime": self.question.runtime,
            "release": self.question.release,
            "objectives": [vars(one) for one in self.question.objectives],
            "rate": self.question.rate,
            "lengths": vars(self.lengths),
            "ranked_by": "cost" if self.priced else "tokens/s of a GPU",
            "candidates": [one.to_json() for one in self.candidates],
            "remarks": list(self.remarks),
        }


def advise(question: Question, efficiency: Efficiency | None = None) -> Advice:
    """Raises UsageError for objectives that cannot be predicted, and where no option can serve anything."""
    how = (efficiency or load_efficiency()).of(question.runtime, question.release)
    lengths = question.demand.lengths()
    require_rotary(question.shape, question.model, question.runtime)
    require_length(question.shape, question.model, lengths.longest, question.runtime, "the load", question.shorter)
    rows = [
        candidate
        for gpu in question.gpus
        for dtype in question.dtypes
        for candidate in _of_gpu(question, gpu, dtype, lengths, how)
    ]
    priced = not question.unpriced

    def order(one: Candidate) -> tuple[bool, float]:
        return one.best is None, (one.cost or math.inf) if priced else -one.per_gpu

    ranked = tuple(sorted(rows, key=order))
    return Advice(
        question=question,
        lengths=lengths,
        candidates=ranked,
        priced=priced,
        remarks=tuple(_remarks(ranked, question, priced)),
    )


def _of_gpu(question: Question, gpu: GpuSpec, dtype: str, lengths: Lengths, how: Efficiency) -> list[Candidate]:
    if gpu.is_cpu:
        reason = "no engine runs on a CPU, and the reference runtime's speed is not predicted"
        return [Candidate(gpu=gpu, dtype=dtype, tp=1, reason=reason)]
    try:
        precision, target = planned_target(question, gpu, dtype, question.kv_cache, question.group_size)
    except UsageError as error:
        return [Candidate(gpu=gpu, dtype=dtype, tp=1, reason=str(error))]
    made: list[Candidate] = []
    for moe_tp, moe_ep in itertools.product(question.moe_tps or (None,), question.moe_eps or (None,)):
        of_all = len(made)
        for tp in question.tps or [number for number in TPS if number <= gpu.ranks_of_host]:
            one = _candidate(question, target, precision, (tp, moe_tp, moe_ep), lengths, how)
            # A number of GPUs that does not fit is dropped once a larger number of one host has been tried.
            if len(made) > of_all and made[-1].option is None and tp <= gpu.ranks_of_host:
                made.pop()
            made.append(one)
    return made


def planned_target(
    question: Question, gpu: GpuSpec, dtype: str, kv_cache: str | None = None, group_size: int | None = None
) -> tuple[Precision, Target]:
    """Precision and target of a build on one GPU. Raises UsageError for what a build would refuse of them."""
    toolchain = facts.find_toolchain(question.release)
    precision = planned_precision(
        question.model, question.shape, question.stored, gpu, question.runtime, dtype, kv_cache, group_size, toolchain
    )
    target = Target(
        gpu=gpu, mapping=Mapping(), quantization=quantization(precision), toolchain=toolchain, stored=precision.stored
    )
    load_backend(question.runtime).resolve(BuildConfig(), target)
    return precision, target


def _candidate(
    question: Question, target: Target, precision: Precision, ranks: tuple[int, int | None, int | None],
    lengths: Lengths, how: Efficiency,
) -> Candidate:  # fmt: skip
    """ranks: tp, moe_tp and moe_ep; None for what is not given."""
    gpu, (tp, moe_tp, moe_ep) = target.gpu, ranks
    try:
        check_expert_groups(question.shape, moe_ep or 1)
        mapping = Mapping.of(tp, 1, moe_tp, moe_ep)
        require_hosts(question.runtime, tp, gpu)
        if mapping.moe_ep_size > 1:
            load_backend(question.runtime).resolve(BuildConfig(), replace(target, mapping=mapping))
        option = Option.make(question.shape, gpu, precision, mapping, lengths, how, adapters=question.adapters)
        option.require_fit(lengths.longest)
    except UsageError as error:
        return Candidate(gpu=gpu, dtype=precision.name, tp=tp, moe_ep=moe_ep or 1, reason=str(error))
    price = question.price(gpu)

    def made(reason: str, **found: Any) -> Candidate:
        return Candidate(
            gpu=gpu, dtype=precision.name, tp=tp, moe_ep=mapping.moe_ep_size, option=option, single=single, price=price,
            reason=reason, **found,
        )  # fmt: skip

    single = option.together(question.demand, 1)
    if not single.meets(question.objectives):
        return made(_too_slow(single, question.objectives))
    found = highest_rate(option, question.demand, question.objectives)
    if found is None:
        return made("too slow as soon as two requests meet")
    rate, best = found
    getting_there = preparation(
        option, question.runtime, stored=question.stored is not None, hourly=None if price is None else price * tp,
        took=question.took,
    )  # fmt: skip
    return made(
        _reason(option, best, precision), rate=rate, best=best, preparation=getting_there,
        replicas=None if question.rate is None else math.ceil(question.rate / rate),
    )  # fmt: skip


def highest_rate(option: Option, demand: Demand, objectives: Sequence[Objective]) -> tuple[float, Prediction] | None:
    """Highest rate of clients per second within the objectives, by bisection, and its prediction; None where the rate
    is below a hundredth of what the engine could do without objectives.
    """
    full = option.full(demand)
    if not objectives:
        return full.requests_per_s / demand.turns, full
    low, high = 0.0, full.requests_per_s / demand.turns
    best: Prediction | None = None
    least = high / 100
    while high - low > max(PRECISION * high, least):
        rate = (low + high) / 2
        found = option.at(demand, rate)
        if found.meets(objectives):
            low, best = rate, found
        else:
            high = rate
    return None if best is None else (low, best)


def _too_slow(single: Prediction, objectives: Sequence[Objective]) -> str:
    for one in objectives:
        value = single.value(one)
        if value is not None and value >= one.limit:
            short = judged()[one.metric.removesuffix("_from_due")].short
            return f"too slow for one client alone: {short} {one.statistic} {value:.0f} ms of {one.limit:g} ms"
    raise AssertionError("one of them is missed")


def _reason(option: Option, best: Prediction, precision: Precision) -> str:
    name, share = max(best.shares.items(), key=lambda item: item[1])
    said = (
        f"{BOUND[name]} ({share:.0%} of the time)" if share >= RULES else f"balanced; most of it {name} ({share:.0%})"
    )
    errors, known = option.confidence
    low, high = _within(best.tokens_per_s, errors["output_tokens_per_s"])
    said += f"; {low:.0f} to {high:.0f} tokens/s"
    if not known:
        said += f", a wide guess: no figure of {option.cost.counts.kind.upper()} on SM{option.gpu.sm} was compared"
    if best.in_flight >= option.limits.max_batch_size:
        said += f"; the KV cache holds {option.limits.max_batch_size} at once"
    if option.gpu.sm is not None and option.gpu.sm < 89 and "fp8" not in precision.name:
        said += "; FP8 unavailable"
    return said


def _within(value: float, share: float) -> tuple[float, float]:
    """Where the true value lies, if `value` is off by no more than `share` of it."""
    return value / (1 + share), value / max(1 - share, 0.1)


def _remarks(ranked: Sequence[Candidate], question: Question, priced: bool) -> list[str]:
    said: list[str] = []
    able = [one for one in ranked if one.best is not None]
    if not able:
        return []
    if not priced:
        said.append(
            f"no price is known for {', '.join(question.unpriced)}: ranked by tokens/s of a GPU; "
            "give --price NAME=PRICE_PER_HOUR, or price_per_hour in gpus/NAME.yaml of TRTPIPE_HOME"
        )
        return said
    best = able[0]
    cheap = min(able, key=lambda one: (one.hourly or math.inf, -(one.rate or 0)))
    if cheap is not best:
        said.append(
            f"up to {cheap.rate:.3g} clients/s {cheap.name} does it for {amount(cheap.hourly)} an hour; "
            f"{best.name} at {amount(best.hourly)} is cheaper only above"
        )
    alone = min(able, key=lambda one: one.single_cost or math.inf)
    if alone is not best:
        said.append(
            f"for one client at a time {alone.name} costs least: {amount(alone.single_cost)} a million tokens, "
            f"{best.name} {amount(best.single_cost)}"
        )
    if cheap is not best and best.cost and cheap.cost:
        # The dearer option must be kept busy: its hourly price is also paid while it is idle.
        duty = best.cost / cheap.cost
        said.append(
            f"{best.name} must be busy {duty:.0%} of the time that it is paid for to match {cheap.name} kept full; "
            f"a job of less than {best.best.tokens_per_s * 3600 * duty / 1e6:.1f} million tokens "  # type: ignore[union-attr]
            "in a paid hour is cheaper on the latter"
        )
    if question.rate is not None:
        fewest = min(able, key=lambda one: ((one.hourly or 0) * (one.replicas or 1), one.gpus or 0))
        said.append(
            f"{question.rate:g} clients/s take {fewest.replicas} engine{'s' if fewest.replicas != 1 else ''} of "
            f"{fewest.name}, {fewest.gpus} GPUs, {amount((fewest.hourly or 0) * (fewest.replicas or 1))} an hour: "
            "the least there is"
        )
    return said


def every_head(option: Option) -> int:
    """Bytes of KV cache per token if every attention head had its own keys and values: often quoted, and many times
    what grouped-query attention takes.
    """
    model = option.model
    return (
        option.memory.kv_token
        // max(1, model.num_key_value_heads // option.tp)
        * (model.num_attention_heads // option.tp)
    )


def memory_json(option: Option) -> dict[str, Any]:
    memory = option.memory
    return {
        "total_bytes": memory.total,
        "runtime_bytes": memory.runtime,
        "weight_bytes": memory.weights,
        "activation_bytes": memory.activations,
        "buffer_bytes": memory.buffers,
        "adapter_bytes": memory.adapters,
        "kv_pool_bytes": memory.kv_pool,
        "kv_bytes_per_token": memory.kv_token,
        "kv_bytes_per_token_if_every_head_had_its_own": every_head(option),
        "kv_blocks": memory.kv_blocks,
        "kv_tokens": memory.kv_tokens,
        "longest_context_at_max_batch_size": memory.context(option.limits.max_batch_size),
    }
