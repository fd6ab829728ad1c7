"""Differences between the reports of a comparison besides their results, printed before the numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.bench.results.metrics import distributions
from trtpipe.pipeline.bench.results.slo import Objective

# Targets and numbers of repeats may differ; loads are compared per load point, tokenizers by their digest.
_NOT_COMPARED = ("targets", "loads", "tokenizer", "seed", "repeat", "report", "work.folder", "log_samples")
# Files among the options: named without their folders, and compared by their digests.
_FILES = ("work.prompts", "work.sharegpt", "work.trace")
# How long a load is measured: compared over all loads that another report has too, since matching load points may
# differ in it.
_SPANS = ("requests", "duration_s", "warmup_s", "warmup_fraction", "cooldown_s", "cooldown_fraction")
# Any of these tells which load a load point has; that of stages has none.
_AMOUNTS = ("concurrency", "rate", "trace")
# Compared facts of the machine that sent the load.
_HOST = ("cpu", "usable_cores")
# Mean lengths that differ by more than this share are reported.
LENGTH_SHARE = 0.01
_LONGEST = 100
# Most characters of a dotted name: each value under it has its own copy.
LONGEST_NAME = 200
_DIGEST = re.compile("[0-9a-f]{64}")
UNTOLD = "has no entry"
# The formula of TPOT has changed; of other metrics only the words of the formula have.
_REDEFINED = "time_per_output_token"
MEASURED_DIFFERENTLY = "the reports measure it differently; measure the base again"


def differences(reports: Mapping[str, dict[str, Any]], shared: Mapping[str, Collection[int]]) -> list[str]:
    """A line for each difference. `reports` by their letters, and the numbers of the load points that each shares with
    another."""
    return [
        *_faults(reports), *_measured(reports), *_settings(reports), *_spans(reports, shared), *_notes(reports),
    ]  # fmt: skip


def defined_alike(metric: str, reports: Collection[dict[str, Any]]) -> bool:
    """Whether reports of this project, whose versions may differ, have the same formula for a metric."""
    ours = [report["metrics"].get(metric, {}) for report in reports if not report.get("tool")]
    return metric != _REDEFINED or len({entry["formula"] for entry in ours if "formula" in entry}) < 2


def load_point_differences(place: str, load_points: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Differences between the repeats of one load point, by the letters of their reports."""
    out = []
    for length in ("input_sequence_length", "output_sequence_length"):
        means = {
            letter: _mean([point["metrics"].get(length, {}).get("mean") for point in mine])
            for letter, mine in load_points.items()
        }
        known = [mean for mean in means.values() if mean is not None]
        if known and max(known) > min(known) * (1 + LENGTH_SHARE):
            out.append(f"{place}: mean {length}: {_sides(means)}")
    sources = {
        letter: ", ".join(dict.fromkeys(point["token_count_source"] or "unknown" for point in mine))
        for letter, mine in load_points.items()
    }
    if len(set(sources.values())) > 1:
        out.append(f"{place}: tokens counted by: {_sides(sources)}")
    for letter, mine in load_points.items():
        for point in mine:
            if point["stopped"] or point["interrupted"]:
                out.append(f"{place}: {letter} ended early: {point['stopped'] or 'interrupted'}")
            for metric in distributions():
                count, of = point.get("unknown_requests", {}).get(metric.name), point["requests"].get("succeeded")
                if count:
                    out.append(f"{place}: the {metric.short} of {count} of {of} requests of {letter} is unknown")
            if point["wrong_length"]:
                out.append(f"{place}: {letter} has {point['wrong_length']} answers of another length than asked for")
    return out


def load_differences(place: str, loads: Mapping[str, dict[str, Any]]) -> list[str]:
    """Differences between the loads of one load point."""
    return [f"{place}: {line}" for line in _differing_keys("load", loads, told_by_all=False)]


def _faults(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for letter, report in reports.items():
        if report["verdict"]["valid"] is False:
            for reason in report["verdict"]["reasons"] or [{"what": "no reason is given", "why": ""}]:
                told = f"{reason['what']}: {reason['why']}" if reason["why"] else reason["what"]
                yield f"{letter} is INVALID: {told}"
        if report.get("partial"):
            yield f"{letter} is partial: {report.get('broken') or 'it was interrupted, or load points ended early'}"


def _measured(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield from _differing("tool", {letter: _tool(report) for letter, report in reports.items()})
    for key in ("model", "server"):
        told = {
            letter: ", ".join(sorted({str(entry[key]) for entry in report["endpoints"] if entry.get(key)})) or None
            for letter, report in reports.items()
        }
        yield from _differing(key, told)
    engines = {letter: _flat(report["engine"]) for letter, report in reports.items() if report.get("engine")}
    yield from _differing_keys("engine", engines, told_by_all=False)
    if engines and len(engines) < len(reports):
        yield f"engine: {', '.join(letter for letter in reports if letter not in engines)} {UNTOLD}"
    files = {letter: _files(report) for letter, report in reports.items() if report.get("work_sha256") is not None}
    if len(files) == len(reports):
        yield from _differing_keys("file", files, told_by_all=False)
    # Runs of one server should differ in their seed: `same_prompts` says so where they do not.
    loads = {_load_of_server(report) for report in reports.values()}
    seed = () if len(loads) == 1 and None not in loads else ("seed",)
    for key in ("repository_sha256", "tokenizer_sha256", *seed):
        yield from _differing(key, {letter: report.get(key) for letter, report in reports.items()})
    if not defined_alike(_REDEFINED, reports.values()):
        yield f"{_REDEFINED}: {MEASURED_DIFFERENTLY}"


def _files(report: dict[str, Any]) -> dict[str, str]:
    """Digests of the files that the load was made from, by the files' names."""
    named: dict[str, list[str]] = {}
    for file, sha256 in report["work_sha256"].items():
        named.setdefault(PurePath(file).name, []).append(str(sha256))
    return {name: ", ".join(sorted(digests)) for name, digests in named.items()}


def _settings(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    options = {letter: _options(report) for letter, report in reports.items()}
    # Tools name their options differently, so an option that only one tool has is no difference.
    alike = len({_tool(report) for report in reports.values()}) == 1
    yield from _differing_keys("option", options, told_by_all=not alike)
    hosts = {letter: report.get("host") or {} for letter, report in reports.items()}
    for key in _HOST:
        yield from _differing(f"client's {key}", {letter: host.get(key) for letter, host in hosts.items()})


def _options(report: dict[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in _flat(report["options"]).items() if key not in _NOT_COMPARED}
    if "objectives" in out:
        out["objectives"] = _objectives(out["objectives"])
    for key in _FILES:
        if isinstance(out.get(key), str) and out[key] in (report.get("work_sha256") or {}):
            out[key] = PurePath(out[key]).name
    return out


def _spans(reports: Mapping[str, dict[str, Any]], shared: Mapping[str, Collection[int]]) -> Iterator[str]:
    """Differences in the length (duration, requests) of loads that several reports have."""
    found = {letter: _shared_loads(report, shared[letter]) for letter, report in reports.items()}
    for key in _SPANS:
        yield from _differing(
            f"option loads.{key}", {letter: _span(loads, key) for letter, loads in found.items() if loads}
        )


def _shared_loads(report: dict[str, Any], shared: Collection[int]) -> list[dict[str, Any]]:
    """The loads among a report's options without those of which no load point is shared."""
    loads = report["options"].get("loads")
    if not isinstance(loads, list) or not all(isinstance(load, dict) for load in loads):
        return []
    out = []
    for load in loads:
        mine = {number for number, point in enumerate(report["levels"]) if _is_of(point["load"], load)}
        if not mine or mine.intersection(shared):
            out.append(load)
    return out


def _is_of(entry: dict[str, Any], load: dict[str, Any]) -> bool:
    """Whether `entry`, the load of a load point, belongs to `load` of the report's options."""
    both = entry.keys() & load.keys()
    return not both.isdisjoint(_AMOUNTS) and all(entry[key] == load[key] for key in both)


def _span(loads: Sequence[dict[str, Any]], key: str) -> Any:
    values = {"none" if load.get(key) is None else json.dumps(_plain(load[key])): load.get(key) for load in loads}
    return next(iter(values.values())) if len(values) == 1 else ", ".join(sorted(values))


def same_prompts(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Note on runs that sent the prompts of one seed to one server."""
    asked: dict[tuple[str, Any], dict[Any, str]] = {}
    for letter, report in reports.items():
        load = _load_of_server(report)
        if load is not None:
            # A report beside itself is one run.
            asked.setdefault((load, report.get("seed")), {})[report.get("started")] = letter
    for runs in asked.values():
        if len(runs) > 1:
            *some, last = runs.values()
            yield (
                f"{', '.join(some)} and {last} sent the same prompts to the same address: where the server was not "
                "restarted between them and keeps KV blocks, it answers the later run faster; take another --seed for "
                "that run"
            )


def _load_of_server(report: dict[str, Any]) -> str | None:
    """Addresses, what they serve as far as the report shows it, and the prompts but for the seed; None where a report
    has no address, or its prompts are of a file."""
    work, urls = report["options"].get("work"), [entry.get("url") for entry in report["endpoints"]]
    if not isinstance(work, dict) or work.get("prompts") or work.get("sharegpt") or not all(urls):
        return None
    return json.dumps([urls, work, *(report.get(key) for key in ("engine", "repository_sha256"))], sort_keys=True)


def _objectives(value: Any) -> Any:
    """Objectives as `--slo` takes them; a value that is none, unchanged."""
    try:
        # Reports of 0.1 have limit_ms: their objectives were times.
        named = [{"limit" if key == "limit_ms" else key: one[key] for key in one} for one in value]
        return " ".join(str(Objective(**one)) for one in named) or "none"
    except (TypeError, UsageError):
        return value


def _notes(reports: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    for letter, report in reports.items():
        for note in report.get("notes", ()):
            yield f"{letter}: {note}"


def _tool(report: dict[str, Any]) -> str:
    tool = report.get("tool") or {"name": "trtpipe", "version": (report.get("client") or {}).get("trtpipe")}
    return f"{tool['name']} {tool['version'] or '(version unknown)'}"


def _differing_keys(what: str, found: Mapping[str, dict[str, Any]], *, told_by_all: bool) -> Iterator[str]:
    for key in dict.fromkeys(key for values in found.values() for key in values):
        if not told_by_all or all(key in values for values in found.values()):
            yield from _differing(f"{what} {key}", {letter: values.get(key) for letter, values in found.items()})


def _differing(what: str, values: Mapping[str, Any]) -> Iterator[str]:
    if len({json.dumps(_plain(value), sort_keys=True) for value in values.values()}) > 1:
        yield f"{what}: {_sides(values)}"


def _plain(value: Any) -> Any:
    """Equal numbers as one type: 16.0 becomes 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _sides(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{letter} {_told(value)}" for letter, value in values.items())


def _told(value: Any) -> str:
    if value is None:
        return UNTOLD
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value)
    if _DIGEST.fullmatch(text):
        return text[:12]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, dict) and len(prefix) + len(key) <= LONGEST_NAME:
            out |= _flat(inner, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = inner
    return out


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None
