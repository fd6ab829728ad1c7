"""Load points of a report: their names, their order, and what must be said of them; values as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trtpipe.pipeline.bench.compare.rows import alternatives
from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.pages.parts import UNKNOWN, number

Level = dict[str, Any]


def named(level: Level) -> str:
    number = level.get("repeat")
    repeat = f", repeat {number + 1}" if number and isinstance(number, int) else ""
    return f"{level['protocol']}, {level['label']}{repeat}"


def amount(level: Level) -> float | None:
    """Requests in flight of a closed loop, requests/s of an open one; None where another tool does not say."""
    load = level["load"]
    value = load.get("concurrency") if load["kind"] == "closed" else load.get("rate")
    return value if isinstance(value, (int, float)) else None


def label(level: Level) -> str:
    """Label of a load beside a point: 16, or 20/s."""
    value = amount(level)
    if value is None:
        return str(level["label"])
    return f"{value:g}" if level["load"]["kind"] == "closed" else f"{value:g}/s"


def kind(level: Level) -> str:
    load = level["load"]
    return "closed loop" if load["kind"] == "closed" else f"{load.get('arrivals')} arrivals"


def by_load(levels: Sequence[Level]) -> dict[tuple[str, str], list[Level]]:
    """Load points of each protocol and kind of load, the lowest load first."""
    out: dict[tuple[str, str], list[Level]] = {}
    for level in levels:
        out.setdefault((level["protocol"], kind(level)), []).append(level)
    for members in out.values():
        members.sort(key=lambda member: amount(member) or 0.0)
    return out


def value(level: Level, metric: str, statistic: str = "value") -> float | None:
    found: float | None = (level["metrics"].get(metric) or {}).get(statistic)
    return found


def shared(runs: Sequence[Sequence[Level]], metric: str, statistic: str) -> tuple[str, str] | None:
    """(name, short name) of the metric, or else of the one that other tools have in its place, that some load point of
    each run has; None if there is none."""
    ours = metrics.find(metric)
    for name, short in ({} if ours is None else alternatives(ours)).items():
        if all(any(value(level, name, statistic) is not None for level in levels) for levels in runs):
            return name, short
    return None


def gpus(report: dict[str, Any]) -> int | None:
    """Number of GPUs of the engine; None where the report does not say."""
    engine = report.get("engine") or {}
    tp, pp = engine.get("tp_size"), engine.get("pp_size")
    return tp * pp if isinstance(tp, int) and isinstance(pp, int) and tp * pp > 0 else None


def invalid(level: Level) -> bool:
    return level["verdict"]["valid"] is False


def missed(level: Level) -> bool:
    """Whether objectives were given, and not all of them are met."""
    slo = level.get("slo")
    return isinstance(slo, dict) and slo.get("met") is False


def faults(level: Level) -> str:
    """Why a load point's figures need caution."""
    told = [f"INVALID: {reason['what']}: {reason['why']}" for reason in level["verdict"]["reasons"]]
    told += [f"ended early: {level['stopped'] or 'interrupted'}"] if level["stopped"] or level["interrupted"] else []
    return "; ".join(told)


def flat(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values under dotted names; entries of a list under their own names, or their numbers."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from flat(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and all(isinstance(one, dict) for one in inner):
            for place, one in enumerate(inner):
                yield from flat(one, f"{prefix}{key}.{one.get('name', place)}.")
        else:
            yield f"{prefix}{key}", inner


def plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return ", ".join(map(plain, value)) or "none"
    return UNKNOWN if value is None else str(value)
