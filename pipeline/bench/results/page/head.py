"""Head of a report's page: what was measured, four figures, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trtpipe.pipeline.bench.results.page.load_points import Level, by_load, gpus, invalid, missed, named, shared, value
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
    levels = report["levels"]
    lengths = [_mean(levels, f"{side}_sequence_length") for side in ("input", "output")]
    asked = [f"{number(mean)} tokens {way}" for mean, way in zip(lengths, ("in", "out"), strict=True) if mean]
    tool = (report.get("tool") or {}).get("name") or "trtpipe bench"
    parts = [
        f"Measured by {tool}" + (f" on {when[:16].replace('T', ' ')} UTC" if (when := report.get("started")) else ""),
        ", ".join(dict.fromkeys(level["protocol"] for level in levels)),
        " and ".join(asked) + (" on average" if asked else ""),
        f"runtime {engine['runtime']}" if engine.get("runtime") else "",
    ]
    return "; ".join(part for part in parts if part) + "."


def _mean(levels: list[Level], metric: str) -> float | None:
    known = [mean for level in levels if (mean := value(level, metric, "mean")) is not None]
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
    able = [level for level in report["levels"] if value(level, rate) is not None]
    good = [level for level in able if not invalid(level) and not missed(level)]
    if not able:
        return []
    best = max(good or able, key=lambda level: value(level, rate) or 0.0)
    out = [Card(label="Output tokens/s", value=number(value(best, rate)), note=f"at {named(best)}")]
    for metric, statistic in _CARDS:
        name, short = shared([able], metric, statistic) or (metric, metric)
        lowest = min((one for level in able if (one := value(level, name, statistic)) is not None), default=None)
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
    valid, levels = report["verdict"]["valid"], report["levels"]
    if valid is not None:
        told = "The client kept up with the load" if valid else "INVALID: the client did not keep up with the load"
        yield Finding(text=f"{told}.", good=valid)
    if report.get("partial"):
        yield Finding(text="Partial: the run did not come to its end.", good=False)
    for level in levels:
        if level["stopped"] or level["interrupted"]:
            told = f"Ended early at {named(level)}: {level['stopped'] or 'interrupted'}"
            yield Finding(text=sentence(told), good=False)
    yield from _objectives(levels)
    failed, asked = (sum(level["requests"].get(key) or 0 for level in levels) for key in ("failed", "measured"))
    told = (
        f"{number(failed)} of {number(asked)} requests failed." if failed else f"No request of {number(asked)} failed."
    )
    if asked:
        yield Finding(text=told, good=not failed)
    for note in report.get("notes", []):
        yield Finding(text=sentence(note))


def _objectives(levels: list[Level]) -> Iterator[Finding]:
    """The highest load of each curve that meets all objectives."""
    if levels and not any(level.get("slo") for level in levels):
        yield Finding(text="No objective was given (--slo).")
    for (protocol, kind), members in by_load(levels).items():
        judged = [level for level in members if level.get("slo") and level["verdict"]["valid"]]
        met = [level for level in judged if level["slo"]["met"]]
        if judged:
            where = f"up to {met[-1]['label']}" if met else "at no load"
            all_of_them = len(met) == len(judged)
            text = f"{protocol}, {kind}: all objectives are met {'at every load point' if all_of_them else where}."
            yield Finding(text=text, good=bool(met))
