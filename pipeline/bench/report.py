"""What a run found: results a level, and everything needed to judge or repeat them."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from engines.errors import HostError
from pipeline.bench.metrics import STATISTICS, WINDOW, definitions, level_metrics, measured_window
from pipeline.bench.record import RequestRecord

# Raised when a key changes its meaning or goes; new keys do not raise it.
SCHEMA = "trtpipe.bench/1"
# Distinct messages kept of each class of failure; the count is of all.
MESSAGES = 3


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """One protocol at one concurrency.

    requests               measured, succeeded, failed, warmup, warmup_failed
    errors                 of measured and warm-up requests, by class: kind, count, messages (a few)
    window_s               seconds over which the rates are taken; None if there was no such time
    token_count_source     `server` (num_output_tokens), `tokenizer` (whole text), `mixed`, None without success
    wrong_length           successful requests with another number of tokens than asked for
    metrics                as `metrics.level_metrics` gives them
    stopped                why the level ended early, None if it did not
    interrupted            Ctrl-C came; requests in flight then are not counted
    """

    protocol: str
    concurrency: int
    requests: dict[str, int]
    errors: list[dict[str, Any]]
    window_s: float | None
    token_count_source: str | None
    wrong_length: int
    metrics: dict[str, dict[str, float | int | None]]
    stopped: str | None
    interrupted: bool


@dataclass(kw_only=True)
class BenchReport:
    """A whole run. `partial` when it was interrupted or a level ended early.

    engine  the passport of what is served
    """

    options: dict[str, Any]
    tokenizer_sha256: str
    started: str
    engine: dict[str, Any] | None = None
    finished: str = ""
    interrupted: bool = False
    endpoints: list[dict[str, Any]] = field(default_factory=list)
    results: list[LevelResult] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        return self.interrupted or any(result.stopped for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """report.json as a value. Times of day are ISO 8601 in UTC; units are those of `metrics`."""
        return {
            "schema": SCHEMA,
            "partial": self.partial,
            "started": self.started,
            "finished": self.finished,
            "options": self.options,
            "tokenizer_sha256": self.tokenizer_sha256,
            "engine": self.engine,
            "endpoints": self.endpoints,
            "client": client_versions(),
            "host": host(),
            "metrics": definitions(),
            "statistics": STATISTICS,
            "window": WINDOW,
            "results": [vars(result) for result in self.results],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One flat row a level, for a table: times in ms, throughput in tokens/s and requests/s, None if undefined."""
        short = {
            "ttft": "time_to_first_token",
            "itl": "inter_token_latency",
            "tpot": "time_per_output_token",
            "e2e": "request_latency",
        }
        rows = []
        for result in self.results:
            row: dict[str, Any] = {"protocol": result.protocol, "concurrency": result.concurrency}
            row |= {"requests": result.requests["succeeded"], "failed": result.requests["failed"]}
            for key, name in short.items():
                row |= {f"{key}_{point}": result.metrics[name][point] for point in ("p50", "p90", "p99")}
            row["tokens_per_s"] = result.metrics["output_token_throughput"]["value"]
            row["requests_per_s"] = result.metrics["request_throughput"]["value"]
            rows.append(row)
        return rows


def level_result(
    records: Sequence[RequestRecord],
    *,
    protocol: str,
    concurrency: int,
    stopped: str | None = None,
    interrupted: bool = False,
) -> LevelResult:
    """Evaluate the settled records of one level."""
    measured = [record for record in records if not record.warmup]
    good = [record for record in measured if record.failure is None]
    warmups = [record for record in records if record.warmup]
    sources = {"server" if record.counted_by_server else "tokenizer" for record in good}
    window = measured_window(records, concurrency)
    return LevelResult(
        protocol=protocol,
        concurrency=concurrency,
        requests={
            "measured": len(measured),
            "succeeded": len(good),
            "failed": len(measured) - len(good),
            "warmup": len(warmups),
            "warmup_failed": sum(record.failure is not None for record in warmups),
        },
        errors=_errors(records),
        window_s=None if window is None else window.seconds,
        token_count_source="mixed" if len(sources) > 1 else next(iter(sources), None),
        wrong_length=sum(record.output_tokens != record.max_tokens for record in good),
        metrics=level_metrics(records, concurrency),
        stopped=stopped,
        interrupted=interrupted,
    )


def _errors(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.failure is None:
            continue
        entry = kinds.setdefault(record.failure.kind, {"kind": record.failure.kind, "count": 0, "messages": []})
        entry["count"] += 1
        if record.failure.message not in entry["messages"] and len(entry["messages"]) < MESSAGES:
            entry["messages"].append(record.failure.message)
    return sorted(kinds.values(), key=lambda entry: (-entry["count"], entry["kind"]))


def write_report(report: BenchReport, path: Path) -> None:
    """Write report.json under a temporary name beside it and rename. Raises HostError."""
    text = json.dumps(report.to_dict(), indent=4, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                # A temporary file is private; a report is an ordinary file.
                Path(file.name).chmod(0o644)
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise HostError(
            f"report {path} cannot be written", why=error.strerror or str(error), remedy="give another place for it"
        ) from None


def client_versions() -> dict[str, str | None]:
    """Versions of what sends and stamps; None for what is not installed."""
    versions: dict[str, str | None] = {}
    for name in ("trtpipe", "tritonclient", "grpcio", "httpx", "numpy", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def host() -> dict[str, Any]:
    """The machine that the load came from."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "python": platform.python_version(),
        # Not platform.platform(): it starts a child process.
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
