"""Load through the gateway for what `trtpipe bench` does not send: adapters, guides and repeated prompt starts."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

# Body of the request of a number.
Body = Callable[[int], dict[str, Any]]
SECONDS = 120.0


def waves(openai: str, body: Body, concurrency: int, waves: int) -> dict[str, float]:
    """Output tokens/s and the median latency of `waves` times `concurrency` requests in a closed loop, all starting
    together, after one wave that is not counted. Answers come whole.

    Raises RuntimeError for an answer that is an error.
    """
    return asyncio.run(_waves(f"{openai}/v1/completions", body, concurrency, waves))


async def _waves(url: str, body: Body, concurrency: int, waves: int) -> dict[str, float]:
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(timeout=SECONDS, limits=limits, trust_env=False) as client:

        async def one(number: int) -> tuple[int, float]:
            began = time.perf_counter()
            answer = await client.post(url, json=body(number))
            if not answer.is_success:
                raise RuntimeError(f"the gateway answers {answer.status_code}: {answer.text[:500]}")
            return int(answer.json()["usage"]["completion_tokens"]), time.perf_counter() - began

        async def place(numbers: range) -> list[tuple[int, float]]:
            return [await one(number) for number in numbers]

        await asyncio.gather(*(one(number) for number in range(concurrency)))
        began = time.perf_counter()
        first, last = concurrency, concurrency * (1 + waves)
        rows = await asyncio.gather(*(place(range(first + n, last, concurrency)) for n in range(concurrency)))
        seconds = time.perf_counter() - began
    tokens = sum(made for row in rows for made, _ in row)
    latency = float(np.median([taken for row in rows for _, taken in row]))
    return {"tokens_per_s": tokens / seconds, "requests_per_s": concurrency * waves / seconds, "latency_s": latency}


def speculation(metrics: str) -> dict[str, float]:
    """Counts of draft tokens, accepted ones and decoding steps so far, of a server that speculates."""
    time.sleep(0.5)  # the backend writes them ten times a second
    text = httpx.get(metrics, timeout=30, trust_env=False).text
    return {
        name: float(value)
        for name, value in re.findall(r'^trtpipe_speculation\{[^}]*speculation_type="(\w+)"[^}]*\} (\S+)', text, re.M)
    }
