"""Summary of a report in words: what its readers must know besides the figures, and why its command fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trtpipe.engines.errors import StageFailed, TrtpipeError
from trtpipe.pipeline.bench.results.metrics import judged
from trtpipe.pipeline.bench.results.report import BenchReport, LoadPointResult

# A clock is slewed by less than this during a load point: a larger step means that it was set.
CLOCK_STEP_MS = 100.0


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
        for line in _of_load_point(result):
            yield f"{result.protocol}, {result.label}: {line}"
    again = report.said_again()
    if again is not None:
        yield again


def unknown_objective(report: BenchReport) -> str | None:
    """Note on the first load point where nobody tells the values of some requests for an objective; None for none."""
    names = (one["metric"] for one in report.options.get("objectives", ()))
    lines = (_unknown(result, name) for name in names for result in report.results if result.unknown_requests.get(name))
    return next(lines, None)


def _unknown(result: LoadPointResult, metric: str) -> str:
    count, succeeded = result.unknown_requests[metric], result.requests["succeeded"]
    is_objective = any(one["metric"] == metric for one in (result.slo or {}).get("objectives", ()))
    missed = "; they count as missing its objective, and tpot needs no such number" if is_objective else ""
    return (
        f"the {judged()[metric].short} of {count} of {succeeded} requests is unknown: the server does not tell how "
        f"many tokens each response had{missed}"
    )


def _of_load_point(result: LoadPointResult) -> Iterator[str]:
    said = (result.server or {}).get("output_tokens")
    if said and said["agree"] is False:
        yield f"the server counted {said['server']} tokens, the client {said['client']}"
    for name, count in result.unknown_requests.items():
        if count:
            yield _unknown(result, name)
    for objective in (result.slo or {}).get("objectives", ()):
        unknown = result.unknown_requests.get(objective["metric"])
        if objective["value"] is None and result.requests["succeeded"] and not unknown:
            yield f"{objective['metric']} could not be measured: its objective is missed, and goodput leaves it out"
    step = result.client["clock_step_ms"]
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
