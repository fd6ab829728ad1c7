"""Verdict on a run: it is INVALID where the client limited the results, and the reasons say what to change.

A client that reads late adds its own lateness to the server's, and one that sends late offers less load than requested.
Neither shows in the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtpipe.pipeline.bench.loop.driver import Client
from trtpipe.pipeline.bench.results.metric import rounded
from trtpipe.pipeline.bench.results.records import NONE, Records
from trtpipe.pipeline.bench.results.window import Window

# Allowed lateness of the event loop: this much, or this share of the typical time to first token if that is more.
LATENESS_MS, LATENESS_SHARE = 5.0, 0.1
# Allowed delay of sending, as far as it is the client's alone.
DISPATCH_MS, DISPATCH_SHARE = 5.0, 0.1
# Share of a core above which reads queue up.
CPU_SHARE = 0.9
# Least shares of the requested slots, and of the requested rate.
REACHED_SHARE, RATE_SHARE = 0.95, 0.99


@dataclass(frozen=True)
class Reason:
    what: str
    why: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """Measurements of the client in a load point, and reasons that make the result invalid."""

    figures: dict[str, Any]
    reasons: list[Reason]

    @property
    def valid(self) -> bool:
        return not self.reasons

    def verdict(self) -> dict[str, Any]:
        return {"valid": self.valid, "reasons": [asdict(reason) for reason in self.reasons]}


def examine(
    records: Records, clients: Sequence[Client], *, ttft_p50_ms: float | None, asked: int | None, bounded: bool = False,
    whole: bool = True, window: Window | None = None,
) -> SelfCheck:  # fmt: skip
    """Examine one load point.

    clients  each process that drove a share: the fullest core counts, and the lateness of all event loops together
    asked    slots of a closed loop; None for an open one
    window   time over which rates are taken; None where there is none
    whole    the load point did not end early; otherwise the cause of a lower load is known
    bounded  requests of an open loop may have waited for a slot, so their delay is not the client's alone
    """
    import numpy as np

    lateness = np.array([late for client in clients for late in client.lateness_ns] or [0]) / 1e6
    sent = (records.sent != NONE) & records.measured()
    delays = (records.sent - records.due)[sent] / 1e6
    tokens = int(records.output_tokens[records.output_tokens != NONE].sum())
    cpu_share = max(client.cpu_ns / max(1, client.wall_ns) for client in clients)
    peak = sum(client.peak for client in clients)
    # For conversations, count slots instead: most conversations wait during think times.
    talks = bool((records.session != NONE).any())
    reached = len(np.unique(records.slot[records.sent != NONE])) if talks else peak
    late, delayed = float(np.percentile(lateness, 99)), float(np.percentile(delays, 99)) if len(delays) else 0.0
    figures: dict[str, Any] = {
        "loop_lateness_ms": _spread(lateness),
        "dispatch_delay_ms": _spread(delays),
        "in_flight": {"asked": asked, "reached": peak},
        "cpu_share": cpu_share,
        "cpu_s_per_1000_tokens": sum(client.cpu_ns for client in clients) / 1e6 / tokens if tokens else None,
        "processes": len(clients),
        # Stamps are of a monotonic clock; only a kernel stamp that was read during a clock step may be off by it.
        "clock_step_ms": max((client.clock_step_ns / 1e6 for client in clients), key=abs),
    }
    reasons = []
    typical = ttft_p50_ms or 0.0
    alone = "measure from a machine with free cores"  # with one request in flight there is no less load to offer
    less = alone if asked == 1 else "offer less load, or measure with more --workers, or from a machine with free cores"
    if late > max(LATENESS_MS, LATENESS_SHARE * typical):
        reasons.append(Reason("the event loop was late", f"by {late:.1f} ms at the 99th percentile", less))
    if not bounded and delayed > max(DISPATCH_MS, DISPATCH_SHARE * typical):
        # A request also waits for a new connection where the server has closed an idle one.
        closer = f"{less}; to a server that closes idle connections, from a machine near it"
        reasons.append(Reason("requests left late", f"by {delayed:.1f} ms at the 99th percentile", closer))
    if cpu_share > CPU_SHARE:
        reasons.append(Reason("the client's core was full", f"{cpu_share:.0%} of it", less))
    if asked is not None and whole and reached < REACHED_SHARE * asked:
        why = f"{reached} in flight of {asked}"
        reasons.append(Reason("the load was not reached", why, "give more requests, or a longer duration"))
    if window is None and asked is not None and whole and records.good().any():
        why = "at no time had every slot a measured request"
        reasons.append(Reason("there is no throughput", why, "give more --requests, or a longer --duration"))
    if window is not None and whole and records.good().any():
        arrived = (records.stamps > window.start_ns) & (records.stamps <= window.stop_ns)
        if not arrived.any():
            why = f"no token arrived in its {window.seconds:.3g} s"
            reasons.append(Reason("the load point was too short", why, "give a longer --duration, or --requests"))
    if asked is None:
        scheduled, offered = (_rate(getattr(records, moment)[sent]) for moment in ("due", "sent"))
        figures["rate"] = {"scheduled": scheduled, "offered": offered}
        if not bounded and whole and scheduled and offered and offered < RATE_SHARE * scheduled:
            why = f"{rounded(offered)} requests/s of {rounded(scheduled)}"
            reasons.append(Reason("the rate was not reached", why, less))
    return SelfCheck(figures=figures, reasons=reasons if len(records) else [])  # without requests there is no fault


def held_back(point: Mapping[str, Any]) -> str | None:
    """Note on a load point, as report.json has it, of whose rate less was offered because requests waited for one of
    the places that the user allows in flight: the client is not at fault, but the asked rate was not measured."""
    most, rate = point["load"].get("max_in_flight"), (point["client"] or {}).get("rate") or {}
    scheduled, offered = rate.get("scheduled"), rate.get("offered")
    if most is None or not scheduled or not offered or offered >= RATE_SHARE * scheduled:
        return None
    told = f"{rounded(offered)} requests/s of {rounded(scheduled)} were sent, since at most {most} were in flight"
    due = point["metrics"].get("time_to_first_token_from_due") or {}
    if due.get("p50") is None or due.get("p99") is None:
        return told
    return f"{told}; TTFT from the moment a request was due: p50 {due['p50']:.1f} ms, p99 {due['p99']:.1f} ms"


def _rate(moments: Any) -> float | None:
    """Events per second, from the first to the last."""
    if len(moments) < 2 or moments.max() <= moments.min():
        return None
    return float(len(moments) - 1) / float(moments.max() - moments.min()) * 1e9


def _spread(values: Any) -> dict[str, float | None]:
    import numpy as np

    names = ("p50", "p99", "p99.9", "max")
    if len(values) == 0:
        return dict.fromkeys(names)
    numbers = [*np.percentile(values, (50, 99, 99.9)), values.max()]
    return {name: float(number) for name, number in zip(names, numbers, strict=True)}
