"""Section of `make gpu-e2e`: chat load for minutes, twice, with adapters, guides and clients that leave, and the engine
process killed once each time. `tests.benchmarks.soak` reads the processes and judges their growth."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from tests.benchmarks import soak
from tests.benchmarks.gpu import features
from tests.benchmarks.gpu.place import Place
from tests.benchmarks.gpu.sections import Keep
from trtpipe.pipeline.bench.monitors.gpu import GpuSampler

ROUNDS, MINUTES = 2, 3.5
# Requests a second, about half of what an H100 answers of them.
RATE = 20.0
# Of a round: when the engine process is killed.
KILL_AT = 0.2
ADAPTERS = 4
WINDOW_S, SAMPLE_S = 5.0, 2.0
# Limits of prompt and answer, in tokens; both are lognormal around their medians.
PROMPT, ANSWER = (256, 0.6, 500), (128, 0.5, 400)
IMPOSSIBLE, LEFT, GUIDED, ADAPTED = 0.03, 0.2, 0.3, 0.3


@dataclass
class Sent:
    """A request: when it was due and when its first line came, in seconds from the round's start; how it ended."""

    at: float
    first: float | None = None
    ended: str = ""
    possible: bool = True


def long(place: Place, model: Path, out: dict[str, Any], keep: Keep) -> None:
    """vLLM with adapters behind the gateway; see the module."""
    words = features.adapter_words(place, model, ADAPTERS)
    run = place.build(model, features.DTYPE, "vllm", words=words)
    with place.front(run.name) as entry:
        server = soak.Server(place.scratch)
        server.attach(entry, run.name)
        sampler = GpuSampler.find("http://localhost")
        if sampler is not None:
            sampler.start()
        rounds = []
        for number in range(ROUNDS):
            rounds.append(asyncio.run(_round(server, number)))
            out.update(minutes=MINUTES, rate=RATE, rounds=rounds)
            keep()
        deadline = time.monotonic() + 10
        while (state := server.gauges()) != (0, 0) and time.monotonic() < deadline:
            time.sleep(0.2)
        out["left_over"] = {"requests": state[0], "kv_blocks": state[1]}
        if sampler is not None:
            sampler.stop()
            out["gpu_mib"] = [[one.at_ns / 1e9, one.memory / 2**20] for one in sampler.readings[0][::4] if one.memory]
        keep()
    place.forget()


async def _round(server: soak.Server, number: int) -> dict[str, Any]:
    rng = random.Random(number)
    seconds = 60 * MINUTES
    sent: list[Sent] = []
    samples: list[dict[str, float]] = []
    parts = _parts(server)
    killed = back = None
    began = time.monotonic()
    limits = httpx.Limits(max_connections=1000, max_keepalive_connections=200)
    async with httpx.AsyncClient(timeout=soak.LONGEST_SECONDS, limits=limits, trust_env=False) as client:

        async def one(request: Sent, body: dict[str, Any], leave_after: int) -> None:
            def first() -> None:
                request.first = time.monotonic() - began

            try:
                request.ended = await soak.over_gateway(client, server.openai, body, leave_after, first)
            except httpx.HTTPError as error:
                request.ended = type(error).__name__

        running: set[asyncio.Task[Any]] = set()
        sampling: asyncio.Task[dict[str, float]] | None = None
        next_sample = 0.0
        while (now := time.monotonic() - began) < seconds:
            if killed is None and now >= KILL_AT * seconds:
                parts.pop("engine").kill()
                killed = now
            elif (
                killed is not None and back is None and any(one.ended == "answered" and one.at > killed for one in sent)
            ):
                back = min(one.first or now for one in sent if one.ended == "answered" and one.at > killed)
                parts = _parts(server)
            if sampling is not None and sampling.done():
                samples.append({"at": next_sample - SAMPLE_S, **sampling.result()})
                sampling = None
            if sampling is None and now >= next_sample:
                sampling = asyncio.create_task(asyncio.to_thread(_sample, server, dict(parts)))
                next_sample = now + SAMPLE_S
            request = Sent(at=now)
            sent.append(request)
            body, leave_after = _request(rng, server.model, request)
            task = asyncio.create_task(one(request, body, leave_after))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(max(0.0, began + len(sent) / RATE - time.monotonic()))
        if running:
            await asyncio.wait(running)
        if sampling is not None:
            await sampling
    return {
        "began_s": began, "killed_s": killed, "back_s": back, "ended": _ended(sent),
        "ttft_ms": _tail([one for one in sent if killed is None or back is None or not killed <= one.at <= back]),
        "windows": _windows(sent, seconds), "growth": _growth(samples, back or 0.0),
        "samples": [
            {"at": one["at"], "host_mib": _host(one), "engine_mib": one.get("engine PSS MiB")} for one in samples
        ],
    }  # fmt: skip


def _request(rng: random.Random, model: str, request: Sent) -> tuple[dict[str, Any], int]:
    """(a body, how many lines its client reads before it leaves, 0 for all); `request` says whether it is possible."""
    prompt, answer = (
        min(int(rng.lognormvariate(np.log(median), spread)) + 1, most) for median, spread, most in (PROMPT, ANSWER)
    )
    name = f"{model}:a{rng.randrange(ADAPTERS):02}" if rng.random() < ADAPTED else model
    request.possible = rng.random() >= IMPOSSIBLE
    body: dict[str, Any] = {
        "model": name, "prompt": [rng.randrange(3, features.VOCABULARY) for _ in range(prompt)], "stream": True,
        "max_tokens": answer if request.possible else 100_000, "temperature": 0.8, "seed": rng.randrange(1 << 30),
    }  # fmt: skip
    body |= features.JSON if rng.random() < GUIDED else {"ignore_eos": True}
    return body, rng.randint(1, 20) if rng.random() < LEFT else 0


def _parts(server: soak.Server) -> dict[str, psutil.Process]:
    """Its processes; those that an engine starts to compile kernels may end while they are listed."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            return server.parts()


def _sample(server: soak.Server, parts: dict[str, psutil.Process]) -> dict[str, float]:
    try:
        return server.sample(parts)
    except psutil.NoSuchProcess:
        return {}


def _ended(sent: Sequence[Sent]) -> dict[str, int]:
    """How many requests were sent, and how they ended: answered, left by their client, refused as they had to be,
    unavailable (an error at once, while the engine starts), cut short by the kill, or wrong."""
    counts = collections.Counter(sent=len(sent))
    for one in sent:
        if one.ended in ("answered", "left"):
            kind = one.ended if one.possible else "wrong"
        elif one.ended == "refused":
            kind = "wrong" if one.possible else "refused"
        elif one.ended.startswith("status 5"):
            kind = "unavailable"
        else:
            kind = one.ended
        counts[kind] += 1
    return dict(counts)


def _tail(sent: Sequence[Sent]) -> dict[str, float]:
    waits = [1e3 * (one.first - one.at) for one in sent if one.first is not None and one.ended in ("answered", "left")]
    if not waits:
        return {}
    return {
        name: float(np.percentile(waits, share))
        for name, share in (("p50", 50), ("p99", 99), ("p99.9", 99.9), ("max", 100))
    }


def _windows(sent: Sequence[Sent], seconds: float) -> list[dict[str, Any]]:
    """By the time that requests were sent at."""
    rows = []
    for number in range(int(seconds / WINDOW_S)):
        there = [one for one in sent if number * WINDOW_S <= one.at < (number + 1) * WINDOW_S]
        rows.append({"at": number * WINDOW_S, "sent": len(there), "ended": _ended(there), **_tail(there)})
    return rows


def _growth(samples: Sequence[Mapping[str, float]], back: float) -> dict[str, Any]:
    """What `soak.judge` says of the samples since the engine was there again."""
    rest = [dict(one) for one in samples if one["at"] > back and "engine PSS MiB" in one]
    rest = [{name: value for name, value in one.items() if name != "at"} for one in rest]
    if len(rest) < 6:
        return {"rows": [], "leaks": [], "samples": len(rest)}
    rows, leaks = soak.judge(rest, len(rest) * SAMPLE_S / 60)
    return {"rows": [row for row in rows if row[0].endswith("PSS MiB")], "leaks": leaks, "samples": len(rest)}


def _host(sample: Mapping[str, float]) -> float:
    """MiB of all parts but the engine."""
    return sum(value for name, value in sample.items() if name.endswith("PSS MiB") and not name.startswith("engine"))
