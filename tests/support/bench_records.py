"""Records of a load point, written by hand in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from trtpipe.pipeline.bench.loop.in_flight import Failure
from trtpipe.pipeline.bench.results.records import NONE, SERVER, Records

MS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request.

    stamps  of its responses
    tokens  of each response; None where nobody says
    output  of all; None for the sum of `tokens`
    unstreamed  those of all that no response brought
    sent    None if it never was
    end     None for the moment of the last response
    failed  class of its failure
    """

    stamps: Sequence[float] = ()
    tokens: Sequence[int] | None = None
    output: int | None = None
    unstreamed: int = 0
    due: float = 0
    sent: float | None = 0
    end: float | None = None
    slot: int = 0
    warmup: bool = False
    failed: str | None = None
    input_tokens: int = 4
    max_tokens: int = 6


def made(*rows: Row) -> Records:
    def column(values: Sequence[int]) -> NDArray[np.int64]:
        return np.array(values, dtype=np.int64)

    def moments(values: Sequence[float | None]) -> NDArray[np.int64]:
        return column([NONE if value is None else round(value * MS) for value in values])

    outputs = [NONE if row.failed else sum(row.tokens or ()) if row.output is None else row.output for row in rows]
    return Records(
        ids=[f"r{number}" for number in range(len(rows))],
        failures=[Failure(row.failed, "no more") if row.failed else None for row in rows],
        sources=[None if row.failed else SERVER for row in rows],
        warmup=np.array([row.warmup for row in rows], dtype=np.bool_),
        slot=column([row.slot for row in rows]),
        session=column([NONE] * len(rows)),
        turn=column([NONE] * len(rows)),
        due=moments([row.due for row in rows]),
        sent=moments([row.sent for row in rows]),
        end=moments([row.stamps[-1] if row.end is None and row.stamps else row.end for row in rows]),
        input_tokens=column([row.input_tokens for row in rows]),
        max_tokens=column([row.max_tokens for row in rows]),
        output_tokens=column(outputs),
        unstreamed_tokens=column([row.unstreamed for row in rows]),
        offsets=column([0, *accumulate(len(row.stamps) for row in rows)]),
        stamps=moments([stamp for row in rows for stamp in row.stamps]),
        tokens=column([count for row in rows for count in row.tokens or [NONE] * len(row.stamps)]),
    )
