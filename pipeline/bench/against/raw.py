"""Requests of one level, read back from report.requests.jsonl, as arrays: values of each metric, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Values:
    """Values of one metric; `owners` are the places of their requests in `Requests`."""

    values: Floats
    owners: Ints


@dataclass(frozen=True, kw_only=True)
class Requests:
    """n measured requests that ended, well or not. Times in nanoseconds; NaN where unknown.

    columns  due, sent, end, first, last, input_tokens, output_tokens: n each, all of a failed request's but sent and
             end NaN
    gaps     time before each response but the first, with its request, and its tokens (0 where nobody says)
    """

    failed: NDArray[np.bool_]
    columns: dict[str, Floats]
    gaps: Values
    gap_tokens: Ints

    def __len__(self) -> int:
        return len(self.failed)


def requests(lines: Iterable[dict[str, Any]]) -> Requests:
    """The measured requests among `lines`, without those that were cut off when the level ended."""
    import numpy as np

    kept = [line for line in lines if not line["warmup"] and (line["failure"] or line["stamps_ns"])]
    failed = np.array([line["failure"] is not None for line in kept], dtype=np.bool_)
    columns = {
        name: np.array([_number(line[key]) for line in kept], dtype=np.float64)
        for name, key in (("due", "due_ns"), ("sent", "sent_ns"), ("end", "end_ns"))
    }
    for name in ("input_tokens", "output_tokens"):
        columns[name] = np.array([_number(None if line["failure"] else line[name]) for line in kept])
    good = [[] if line["failure"] else line["stamps_ns"] for line in kept]
    columns["first"] = np.array([_number(stamps[0] if stamps else None) for stamps in good])
    columns["last"] = np.array([_number(stamps[-1] if stamps else None) for stamps in good])
    times = [stamp - stamps[0] for stamps in good for stamp in stamps]
    tokens = [count for line, stamps in zip(kept, good, strict=True) for count in _tokens(line, len(stamps))]
    owners = np.repeat(np.arange(len(kept)), [len(stamps) for stamps in good])
    inner = np.flatnonzero(owners[1:] == owners[:-1])
    steps = np.diff(np.array(times, dtype=np.float64))[inner]
    return Requests(
        failed=failed,
        columns=columns,
        gaps=Values(values=steps / 1e6, owners=owners[inner + 1]),
        gap_tokens=np.array(tokens, dtype=np.int64)[inner + 1],
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def _tokens(line: dict[str, Any], responses: int) -> list[int]:
    return [0] * responses if line["tokens"] is None else line["tokens"][:responses]


def values(found: Requests, metric: str) -> Values | None:
    """Values of `metric`; None for one that requests do not tell."""
    return None if metric not in _METRICS else _METRICS[metric](found)


def _known(numbers: Floats) -> Values:
    import numpy as np

    owners = np.flatnonzero(np.isfinite(numbers))
    return Values(values=numbers[owners], owners=owners)


def _between(start: str, stop: str) -> Callable[[Requests], Values]:
    return lambda found: _known((found.columns[stop] - found.columns[start]) / 1e6)


def _column(name: str) -> Callable[[Requests], Values]:
    return lambda found: _known(found.columns[name])


def _dispatch_delay(found: Requests) -> Values:
    import numpy as np

    delays = (found.columns["sent"] - found.columns["due"]) / 1e6
    return _known(np.where(found.failed, np.nan, delays))


def _time_per_output_token(found: Requests) -> Values:
    import numpy as np

    steps = found.columns["output_tokens"] - 1
    return _known((found.columns["last"] - found.columns["first"]) / 1e6 / np.where(steps > 0, steps, np.nan))


def _per_user(found: Requests) -> Values:
    import numpy as np

    seconds = (found.columns["last"] - found.columns["sent"]) / 1e9
    return _known(found.columns["output_tokens"] / np.where(seconds > 0, seconds, np.nan))


def _chunk_gaps(found: Requests) -> Values:
    return found.gaps


def _token_gaps(found: Requests) -> Values:
    import numpy as np

    times = found.gap_tokens
    each = found.gaps.values / np.maximum(1, times)
    return Values(values=np.repeat(each, times), owners=np.repeat(found.gaps.owners, times))


# Those of other tools that need no more than stamps are among them.
_METRICS: dict[str, Callable[[Requests], Values]] = {
    "time_to_first_token": _between("sent", "first"),
    "time_to_first_token_from_due": _between("due", "first"),
    "time_to_first_chunk": _between("sent", "first"),
    "inter_chunk_latency": _chunk_gaps,
    "inter_chunk_latency_with_role_chunk": _chunk_gaps,
    "inter_token_latency": _token_gaps,
    "time_per_output_token": _time_per_output_token,
    "request_latency": _between("sent", "last"),
    "request_latency_from_due": _between("due", "last"),
    "dispatch_delay": _dispatch_delay,
    "output_token_throughput_per_user": _per_user,
    "input_sequence_length": _column("input_tokens"),
    "output_sequence_length": _column("output_tokens"),
}


def whole_run_rates(found: Requests) -> dict[str, float]:
    """Rates as tools without a window take them: from the first request sent to the last response."""
    import numpy as np

    good = ~found.failed
    if not good.any():
        return {}
    seconds = float(np.nanmax(found.columns["last"]) - np.nanmin(found.columns["sent"])) / 1e9
    if seconds <= 0:
        return {}
    output = float(np.nansum(found.columns["output_tokens"]))
    return {
        "request_throughput_whole_run": float(good.sum()) / seconds,
        "output_token_throughput_whole_run": output / seconds,
        "total_token_throughput_whole_run": (output + float(np.nansum(found.columns["input_tokens"]))) / seconds,
    }
