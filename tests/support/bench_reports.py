"""Reports of schema trtpipe.bench/2 and their requests, made from chosen times rather than measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

STATISTICS = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9")
UNITS = {
    "time_to_first_token": "ms",
    "time_to_first_token_from_due": "ms",
    "inter_chunk_latency": "ms",
    "inter_token_latency": "ms",
    "time_per_output_token": "ms",
    "request_latency": "ms",
    "request_latency_from_due": "ms",
    "dispatch_delay": "ms",
    "output_token_throughput_per_user": "tokens/s",
    "input_sequence_length": "tokens",
    "output_sequence_length": "tokens",
    "output_token_throughput": "tokens/s",
    "total_token_throughput": "tokens/s",
    "request_throughput": "requests/s",
    "effective_concurrency": "requests",
    "error_rate": "",
    "request_goodput": "requests/s",
    "token_goodput": "tokens/s",
}
GOOD = {"valid": True, "reasons": []}
LATE: dict[str, Any] = {
    "valid": False,
    "reasons": [
        {"what": "the event loop was late", "why": "by 31.0 ms at the 99th percentile", "remedy": "offer less"}
    ],
}


def line(number: int, sent_ms: float, ttft_ms: float, gaps_ms: Sequence[float], **changes: Any) -> dict[str, Any]:
    """A request that was due 1 ms before it was sent, and got one token a response."""
    times = np.cumsum([ttft_ms, *gaps_ms])
    stamps = [round((sent_ms + time) * 1e6) for time in times]
    whole = {
        "level": 0, "id": f"r{number}", "warmup": False, "due_ns": round((sent_ms - 1) * 1e6),
        "sent_ns": round(sent_ms * 1e6), "end_ns": stamps[-1], "stamps_ns": stamps, "tokens": [1] * len(stamps),
        "input_tokens": 16, "output_tokens": len(stamps), "max_tokens": len(stamps), "failure": None,
    }  # fmt: skip
    return {**whole, **changes}


def failed(number: int, sent_ms: float, kind: str = "http 503", message: str = "queue full") -> dict[str, Any]:
    changes: dict[str, Any] = {
        "stamps_ns": [],
        "tokens": None,
        "output_tokens": None,
        "failure": {"kind": kind, "message": message},
    }
    return {**line(number, sent_ms, 1.0, ()), **changes}


def lines(
    count: int, *, seed: int, ttft_ms: float = 50.0, gap_ms: float = 10.0, spread: float = 0.2, tokens: int = 8
) -> list[dict[str, Any]]:
    """Requests one after the other, whose times scatter by `spread` around those given."""
    rng = np.random.default_rng(seed)
    out, at = [], 0.0
    for number in range(count):
        ttft, *gaps = rng.lognormal(0.0, spread, tokens) * [ttft_ms, *[gap_ms] * (tokens - 1)]
        out.append(line(number, at, ttft, gaps))
        at += ttft + sum(gaps)
    return out


def summary(values: Sequence[float]) -> dict[str, Any]:
    names = ("mean", "std", "min", "max", *STATISTICS)
    if not len(values):
        return {"n": 0, **dict.fromkeys(names), "interval": None}
    points = np.percentile(values, [float(name[1:]) for name in STATISTICS])
    numbers = [np.mean(values), np.std(values), np.min(values), np.max(values), *points]
    found: dict[str, Any] = {name: float(number) for name, number in zip(names, numbers, strict=True)}
    interval = {name: [found[name] * 0.95, found[name] * 1.05] for name in ("mean", "p50", "p90", "p99")}
    return {"n": len(values), **found, "interval": interval}


def metrics(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    good = [one for one in requests if not one["warmup"] and one["failure"] is None]
    measured = [one for one in requests if not one["warmup"]]
    ttft = [(one["stamps_ns"][0] - one["sent_ns"]) / 1e6 for one in good]
    latency = [(one["stamps_ns"][-1] - one["sent_ns"]) / 1e6 for one in good]
    gaps = [gap / 1e6 for one in good for gap in np.diff(one["stamps_ns"])]
    tpot = [(last - first) / (one["output_tokens"] - 1) for first, last, one in zip(ttft, latency, good, strict=True)]
    seconds = (max(one["end_ns"] for one in measured) - min(one["sent_ns"] for one in measured)) / 1e9
    output = sum(one["output_tokens"] for one in good)
    rates = {
        "output_token_throughput": output / seconds,
        "total_token_throughput": (output + 16 * len(good)) / seconds,
        "request_throughput": len(good) / seconds,
        "effective_concurrency": 1.0,
        "error_rate": 1 - len(good) / len(measured),
        "request_goodput": 0.9 * len(good) / seconds,
        "token_goodput": 0.9 * output / seconds,
    }
    return {
        "time_to_first_token": summary(ttft),
        "time_to_first_token_from_due": summary([value + 1 for value in ttft]),
        "inter_chunk_latency": summary(gaps),
        "inter_token_latency": summary(gaps),
        "time_per_output_token": summary(tpot),
        "request_latency": summary(latency),
        "request_latency_from_due": summary([value + 1 for value in latency]),
        "dispatch_delay": summary([1.0] * len(good)),
        "output_sequence_length": summary([one["output_tokens"] for one in good]),
        "input_sequence_length": summary([one["input_tokens"] for one in good]),
        **{name: {"value": value, "interval": None} for name, value in rates.items()},
    }


def load_point(
    requests: Sequence[dict[str, Any]], *, concurrency: float | None = 1, rate: float | None = None, **changes: Any
) -> dict[str, Any]:
    """What a report says of `requests`, under a closed loop unless a rate is given."""
    closed = {"kind": "closed", "concurrency": concurrency}
    load = closed if rate is None else {"kind": "open", "arrivals": "poisson", "rate": rate}
    good = sum(one["failure"] is None for one in requests)
    warmup = sum(one["warmup"] for one in requests)
    counts = {"measured": len(requests) - warmup, "succeeded": good, "failed": len(requests) - good}
    whole = {
        "protocol": "grpc", "label": f"{concurrency} in flight" if rate is None else f"{rate:g} requests/s",
        "repeat": 0, "load": load, "requests": {**counts, "warmup": warmup, "warmup_failed": 0, "cut": 0},
        "errors": [], "window_s": 1.0, "token_count_source": "server", "wrong_length": 0,
        "metrics": metrics(requests), "slo": None, "client": None, "server": None, "verdict": GOOD,
        "stopped": None, "interrupted": False, "series": None, "histograms": {}, "samples": [sample()],
    }  # fmt: skip
    return {**whole, **changes}


def sample(prompt: str = "Say it.", answer: str = "It is said.", **changes: Any) -> dict[str, Any]:
    lengths = {"prompt_characters": len(prompt), "answer_characters": len(answer)}
    return {"id": "r0", "prompt": prompt, "answer": answer, **lengths, **changes}


def report(load_points: Sequence[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    whole = {
        "schema": "trtpipe.bench/2", "partial": False, "command": ["trtpipe", "bench", "--concurrency", "1,4"],
        "started": "2026-11-22T01:00:00+00:00", "finished": "2026-11-22T01:05:00+00:00", "verdict": GOOD,
        "options": {"input_tokens": 16, "output_tokens": 8, "report": "reports/report.json"}, "seed": 0,
        "engine": {"gpu": "H100", "tensorrt_llm": "1.2.1", "build": {"max_batch_size": 64}},
        "repository_sha256": "ab" * 32, "tokenizer_sha256": "cd" * 32,
        "endpoints": [{"protocol": "grpc", "url": "localhost:8001", "server": "triton 2.51.0", "model": "ensemble"}],
        "client": {"trtpipe": "0.15.0", "numpy": "1.26.4"},
        "host": {"cpu": "EPYC", "cores": 8, "usable_cores": 2, "python": "3.11.7", "platform": "Linux"},
        "metrics": {
            name: {"unit": unit, "formula": f"formula of {name}", "undefined": "no successful request"}
            for name, unit in UNITS.items()
        },
        "records": "report.requests.jsonl", "levels": list(load_points),
    }  # fmt: skip
    return {**whole, **changes}


def save(folder: Path, value: dict[str, Any], requests: Sequence[Sequence[dict[str, Any]]] = ()) -> Path:
    """Write report.json, and the requests of each load point beside it."""
    folder.mkdir(parents=True)
    if requests:
        text = [
            json.dumps({**one, "level": number}) + "\n"
            for number, of_load_point in enumerate(requests)
            for one in of_load_point
        ]
        (folder / "report.requests.jsonl").write_text("".join(text))
        value = {**value, "records_sha256": hashlib.sha256("".join(text).encode()).hexdigest()}
    path = folder / "report.json"
    path.write_text(json.dumps(value))
    return path


def saved(folder: Path, *load_points: Sequence[dict[str, Any]], **changes: Any) -> Path:
    """A report of closed loops of 1, 2, 4, ... in flight, with its requests."""
    told = [load_point(requests, concurrency=2**number) for number, requests in enumerate(load_points)]
    return save(folder, report(told, **changes), load_points)
