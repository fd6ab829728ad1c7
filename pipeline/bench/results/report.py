"""Report of a benchmark run: results of each load point, and everything needed to judge or repeat them."""

from __future__ import annotations

import os
import platform
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import Ended, TrtpipeError
from trtpipe.engines.short_repr import short_repr
from trtpipe.pipeline.bench.results.metrics import definitions, distributions
from trtpipe.pipeline.bench.results.records import Records
from trtpipe.pipeline.bench.results.repeats import INTERVALS as REPEATS
from trtpipe.pipeline.bench.results.repeats import repeats
from trtpipe.pipeline.bench.results.series import histograms, series
from trtpipe.pipeline.bench.results.slo import Objective, judge
from trtpipe.pipeline.bench.results.statistics import STATISTICS, load_point_metrics
from trtpipe.pipeline.bench.results.verdict import SelfCheck
from trtpipe.pipeline.bench.results.window import WINDOW, Window
from trtpipe.pipeline.bench.search import Found, Search

# Raised when a key changes its meaning or is removed; new keys do not raise it.
SCHEMA = "trtpipe.bench/2"
# Number of distinct messages kept for each class of failure; the count includes all.
MESSAGES = 3


@dataclass(frozen=True, kw_only=True)
class LoadPointResult:
    """Result of one protocol under one load.

    requests            measured, succeeded, failed; warmup: requests before and after that are not measured, and
                        warmup_failed; cut: abandoned when the load point ended
    errors              failures of measured and other requests by class: kind, count, messages (a few)
    window_s            seconds over which the rates are taken; None if there was no such time
    token_count_source  `server` (its counts or ids), `usage`, `tokenizer` (of the whole text), `mixed`, or None
    wrong_length        successful requests whose number of tokens differs from the requested one
    unknown_requests    measured requests whose values of a metric nobody tells, by the names of such metrics
    metrics             as `statistics.load_point_metrics` gives them, and goodput
    slo                 None where no objective was given
    client, verdict     as `verdict.examine` gives them
    server              as `monitors.server.ServerMonitor` gives it; None where neither metrics nor GPUs are at hand
    stopped             why the load point ended early, None if it did not
    interrupted         whether Ctrl-C ended it
    samples             as `samples.Samples` gives them; none of private prompts
    """

    protocol: str
    label: str
    load: dict[str, Any]
    repeat: int
    requests: dict[str, int]
    errors: list[dict[str, Any]]
    window_s: float | None
    token_count_source: str | None
    wrong_length: int
    metrics: dict[str, dict[str, Any]]
    slo: dict[str, Any] | None
    client: dict[str, Any]
    server: dict[str, Any] | None
    verdict: dict[str, Any]
    stopped: str | None
    interrupted: bool
    series: dict[str, Any] | None
    histograms: dict[str, Any]
    samples: Sequence[dict[str, Any]] = ()
    unknown_requests: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """A search over one protocol and its result. Its runs are load points of the report."""

    protocol: str
    search: Search
    found: Found

    def to_json(self) -> dict[str, Any]:
        wanted = {name: getattr(self.search, name) for name in ("goal", "attainment", "precision", "repeats", "unit")}
        return {"protocol": self.protocol, **wanted, **self.found.to_json()}

    def said(self) -> str:
        """The search in one line."""
        found = self.found
        if found.rate is None:
            return f"{self.protocol}: no {self.search.goal} was found: {found.ended}"
        low, high = ("open" if side is None else f"{side:g}" for side in found.interval)
        rest = f"; {found.ended}" if found.ended else ""
        if found.behind is not None:
            rest += (
                f"; the server answered {found.behind:.4g} of them, so that its queue was growing: measure longer "
                "(--duration)"
            )
        rate = f"{found.rate:g} {self.search.unit} ({low} to {high})"
        return f"{self.protocol}: {self.search.goal} {rate}, {found.runs} runs{rest}"


@dataclass(kw_only=True)
class BenchReport:
    """A whole run. `partial` when it was interrupted or broken, or a load point ended early.

    hosts    machines that sent the load, where it was not this one alone
    distinct number of prompts in the prompt file, which begins again after them; None for synthetic prompts
    target   name of the target that is served
    engine   passport of the engine that is served, and the digest of its files as `content`
    repository_sha256  content digest of the model repository that is served
    work_sha256  digests of the files that the work is made from
    records  records of each result, in the order of the results
    ended_by the signal that interrupted it
    broken   why the load points after those of `results` were not measured: the server died, for example
    unread_metrics  why metrics pages could not be read, by address
    """

    __repr__ = short_repr("target", "started", "finished")

    command: list[str]
    options: dict[str, Any]
    tokenizer_sha256: str | None
    started: str
    work_sha256: dict[str, str] = field(default_factory=dict)
    hosts: list[str] = field(default_factory=list)
    distinct: int | None = None
    target: str | None = None
    engine: dict[str, Any] | None = None
    repository_sha256: str | None = None
    finished: str = ""
    interrupted: bool = False
    ended_by: int = signal.SIGINT
    endpoints: list[dict[str, Any]] = field(default_factory=list)
    results: list[LoadPointResult] = field(default_factory=list)
    records: list[Records] = field(default_factory=list)
    broken: TrtpipeError | None = None
    unread_metrics: dict[str, str] = field(default_factory=dict)
    searches: list[SearchResult] = field(default_factory=list)

    @property
    def partial(self) -> bool:
        return self.interrupted or self.broken is not None or any(result.stopped for result in self.results)

    def interruption(self) -> BaseException:
        """The exception for the signal that interrupted the run: KeyboardInterrupt for Ctrl-C, else Ended."""
        return KeyboardInterrupt() if self.ended_by == signal.SIGINT else Ended(128 + self.ended_by)

    @property
    def valid(self) -> bool:
        return bool(self.verdict()["valid"])

    def failures(self) -> dict[str, int]:
        """Number of measured requests that failed, by class, the most frequent first."""
        kinds = Counter(
            failure.kind
            for records in self.records
            for failure, warmup in zip(records.failures, records.warmup.tolist(), strict=True)
            if failure is not None and not warmup
        )
        return dict(kinds.most_common())

    def said_again(self) -> str | None:
        """Note that prompts were sent more than once, if they were: a server that keeps KV blocks gains from it."""
        asked = sum(len(records.sent) for records in self.records)
        if self.distinct is None or asked <= self.distinct:
            return None
        return (
            f"{self.distinct} different prompts were asked {asked} times: a server that keeps KV blocks gains from it"
        )

    def repeats(self) -> list[dict[str, Any]]:
        """Repeated runs, as `repeats.repeats` gives them."""
        return repeats(vars(result) for result in self.results)

    def verdict(self) -> dict[str, Any]:
        reasons = []
        # Where a search has measured a load point again, its last run counts.
        last = {(result.protocol, result.label, result.repeat): result for result in self.results}
        for result in last.values() if self.searches else self.results:
            for reason in result.verdict["reasons"]:
                reasons.append({**reason, "what": f"{result.protocol}, {result.label}: {reason['what']}"})
        return {"valid": not reasons, "reasons": reasons}

    def to_json(self, records: str | None = None, records_sha256: str | None = None) -> dict[str, Any]:
        """report.json as a value. Dates and times are ISO 8601 in UTC; units are those of `metrics`.

        records, records_sha256  name and digest of the file with every request
        """
        from trtpipe.pipeline.bench.monitors.server import SERVER_METRICS

        return {
            "schema": SCHEMA,
            "verdict": self.verdict(),
            "partial": self.partial,
            "broken": None if self.broken is None else str(self.broken),
            "command": self.command,
            "started": self.started,
            "finished": self.finished,
            "options": self.options,
            "seed": self.options.get("seed"),
            "tokenizer_sha256": self.tokenizer_sha256,
            "work_sha256": self.work_sha256,
            "distinct_prompts": self.distinct,
            "target": self.target,
            "engine": self.engine,
            "repository_sha256": self.repository_sha256,
            "endpoints": self.endpoints,
            "client": client_versions(),
            "host": host(),
            "hosts": self.hosts,
            "metrics": definitions(),
            "statistics": STATISTICS,
            "window": WINDOW,
            "records": records,
            "records_sha256": records_sha256,
            "unread_metrics": self.unread_metrics,
            "server_metrics": SERVER_METRICS,
            "repeats": self.repeats(),
            "repeats_interval": REPEATS,
            "searches": [search.to_json() for search in self.searches],
            "levels": [vars(result) for result in self.results],
        }


def load_point_result(
    records: Records, window: Window | None, check: SelfCheck, *, protocol: str, label: str, load: dict[str, Any],
    repeat: int = 0, cut: int = 0, server: dict[str, Any] | None = None, objectives: Sequence[Objective] = (),
    stopped: str | None = None, interrupted: bool = False, samples: Sequence[dict[str, Any]] = (),
) -> LoadPointResult:  # fmt: skip
    """Evaluate the records of one load point."""
    measured, good, failed = records.measured(), records.good(), records.failed
    sources = {source for source, is_good in zip(records.sources, good.tolist(), strict=True) if is_good and source}
    metrics = load_point_metrics(records, window)
    served = _speculation(server)
    outcome = judge(records, window, list(objectives), metrics | served) if objectives else None
    if outcome is not None:
        metrics["request_goodput"] = {"value": outcome.request_goodput, "interval": None}
        metrics["token_goodput"] = {"value": outcome.token_goodput, "interval": None}
    metrics |= served
    return LoadPointResult(
        protocol=protocol,
        label=label,
        load=load,
        repeat=repeat,
        requests={
            "measured": int(measured.sum()),
            "succeeded": int(good.sum()),
            "failed": int((measured & failed).sum()),
            "warmup": int(records.warmup.sum()),
            "warmup_failed": int((records.warmup & failed).sum()),
            "cut": cut,
        },
        errors=_errors(records),
        window_s=None if window is None else window.seconds,
        token_count_source="mixed" if len(sources) > 1 else next(iter(sources), None),
        wrong_length=int((records.output_tokens != records.max_tokens)[good].sum()),
        metrics=metrics,
        slo=None if outcome is None else outcome.to_json(),
        client=check.figures,
        server=server,
        verdict=check.verdict(),
        stopped=stopped,
        interrupted=interrupted,
        series=series(records),
        histograms=histograms(records),
        samples=samples,
        unknown_requests={
            metric.name: int(metric.unknown(records).sum()) for metric in distributions() if metric.unknown is not None
        },
    )


def _speculation(server: dict[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Metrics of speculation, of the one engine that has them."""
    engines = [one for one in (server or {}).get("engines", ()) if one["tokens_per_step"] is not None]
    if len(engines) != 1:
        return {}
    found = {"tokens_per_step": engines[0]["tokens_per_step"], "draft_acceptance_rate": engines[0]["draft_acceptance"]}
    return {name: {"value": value, "interval": None} for name, value in found.items()}


def _errors(records: Records) -> list[dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for failure in records.failures:
        if failure is None:
            continue
        entry = kinds.setdefault(failure.kind, {"kind": failure.kind, "count": 0, "messages": []})
        entry["count"] += 1
        if failure.message not in entry["messages"] and len(entry["messages"]) < MESSAGES:
            entry["messages"].append(failure.message)
    return sorted(kinds.values(), key=lambda entry: (-entry["count"], entry["kind"]))


def client_versions() -> dict[str, str | None]:
    """Versions of the software that sends and stamps; None for what is not installed."""
    from importlib import metadata

    versions: dict[str, str | None] = {}
    for name in ("trtpipe", "uvloop", "hpack", "tritonclient", "numpy", "tokenizers"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def host() -> dict[str, Any]:
    """Description of the machine that sent the load."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "python": platform.python_version(),
        # platform.platform() is not used, since it starts a child process.
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
