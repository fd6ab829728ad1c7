"""Metrics computed from records: each one's name, unit, formula, undefined case, and where it is shown.

Names are aiperf's where it has the metric; the formula states any difference. Latencies leave out warm-up requests and
failed requests. An undefined value is None, never 0.
"""

from __future__ import annotations

from typing import Any

from trtpipe.pipeline.bench.results.metric import Distribution, Metric, Rate
from trtpipe.pipeline.bench.results.rate_metrics import RATE_METRICS
from trtpipe.pipeline.bench.results.request_metrics import REQUEST_METRICS

# Goodput needs objectives: `slo.judge` computes it.
_GOODPUT = (
    Metric(
        name="request_goodput",
        unit="requests/s",
        short="goodput/s",
        better="higher",
        aliases=("goodput",),
        tabled=True,
        formula="good requests whose stream ended within the window / seconds of the window",
        undefined="no window, or no objective",
    ),
    Metric(
        name="token_goodput",
        unit="tokens/s",
        better="higher",
        formula="output tokens of those requests / seconds of the window",
        undefined="no window, or no objective",
    ),
)
# Of the server's own counters, where it speculates: `report.load_point_result` takes them from its metrics.
SPECULATION = (
    Metric(
        name="tokens_per_step",
        unit="tokens",
        short="tokens/step",
        better="higher",
        tabled=True,
        formula="1 + accepted draft tokens / steps of each request after its first token, over the load point",
        undefined="the server does not speculate, has several engines that do, or its metrics were not read",
    ),
    Metric(
        name="draft_acceptance_rate",
        unit="",
        short="drafts accepted %",
        better="higher",
        aliases=("acceptance",),
        tabled=True,
        formula="accepted draft tokens / draft tokens, over the load point",
        undefined="no draft token within the load point, several engines, or the server's metrics were not read",
    ),
)
# Every metric, in the order of reports and tables. To add one, add its entry to one of these four.
METRICS: tuple[Metric, ...] = (*REQUEST_METRICS, *RATE_METRICS, *_GOODPUT, *SPECULATION)


# The one that tables of objectives have.
REQUEST_GOODPUT = _GOODPUT[0]


def distributions() -> list[Distribution]:
    return [metric for metric in METRICS if isinstance(metric, Distribution)]


def rates() -> list[Rate]:
    return [metric for metric in METRICS if isinstance(metric, Rate)]


def tabled() -> list[Metric]:
    return [metric for metric in METRICS if metric.tabled]


def judged() -> dict[str, Metric]:
    """Metrics that an objective (`--slo`) can name: those that have a better side, without goodput, which objectives
    define."""
    return {metric.name: metric for metric in METRICS if metric.better and metric not in _GOODPUT}


def find(name: str) -> Metric | None:
    return next((metric for metric in METRICS if metric.name == name), None)


def definitions() -> dict[str, dict[str, Any]]:
    """Unit, formula and undefined case of each metric, for the report."""
    return {
        metric.name: {"unit": metric.unit, "formula": metric.formula, "undefined": metric.undefined}
        for metric in METRICS
    }
