"""Metrics that the number of replicas follows, derived from the server's gauges.

There are two metrics. `waiting`: requests that the engine has taken in and cannot run yet, for lack of KV cache.
Fullness: the engine takes in no more than `max` requests, and those that wait outside are counted nowhere, so a full
engine may have a queue. Fullness also keeps replicas that are busy without a queue, which would otherwise go as soon
as nobody waits. Triton's own queue time is neither: a request leaves Triton's queue when it is handed to the engine,
where it waits.
"""

from __future__ import annotations

from typing import Any

SERIES = "nv_trt_llm_request_metrics"
FULLNESS = "trtllm_batch_fullness"
# Fraction of the requests that an engine takes in at which another replica is wanted.
FULL = "900m"
# The gauges jump with every step of the engine; the autoscaler looks every 15 seconds.
WINDOW = "1m"
SCRAPE = "15s"


def waiting_metric(pp_size: int) -> str:
    """Name of the metric; an engine with pipeline stages counts otherwise, see `adapter_rules`."""
    return "trtllm_waiting_requests" if pp_size == 1 else f"trtllm_waiting_requests_pp{pp_size}"


def adapter_rules(pp_size: int) -> list[dict[str, Any]]:
    """Rules of prometheus-adapter that turn the series into metrics of pods."""
    waiting, scheduled = _gauge("waiting"), _gauge("scheduled")
    if pp_size > 1:
        # The backend reports as waiting what the last step did not schedule. With pipeline stages a step schedules one
        # batch of `pp_size`, and the other batches are running all the same.
        waiting = f"{waiting} - {pp_size - 1} * {scheduled}"
    return [
        # This gauge is active - scheduled, and negative after a step in which a request ended.
        _rule(waiting_metric(pp_size), "waiting", f"clamp_min({waiting}, 0)"),
        _rule(FULLNESS, "active", f"{_gauge('active')} / {_gauge('max')}"),
    ]


def pod_monitor(name: str, labels: dict[str, str], selector: dict[str, str]) -> dict[str, Any]:
    """A PodMonitor, by which the Prometheus operator scrapes the pods."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": selector},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": SCRAPE}],
        },
    }


def _gauge(request_type: str) -> str:
    matchers = f'<<.LabelMatchers>>,request_type="{request_type}"'
    return f"sum(avg_over_time(<<.Series>>{{{matchers}}}[{WINDOW}])) by (<<.GroupBy>>)"


def _rule(name: str, request_type: str, query: str) -> dict[str, Any]:
    return {
        "seriesQuery": f'{SERIES}{{namespace!="",pod!="",request_type="{request_type}"}}',
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": f"^{SERIES}$", "as": name},
        "metricsQuery": query,
    }
