"""Load points of a report: their names, their order, and what must be said of them; values as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trtpipe.pipeline.bench.compare.rows import alternatives
from trtpipe.pipeline.bench.results import metrics
from trtpipe.pipeline.pages.parts import UNKNOWN, number

LoadPoint = dict[str, Any]


def named(point: LoadPoint) -> str:
    number = point.get("repeat")
    repeat = f", repeat {number + 1}" if number and isinstance(number, int) else ""
    return f"{point['protocol']}, {point['label']}{repeat}"


def amount(point: LoadPoint) -> float | None:
    """Requests in flight of a closed loop, the rate of an open one; None where another tool does not say."""
    load = point["load"]
    value = load.get("concurrency") if load["kind"] == "closed" else load.get("rate")
    return value if isinstance(value, (int, float)) else None


def label(point: LoadPoint) -> str:
    """Label of a load beside a point: 16, or 20/s."""
    value = amount(point)
    if value is None:
        return str(point["label"])
    return f"{value:g}" if point["load"]["kind"] == "closed" else f"{value:g}/s"


def kind(point: LoadPoint) -> str:
    load = point["load"]
    return "closed loop" if load["kind"] == "closed" else f"{load.get('arrivals')} arrivals"


def by_load(points: Sequence[LoadPoint]) -> dict[tuple[str, str], list[LoadPoint]]:
    """Load points of each protocol and kind of load, the lowest load first."""
    out: dict[tuple[str, str], list[LoadPoint]] = {}
    for point in points:
        out.setdefault((point["protocol"], kind(point)), []).append(point)
    for members in out.values():
        members.sort(key=lambda member: amount(member) or 0.0)
    return out


def value(point: LoadPoint, metric: str, statistic: str = "value") -> float | None:
    found: float | None = (point["metrics"].get(metric) or {}).get(statistic)
    return found


def shared(runs: Sequence[Sequence[LoadPoint]], metric: str, statistic: str) -> tuple[str, str] | None:
    """(name, short name) of the metric, or else of the one that other tools have in its place, that some load point of
    each run has; None if there is none."""
    ours = metrics.find(metric)
    for name, short in ({} if ours is None else alternatives(ours)).items():
        if all(any(value(point, name, statistic) is not None for point in points) for points in runs):
            return name, short
    return None


def gpus(report: dict[str, Any]) -> int | None:
    """Number of GPUs of the engine; None where the report does not say."""
    engine = report.get("engine") or {}
    tp, pp = engine.get("tp_size"), engine.get("pp_size")
    return tp * pp if isinstance(tp, int) and isinstance(pp, int) and tp * pp > 0 else None


def invalid(point: LoadPoint) -> bool:
    return point["verdict"]["valid"] is False


def missed(point: LoadPoint) -> bool:
    """Whether objectives were given, and not all of them are met."""
    slo = point.get("slo")
    return isinstance(slo, dict) and slo.get("met") is False


def faults(point: LoadPoint) -> str:
    """Why a load point's figures need caution."""
    told = [f"INVALID: {reason['what']}: {reason['why']}" for reason in point["verdict"]["reasons"]]
    told += [f"ended early: {point['stopped'] or 'interrupted'}"] if point["stopped"] or point["interrupted"] else []
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
