"""Judgement of every run by a fit that did not see its GPU, model and number of GPUs."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from tests.benchmarks.planner.batch import Batch
from tests.benchmarks.planner.fit import fit
from trtpipe.pipeline.planner.efficiency import Efficiency
from trtpipe.pipeline.planner.measured_runs import QUANTITIES, MeasuredRun, PredictedRun, errors, option, predict_run

FOLDS = 5


def fold(figure: MeasuredRun) -> int:
    return zlib.crc32(figure.group.encode()) % FOLDS


def folds(how: Efficiency, known: Batch, few: Sequence[MeasuredRun]) -> list[Efficiency]:
    """For each fold a fit to the figures of the other folds, which begins where every fit does."""
    fits = []
    for number in range(FOLDS):
        rest = known.only([fold(one) != number for one in known.figures])
        fits.append(fit(how, rest, [one for one in few if fold(one) != number]))
    return fits


Judged = list[tuple[MeasuredRun, PredictedRun]]


def judged(figures: Sequence[MeasuredRun], fits: Sequence[Efficiency], known: Batch) -> Judged:
    """Prediction of every run by the fit that has not seen its group: by `plan`'s own simulation, or by the steps that
    are known."""
    at_once = [known.predicted(how) for how in fits]
    place = {one: number for number, one in enumerate(known.figures)}
    out: Judged = []
    for one in figures:
        number = fold(one) if len(fits) > 1 else 0
        if one in place:
            out.append((one, PredictedRun(float(at_once[number][place[one]]), None, None)))
        else:
            out.append((one, predict_run(one, fits[number])))
    return out


def kind_of(figure: MeasuredRun) -> str:
    """Runtime, SM and type of operands, as `Efficiency.confidence` asks for them."""
    made = option(figure)
    kind = {"bf16": "fp16"}.get(made.cost.counts.kind, made.cost.counts.kind)
    return f"{figure.runtime} {made.gpu.sm}.{kind}"


def spread(found: Judged) -> dict[str, dict[str, float]]:
    """Share that 8 of 10 errors are within, by quantity and kind, of kinds with ten figures or more."""
    out: dict[str, dict[str, float]] = {}
    for quantity in QUANTITIES:
        rows: dict[str, Judged] = {}
        for figure, predicted in found:
            rows.setdefault(kind_of(figure), []).append((figure, predicted))
        of = {kind: errors(members, quantity).values for kind, members in rows.items()}
        out[quantity] = {
            kind: round(float(np.quantile(np.abs(values), 0.8)), 3)
            for kind, values in sorted(of.items())
            if len(values) >= 10
        }
    return out
