"""Requests of one level, read back from report.requests.jsonl or another tool's file: as Records again, with unknown
moments and counts where the tool does not tell them, and by the formulas of `metrics`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.bench.metrics import DISTRIBUTIONS, Values
from pipeline.bench.records import NONE, Records, read_objects

# Other tools' metrics that need no more than stamps, and what of ours has the same formula.
ALIKE = {
    "time_to_first_chunk": "time_to_first_token",
    "inter_chunk_latency_with_role_chunk": "inter_chunk_latency",
}
_FORMULAS = {metric.name: metric.values for metric in DISTRIBUTIONS}


def requests(lines: Iterable[dict[str, Any]]) -> Records:
    """The measured requests among `lines`, without those that were cut off when the level ended."""
    return read_objects(line for line in lines if not line["warmup"] and (line["failure"] or line["stamps_ns"]))


def values(found: Records, metric: str) -> Values | None:
    """Values of `metric`; None for one that requests do not tell."""
    formula = _FORMULAS.get(ALIKE.get(metric, metric))
    return None if formula is None else formula(found)


def whole_run_rates(found: Records) -> dict[str, float]:
    """Rates as tools without a window take them: from the first request sent to the last response."""
    import numpy as np

    good = found.good()
    sent = found.sent[found.sent != NONE]
    if not good.any() or not len(sent):
        return {}
    seconds = float(found.stamps[found.offsets[1:][good] - 1].max() - sent.min()) / 1e9
    if seconds <= 0:
        return {}
    output, prompts = (
        float(np.where(column == NONE, 0, column)[good].sum()) for column in (found.output_tokens, found.input_tokens)
    )
    return {
        "request_throughput_whole_run": float(good.sum()) / seconds,
        "output_token_throughput_whole_run": output / seconds,
        "total_token_throughput_whole_run": (output + prompts) / seconds,
    }
