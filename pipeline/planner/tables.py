"""Tables of a plan as rows of text, which both the terminal and the page show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtpipe.pipeline.planner.advice import Advice, Candidate, every_head
from trtpipe.pipeline.planner.disaggregation import Split
from trtpipe.pipeline.planner.preparation import amount
from trtpipe.pipeline.planner.whatif import WhatIf

# Most splits that are shown.
SPLITS = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """`worded` where the last column is a sentence."""

    title: str
    columns: list[str]
    rows: list[list[str | None]]
    worded: bool = True


def load(found: Advice) -> str:
    lengths, turns = found.lengths, found.question.demand.turns
    return (
        f"prompts of {lengths.mean_input:.0f} tokens on average, {lengths.longest_input} at most; "
        f"answers of {lengths.mean_output:.0f}; sequences of up to {lengths.longest}; "
        f"{turns:.3g} request{'' if turns == 1 else 's'} of a client"
    )


def options(found: Advice) -> Table:
    """Options that can serve the load, the best first."""
    columns = ["option", "KV GiB", "batch", "TTFT alone", "TPOT alone", "clients/s", "TTFT p99", "TPOT p99", "tokens/s"]
    columns += ["a GPU"] + (["1M tokens"] if found.priced else []) + (["GPUs"] if found.question.rate else [])
    rows = [_option(one, found) for one in found.candidates if one.best is not None]
    return Table(title="options", columns=[*columns, "why"], rows=rows)


def memory(found: Advice) -> Table:
    """Use of each option's memory in GiB, and the capacity of the rest."""
    rows: list[list[str | None]] = []
    adapted = found.question.adapters is not None
    for one in found.candidates:
        if one.option is None:
            continue
        of, batch = one.option.memory, one.option.limits.max_batch_size
        parts = [of.total, of.weights, of.activations, of.buffers, of.runtime, of.kv_pool]
        parts += [of.adapters] if adapted else []
        every = every_head(one.option)
        rows.append(
            [
                one.name, *(f"{part / 2**30:.1f}" for part in parts), f"{of.kv_token:,}", f"{every:,}",
                f"{of.kv_blocks:,}", f"{of.batch(found.lengths.longest):,}", f"{of.context(batch):,}", str(batch),
            ]
        )  # fmt: skip
    columns = ["option", "GiB", "weights", "activations", "buffers", "runtime", "KV pool"]
    columns += (["adapters"] if adapted else []) + ["KV bytes a token"]
    columns += ["without GQA", "blocks", f"at once of {found.lengths.longest}", "longest at the batch", "of"]
    return Table(title="memory of each GPU", columns=columns, rows=rows, worded=False)


def refusals(found: Advice) -> Table:
    rows: list[list[str | None]] = [[one.name, one.reason] for one in found.candidates if one.best is None]
    return Table(title="what cannot serve it", columns=["option", "why"], rows=rows)


def changes(of: str, found: Sequence[WhatIf]) -> Table:
    rows: list[list[str | None]] = [
        [
            one.name, _pair(one.kv_tokens, whole), _pair(one.ttft, figure), _pair(one.tpot, figure),
            _pair(one.tokens_per_s, whole), one.said,
        ]
        for one in found
    ]  # fmt: skip
    columns = ["change", "KV tokens", "TTFT alone", "TPOT alone", "tokens/s when full", ""]
    return Table(title=f"what if, of {of}", columns=columns, rows=rows)


def splits(found: Advice, made: Sequence[Split]) -> Table:
    """The best splits, and the best engine that is not split."""
    kept = list(made[:SPLITS])
    kept += [one for one in made if not one.answers][:1] if all(one.answers for one in kept) else []
    rows: list[list[str | None]] = [
        [
            one.name, str(one.gpus), figure(one.rate), figure(one.per_gpu),
            f"{one.transfer_ms:.1f}" if one.answers else None,
        ]
        for one in kept
    ]  # fmt: skip
    best = found.candidates[0]
    return Table(
        title=f"split between prompts and answers, of {best.gpu.name} {best.dtype}",
        columns=["engines", "GPUs", "clients/s", "clients/s of a GPU", "transfer ms"], rows=rows, worded=False,
    )  # fmt: skip


def _option(one: Candidate, found: Advice) -> list[str | None]:
    assert one.option is not None
    assert one.best is not None
    assert one.single is not None
    assert one.rate is not None
    row: list[str | None] = [
        one.name,
        f"{one.option.memory.kv_pool / 2**30:.1f}",
        str(one.option.limits.max_batch_size),
        _percentile(one.single.ttft, 50, ".0f"),
        _percentile(one.single.tpot, 50, ".1f"),
        figure(one.rate),
        _percentile(one.best.ttft, 99, ".0f"),
        _percentile(one.best.tpot, 99, ".1f"),
        f"{one.best.tokens_per_s:.0f}",
        f"{one.per_gpu:.0f}",
    ]
    if found.priced:
        row.append(amount(one.cost))
    if found.question.rate:
        row.append(str(one.gpus))
    return [*row, one.reason]


def _percentile(values: Any, percent: float, form: str) -> str | None:
    return f"{np.percentile(values, percent):{form}}" if len(values) else None


def figure(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return whole(value) if abs(value) >= 100 else f"{value:.3g}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def _pair(values: tuple[float, float] | None, form: Callable[[float], str]) -> str | None:
    """A figure before and after a change; one where they are equal."""
    return None if values is None else " -> ".join(dict.fromkeys(map(form, values)))
