"""Summary of a report in words: what its readers must know besides the figures, and why its command fails."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import StageFailed, TrtpipeError
from trtpipe.pipeline.bench.results.metric import Distribution, rounded
from trtpipe.pipeline.bench.results.metrics import distributions
from trtpipe.pipeline.bench.results.records import SERVER, USAGE
from trtpipe.pipeline.bench.results.report import BenchReport
from trtpipe.pipeline.bench.results.verdict import held_back

# A clock is slewed by less than this during a load point: a larger step means that it was set.
CLOCK_STEP_MS = 100.0
# Answers whose responses all come within the first time, after no less than the second, were held back on their way.
TOGETHER_MS, HELD_MS = 1.0, 20.0


def notes(report: BenchReport) -> Iterator[str]:
    """Notes for people, one line each."""
    for result in report.results:
        if result.stopped is not None:
            yield f"{result.protocol}, {result.label}: it ended early: {result.stopped}"
    if report.interrupted:
        yield "what is not in the table was not measured"
    for url, why in report.unread_metrics.items():
        yield f"no metrics could be read from {url}: {why}"
    for reason in report.verdict()["reasons"]:
        yield f"INVALID: {reason['what']}: {reason['why']}; {reason['remedy']}"
    for endpoint in report.endpoints:
        off = endpoint.get("measured_error")
        if off is not None:
            yield (
                f"{endpoint['protocol']} through {endpoint['transport']}: here, with {off['streams']} in flight, TTFT "
                f"comes out {off['ttft_p50_ms']:.1f} ms (p50) and {off['ttft_p99_ms']:.1f} ms (p99) too long"
            )
    for result in report.results:
        for line in of_load_point(vars(result), report.options):
            yield f"{result.protocol}, {result.label}: {line}"
    again = report.said_again()
    if again is not None:
        yield again


def unknown_objective(report: BenchReport) -> str | None:
    """Note on the first load point where nobody tells the values of some requests for an objective; None for none."""
    names = (one["metric"] for one in report.options.get("objectives", ()))
    points = [(name, vars(result)) for name in names for result in report.results]
    lines = (_unknown(point, one) for name, point in points for one in _untold(point) if one.name == name)
    return next(lines, None)


def _untold(point: Mapping[str, Any]) -> list[Distribution]:
    """Metrics of which nobody tells the values of some requests."""
    return [metric for metric in distributions() if point.get("unknown_requests", {}).get(metric.name)]


def _unknown(point: Mapping[str, Any], metric: Distribution) -> str:
    count, succeeded = point["unknown_requests"][metric.name], point["requests"]["succeeded"]
    told = f"the {metric.short} of {count} of {succeeded} requests is unknown: {metric.untold}"
    if any(one["metric"] == metric.name for one in (point["slo"] or {}).get("objectives", ())):
        told += "; they count as missing its objective"
        told += "" if point["unknown_requests"].get("time_per_output_token") else ", and tpot needs only their sum"
    return told


def of_load_point(point: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Notes on one load point of a report that was measured with these options, as report.json has both."""
    said = (point["server"] or {}).get("output_tokens")
    if said and said["agree"] is False:
        yield f"the server counted {said['server']} tokens, the client {said['client']}"
    wrong, succeeded = point["wrong_length"], point["requests"]["succeeded"]
    # By a count of the server's such an answer has failed.
    if wrong and point["token_count_source"] not in (SERVER, USAGE) and (options.get("work") or {}).get("ignore_eos"):
        mean = rounded(point["metrics"]["output_sequence_length"]["mean"])
        yield (
            f"{wrong} of {succeeded} answers have another length than asked for; by the tokenizer's count, answers "
            f"have {mean} tokens on average"
        )
    untold = _untold(point)
    for metric in untold:
        yield _unknown(point, metric)
    for objective in (point["slo"] or {}).get("objectives", ()):
        if objective["value"] is None and succeeded and objective["metric"] not in [metric.name for metric in untold]:
            yield f"{objective['metric']} could not be measured: its objective is missed, and goodput leaves it out"
    first, last = (point["metrics"].get(name, {}).get("p50") for name in ("time_to_first_token", "request_latency"))
    gaps = point["metrics"].get("inter_chunk_latency", {}).get("n")
    several = succeeded and gaps and gaps > 2 * succeeded  # more than three responses each
    if several and first and last and first > HELD_MS and last - first < TOGETHER_MS:
        yield (
            "most answers came whole, after their TTFT: a proxy or the server holds responses back, and times between "
            "them are not those of tokens"
        )
    waited = held_back(point)
    if waited is not None:
        yield waited
    step = (point["client"] or {}).get("clock_step_ms", 0.0)
    if abs(step) > CLOCK_STEP_MS:
        yield f"the time of day was set by {step:.0f} ms meanwhile"


def refusal(report: BenchReport, path: Path) -> TrtpipeError | None:
    """The error that ends the command whose report is at `path`; None where all succeeded and the run is valid."""
    if report.broken is not None:
        return report.broken
    failed = sum(result.requests["failed"] for result in report.results)
    if report.searches:
        failed = 0  # beyond the limit requests fail, which is what the search looks for
        none = next((one for one in report.searches if one.found.rate is None), None)
        if none is not None and report.valid:
            return StageFailed(
                f"no {none.search.goal} was found", remedy="loosen --slo, or see the load points in the report"
            )
    if failed:
        asked = sum(result.requests["measured"] for result in report.results)
        kinds = ", ".join(f"{count} {kind}" for kind, count in report.failures().items())
        return StageFailed(f"{failed} of {asked} requests failed", why=kinds, remedy=f"{path} has their messages")
    early = None if report.searches else next((one for one in report.results if one.stopped), None)
    if early is not None:  # only requests before or after the measured part failed
        name = f"{early.protocol}, {early.label}"
        return StageFailed(f"{name} ended early", why=early.stopped or "", remedy=f"{path} has what was measured")
    if not report.valid:
        return StageFailed(
            "the run is INVALID", why=report.verdict()["reasons"][0]["what"], remedy=f"{path} has every reason"
        )
    return None
