"""Importer of `vllm bench serve --save-result` files (of 0.25 and 0.32, and of the Rust client of 0.32). A
file holds one load point, or several with --append-result; with --save-detailed it holds the requests too.
"""

from __future__ import annotations

from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from trtpipe.pipeline.bench.compare.importers import schema
from trtpipe.pipeline.bench.compare.rows import WHOLE_RUN

NAME = "vllm bench serve"
VERSIONS = "0.25 to 0.32"

# In a completions stream every chunk has tokens. In a chat stream the first chunk has only the role, and counts too.
_COMPLETIONS = {
    "ttft": ("time_to_first_token", "first chunk with choices - request sent"),
    "tpot": ("time_per_output_token", "(request_latency - time_to_first_token) / (output tokens - 1)"),
    "itl": ("inter_chunk_latency", "gap between consecutive chunks with choices; one value a gap (vLLM: itl)"),
    "e2el": ("request_latency", "last chunk with choices - request sent"),
}
_CHAT = {
    "ttft": ("time_to_first_chunk", "first chunk with choices, which brings the role and no token - request sent"),
    "tpot": (
        "time_per_output_token_from_first_chunk",
        "(request_latency_to_last_chunk - time_to_first_chunk) / (output tokens - 1)",
    ),
    "itl": (
        "inter_chunk_latency_with_role_chunk",
        "gap between consecutive chunks with choices, that after the role's included; one value a gap",
    ),
    "e2el": ("request_latency_to_last_chunk", "last chunk, that with the usage included - request sent"),
}
_RATES = {
    "request_throughput": ("request_throughput", "requests/s", "successful requests / duration"),
    "request_goodput": ("request_goodput", "requests/s", "requests that meet every objective / duration"),
    "output_throughput": ("output_token_throughput", "tokens/s", "output tokens / duration"),
    "total_token_throughput": ("total_token_throughput", "tokens/s", "input and output tokens / duration"),
}
_DURATION = " (from the start until all requests have ended)"
_LENGTHS = {"input_sequence_length": "total_input_tokens", "output_sequence_length": "total_output_tokens"}
_BACKENDS = {"vllm": _COMPLETIONS, "openai": _COMPLETIONS, "openai-chat": _CHAT}
_ROLE = "`vllm bench serve` counts the role chunk of a chat: its first token, gaps and time per token are named so"


def recognises(value: dict[str, Any]) -> bool:
    return {"backend", "model_id", "num_prompts", "request_rate", "completed", "total_output_tokens"} <= set(value)


def report(values: list[dict[str, Any]]) -> dict[str, Any]:
    load_points: list[dict[str, Any]] = []
    definitions: dict[str, dict[str, str]] = {}
    for value in values:
        point = _load_point(value, definitions)
        point["repeat"] = sum(earlier["load"] == point["load"] for earlier in load_points)
        load_points.append(point)
    chat = any(_BACKENDS.get(value["backend"]) is _CHAT for value in values)
    return schema.report(
        NAME,
        None,
        load_points,
        definitions,
        model=", ".join(dict.fromkeys(value["model_id"] for value in values)),
        url=None,
        options={
            "backend": ", ".join(dict.fromkeys(value["backend"] for value in values)),
            "tokenizer": values[0].get("tokenizer_id"),
        },
        started=_date(values[0].get("date")),
        notes=[_ROLE] if chat else [],
    )


def records(file: Path, values: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    if not all("start_times" in value for value in values):
        return None
    return [record for number, value in enumerate(values) for record in _records(number, value)]


def _load_point(value: dict[str, Any], definitions: dict[str, dict[str, str]]) -> dict[str, Any]:
    completed, failed = value["completed"], value.get("failed")
    metrics: dict[str, dict[str, Any]] = {}
    for short, (name, formula) in _BACKENDS.get(value["backend"], _other(value["backend"])).items():
        if f"mean_{short}_ms" in value:
            metrics[name] = schema.distribution(_statistics(value, short))
            definitions[name] = schema.definition("ms", formula)
    for tag, (ours, unit, formula) in _RATES.items():
        if tag in value:
            metrics[ours + WHOLE_RUN] = schema.rate(value[tag])
            definitions[ours + WHOLE_RUN] = schema.definition(unit, formula + _DURATION)
    for name, tag in _LENGTHS.items():
        metrics[name] = schema.distribution({"n": completed, "mean": value[tag] / completed if completed else None})
        definitions[name] = schema.definition("tokens", f"{tag} / successful requests")
    total = None if failed is None else completed + failed
    metrics["error_rate"] = schema.rate(failed / total if failed is not None and total else None)
    definitions["error_rate"] = schema.definition("", "failed / all requests")
    return schema.load_point(
        {"openai-chat": "chat", "openai": "completions", "vllm": "completions"}.get(value["backend"], value["backend"]),
        _load(value),
        metrics,
        requests={"measured": total, "succeeded": completed, "failed": failed},
        errors=_errors(value),
        window_s=value["duration"],
    )


def _other(backend: str) -> dict[str, tuple[str, str]]:
    """Metric names for a backend whose chunks are unknown."""
    return {short: (f"{short}_of_{backend}", f"vLLM's {short} of {backend}") for short in _COMPLETIONS}


def _statistics(value: dict[str, Any], short: str) -> dict[str, float | None]:
    found = {"mean": value[f"mean_{short}_ms"], "p50": value[f"median_{short}_ms"], "std": value[f"std_{short}_ms"]}
    for statistic in schema.STATISTICS:
        if f"{statistic}_{short}_ms" in value:
            found[statistic] = value[f"{statistic}_{short}_ms"]
    # vLLM writes 0 for a statistic of no values.
    return dict.fromkeys(found) if found["mean"] == 0 else found


def _load(value: dict[str, Any]) -> dict[str, Any]:
    requested, places = value["request_rate"], value.get("max_concurrency")
    if value.get("ramp_up_strategy"):
        return schema.opened("stages", None)
    if requested == "inf":
        return schema.opened("all at once", None) if places is None else schema.closed(places)
    burstiness = value.get("burstiness")
    poisson = burstiness in (1, None)
    return schema.opened(
        "poisson" if poisson else "gamma",
        requested,
        burstiness=None if poisson else burstiness,
        max_in_flight=places,
    )


def _errors(value: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for told in filter(None, value.get("errors") or []):
        failed = _failure(told)
        entry = kinds.setdefault(failed["kind"], {"kind": failed["kind"], "count": 0, "messages": []})
        entry["count"] += 1
        if failed["message"] not in entry["messages"] and len(entry["messages"]) < 3:
            entry["messages"].append(failed["message"])
    return sorted(kinds.values(), key=lambda entry: (-entry["count"], entry["kind"]))


def _failure(told: str) -> dict[str, str]:
    """Failure from a traceback, whose last line says what happened, or from the reason phrase of an HTTP answer."""
    last = (told.strip().splitlines() or ["no answer"])[-1]
    kind, colon, message = last.partition(": ")
    return schema.failure(kind.rpartition(".")[2], message) if colon else schema.failure(last, last)


def _date(told: str | None) -> str | None:
    # The Rust client already writes ISO format in UTC.
    if told is None or "T" in told:
        return told
    return datetime.strptime(told, "%Y%m%d-%H%M%S").isoformat()


def _records(number: int, value: dict[str, Any]) -> list[dict[str, Any]]:
    out = []
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    latencies = value.get("latencies") or [None] * len(value["start_times"])
    rows = zip(*(value[name] for name in columns), latencies, strict=True)
    for place, (start, ttft, gaps, asked, answered, error, latency) in enumerate(rows):
        # A refused request has an empty text where the server gave no reason, and a first token after 0 s.
        broken = bool(error) or ttft == 0
        times = [] if ttft == 0 else list(accumulate([ttft, *gaps]))
        ended = latency if latency is not None else times[-1] if times else 0.0
        out.append(
            schema.record(
                f"{number}-{place}",
                level=number,
                sent_ns=round(start * 1e9),
                end_ns=round((start + ended) * 1e9),
                stamps_ns=[round((start + time) * 1e9) for time in times],
                input_tokens=asked,
                output_tokens=None if broken else answered,
                failure=_failure(error or "no answer") if broken else None,
            )
        )
    return out
