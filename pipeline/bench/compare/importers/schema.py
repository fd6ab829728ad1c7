"""Our report schema with unknown values, which importers of other tools' results fill in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STATISTICS = ("n", "mean", "std", "min", "max", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "p99.9")
COUNTS = ("measured", "succeeded", "failed", "warmup", "warmup_failed", "cut")
# Units of other tools -> ours.
UNITS = {
    "requests/sec": "requests/s",
    "tokens/sec": "tokens/s",
    "tokens/sec/user": "tokens/s",
    "sec": "s",
    "ratio": "",
    "count": "",
}


def report(
    tool: str,
    version: str | None,
    load_points: list[dict[str, Any]],
    definitions: dict[str, dict[str, str]],
    *,
    model: str | None,
    url: str | None,
    options: dict[str, Any],
    seed: int | None = None,
    started: str | None = None,
    finished: str | None = None,
    command: list[str] | None = None,
    partial: bool | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """A whole report. `notes` are facts that a reader of its numbers must know."""
    return {
        "schema": "trtpipe.bench/2",
        "tool": {"name": tool, "version": version},
        "notes": list(notes),
        "partial": partial,
        "command": command,
        "started": started,
        "finished": finished,
        "verdict": {"valid": None, "reasons": []},
        "options": {name: value for name, value in options.items() if value is not None},
        "seed": seed,
        "engine": None,
        "repository_sha256": None,
        "tokenizer_sha256": None,
        "endpoints": [{"protocol": load_points[0]["protocol"], "url": url, "server": None, "model": model}],
        "client": {tool: version},
        "host": None,
        "metrics": definitions,
        "records": None,
        "levels": load_points,
    }


def load_point(
    protocol: str,
    load: dict[str, Any],
    metrics: dict[str, dict[str, Any]],
    *,
    repeat: int = 0,
    requests: dict[str, int | None],
    errors: list[dict[str, Any]] | None = None,
    window_s: float | None = None,
    token_count_source: str | None = None,
) -> dict[str, Any]:
    return {
        "protocol": protocol,
        "label": label(load),
        "repeat": repeat,
        "load": load,
        "requests": {**dict.fromkeys(COUNTS), **requests},
        "errors": errors or [],
        "window_s": window_s,
        "token_count_source": token_count_source,
        "wrong_length": None,
        "metrics": metrics,
        "slo": None,
        "client": None,
        "server": None,
        "verdict": {"valid": None, "reasons": []},
        "stopped": None,
        "interrupted": False,
        "series": None,
        "histograms": {},
        "samples": [],
    }


def closed(concurrency: int) -> dict[str, Any]:
    return {"kind": "closed", "concurrency": concurrency}


def opened(arrivals: str, rate: float | None, **more: Any) -> dict[str, Any]:
    told = {name: value for name, value in more.items() if value is not None}
    return {"kind": "open", "arrivals": arrivals, "rate": rate, **told}


def label(load: dict[str, Any]) -> str:
    if load["kind"] == "closed":
        return f"{load['concurrency']} in flight"
    return str(load["arrivals"]) if load["rate"] is None else f"{load['rate']:g} requests/s"


def distribution(statistics: dict[str, float | int | None]) -> dict[str, Any]:
    """A metric with those of its statistics that are known."""
    return {**dict.fromkeys(STATISTICS), **statistics, "interval": None}


def rate(value: float | None) -> dict[str, Any]:
    return {"value": value, "interval": None}


def definition(unit: str, formula: str, undefined: str = "where the tool leaves it out") -> dict[str, str]:
    return {"unit": UNITS.get(unit, unit), "formula": formula, "undefined": undefined}


def whole(number: float | None) -> int | None:
    """An integer that a tool writes as 17.0."""
    return None if number is None else round(number)


def failure(kind: str, message: str) -> dict[str, str]:
    """A failure; kind and message are put on one line each, as in our own reports."""
    return {"kind": kind, "message": " ".join(message.split())}


def record(identity: str, **known: Any) -> dict[str, Any]:
    """A line of report.requests.jsonl. No other tool writes when a request was due."""
    blank: dict[str, Any] = {
        "level": 0, "warmup": False, "due_ns": None, "sent_ns": None, "end_ns": None, "stamps_ns": [],
        "tokens": None, "input_tokens": None, "output_tokens": None, "max_tokens": None, "failure": None,
    }  # fmt: skip
    return {"id": identity, **blank, **known}
