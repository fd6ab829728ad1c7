"""Reader of request traces in Mooncake's format: arrival time, lengths and prefix blocks of each request.

One JSON object per line: `timestamp` in milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`,
one for each 512 tokens of the input, the last one for the rest. Equal ids stand for equal text: requests that begin
with the same ids share that many blocks of prefix. Other keys are ignored, since tools add their own.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.load.lengths import MOST_TOKENS
from trtpipe.pipeline.bench.load.lines import numbered, read_object, shown

BLOCK_TOKENS = 512
# The year 5138, in milliseconds since 1970.
LATEST_MS = 10**14
FORMAT = "give a trace in Mooncake's format: timestamp (ms), input_length, output_length, hash_ids"


@dataclass(frozen=True)
class TracedRequest:
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@lru_cache(maxsize=4)
def read_trace(file: Path, max_total_tokens: int | None = None) -> tuple[TracedRequest, ...]:
    """The requests of a trace in order of time, without those above `max_total_tokens`, prompt plus answer.

    Cached, because the times and the prompts of one load are read from the same file. Raises InputDataError.
    """
    with closing(numbered(file, "trace")) as lines:
        found = [_request(where, read_object(where, line)) for where, line in lines]
    kept = [
        request
        for request in found
        if max_total_tokens is None or request.input_tokens + request.output_tokens <= max_total_tokens
    ]
    if not kept:
        why = f"all {len(found)} are longer than {max_total_tokens} tokens" if found else "the file is empty"
        raise InputDataError(f"trace {file} has no request to replay", why=why, remedy=FORMAT if not found else "")
    # The sort is stable: requests with the same time keep their order.
    return tuple(sorted(kept, key=lambda request: request.timestamp_ms))


def _request(where: str, entry: dict[str, Any]) -> TracedRequest:
    for key in ("timestamp", "input_length", "output_length"):
        if key not in entry:
            raise InputDataError(f"{where} has no {key}", remedy=FORMAT)
    hash_ids = entry.get("hash_ids", [])
    _check(where, "timestamp", entry["timestamp"], (int, float), 0, LATEST_MS)
    _check(where, "input_length", entry["input_length"], (int,), 1, MOST_TOKENS)
    _check(where, "output_length", entry["output_length"], (int,), 1, MOST_TOKENS)
    if not isinstance(hash_ids, list):
        raise InputDataError(f"{where}: hash_ids is not a list")
    for identity in hash_ids:
        _check(where, "hash_ids", identity, (int,), 0, 2**63 - 1)
    # Ids beyond the length of the input stand for no text.
    used = hash_ids[: -(-entry["input_length"] // BLOCK_TOKENS)]
    return TracedRequest(entry["timestamp"], entry["input_length"], entry["output_length"], tuple(used))


def _check(where: str, key: str, value: Any, kinds: tuple[type, ...], least: int, most: int) -> None:
    if type(value) not in kinds or not value >= least:
        raise InputDataError(f"{where}: {key} is {shown(value)}, which is not a number from {least} on")
    if value > most:
        raise InputDataError(f"{where}: {key} is {shown(value)}, which is more than {most:,}")
