"""Head of a report's page: what was measured, four figures, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.bench.results.page.load_points import (
    LoadPoint,
    by_load,
    gpus,
    invalid,
    missed,
    named,
    shared,
    value,
)
from trtpipe.pipeline.bench.results.summary import of_load_point
from trtpipe.pipeline.pages.parts import Alarm, Card, Finding, capital, number, sentence

# Names of Triton's models in our repositories: they do not say what is served.
_TRITON = ("ensemble", "tensorrt_llm", "tensorrt_llm_bls")
_CARDS = (("time_to_first_token", "p99"), ("inter_token_latency", "p99"), ("request_latency", "p99"))


def title(report: dict[str, Any]) -> str:
    """Model, GPU and precision: "llama3-8b on h100, FP8, 2 GPUs"; what is known of them."""
    engine = report.get("engine") or {}
    gpu, target = engine.get("gpu"), report.get("target")
    model = str(target).partition(f".{gpu}")[0] if target else ", ".join(_models(report))
    precision = engine.get("quant_algo") or engine.get("dtype")
    count = gpus(report) or 1
    where = f"{count} x {gpu}" if gpu and count > 1 else gpu
    told = " on ".join(str(part) for part in (model, where) if part)
    return ", ".join(str(part) for part in (told, precision) if part) or "A server"


def _models(report: dict[str, Any]) -> list[str]:
    told = dict.fromkeys(str(entry["model"]) for entry in report["endpoints"] if entry.get("model"))
    named = [name for name in told if not name.endswith(_TRITON)]
    return named or ["" if report.get("engine") else "Triton" for _ in list(told)[:1]]


def about(report: dict[str, Any]) -> str:
    """When, how and with which lengths it was measured, in one line."""
    engine = report.get("engine") or {}
    points = report["levels"]
    lengths = [_mean(points, f"{side}_sequence_length") for side in ("input", "output")]
    asked = [f"{number(mean)} tokens {way}" for mean, way in zip(lengths, ("in", "out"), strict=True) if mean]
    tool = (report.get("tool") or {}).get("name") or "trtpipe bench"
    parts = [
        f"Measured by {tool}" + (f" on {when[:16].replace('T', ' ')} UTC" if (when := report.get("started")) else ""),
        ", ".join(dict.fromkeys(point["protocol"] for point in points)),
        " and ".join(asked) + (" on average" if asked else ""),
        f"runtime {engine['runtime']}" if engine.get("runtime") else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _mean(points: list[LoadPoint], metric: str) -> float | None:
    known = [mean for point in points if (mean := value(point, metric, "mean")) is not None]
    return sum(known) / len(known) if known else None


def alarm(report: dict[str, Any]) -> Alarm | None:
    verdict = report["verdict"]
    if verdict["valid"] is not False:
        return None
    reasons = [
        (f"{one['what']}: {one['why']}" if one.get("why") else one["what"], sentence(one.get("remedy") or ""))
        for one in verdict["reasons"]
    ]
    text = "The client was part of what was measured: these are not the server's figures."
    return Alarm(word="INVALID", text=text, reasons=reasons)


def cards(report: dict[str, Any]) -> list[Card]:
    """Throughput and latencies at the best load point: the highest throughput that is valid and meets all objectives,
    or, where none does, the highest."""
    rate, _ = shared([report["levels"]], "output_token_throughput", "value") or ("", "")
    able = [point for point in report["levels"] if value(point, rate) is not None]
    good = [point for point in able if not invalid(point) and not missed(point)]
    if not able:
        return []
    best = max(good or able, key=lambda point: value(point, rate) or 0.0)
    out = [Card(label="Output tokens/s", value=number(value(best, rate)), note=f"at {named(best)}")]
    for metric, statistic in _CARDS:
        name, short = shared([able], metric, statistic) or (metric, metrics.judged()[metric].short)
        lowest = min((one for point in able if (one := value(point, name, statistic)) is not None), default=None)
        out.append(
            Card(
                label=f"{capital(short)} {statistic}",
                value=number(value(best, name, statistic)),
                unit="ms",
                note="" if len(able) == 1 or lowest is None else f"from {number(lowest)} ms at its lowest",
            )
        )
    return out


def findings(report: dict[str, Any]) -> Iterator[Finding]:
    valid, points = report["verdict"]["valid"], report["levels"]
    if valid is not None:
        told = "The client kept up with the load" if valid else "INVALID: the client did not keep up with the load"
        yield Finding(text=f"{told}.", good=valid)
    if report.get("partial"):
        yield Finding(text="Partial: the run did not come to its end.", good=False)
    for point in points:
        if point["stopped"] or point["interrupted"]:
            told = f"Ended early at {named(point)}: {point['stopped'] or 'interrupted'}"
            yield Finding(text=sentence(told), good=False)
    yield from _objectives(points)
    failed, asked = (sum(point["requests"].get(key) or 0 for point in points) for key in ("failed", "measured"))
    told = (
        f"{number(failed)} of {number(asked)} requests failed." if failed else f"No request of {number(asked)} failed."
    )
    if asked:
        yield Finding(text=told, good=not failed)
    for point in points:
        for note in of_load_point(point, report["options"]):
            yield Finding(text=sentence(f"{named(point)}: {note}"), good=False)
    for note in report.get("notes", []):
        yield Finding(text=sentence(note))


def _objectives(points: list[LoadPoint]) -> Iterator[Finding]:
    """The highest load of each curve up to which all objectives are met; each load where one below it misses some."""
    if points and not any(point.get("slo") for point in points):
        yield Finding(text="No objective was given (--slo).")
    for (protocol, kind), members in by_load(points).items():
        judged: dict[str, bool] = {}
        for point in members:
            if point.get("slo") and point["verdict"]["valid"]:
                judged[str(point["label"])] = judged.get(str(point["label"]), True) and bool(point["slo"]["met"])
        if judged:
            text = f"{protocol}, {kind}: all objectives are met {_where(judged)}."
            yield Finding(text=text, good=any(judged.values()))


def _where(judged: dict[str, bool]) -> str:
    """At which loads all objectives are met; `judged` has the lowest load first."""
    met = [name for name, good in judged.items() if good]
    if len(met) == len(judged):
        return "at every load point"
    if not met:
        return "at no load"
    if met == list(judged)[: len(met)]:
        return f"up to {met[-1]}"
    return f"at {', '.join(met)}, not at {', '.join(name for name, good in judged.items() if not good)}"
