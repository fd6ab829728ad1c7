"""Prediction of a serving option at a rate: a simulation, evaluated as the load generator evaluates a server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trtpipe.engines.base import Mapping
from trtpipe.engines.errors import UsageError
from trtpipe.engines.gpu import GpuSpec
from trtpipe.engines.model_config import ModelConfig
from trtpipe.engines.precision import Precision
from trtpipe.engines.quantization import UNQUANTIZED, Quantization
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.planner.cost import Parts, Step, StepCost, Stopwatch
from trtpipe.pipeline.planner.demand import REQUESTS, Demand, Follow
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.lengths import Lengths
from trtpipe.pipeline.planner.memory import Adapters, Limits, Memory, memory
from trtpipe.pipeline.planner.scheduler import Asked, Places, Timeline, simulate
from trtpipe.pipeline.planner.sizes import LEAST, sizes

# Share of a run's time that is left out at the start, while the batch fills.
FILLING = 0.5
# Least length of a run in request latencies, and the most requests to reach it.
LATENCIES, MOST_REQUESTS = 8, 10_000
# Metrics of objectives -> fields of Prediction.
FIELDS = {
    "time_to_first_token": "ttft", "time_per_output_token": "tpot", "request_latency": "latency",
    "inter_token_latency": "itl", "inter_chunk_latency": "itl",
}  # fmt: skip
# Least share of the offered rate that must be served; chance alone takes a few per cent of a run.
KEEPS_UP = 0.9


@dataclass(frozen=True, kw_only=True)
class Option:
    """A way to serve a model: GPUs of one kind in one precision, with the sizes that its engine is built for.

    drafts      draft tokens of each sequence in a step
    acceptance  share of them that is accepted; each saves a step of its sequence
    """

    model: ModelConfig
    gpu: GpuSpec
    precision: Precision
    mapping: Mapping
    limits: Limits
    memory: Memory
    cost: StepCost
    chunked: bool = True
    window: int | None = None
    drafts: int = 0
    acceptance: float = 0.0

    @classmethod
    def make(
        cls,
        model: ModelConfig,
        gpu: GpuSpec,
        precision: Precision,
        mapping: Mapping,
        lengths: Lengths,
        efficiency: Efficiency,
        limits: Limits | None = None,
        *,
        chunked: bool = True,
        adapters: Adapters | None = None,
    ) -> Option:
        """Make an option with `limits`, or with sizes that suit `lengths` and `adapters`. Raises UsageError for an
        impossible one."""
        made = quantization(precision)
        chosen = limits or sizes(
            model, precision.dtype, mapping, made, gpu, lengths, efficiency, least=replace(LEAST, adapters=adapters)
        )  # fmt: skip
        found = memory(model, precision.dtype, mapping, made, gpu, chosen, efficiency)
        cost = StepCost.of(model, precision.dtype, mapping, made, gpu, efficiency)
        if found.adapters:  # read in each step
            reading = found.adapters / (efficiency.bandwidth(gpu) * efficiency.weights)
            cost = replace(cost, fixed_s=cost.fixed_s + reading)
        return cls(
            model=model, gpu=gpu, precision=precision, mapping=mapping, limits=chosen, memory=found, cost=cost,
            chunked=chunked,
        )  # fmt: skip

    @property
    def tp(self) -> int:
        """GPUs of the engine."""
        return self.mapping.tp_size

    @property
    def confidence(self) -> tuple[dict[str, float], bool]:
        """Shares by quantity that predictions are off by, and whether figures of this kind were compared."""
        assert self.gpu.sm is not None
        return self.cost.efficiency.confidence(self.gpu.sm, self.cost.counts.kind)

    @property
    def places(self) -> Places:
        return Places(
            batch=self.limits.max_batch_size, tokens=self.limits.max_num_tokens, kv_blocks=self.memory.kv_blocks,
            tokens_per_block=self.limits.tokens_per_block, chunked=self.chunked, window=self.window,
            ahead=bool(self.cost.efficiency.ahead),
        )  # fmt: skip

    @functools.cached_property
    def seconds(self) -> Callable[[Step], float]:
        """Seconds of a step: a function of the step."""
        whole = Stopwatch(self.cost)
        return whole if self.window is None and not self.drafts else functools.partial(self._changed, whole)

    def _changed(self, whole: Stopwatch, step: Step) -> float:
        """With a window or drafts."""
        if self.window is not None:
            step = step._replace(cached=min(step.cached, self.window * step.decoding))
        seconds = whole(step)
        if not self.drafts or not step.decoding:
            return seconds
        # A simulated step gives each sequence one token. One with drafts gives it several, and computes each draft as
        # another sequence of the batch; what prompts add to the step is the same.
        n, rows = step.decoding, 1 + self.drafts
        plain = step._replace(context=0, work=0, logits=n)
        guessed = plain._replace(decoding=n * rows, logits=n * rows)
        return seconds - whole(plain) + whole(guessed) / (1 + self.drafts * self.acceptance)

    def require_fit(self, longest: int) -> None:
        """Raises UsageError when no request of `longest` tokens fits."""
        if shortage := self.memory.shortage(longest, self.mapping.world_size, self.limits):
            raise UsageError(shortage)

    def at(self, demand: Demand, rate: float) -> Prediction:
        """Predict `rate` clients per second."""
        offered, count = rate * demand.turns, REQUESTS
        while True:
            found = self._predict(demand.requests(rate, count), None, offered)
            # A run must be several times as long as a request, or it ends before the batch has filled.
            needed = min(MOST_REQUESTS, round(LATENCIES * offered * float(found.latency.mean()) / 1e3))
            if needed <= 1.2 * count:
                return found
            count = needed

    def together(self, demand: Demand, concurrency: int) -> Prediction:
        """Predict `concurrency` clients, each of which sends its next request as soon as one is answered."""
        asked, follow = demand.together(concurrency, max(40, 4 * concurrency), self.cost.efficiency.front_s)
        return self._predict(asked, follow, None)

    def waves(self, demand: Demand, concurrency: int, number: int = 4) -> Prediction:
        """Predict clients that start together and send `number` requests each: the whole run, its start too."""
        front = self.cost.efficiency.front_s
        asked, follow = demand.together(concurrency, number * concurrency, front, in_step=True)
        return Prediction.whole(simulate(asked, self.places, self.seconds, follow=follow), front)

    def full(self, demand: Demand) -> Prediction:
        """Predict as many clients as the batch has slots."""
        return self.together(demand, self.limits.max_batch_size)

    def _predict(self, asked: list[Asked], follow: Follow | None, offered: float | None) -> Prediction:
        timeline = simulate(asked, self.places, self.seconds, follow=follow)
        made = Prediction.of(timeline, offered, self.cost.efficiency.front_s, len(asked))
        return replace(made, cost=self.cost)


def bounds(cost: StepCost, step: Step) -> dict[str, Any]:
    """Seconds of a step, or of each of several, by what bounds it: compute, weights, kv, all-reduce, overhead."""
    parts: Parts = cost.parts(step)
    tokens = step.context + step.decoding
    compute, reading = cost.computing(tokens), cost.reading(tokens)
    products = parts.products + parts.head
    return {
        "compute": products * compute / (compute + reading) + parts.attention,
        "weights": products * reading / (compute + reading),
        "kv": parts.cache,
        "elementwise": parts.elementwise,
        "all-reduce": parts.allreduce,
        "overhead": parts.overhead,
    }


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted service, over the measured middle of the run. Times in ms, named as the load generator names them.

    offered        requests per second; None where each client sends its next request when one is answered
    ttft, tpot     values of each request
    latency        values of each request
    output         output tokens of each request
    tokens_per_s   output tokens per second over the measured time
    requests_per_s requests per second, likewise
    in_flight      most sequences at once
    busy           share of the time in which a step ran
    ran            steps: how many were equal, seconds of each, and the step
    cost           engine of which `shares` are computed
    """

    offered: float | None
    ttft: Any
    tpot: Any
    latency: Any
    output: Any
    tokens_per_s: float
    requests_per_s: float
    in_flight: int
    busy: float
    ran: Sequence[tuple[int, float, Step]]
    cost: StepCost | None = None

    @classmethod
    def of(
        cls, timeline: Timeline, offered: float | None, front_s: float, clients: int, *, in_step: bool = False
    ) -> Prediction:
        """`clients` is the number of requests at once of a closed loop, in step or spread. Tokens are counted when they
        come, not when their request ends: in a run of equal requests, whole waves end together inside the window or
        outside it."""
        arrival, output, first, end = _served(timeline)
        if offered is None:
            # From when every client has had its first answer, which was cut short, until the last request is sent.
            # In step no answer is cut: from the first answer on.
            order = np.sort(end)
            start, stop = (
                order[0 if in_step else min(clients, len(order) // 2) - 1],
                order[max(len(order) - clients - 1, len(order) // 2)],
            )
        else:
            start, stop = arrival.min() + FILLING * (arrival.max() - arrival.min()), arrival.max()
        measured = (arrival >= start) & (arrival <= stop)
        seconds = max(stop - start, 1e-9)
        several = measured & (output > 1)
        inside = float(((end > start) & (end <= stop)).sum())
        return cls(
            offered=offered,
            ttft=(first - arrival + front_s)[measured] * 1e3,
            tpot=((end - first)[several] / (output[several] - 1)) * 1e3,
            latency=(end - arrival + front_s)[measured] * 1e3,
            output=output[measured],
            tokens_per_s=float(_between(first, end, output, start, stop).sum() / seconds),
            requests_per_s=inside / seconds,
            in_flight=timeline.most,
            busy=float(timeline.busy / max(end.max() - arrival.min(), 1e-9)),
            ran=timeline.ran,
        )

    @classmethod
    def whole(cls, timeline: Timeline, front_s: float) -> Prediction:
        """The whole run, as a load tester reports it that sends a given number of requests."""
        arrival, output, first, end = _served(timeline)
        seconds, several = end.max() - arrival.min(), output > 1
        return cls(
            offered=None, ttft=(first - arrival + front_s) * 1e3,
            tpot=((end - first)[several] / (output[several] - 1)) * 1e3,
            latency=(end - arrival + front_s) * 1e3, output=output, tokens_per_s=float(output.sum() / seconds),
            requests_per_s=len(output) / seconds, in_flight=timeline.most, busy=float(timeline.busy / seconds),
            ran=timeline.ran,
        )  # fmt: skip

    @functools.cached_property
    def shares(self) -> dict[str, float]:
        """Shares of the busy time, by what bounds it. Computed when asked for: of most predictions nobody asks."""
        assert self.cost is not None
        repeat = np.array([repeat for repeat, _, _ in self.ran], dtype=float)
        steps = Step(*np.array([step for _, _, step in self.ran], dtype=float).T)
        seconds = {name: float((repeat * each).sum()) for name, each in bounds(self.cost, steps).items()}
        total = sum(seconds.values())
        return {name: each / total for name, each in seconds.items()}

    @functools.cached_property
    def itl(self) -> Any:
        """(ms, tokens that come after it) of every step with decoding sequences."""
        gaps = [(1e3 * took, repeat * step.decoding) for repeat, took, step in self.ran if step.decoding]
        return np.array(gaps, dtype=float).reshape(-1, 2)

    def value(self, objective: Objective) -> float | None:
        """The objective's statistic in ms; None where no request has a value."""
        if not predicted(objective):
            raise UsageError(
                f"the planner does not predict {objective.metric}", remedy="use ttft, tpot, itl or latency"
            )
        field = FIELDS[_metric(objective)]
        if field == "itl":
            return _weighted(self.itl, objective)
        values = getattr(self, field)
        if not len(values):
            return None
        if objective.percent is not None:
            return float(np.percentile(values, objective.percent))
        return float(values.mean() if objective.statistic == "mean" else values.max())

    @property
    def keeps_up(self) -> bool:
        """Whether answers keep up with requests: in a growing queue the first requests still start in time."""
        return self.offered is None or self.requests_per_s > KEEPS_UP * self.offered

    def meets(self, objectives: Sequence[Objective]) -> bool:
        if not self.keeps_up:
            return False
        values = [(self.value(one), one.limit) for one in objectives]
        return all(value is None or value < limit for value, limit in values)

    def to_json(self) -> dict[str, Any]:
        def quantiles(values: Any) -> dict[str, float] | None:
            if not len(values):
                return None
            return {"mean": float(values.mean())} | {f"p{p}": float(np.percentile(values, p)) for p in (50, 99)}

        return {
            "offered_requests_per_s": self.offered,
            "time_to_first_token_ms": quantiles(self.ttft),
            "time_per_output_token_ms": quantiles(self.tpot),
            "request_latency_ms": quantiles(self.latency),
            "output_tokens_per_s": self.tokens_per_s,
            "requests_per_s": self.requests_per_s,
            "in_flight": self.in_flight,
            "busy": self.busy,
            "time_by_bound": self.shares,
        }


def predicted(objective: Objective) -> bool:
    """Whether the planner predicts what the objective is of."""
    return _metric(objective) in FIELDS


def _metric(objective: Objective) -> str:
    return objective.metric.removesuffix("_from_due")  # simulated clients never wait for a slot


def _served(timeline: Timeline) -> tuple[Any, Any, Any, Any]:
    """Arrival, output tokens, first token and end of the requests that fit. Raises UsageError where none does."""
    arrival, _, output, _ = np.array(list(zip(*timeline.asked, strict=True)), dtype=float)
    first, end = np.array(timeline.first, dtype=float), np.array(timeline.end, dtype=float)
    served = ~np.isnan(end)
    if not served.any():
        raise UsageError("no request fits")
    return arrival[served], output[served], first[served], end[served]


def _between(first: Any, end: Any, output: Any, start: float, stop: float) -> Any:
    """Tokens of each request that come after `start`, until `stop`: one at `first`, the others evenly until `end`."""
    spell = np.maximum(end - first, 1e-12)
    share = np.clip((np.minimum(end, stop) - np.maximum(first, start)) / spell, 0.0, 1.0)
    return ((first > start) & (first <= stop)) + np.where(output > 1, (output - 1) * share, 0.0)


def quantization(precision: Precision) -> Quantization:
    return precision.recipe.quantization if precision.recipe else UNQUANTIZED


def _weighted(gaps: Any, objective: Objective) -> float | None:
    if not len(gaps):
        return None
    order = np.argsort(gaps[:, 0])
    times, weights = gaps[order, 0], gaps[order, 1]
    if objective.percent is not None:
        return float(times[np.searchsorted(weights.cumsum(), objective.percent / 100 * weights.sum())])
    return float(np.average(times, weights=weights) if objective.statistic == "mean" else times[-1])
