"""Statistics of repeated runs of one load: mean of each figure over the runs, and its confidence interval.

An interval within a run (bootstrap over its requests) does not include differences between runs: caches, clocks, other
processes. Only repeats show these, and few repeats show little: hence Student's t.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

FIGURES = ("mean", "p50", "p90", "p99", "value")
INTERVALS = (
    "Of 95%: the mean over the runs, and Student's t times their standard deviation over the root of their number."
)
# 97.5% quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal quantile is off by 2% at most.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.960


def repeats(load_points: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Load points of a report that were measured more than once: protocol, label, runs, valid (number of valid runs),
    and for each metric its figures as {mean, std, interval}. INVALID runs are left out; a figure that a run lacks
    is None, and so is everything where fewer than two runs are left."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for point in load_points:
        same = json.dumps([point["protocol"], point["label"], point["load"]], sort_keys=True)
        groups.setdefault(same, []).append(point)
    out = []
    for runs in groups.values():
        if len(runs) < 2:
            continue
        valid = [run["metrics"] for run in runs if run["verdict"]["valid"]]
        metrics = {
            name: {figure: over_runs([run[name][figure] for run in valid]) for figure in FIGURES if figure in entry}
            for name, entry in runs[0]["metrics"].items()
        }
        out.append(
            {"protocol": runs[0]["protocol"], "label": runs[0]["label"], "runs": len(runs), "valid": len(valid),
             "metrics": metrics}
        )  # fmt: skip
    return out


def over_runs(values: list[float | None]) -> dict[str, Any] | None:
    """{mean, std (of the sample), interval} of one figure; None for fewer than two values, or where one is unknown."""
    known = [value for value in values if value is not None]
    if len(known) < 2 or len(known) < len(values):
        return None
    mean, std = statistics.fmean(known), statistics.stdev(known)
    freedom = len(known) - 1
    half = (_T[freedom - 1] if freedom <= len(_T) else _NORMAL) * std / len(known) ** 0.5
    return {"mean": mean, "std": std, "interval": [mean - half, mean + half]}
