"""Monitoring of a served repository: a Grafana dashboard, a Prometheus scrape config and alert rules.

The files are written beside the repository, never in it: Triton takes every folder of a repository for a model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from trtpipe.engines.errors import UsageError

JOB = "trtpipe"
FOLDER = "monitoring"
DASHBOARD, SCRAPE, ALERTS = "grafana-dashboard.json", "prometheus.yml", "alerts.yml"
TARGETS = ("localhost:8002",)
# Version that Grafana 11.6 and 12 write; newer ones update older dashboards when they load them.
SCHEMA_VERSION = 41

KV_FULL = 0.95

_COLUMNS = 24
_HEIGHT = 8
# Every panel follows the two selectors at the top of the dashboard; those of GPUs and hosts only the first.
_SERVER = 'instance=~"$instance"'
_MODEL = 'instance=~"$instance",model=~"$model"'
_BY = "sum by (instance, model)"

Panel = dict[str, Any]


def write_monitoring(repository_models: Iterable[str], out: Path, *, targets: Sequence[str] = TARGETS) -> Path:
    """Write OUT/monitoring/ for a repository with these models, served at `targets` (host:port of the metrics).

    Returns the folder. Raises UsageError if `out` is a model repository.
    """
    if out.is_dir() and any(out.glob("*/config.pbtxt")):
        raise UsageError(
            f"{out} is a model repository",
            why=f"Triton would take the folder '{FOLDER}' in it for a model",
            remedy="name a folder beside it",
        )
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DASHBOARD).write_text(json.dumps(dashboard(), indent=2) + "\n", encoding="utf-8")
    for name, content in ((SCRAPE, scrape_config(targets)), (ALERTS, alert_rules(sorted(set(repository_models))))):
        (folder / name).write_text(yaml.safe_dump(content, sort_keys=False, width=120), encoding="utf-8")
    return folder


def scrape_config(targets: Sequence[str]) -> dict[str, Any]:
    """Five seconds miss little: Triton renews its own gauges every two seconds, the engine's ten times a second."""
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": [ALERTS],
        "scrape_configs": [
            {
                "job_name": JOB,
                "metrics_path": "/metrics",
                "static_configs": [{"targets": list(targets)}],
            }
        ],
    }


def alert_rules(models: Sequence[str]) -> dict[str, Any]:
    own = f'job="{JOB}"'
    kv_use = f"{_blocks('used', own)} / {_blocks('max', own)}"
    waiting = f'{_BY} (nv_trt_llm_request_metrics{{{own},request_type="waiting"}})'
    # A request that its client cancelled is no failure of the server.
    failed = f'rate(nv_inference_request_failure{{{own},reason!="CANCELED"}}[5m])'
    succeeded = f"rate(nv_inference_request_success{{{own}}}[5m])"
    rules = [
        _alert(
            "TrtpipeServerDown",
            f"up{{{own}}} == 0 or absent(up{{{own}}})",
            "1m",
            "critical",
            "a server does not answer: {{ $labels.instance }}",
            "Prometheus gets no metrics: the server has ended, hangs, or its metrics port is not reachable. See "
            "`trtpipe ps` and `trtpipe logs`.",
        ),
        _alert(
            "TrtpipeRequestsFail",
            f"{_BY} ({failed}) / ({_BY} ({failed}) + {_BY} ({succeeded})) > 0.01",
            "5m",
            "warning",
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} fail",
            "The server's log names each failure. An ensemble counts a failed request twice, for itself and for the "
            "step that failed, so the true share can be half of this.",
        ),
        _alert(
            "TrtpipeRequestsWait",
            f"{waiting} > 0 and {kv_use} > {KV_FULL}",
            "5m",
            "critical",
            "{{ $value }} requests wait for KV-cache blocks on {{ $labels.instance }}",
            "The cache is full and requests queue inside the engine, where Triton's queue time does not see them. Add "
            "a replica, shorten max_tokens, quantize the KV cache, or give it more of the GPU's memory.",
        ),
        _alert(
            "TrtpipeKvCacheFull",
            f"{kv_use} > {KV_FULL}",
            "10m",
            "warning",
            "{{ $value | humanizePercentage }} of the KV cache of {{ $labels.model }} is in use",
            "The next requests will wait for blocks. Nothing is wrong yet if none do.",
        ),
        _alert(
            "TrtpipeEngineFull",
            f"{_requests('active', own)} >= {_requests('max', own)}",
            "10m",
            "warning",
            "{{ $labels.model }} has as many requests in flight as it was built for",
            "More requests queue where no metric counts them. Add a replica, or build with a larger max_batch_size if "
            "the KV cache has room.",
        ),
    ]
    rules += [
        _alert(
            "TrtpipeModelMissing",
            f"absent(nv_inference_request_success{{{own},model={json.dumps(model)}}}) and on () max(up{{{own}}}) == 1",
            "5m",
            "critical",
            "no server has loaded the model {{ $labels.model }}",
            "A server answers, but this model of the repository is not loaded. Its log says why.",
            model=model,
        )
        for model in models
    ]
    return {"groups": [{"name": JOB, "rules": rules}]}


def _alert(
    name: str, expr: str, wait: str, severity: str, summary: str, description: str, **labels: str
) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "description": description},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's classic JSON model. One serves any number of servers and repositories."""
    panels = _place(
        [
            ("At a glance", _glance()),
            ("Requests", _request_panels()),
            ("Tokens", _token_panels()),
            ("Engine", _engine_panels()),
            ("KV cache", _kv_panels()),
            ("Where the time goes", _time_panels()),
            ("GPUs", _gpu_panels()),
            ("Host", _host_panels()),
        ]
    )
    return {
        "uid": "trtpipe",
        "title": "trtpipe: Triton and TensorRT-LLM",
        "description": "A served model repository. Every panel says what it shows and what to do when it is bad.",
        "tags": ["triton", "tensorrt-llm", "trtpipe"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "prometheus", "uid": "${datasource}"}

    def chooser(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": source,
            "definition": query,
            "query": {"query": query, "refId": f"{name}-variable"},
            "refresh": 2,  # when the time range changes, so that a new server appears
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
            "hide": 0,
        }

    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "multi": False,
            "includeAll": False,
            "refresh": 1,
            "hide": 0,
        },
        chooser("instance", "Server", "label_values(nv_inference_request_success, instance)"),
        chooser("model", "Model", 'label_values(nv_inference_request_success{instance=~"$instance"}, model)'),
    ]


def _glance() -> list[Panel]:
    return [
        _stat(
            "Servers",
            "none",
            f'sum(up{{job="{JOB}",{_SERVER}}})',
            "Servers that answer Prometheus. Fewer than you started: one has ended or its port is not reachable; see "
            "`trtpipe ps` and `trtpipe logs`.",
        ),
        _stat(
            "Requests",
            "reqps",
            f"sum({_rate('nv_inference_request_success')} and on (instance, model) "
            f'nv_trt_llm_request_metrics{{request_type="active"}})',
            "Requests a second that an engine took. Not all models' sum: a request through the ensemble counts in each "
            "of its steps, and in postprocessing once for each response.",
        ),
        _stat(
            "Output tokens",
            "suffix: tokens/s",
            f"sum({_rate('nv_llm_output_token_len_sum')})",
            "Tokens of answers that ended, a second. Long answers arrive in lumps: widen the time range to smooth it.",
        ),
        _stat(
            "Waiting requests",
            "none",
            f"sum({_requests('waiting', _MODEL)})",
            "Requests inside the engine that took no part in its last step. Above 0 for long: the KV cache or the "
            "batch is full; see the panels below, add a replica.",
            (1, 10),
        ),
        _stat(
            "KV cache in use",
            "percentunit",
            f"max({_blocks('used', _MODEL)} / {_blocks('max', _MODEL)})",
            "Of the fullest engine. Near 1 new requests wait for blocks; the panels of the KV cache say what helps.",
            (0.8, KV_FULL),
        ),
        _stat(
            "GPU busy",
            "percentunit",
            f"avg(nv_gpu_utilization{{{_SERVER}}})",
            "Share of time in which a kernel ran, mean of all GPUs. Low while requests wait: the limit is elsewhere, "
            "in preprocessing or the clients. No data: the server sees no GPU.",
        ),
    ]


def _request_panels() -> list[Panel]:
    return [
        _series(
            "Successful requests",
            "reqps",
            [(f"{_BY} ({_rate('nv_inference_request_success')})", "{{model}}")],
            "Requests that Triton answered, a second, by model. Decoupled Python models count a request as successful "
            "when it was taken, whatever became of it, and the steps of an ensemble once for each response: trust the "
            "front model, ensemble or BLS.",
        ),
        _series(
            "Failed requests",
            "reqps",
            [
                (
                    f"sum by (instance, model, reason) ({_rate('nv_inference_request_failure')})",
                    "{{model}} {{reason}}",
                )
            ],
            "Failures a second by reason: REJECTED by the queue policy (add a replica), BACKEND in the "
            "model (see the log), CANCELED by the client, OTHER. An ensemble counts each failure twice, as OTHER. "
            "Errors that a decoupled model sends as a response, and requests that HTTP refuses, are in none.",
        ),
        _series(
            "Time of a request",
            "ms",
            [(_mean_ms("nv_inference_request_duration_us"), "{{model}}")],
            "Mean time from arrival to last response, of successful requests. It grows with the answers' length: "
            "compare with tokens a request before worrying. For decoupled Python models it ends when the request was "
            "taken; the ensemble's is whole.",
        ),
    ]


def _token_panels() -> list[Panel]:
    def mean(family: str) -> str:
        return f"{_BY} ({_rate(family + '_sum')}) / {_BY} ({_rate(family + '_count')})"

    return [
        _series(
            "Tokens",
            "suffix: tokens/s",
            [
                (f"{_BY} ({_rate('nv_llm_input_token_len_sum')})", "{{model}} in"),
                (f"{_BY} ({_rate('nv_llm_output_token_len_sum')})", "{{model}} out"),
            ],
            "Tokens of prompts and of answers a second, counted when a request ends. Falls while requests wait: the "
            "engine is at its limit. Falls while none do: the clients send less.",
            width=12,
        ),
        _series(
            "Tokens a request",
            "suffix: tokens",
            [
                (mean("nv_llm_input_token_len"), "{{model}} in"),
                (mean("nv_llm_output_token_len"), "{{model}} out"),
            ],
            "Mean length of prompts and answers. A jump explains one in time and in KV-cache use. Answers that all "
            "reach max_tokens often lack a stop token: check end_id and stop_words.",
            width=12,
        ),
    ]


def _engine_panels() -> list[Panel]:
    batcher = "nv_trt_llm_inflight_batcher_metrics"
    label = "inflight_batcher_specific_metric"
    return [
        _series(
            "Requests in the engine",
            "none",
            [
                (_requests("active", _MODEL), "{{model}} in flight"),
                (_requests("scheduled", _MODEL), "{{model}} in the last step"),
                (f"clamp_min({_requests('waiting', _MODEL)}, 0)", "{{model}} waiting"),
                (_requests("max", _MODEL), "{{model}} limit"),
            ],
            "TensorRT-LLM's own queue, which Triton's queue time does not contain. Waiting above 0: the KV cache or "
            "the token budget of a step is full. In flight at the limit: more requests queue where nobody counts "
            "them; add a replica or build with a larger max_batch_size. The gauges keep the last step's values while "
            "nothing runs.",
        ),
        _series(
            "The last step",
            "none",
            [
                (_gauge(batcher, label, "generation_requests"), "{{model}} generating"),
                (_requests("context", _MODEL), "{{model}} reading prompts"),
                (_gauge(batcher, label, "paused_requests"), "{{model}} paused"),
            ],
            "What the last step worked on. Prompts stall answers unless enable_chunked_context is on. Paused above 0: "
            "max_utilization took blocks from running requests, which are computed again later; use "
            "guaranteed_no_evict or add KV cache.",
        ),
        _series(
            "Steps",
            "suffix: steps/s",
            [(f"{_BY} ({_rate('nv_trt_llm_general_metrics', 'general_type', 'iteration_counter')})", "{{model}}")],
            "Steps of the in-flight batch a second. One step gives each generating request a token: its inverse is "
            "the time between tokens. 0 with requests in flight: the engine hangs; restart the server and keep its "
            "log.",
        ),
    ]


def _kv_panels() -> list[Panel]:
    blocks = "nv_trt_llm_kv_cache_block_metrics"
    reused = f"{_BY} ({_rate(blocks, 'kv_cache_block_type', 'reused')})"
    size = f'max by (instance, model) ({blocks}{{{_MODEL},kv_cache_block_type="tokens_per"}})'
    prompts = f"{_BY} ({_rate('nv_llm_input_token_len_sum')})"
    return [
        _series(
            "KV cache in use",
            "percentunit",
            [(f"{_blocks('used', _MODEL)} / {_blocks('max', _MODEL)}", "{{model}}")],
            "Share of the blocks that requests hold; those kept for reuse count as free. Above 0.95 new requests "
            "wait: raise kv_cache_free_gpu_mem_fraction, quantize the cache, shorten max_tokens or add a replica. "
            "Low under load: max_batch_size is the limit, not memory.",
            most=1.0,
            thresholds=(0.8, KV_FULL),
        ),
        _series(
            "KV-cache blocks",
            "none",
            [
                (_blocks("used", _MODEL), "{{model}} used"),
                (_blocks("free", _MODEL), "{{model}} free"),
            ],
            "Blocks of tokens_per tokens. The sum is fixed when the engine loads, from the GPU memory left then: less "
            "than planned means that something else held memory at that time.",
            stack=True,
        ),
        _series(
            "KV-cache reuse",
            "percentunit",
            [(f"clamp_max({reused} * {size} / {prompts}, 1)", "{{model}} of the prompt tokens")],
            "Share of prompt tokens found in the cache instead of computed. 0 although prompts begin alike: "
            "enable_kv_cache_reuse is off, the common part is shorter than a block, or the cache is too small to keep "
            "it.",
            most=1.0,
        ),
    ]


def _time_panels() -> list[Panel]:
    histogram = _rate("nv_inference_first_response_histogram_ms_bucket")
    first = f"sum by (le, instance, model) ({histogram})"
    return [
        _series(
            "Queue and compute",
            "ms",
            [
                (_mean_ms("nv_inference_queue_duration_us"), "{{model}} queue"),
                (_mean_ms("nv_inference_compute_infer_duration_us"), "{{model}} compute"),
            ],
            "Mean time in Triton's queue and in the model. The queue ends when the engine takes the request: waiting "
            "inside the engine counts as compute, so do not scale on this; use waiting requests. A long queue of "
            "pre- or postprocessing wants more instances of it.",
        ),
        _series(
            "First response",
            "ms",
            [
                (f"histogram_quantile(0.5, {first})", "{{model}} p50"),
                (f"histogram_quantile(0.9, {first})", "{{model}} p90"),
                (f"histogram_quantile(0.99, {first})", "{{model}} p99"),
            ],
            "Time to the first response of decoupled models, which is the first token when the client streams and the "
            "whole answer when it does not. Needs `--metrics-config histogram_latencies=true` and a Triton newer than "
            "24.10. Grows with waiting requests and with long prompts.",
        ),
        _series(
            "Pending in Triton",
            "none",
            [(f"{_BY} (nv_inference_pending_request_count{{{_MODEL}}})", "{{model}}")],
            "Requests that Triton holds and no backend has taken. Above 0 for long: too few instances of that model. "
            "It says nothing of the engine's own queue, which takes all that comes.",
        ),
    ]


def _gpu_panels() -> list[Panel]:
    energy = f"sum by (instance) (rate(nv_energy_consumption{{{_SERVER}}}[$__rate_interval]))"
    tokens = f"sum by (instance) (rate(nv_llm_output_token_len_sum{{{_SERVER}}}[$__rate_interval]))"
    return [
        _series(
            "GPU busy",
            "percentunit",
            [(f"nv_gpu_utilization{{{_SERVER}}}", "{{gpu_uuid}}")],
            "Share of time in which a kernel ran; full does not mean efficient. Low while requests wait: look at "
            "pre- and postprocessing. Zero on one of several GPUs: a rank is gone.",
            most=1.0,
            width=6,
        ),
        _series(
            "GPU memory",
            "bytes",
            [
                (f"nv_gpu_memory_used_bytes{{{_SERVER}}}", "{{gpu_uuid}} used"),
                (f"nv_gpu_memory_total_bytes{{{_SERVER}}}", "{{gpu_uuid}} of"),
            ],
            "TensorRT-LLM takes its KV cache when it loads, so used is high and flat. Growing: another process, or "
            "a leak.",
            width=6,
        ),
        _series(
            "GPU power",
            "watt",
            [
                (f"nv_gpu_power_usage{{{_SERVER}}}", "{{gpu_uuid}}"),
                (f"nv_gpu_power_limit{{{_SERVER}}}", "{{gpu_uuid}} limit"),
            ],
            "At its limit a GPU lowers its clocks: throughput is then bounded by power or cooling.",
            width=6,
        ),
        _series(
            "Energy of a token",
            "joule",
            [(f"{energy} / {tokens}", "{{instance}}")],
            "Joules of all GPUs of a server for each output token. High at low load, because idle GPUs draw power "
            "too: fewer, fuller replicas cost less.",
            width=6,
        ),
        _series(
            "Memory of the engine",
            "bytes",
            [
                (
                    f"sum by (instance, model, memory_type) (nv_trt_llm_runtime_memory_metrics{{{_MODEL}}})",
                    "{{model}} {{memory_type}}",
                )
            ],
            "What the runtime itself has allocated, by kind. Flat after warm-up; growth is a leak worth a report.",
            width=12,
        ),
        _series(
            "Time to load",
            "s",
            [(f"nv_model_load_duration_secs{{{_MODEL}}}", "{{model}}")],
            "How long each model took to load. Startup probes and autoscalers must wait longer than the longest.",
            width=12,
        ),
    ]


def _host_panels() -> list[Panel]:
    return [
        _series(
            "CPU busy",
            "percentunit",
            [(f"nv_cpu_utilization{{{_SERVER}}}", "{{instance}}")],
            "Of all cores of the host. Near 1: tokenizing and sending responses are the limit; give the server more "
            "cores before more GPUs.",
            most=1.0,
            width=12,
        ),
        _series(
            "Host memory",
            "bytes",
            [
                (f"nv_cpu_memory_used_bytes{{{_SERVER}}}", "{{instance}} used"),
                (f"nv_cpu_memory_total_bytes{{{_SERVER}}}", "{{instance}} of"),
                (f"nv_pinned_memory_pool_used_bytes{{{_SERVER}}}", "{{instance}} pinned pool"),
            ],
            "Memory of the host, not of the server alone. Growing without end: a leak in a Python model or a client "
            "that never reads its responses.",
            width=12,
        ),
    ]


# -- expressions -------------------------------------------------------------------------------------------------------


def _rate(series: str, label: str = "", value: str = "") -> str:
    own = f',{label}="{value}"' if label else ""
    return f"rate({series}{{{_MODEL}{own}}}[$__rate_interval])"


def _gauge(family: str, label: str, value: str, chosen: str = _MODEL) -> str:
    return f'{_BY} ({family}{{{chosen},{label}="{value}"}})'


def _requests(kind: str, chosen: str) -> str:
    return _gauge("nv_trt_llm_request_metrics", "request_type", kind, chosen)


def _blocks(kind: str, chosen: str) -> str:
    return _gauge("nv_trt_llm_kv_cache_block_metrics", "kv_cache_block_type", kind, chosen)


def _mean_ms(counter: str) -> str:
    return f"{_BY} ({_rate(counter)}) / {_BY} ({_rate('nv_inference_request_success')}) / 1000"


# -- panels ------------------------------------------------------------------------------------------------------------


def _panel(kind: str, title: str, unit: str, description: str, width: int) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "gridPos": {"w": width, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
    }


def _targets(expressions: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + number),
            "expr": expr,
            "legendFormat": f"{legend} {{{{instance}}}}" if legend and "{{instance}}" not in legend else legend,
            "range": True,
            "editorMode": "code",
        }
        for number, (expr, legend) in enumerate(expressions)
    ]


def _thresholds(limits: Sequence[float]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": limit} for color, limit in zip(("yellow", "red"), limits, strict=False)]
    return {"mode": "absolute", "steps": steps}


def _series(
    title: str, unit: str, expressions: Sequence[tuple[str, str]], description: str, *,
    width: int = 8, most: float | None = None, stack: bool = False, thresholds: Sequence[float] = (),
) -> Panel:  # fmt: skip
    panel = _panel("timeseries", title, unit, description, width)
    panel["targets"] = _targets(expressions)
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if stack:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if thresholds:
        custom["thresholdsStyle"] = {"mode": "line"}
        panel["fieldConfig"]["defaults"]["thresholds"] = _thresholds(thresholds)
    if most is not None:
        panel["fieldConfig"]["defaults"]["max"] = most
    panel["fieldConfig"]["defaults"]["custom"] = custom
    panel["options"] = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel


def _stat(title: str, unit: str, expr: str, description: str, thresholds: Sequence[float] = ()) -> Panel:
    panel = _panel("stat", title, unit, description, width=4)
    panel["gridPos"]["h"] = 4
    panel["targets"] = _targets([(expr, "")])
    panel["fieldConfig"]["defaults"]["thresholds"] = _thresholds(thresholds)
    panel["options"] = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto",
    }
    return panel


def _place(rows: Sequence[tuple[str, Sequence[Panel]]]) -> list[Panel]:
    """Number the panels and lay them out from left to right, each group below a row with its name."""
    placed: list[Panel] = []
    top = 0
    for title, panels in rows:
        placed.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _at(0, top, 24, 1)})
        top += 1
        left = height = 0
        for panel in panels:
            size = panel["gridPos"]
            if left + size["w"] > _COLUMNS:
                left, top, height = 0, top + height, 0
            placed.append({**panel, "gridPos": _at(left, top, size["w"], size["h"])})
            left, height = left + size["w"], max(height, size["h"])
        top += height
    return [{"id": number, **panel} for number, panel in enumerate(placed, start=1)]


def _at(left: int, top: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}
