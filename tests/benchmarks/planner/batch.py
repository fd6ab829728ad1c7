"""Runs whose steps are known beforehand, evaluated together: a fit evaluates them thousands of times."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trtpipe.pipeline.planner.cost import Step, StepCost
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.measured_runs import MeasuredRun, at_once, option
from trtpipe.pipeline.planner.routing import Routing


@dataclass(frozen=True)
class Batch:
    """Runs with the steps of all of them, one after another. `engine` is the place of a run's engine in `engines`:
    (runtime, release, cost)."""

    figures: list[MeasuredRun]
    engines: list[tuple[str, str | None, StepCost]]
    engine: Any
    repeat: Any
    step: Step
    owner: Any
    tokens: Any

    def predicted(self, how: Efficiency) -> Any:
        """Tokens a second of each run."""
        under = {key: how.of(*key) for key in {(runtime, release) for runtime, release, _ in self.engines}}
        costs = [cost.under(under[runtime, release]) for runtime, release, cost in self.engines]
        seconds = spread(costs, self.engine[self.owner]).seconds(self.step)
        return self.tokens / np.bincount(self.owner, self.repeat * seconds)

    def only(self, kept: Sequence[bool]) -> Batch:
        """Of those runs alone."""
        keep = np.array(kept)
        steps, number = keep[self.owner], np.cumsum(keep) - 1
        return Batch(
            [one for one, here in zip(self.figures, kept, strict=True) if here], self.engines, self.engine[keep],
            self.repeat[steps], Step(*(column[steps] for column in self.step)), number[self.owner[steps]],
            self.tokens[keep],
        )  # fmt: skip


def spread(costs: Sequence[StepCost], owner: Any = slice(None)) -> StepCost:
    """The costs of several engines as one, whose coefficients are arrays; `owner` has the place of each value's. None
    of them divides its experts into groups."""
    names = [field.name for field in dataclasses.fields(StepCost) if field.name.endswith("_s")]
    values: dict[str, Any] = {name: np.array([getattr(cost, name) for cost in costs])[owner] for name in names}
    routing = Routing(missed=np.array([cost.counts.routing.missed for cost in costs])[owner])
    return replace(costs[0], counts=replace(costs[0].counts, routing=routing), **values)


def batch(of: Iterable[MeasuredRun]) -> Batch:
    kept: list[MeasuredRun] = []
    engines: dict[tuple[Any, ...], int] = {}
    costs, places, rows, tokens = [], [], [], []
    for figure in of:
        found = at_once(figure)
        if found is None:
            continue
        repeat, step, made = found
        for line in _binned(repeat, np.array(step)):
            rows.append((len(kept), *line))
        engine = (figure.group, figure.dtype, figure.kv_cache, figure.runtime, figure.release)
        if engine not in engines:
            engines[engine] = len(engines)
            costs.append((figure.runtime, figure.release, option(figure).cost))
        places.append(engines[engine])
        kept.append(figure)
        tokens.append(made)
    columns = np.array(rows).T
    return Batch(
        kept, costs, np.array(places), columns[1], Step(*columns[2:]), columns[0].astype(int),
        np.array(tokens, dtype=float),
    )  # fmt: skip


def _binned(repeat: Any, step: Any) -> list[tuple[float, ...]]:
    """Steps of about as many tokens as one: a step's seconds are nearly linear in the rest."""
    place = np.round(np.log(step[0] + step[1]) * 8).astype(int) * 2 + (step[0] > 0)
    out = []
    for one in np.unique(place):
        here = place == one
        weight = repeat[here]
        out.append((float(weight.sum()), *(step[:, here] @ weight / weight.sum()).tolist()))
    return out
