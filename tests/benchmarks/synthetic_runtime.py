"""An engine that computes nothing: at every tick each running request gets one token. Ground truth for the front.

Loaded by the engine process as `--runtime tests.benchmarks.synthetic_runtime`. The tick is in TRTPIPE_TICK_MS. It keeps
to absolute times, so that what is offered is known, and counts the ticks it could not keep.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trtpipe.engines.engine_process.request import Output, Request

TOKEN = 5


class Runtime:
    """As trtpipe.engines.reference.runtime.Runtime, without an engine."""

    def __init__(self, engine: Path, **options: Any) -> None:
        self._period = float(os.environ.get("TRTPIPE_TICK_MS", "20")) / 1000
        self._running: dict[Any, list[int]] = {}
        self._cancelled: list[Output] = []
        self._next = 0.0
        self._ticks = self._late = self._tokens = 0
        self._report = os.environ.get("TRTPIPE_TICK_REPORT")

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._cancelled)

    def submit(self, request: Request) -> None:
        if not self._running:
            self._next = time.perf_counter() + self._period
        self._running[request.id] = [request.max_tokens]

    def cancel(self, identity: Any) -> None:
        if self._running.pop(identity, None) is not None:
            self._cancelled.append(Output(id=identity, tokens=[], finish="cancelled"))

    def step(self) -> list[Output]:
        out, self._cancelled = self._cancelled, []
        now = time.perf_counter()
        if now < self._next:
            time.sleep(self._next - now)
        elif now > self._next + self._period:
            self._late += 1
            self._next = now  # a tick that was missed is not made up for
        self._next += self._period
        self._ticks += 1
        for identity, left in list(self._running.items()):
            left[0] -= 1
            if left[0] == 0:
                del self._running[identity]
            out.append(Output(id=identity, tokens=[TOKEN], finish=None if left[0] else "length"))
        self._tokens += len(out)
        if not self._running and self._report:
            Path(self._report).write_text(
                json.dumps({"ticks": self._ticks, "late": self._late, "tokens": self._tokens}), encoding="utf-8"
            )
        return out

    def stats(self) -> dict[str, int]:
        active = len(self._running)
        named = {"active_requests": active, "scheduled_requests": active, "generation_requests": active}
        zero = (
            "max_requests", "context_requests", "waiting_requests", "paused_requests", "total_context_tokens",
            "kv_max_blocks", "kv_free_blocks", "kv_used_blocks", "kv_reused_blocks", "tokens_per_block",
        )  # fmt: skip
        return {"iteration": self._ticks, **named, **dict.fromkeys(zero, 0)}
