"""Metrics that the number of replicas follows, derived from gauges of the server and the gateway.

There are three metrics. `waiting`: requests that the engine has taken in and cannot run yet, for lack of KV cache.
Fullness: the engine takes in no more than `max` requests, and those that wait outside are counted nowhere, so a full
engine may have a queue. Fullness also keeps replicas that are busy without a queue, which would otherwise go as soon
as nobody waits. Triton's own queue time is neither: a request leaves Triton's queue when it is handed to the engine,
where it waits. `unanswered`: requests at the gateway that have no token yet, wherever they wait.
"""

from __future__ import annotations

from typing import Any

from trtpipe.pipeline.deploy.target import Target
from trtpipe.pipeline.deploy.values import Lifted

SERIES = "nv_trt_llm_request_metrics"
FULLNESS = "trtllm_batch_fullness"
UNANSWERED_SERIES, UNANSWERED = "trtpipe_gateway_waiting", "trtpipe_gateway_unanswered_requests"
# Fraction of the requests that an engine takes in at which another replica is wanted.
FULL = "900m"
# The gauges jump with every step of the engine; the autoscaler looks every 15 seconds.
WINDOW = "1m"
SCRAPE = "15s"
# Key of the API key of Prometheus, in the Secret of the gateway's keys.
METRICS_KEY = "metrics-key"


def waiting_metric(pp_size: int) -> str:
    """Name of the metric; an engine with pipeline stages counts otherwise, see `adapter_rules`."""
    return "trtllm_waiting_requests" if pp_size == 1 else f"trtllm_waiting_requests_pp{pp_size}"


def adapter_rules(pp_size: int, *, gateway: bool) -> list[dict[str, Any]]:
    """Rules of prometheus-adapter that turn the series into metrics of pods."""
    waiting, scheduled = _gauge("waiting"), _gauge("scheduled")
    if pp_size > 1:
        # The backend reports as waiting what the last step did not schedule. With pipeline stages a step schedules one
        # batch of `pp_size`, and the other batches are running all the same.
        waiting = f"{waiting} - {pp_size - 1} * {scheduled}"
    rules = [
        # This gauge is active - scheduled, and negative after a step in which a request ended.
        _rule(waiting_metric(pp_size), SERIES, f"clamp_min({waiting}, 0)", 'request_type="waiting"'),
        _rule(FULLNESS, SERIES, f"{_gauge('active')} / {_gauge('max')}", 'request_type="active"'),
    ]
    if gateway:
        query = f"sum(avg_over_time(<<.Series>>{{<<.LabelMatchers>>}}[{WINDOW}])) by (<<.GroupBy>>)"
        rules.append(_rule(UNANSWERED, UNANSWERED_SERIES, query))
    return rules


def pod_monitor(target: Target) -> dict[str, Any]:
    """A PodMonitor, by which the Prometheus operator scrapes the pods, under the jobs that the alerts name."""
    endpoints: list[dict[str, Any]] = [_endpoint("metrics", "trtpipe")]
    if target.gateway_image is not None:
        endpoints.append(_endpoint("openai", "trtpipe-gateway"))
    if target.keys_secret is not None:
        key = {"name": Lifted("apiKeysSecret", target.keys_secret), "key": METRICS_KEY}
        endpoints[-1]["authorization"] = {"type": "Bearer", "credentials": key}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": {"name": target.name, "labels": target.labels()},
        "spec": {"selector": {"matchLabels": target.selector()}, "podMetricsEndpoints": endpoints},
    }


def _endpoint(port: str, job: str) -> dict[str, Any]:
    relabeling = {"targetLabel": "job", "replacement": job}
    return {"port": port, "path": "/metrics", "interval": SCRAPE, "relabelings": [relabeling]}


def _gauge(request_type: str) -> str:
    matchers = f'<<.LabelMatchers>>,request_type="{request_type}"'
    return f"sum(avg_over_time(<<.Series>>{{{matchers}}}[{WINDOW}])) by (<<.GroupBy>>)"


def _rule(name: str, series: str, query: str, matcher: str = "") -> dict[str, Any]:
    labels = ",".join(filter(None, ('namespace!="",pod!=""', matcher)))
    return {
        "seriesQuery": f"{series}{{{labels}}}",
        "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
        "name": {"matches": f"^{series}$", "as": name},
        "metricsQuery": query,
    }
