"""The planner beside measured runs: its errors, and overheads refitted to them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trtpipe.configs import read
from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.planner.efficiency import OVERHEADS, Efficiency, own_file
from trtpipe.pipeline.planner.measured_runs import QUANTITIES, Errors, MeasuredRun, PredictedRun, errors, predict_run
from trtpipe.pipeline.planner.tables import Table

# Rounds of a refit, each with a step half as long as the one before: factors are found within 2%.
ROUNDS, STEP = 5, 0.4
HEADER = "# Written by `trtpipe plan --calibrate` from measured runs; goes before the shipped overheads.\n"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predictions of the runs, and the runs that cannot be planned: (name, why)."""

    predicted: tuple[tuple[MeasuredRun, PredictedRun], ...]
    refused: tuple[tuple[str, str], ...]

    def errors(self) -> dict[str, Errors]:
        """By quantity, of those that were measured."""
        found = {quantity: errors(self.predicted, quantity) for quantity in QUANTITIES}
        return {quantity: one for quantity, one in found.items() if one.values}

    def to_json(self) -> dict[str, Any]:
        return {
            "errors": {
                quantity: {"runs": len(one.values), "mean_absolute": one.mean, "mean": one.bias}
                for quantity, one in self.errors().items()
            },
            "runs": [{"run": name(figure), **vars(one)} for figure, one in self.predicted],
            "refused": [{"run": run, "why": why} for run, why in self.refused],
        }


def compare(figures: Sequence[MeasuredRun], efficiency: Efficiency) -> Comparison:
    """Plan each run."""
    predicted, refused = [], []
    for figure in figures:
        try:
            predicted.append((figure, predict_run(figure, efficiency)))
        except UsageError as error:
            refused.append((name(figure), str(error)))
    return Comparison(predicted=tuple(predicted), refused=tuple(refused))


def name(figure: MeasuredRun) -> str:
    load = f"{figure.input_tokens}/{figure.output_tokens}"
    if figure.concurrency is not None:
        load += f", {figure.concurrency} clients"
    elif figure.requests_per_s is not None:
        load += f", {figure.requests_per_s:g} requests/s"
    return f"{figure.group} {figure.dtype} {figure.runtime} {load}"


def table(found: Comparison) -> Table:
    """Errors by group of runs, the last row of all."""
    groups: dict[str, list[tuple[MeasuredRun, PredictedRun]]] = {}
    for figure, one in found.predicted:
        groups.setdefault(f"{figure.group} {figure.dtype}", []).append((figure, one))
    rows: list[list[str | None]] = []
    for group, members in [*sorted(groups.items()), ("all", list(found.predicted))]:
        row: list[str | None] = [group, str(len(members))]
        for quantity in QUANTITIES:
            of = errors(members, quantity)
            row += [f"{of.mean:.0%}", f"{of.bias:+.0%}"] if of.values else [None, None]
        rows.append(row)
    columns = ["runs of", "number"] + [f"{one} {what}" for one in QUANTITIES.values() for what in ("error", "bias")]
    return Table(title="the planner beside measured runs", columns=columns, rows=rows, worded=False)


def calibrate(figures: Sequence[MeasuredRun], efficiency: Efficiency) -> dict[str, dict[str, float]]:
    """Overheads of each runtime that brings its runs nearest: one factor on all that it spends besides computing and
    reading, one on the work itself, and the time from a client to the engine. Few, since tables of users are short. The
    factor on the work is not so small that weights are read faster than the data sheet says: few or wrong figures would
    else make plans that no GPU can reach.

    Raises UsageError where no run can be planned.
    """
    found: dict[str, dict[str, float]] = {}
    for runtime in sorted({figure.runtime for figure in figures}):
        runs = [one for one in figures if one.runtime == runtime]
        # `slower` of an earlier file would hide how the releases differ.
        own = {key: value for key, value in efficiency.runtimes.get(runtime, {}).items() if key != "slower"}
        base, before = efficiency.of(runtime), own.get("work", 1.0)
        plain = dataclasses.replace(efficiency, runtimes={**efficiency.runtimes, runtime: own}).of(runtime)
        least = base.weights / plain.slower

        def changed(factors: Sequence[float], base: Efficiency = base, before: float = before) -> dict[str, float]:
            beside, work, front = factors
            values = {key: getattr(base, key) * beside for key in OVERHEADS}
            return {**values, "work": before * work, "front_s": base.front_s * front}

        def loss(
            factors: Sequence[float], runs: Sequence[MeasuredRun] = runs, runtime: str = runtime,
            own: dict[str, float] = own,
        ) -> float:  # fmt: skip
            row = {**own, **changed(factors)}
            how = dataclasses.replace(efficiency, runtimes={**efficiency.runtimes, runtime: row})
            values = [one for of in compare(runs, how).errors().values() for one in of.values]
            if not values:
                raise UsageError(f"no run of {runtime} can be planned", remedy="see what --against says of each")
            return sum(abs(math.log1p(max(one, -0.99))) for one in values) / len(values)

        factors, best = [1.0, 1.0, 1.0], loss([1.0, 1.0, 1.0])
        for number in range(ROUNDS):
            step, moved = math.exp(STEP / 2**number), True
            while moved:
                moved = False
                for at, factor in itertools.product(range(3), (step, 1 / step)):
                    tried = [value * factor if at == one else value for one, value in enumerate(factors)]
                    if tried[1] < min(least, factors[1]):
                        continue
                    if (value := loss(tried)) < best * 0.999:
                        factors, best, moved = tried, value, True
        found[runtime] = {key: float(f"{value:.3g}") for key, value in changed(factors).items()}
    return found


def write(runtimes: dict[str, dict[str, float]]) -> Path:
    """Write efficiency.yaml of TRTPIPE_HOME, whose other runtimes stay. Raises HostError."""
    file = own_file()
    try:
        old = read.read_yaml(file) if file.is_file() else {}
        file.parent.mkdir(parents=True, exist_ok=True)
        made = {"runtimes": {**old.get("runtimes", {}), **runtimes}}
        file.write_text(HEADER + yaml.safe_dump(made, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise HostError(f"{file} cannot be written", why=error.strerror or str(error)) from None
    return file
