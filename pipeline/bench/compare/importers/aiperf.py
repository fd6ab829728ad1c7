"""Importer of AIPerf's profile_export_aiperf.json (schema 1, as of 0.13) and the profile_export.jsonl beside it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.bench.compare.importers import schema
from trtpipe.pipeline.bench.compare.json_files import read_lines
from trtpipe.pipeline.bench.compare.rows import WHOLE_RUN

# Most characters of a command.
LONGEST_COMMAND = 100_000

NAME = "aiperf"
VERSIONS = "0.13 (schema 1)"

# AIPerf's name -> (our name, AIPerf's formula).
_SAME = {
    "time_to_first_token": ("time_to_first_token", "first response with content - request start"),
    "request_latency": ("request_latency", "last response with content - request start"),
    "inter_chunk_latency": ("inter_chunk_latency", "gap between consecutive responses with content; one value a gap"),
    "inter_token_latency": (
        "time_per_output_token",
        "(request_latency - time_to_first_token) / (output tokens - 1); one value a request "
        "(AIPerf: inter_token_latency)",
    ),
    "output_sequence_length": ("output_sequence_length", "output and reasoning tokens of a request"),
    "input_sequence_length": ("input_sequence_length", "tokens of the prompt"),
    "e2e_output_token_throughput": (
        "output_token_throughput_per_user",
        "output tokens / request_latency; one value a request (AIPerf: e2e_output_token_throughput)",
    ),
    "output_token_throughput_per_user": (
        "output_token_throughput_per_user_after_first_token",
        "1 / inter_token_latency of AIPerf; one value a request",
    ),
    "request_error_rate": ("error_rate", "failed / (succeeded + failed requests)"),
}
_WHOLE_RUN = {
    "output_token_throughput": "output tokens / benchmark duration",
    "total_token_throughput": "input and output tokens / benchmark duration",
    "request_throughput": "successful requests / benchmark duration",
    "goodput": "requests that meet every objective / benchmark duration",
    "effective_concurrency": "requests in flight, mean over time",
}
_RENAMED = {"goodput": "request_goodput"}
_DURATION = " (first request sent to last response)"
# With --per-chunk-usage AIPerf leaves out all tokens of the first chunk; ours leaves out one where none are counted.
_AFTER_FIRST_CHUNK = (
    "time_per_output_token_after_first_chunk",
    "(request_latency - time_to_first_token) / (output tokens - those of the first response); one value a request",
)
_STATISTICS = {"avg": "mean", "count": "n"}
_ARRIVALS = {"poisson": "poisson", "gamma": "gamma", "constant": "constant", "fixed_schedule": "trace"}


def recognises(value: dict[str, Any]) -> bool:
    return "aiperf_version" in value and str(value.get("schema_version")).startswith("1.")


def report(values: list[dict[str, Any]]) -> dict[str, Any]:
    (value,) = values
    config = value["input_config"]
    endpoint, run = config["endpoint"], value.get("run_info") or {}
    metrics, definitions = _metrics(value, per_chunk_usage=bool(endpoint.get("per_chunk_usage")))
    prompts: dict[str, Any] = (config.get("datasets") or [{}])[0].get("prompts") or {}
    point = schema.load_point(
        endpoint["type"],
        _load(config["phases"]),
        metrics,
        requests=_requests(value),
        errors=[_error(entry) for entry in value.get("error_summary") or []],
        window_s=_average(value, "benchmark_duration"),
        token_count_source="usage" if endpoint.get("use_server_token_count") else "tokenizer",
    )
    return schema.report(
        NAME,
        value["aiperf_version"],
        [point],
        definitions,
        model=", ".join(item["name"] for item in config["models"]["items"]),
        url=", ".join(endpoint["urls"]),
        options={
            "endpoint": endpoint["type"],
            "streaming": endpoint.get("streaming"),
            "input_tokens": (prompts.get("isl") or {}).get("mean"),
            "input_tokens_stddev": (prompts.get("isl") or {}).get("stddev"),
            "output_tokens": (prompts.get("osl") or {}).get("mean"),
            "output_tokens_stddev": (prompts.get("osl") or {}).get("stddev"),
            "slos": config.get("slos"),
        },
        seed=run.get("random_seed"),
        started=value.get("start_time"),
        finished=value.get("end_time"),
        command=_command(run.get("cli_command")),
        partial=bool(value.get("was_cancelled")) or value.get("is_complete") is False,
    )


def records(file: Path, values: list[dict[str, Any]]) -> Iterator[dict[str, Any]] | None:
    # The records of PREFIX_aiperf.json are in PREFIX.jsonl, whatever the prefix is.
    beside = file.with_name(file.name.removesuffix("_aiperf.json") + ".jsonl")
    return _records(file, beside, _requests(values[0])["measured"]) if beside.is_file() else None


def _records(file: Path, beside: Path, told: int | None) -> Iterator[dict[str, Any]]:
    measured = 0
    for _, line in read_lines(beside):
        record = _record(line)
        measured += not record["warmup"]
        yield record
    if told is not None and measured != told:
        raise InputDataError(
            f"{beside} is of another run than {file}",
            why=f"it has {measured} requests, and the result {told}",
            remedy="bring back the one that was written with it, or remove it to do without",
        )


def _metrics(
    value: dict[str, Any], *, per_chunk_usage: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    metrics, definitions = {}, {}
    for tag, entry in value.items():
        if not isinstance(entry, dict) or "unit" not in entry:
            continue
        # A metric that is not in our tables keeps its name, which we do not use.
        name, formula = _SAME.get(tag, (tag, f"AIPerf's {tag}"))
        if tag == "inter_token_latency" and per_chunk_usage:
            name, formula = _AFTER_FIRST_CHUNK
        if tag in _WHOLE_RUN:
            name, formula = _RENAMED.get(tag, tag) + WHOLE_RUN, _WHOLE_RUN[tag] + _DURATION
        percent = name == "error_rate"
        definitions[name] = schema.definition("" if percent else entry["unit"], formula)
        if "p50" in entry and tag not in _WHOLE_RUN:
            known = {_STATISTICS.get(key, key): number for key, number in entry.items()}
            metrics[name] = schema.distribution({key: known[key] for key in schema.STATISTICS if key in known})
        else:
            number = entry.get("avg")
            metrics[name] = schema.rate(number / 100 if percent and number is not None else number)
    return metrics, definitions


def _command(told: str | None) -> list[str] | None:
    """A command split into words; None where it is too long to split, which takes a microsecond per character."""
    return shlex.split(told) if told and len(told) <= LONGEST_COMMAND else None


def _average(value: dict[str, Any], tag: str) -> float | None:
    found: float | None = (value.get(tag) or {}).get("avg")
    return found


def _requests(value: dict[str, Any]) -> dict[str, int | None]:
    # A run without errors omits the number of errors, and one with errors only omits the number of successes.
    total = schema.whole(_average(value, "completed_request_count"))
    good, bad = schema.whole(_average(value, "request_count")), schema.whole(_average(value, "error_request_count"))
    if total is not None:
        good = total - (bad or 0) if good is None else good
        bad = total - good
    warmup = value.get("warmup_metrics")
    has_warmup = any(phase.get("kind") == "warmup" for phase in value["input_config"]["phases"])
    return {
        "measured": total,
        "succeeded": good,
        "failed": bad,
        "warmup": schema.whole(_average(warmup or {}, "request_count")) if has_warmup else 0,
    }


def _error(entry: dict[str, Any]) -> dict[str, Any]:
    told = _failure(entry["error_details"])
    return {"kind": told["kind"], "count": entry["count"], "messages": [told["message"]]}


def _failure(details: dict[str, Any]) -> dict[str, str]:
    code = details.get("code")
    kind = f"http {code}" if code is not None and 100 <= code < 600 else details.get("type") or "error"
    return schema.failure(kind, details["message"])


def _load(phases: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [phase for phase in phases if phase.get("kind") != "warmup"]
    if len(measured) != 1:
        return schema.opened("several phases", None)
    (phase,) = measured
    if phase["type"] == "concurrency":
        return schema.closed(phase.get("concurrency", 1))
    if phase.get("rate_series") is not None:
        return schema.opened("stages", None)
    return schema.opened(
        _ARRIVALS.get(phase["type"], phase["type"]),
        phase.get("rate"),
        burstiness=phase.get("smoothness"),
        max_in_flight=phase.get("concurrency"),
    )


def _record(line: dict[str, Any]) -> dict[str, Any]:
    meta, metrics, error = line["metadata"], line["metrics"], line.get("error")

    def value(tag: str) -> Any:
        return (metrics.get(tag) or {}).get("value")

    sent: int = meta["request_start_ns"]
    stamps: list[int] = []
    if value("time_to_first_token") is not None:
        at = value("time_to_first_token")
        stamps = [sent + round(at * 1e6)]
        for gap in value("inter_chunk_latency") or []:
            at += gap
            stamps.append(sent + round(at * 1e6))
    failed = _failure(error) if error else None
    if failed is None and meta.get("was_cancelled"):
        failed = schema.failure("Cancelled", "cancelled during the run")
    return schema.record(
        meta.get("x_request_id") or str(meta["session_num"]),
        warmup=meta["benchmark_phase"] == "warmup",
        sent_ns=sent,
        end_ns=meta["request_end_ns"],
        stamps_ns=stamps,
        input_tokens=value("input_sequence_length"),
        output_tokens=value("output_sequence_length"),
        failure=failed,
    )
