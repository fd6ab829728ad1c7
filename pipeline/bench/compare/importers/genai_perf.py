"""Importer of GenAI-Perf's profile_export_genai_perf.json (0.0.16): no version, no failures, no requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trtpipe.pipeline.bench.compare.importers import schema

NAME = "genai-perf"
VERSIONS = "0.0.16"

_PER_REQUEST = {
    "time_to_first_token": ("time_to_first_token", "first response - request sent"),
    "request_latency": ("request_latency", "last response - request sent"),
    "inter_token_latency": (
        "time_per_output_token",
        "(request_latency - time_to_first_token) / (output tokens - 1); one value a request "
        "(GenAI-Perf: inter_token_latency)",
    ),
    "output_sequence_length": ("output_sequence_length", "tokens of an answer, by the client's tokenizer"),
    "input_sequence_length": ("input_sequence_length", "tokens of a prompt, by the client's tokenizer"),
    "time_to_second_token": ("time_to_second_token", "second response - first response"),
    "output_token_throughput_per_user": (
        "output_token_throughput_per_user_after_first_token",
        "1 / inter_token_latency of GenAI-Perf; one value a request",
    ),
}
_WHOLE_RUN = {
    "output_token_throughput": "output tokens / (first request sent to last response)",
    "request_throughput": "requests / (first request sent to last response)",
    "request_goodput": "requests that meet every objective / (first request sent to last response)",
}
_STATISTICS = ("std", "min", "max", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")
_EMPTY_COUNTS = "GenAI-Perf over gRPC takes an empty response for a token: its first and last may have been empty"
_NO_FAILURES = "GenAI-Perf does not say how many requests failed"


def recognises(value: dict[str, Any]) -> bool:
    return "request_latency" in value and "perf_analyzer" in (value.get("input_config") or ())


def report(values: list[dict[str, Any]]) -> dict[str, Any]:
    (value,) = values
    config = value["input_config"]
    endpoint, inputs = config["endpoint"], config["input"]
    metrics, definitions = _metrics(value)
    protocol = _protocol(endpoint)
    level = schema.level(
        protocol,
        _load(config["perf_analyzer"]["stimulus"]),
        metrics,
        requests={
            "succeeded": schema.whole(value.get("request_count", {}).get("avg")),
            "warmup": _told(config["perf_analyzer"].get("warmup_request_count")),
        },
        token_count_source="tokenizer",
    )
    return schema.report(
        NAME,
        None,
        [level],
        definitions,
        model=", ".join(config["model_names"]),
        url=_told(endpoint.get("url")),
        options={
            "endpoint": endpoint["type"],
            "streaming": endpoint.get("streaming"),
            "input_tokens": _told(inputs["synthetic_tokens"]["mean"]),
            "input_tokens_stddev": _told(inputs["synthetic_tokens"]["stddev"]),
            "output_tokens": _told(inputs["output_tokens"]["mean"]),
            "output_tokens_stddev": _told(inputs["output_tokens"]["stddev"]),
            "goodput": _told(inputs.get("goodput")),
        },
        seed=_told(inputs.get("random_seed")),
        notes=[_NO_FAILURES, *([_EMPTY_COUNTS] if protocol == "grpc" else [])],
    )


def records(file: Path, values: list[dict[str, Any]]) -> None:
    return None


def _told(value: Any) -> Any:
    """A setting, or None for an empty text, which stands for a setting that was not made."""
    return None if value == "" else value


def _metrics(value: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    metrics, definitions = {}, {}
    for tag, (name, formula) in _PER_REQUEST.items():
        if tag in value:
            entry = value[tag]
            known = {key: entry[key] for key in _STATISTICS if key in entry}
            metrics[name] = schema.distribution({"mean": entry["avg"], **known})
            definitions[name] = schema.definition(entry["unit"], formula)
    for tag, formula in _WHOLE_RUN.items():
        if tag in value:
            number = value[tag]["avg"]
            # GenAI-Perf writes -1 for a goodput that could not be computed.
            metrics[tag + schema.WHOLE_RUN] = schema.rate(number if number >= 0 else None)
            definitions[tag + schema.WHOLE_RUN] = schema.definition(value[tag]["unit"], formula)
    return metrics, definitions


def _protocol(endpoint: dict[str, Any]) -> str:
    if endpoint["service_kind"] == "triton":
        return "grpc"
    return "http" if endpoint["type"] == "generate" else str(endpoint["type"])


def _load(stimulus: Any) -> dict[str, Any]:
    if isinstance(stimulus, dict) and "concurrency" in stimulus:
        return schema.closed(stimulus["concurrency"])
    if isinstance(stimulus, dict) and "request_rate" in stimulus:
        # perf_analyzer's default; GenAI-Perf does not record another distribution.
        return schema.opened("constant", stimulus["request_rate"])
    return schema.opened("trace" if stimulus == "fixed_schedule" else str(stimulus), None)
