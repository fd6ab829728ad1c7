"""Disaggregated serving: some engines compute prompts, others the answers, and the KV cache passes between them.

A request's time to first token is that of the engines that compute prompts, and the transfer of its KV cache: bytes
of a token x tokens of the prompt, on each of the GPUs that hold it, over the link between two GPUs. The time per output
token is that of the engines that decode, whose steps no prompt lengthens. The rate of a split is the least of what its
prompt engines and its decode engines serve within the objectives. No queue between them is simulated: where both are
near their limit the rate is an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.results.slo import Objective
from trtpipe.pipeline.planner.advice import Advice, Candidate, highest_rate
from trtpipe.pipeline.planner.cost import all_reduce
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.planner.predict import Option

# Objectives of the engines that compute prompts, and of those that decode.
OF_PROMPTS = ("time_to_first_token",)
OF_ANSWERS = ("time_per_output_token", "inter_token_latency", "inter_chunk_latency")


@dataclass(frozen=True, kw_only=True)
class Side:
    """One kind of engine of a split: its number of GPUs, and the rate of clients per second that one serves."""

    tp: int
    rate: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """`prompts` engines that compute prompts and `answers` that decode; without `answers`, engines that do both.

    rate         clients per second within the objectives, of all together
    transfer_ms  of the longest prompt
    """

    prompts: int
    answers: int
    of_prompts: Side
    of_answers: Side
    transfer_ms: float

    @property
    def gpus(self) -> int:
        return self.prompts * self.of_prompts.tp + self.answers * self.of_answers.tp

    @property
    def rate(self) -> float:
        if not self.answers:
            return self.prompts * self.of_prompts.rate
        return min(self.prompts * self.of_prompts.rate, self.answers * self.of_answers.rate)

    @property
    def per_gpu(self) -> float:
        """Clients per second of a GPU."""
        return self.rate / self.gpus

    @property
    def name(self) -> str:
        if not self.answers:
            return f"{self.prompts} x tp{self.of_prompts.tp} for both"
        return (
            f"{self.prompts} x tp{self.of_prompts.tp} for prompts, {self.answers} x tp{self.of_answers.tp} for answers"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_engines": self.prompts,
            "prompt_tp": self.of_prompts.tp,
            "answer_engines": self.answers,
            "answer_tp": self.of_answers.tp if self.answers else None,
            "gpus": self.gpus,
            "max_rate": self.rate,
            "transfer_ms": self.transfer_ms,
        }


def disaggregate(found: Advice, gpus: int) -> list[Split]:
    """Splits of up to `gpus` GPUs of the best option's kind and precision, and its own engines without a split; the
    highest rate of a GPU first, and of equal ones the fewest GPUs. Raises UsageError for an objective that no side of a
    split can answer for, and for a number of GPUs that holds none."""
    best, question = found.candidates[0], found.question
    if gpus < 1:
        raise UsageError(f"--disaggregated is {gpus}", remedy="give the number of GPUs to divide, such as 8")
    if best.gpu.mig:
        raise UsageError(
            "--disaggregated is for whole GPUs", why=f"no KV cache passes between MIG slices ({best.gpu.name})",
            remedy="leave it out, or plan for whole GPUs",
        )  # fmt: skip
    host = best.gpu.ranks_of_host
    if max(2, gpus) > host:
        raise UsageError(
            f"--disaggregated is for the GPUs of one host, and a host has {host} {best.gpu.name}",
            why="the network between hosts is not predicted",
            remedy=f"{f'give {host} or fewer' if host > 1 else 'leave it out'}, or write host_gpus into "
            f"gpus/{best.gpu.name}.yaml of TRTPIPE_HOME",
        )
    if best.best is None:
        raise UsageError("nothing serves this load, so nothing can be split")
    for one in question.objectives:
        if _metric(one) not in OF_PROMPTS + OF_ANSWERS:
            raise UsageError(
                f"--disaggregated has no {_metric(one)}",
                why="no side of a split has the whole of a request",
                remedy="give objectives of ttft, tpot or itl",
            )
    alike = [
        one
        for one in found.candidates
        if one.option is not None
        and one.tp <= gpus
        and (one.gpu.name, one.dtype, one.moe_ep > 1) == (best.gpu.name, best.dtype, best.moe_ep > 1)
    ]
    longest = found.lengths.longest_input
    prompts, answers = question.demand.prompts(), question.demand.answers()
    out = [_together(one) for one in alike if one.best is not None]
    ahead, behind = [], []
    for candidate in alike:
        assert candidate.option is not None
        waits = transfer_ms(candidate.option, longest)
        first = [replace(of, limit=of.limit - waits) for of in question.objectives if _metric(of) in OF_PROMPTS]
        rest = [of for of in question.objectives if _metric(of) in OF_ANSWERS]
        if all(of.limit > 0 for of in first) and (side := _side(candidate.option, prompts, first)):
            ahead.append((side, waits))
        if side := _side(candidate.option, answers, rest):
            behind.append(side)
    for side, waits in ahead:
        for other in behind:
            out += [
                Split(prompts=n, answers=m, of_prompts=side, of_answers=other, transfer_ms=waits)
                for n in range(1, gpus)
                for m in range(1, gpus)
                if n * side.tp + m * other.tp <= gpus and math.gcd(n, m) == 1  # twice as many serve twice as much
            ]
    if not out:
        raise UsageError(f"{gpus} GPUs hold no engine of {best.name}", remedy="give more")
    return sorted(out, key=lambda one: (-round(one.per_gpu, 6), one.gpus))


def transfer_ms(option: Option, tokens: int) -> float:
    """Time in which the KV cache of a prompt passes from the GPUs that computed it to as many others."""
    # As much as a ring all-reduce of two GPUs passes: each of its bytes crosses the link once.
    return 1e3 * tokens * option.memory.kv_token * all_reduce(option.gpu, 2, option.cost.efficiency).ring_byte_s


def _side(option: Option, demand: Demand, objectives: Sequence[Objective]) -> Side | None:
    if not option.together(demand, 1).meets(objectives):
        return None
    found = highest_rate(option, demand, objectives)
    return None if found is None else Side(tp=option.tp, rate=found[0])


def _together(of: Candidate) -> Split:
    assert of.rate is not None
    side = Side(tp=of.tp, rate=of.rate)
    return Split(prompts=1, answers=0, of_prompts=side, of_answers=side, transfer_ms=0.0)


def _metric(objective: Objective) -> str:
    return objective.metric.removesuffix("_from_due")
