"""Parser of a Triton server's /metrics: typed samples, and the rates and states derived from them.

Counters count since the server started, so every rate is computed from two scrapes. A value whose family is not
published, or without an event in the interval, is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trtpipe.engines.errors import InputDataError


@dataclass(frozen=True, kw_only=True)
class Family:
    """A metric family worth watching; docs/metrics.md and the dashboard name these and no others.

    `kind` is counter, gauge, histogram or summary; `label` is the family's own label besides `model` and `version`,
    with its values; `reference` tells whether a server of the reference runtime publishes it; `option` is the server
    option without which no server publishes it.
    """

    name: str
    kind: str
    unit: str
    source: str
    label: str = ""
    values: tuple[str, ...] = ()
    reference: bool = False
    option: str = ""


def _triton(name: str, kind: str, unit: str, **more: Any) -> Family:
    return Family(name=name, kind=kind, unit=unit, source="triton", **{"reference": True, **more})


def _engine(name: str, kind: str, unit: str, label: str, *values: str, reference: bool = False) -> Family:
    return Family(
        name=name, kind=kind, unit=unit, source="tensorrt_llm", label=label, values=values, reference=reference
    )


_REASONS = ("OTHER", "BACKEND", "CANCELED", "REJECTED")
_SUMMARY = {"option": "summary_latencies", "reference": False}
_GPU = {"label": "gpu_uuid", "reference": False}
_CACHE = {"option": "cache-config", "reference": False}

# As TensorRT-LLM 0.19 to 1.2 and Triton 24.10 and newer publish them. What older ones lack is in docs/metrics.md.
FAMILIES = (
    _triton("nv_inference_request_success", "counter", "requests"),
    _triton("nv_inference_request_failure", "counter", "requests", label="reason", values=_REASONS),
    _triton("nv_inference_count", "counter", "inferences"),
    _triton("nv_inference_exec_count", "counter", "executions"),
    _triton("nv_inference_request_duration_us", "counter", "us"),
    _triton("nv_inference_queue_duration_us", "counter", "us"),
    _triton("nv_inference_compute_input_duration_us", "counter", "us"),
    _triton("nv_inference_compute_infer_duration_us", "counter", "us"),
    _triton("nv_inference_compute_output_duration_us", "counter", "us"),
    _triton("nv_inference_pending_request_count", "gauge", "requests"),
    _triton(
        "nv_inference_first_response_histogram_ms", "histogram", "ms", option="histogram_latencies", reference=False
    ),
    _triton("nv_inference_request_summary_us", "summary", "us", **_SUMMARY),
    _triton("nv_inference_queue_summary_us", "summary", "us", **_SUMMARY),
    _triton("nv_inference_compute_input_summary_us", "summary", "us", **_SUMMARY),
    _triton("nv_inference_compute_infer_summary_us", "summary", "us", **_SUMMARY),
    _triton("nv_inference_compute_output_summary_us", "summary", "us", **_SUMMARY),
    _triton("nv_model_load_duration_secs", "gauge", "s", reference=False),
    _triton("nv_cache_num_hits_per_model", "counter", "requests", **_CACHE),
    _triton("nv_cache_num_misses_per_model", "counter", "requests", **_CACHE),
    _triton("nv_cache_hit_duration_per_model", "counter", "us", **_CACHE),
    _triton("nv_cache_miss_duration_per_model", "counter", "us", **_CACHE),
    _triton("nv_gpu_utilization", "gauge", "0 to 1", **_GPU),
    _triton("nv_gpu_memory_total_bytes", "gauge", "bytes", **_GPU),
    _triton("nv_gpu_memory_used_bytes", "gauge", "bytes", **_GPU),
    _triton("nv_gpu_power_usage", "gauge", "W", **_GPU),
    _triton("nv_gpu_power_limit", "gauge", "W", **_GPU),
    _triton("nv_energy_consumption", "counter", "J", **_GPU),
    _triton("nv_cpu_utilization", "gauge", "0 to 1"),
    _triton("nv_cpu_memory_total_bytes", "gauge", "bytes"),
    _triton("nv_cpu_memory_used_bytes", "gauge", "bytes"),
    _triton("nv_pinned_memory_pool_total_bytes", "gauge", "bytes"),
    _triton("nv_pinned_memory_pool_used_bytes", "gauge", "bytes"),
    _engine(
        "nv_trt_llm_request_metrics", "gauge", "requests", "request_type",
        "active", "max", "scheduled", "context", "waiting", reference=True,
    ),
    _engine("nv_trt_llm_runtime_memory_metrics", "gauge", "bytes", "memory_type", "cpu", "gpu", "pinned"),
    _engine(
        "nv_trt_llm_kv_cache_block_metrics", "gauge", "blocks", "kv_cache_block_type",
        "max", "free", "used", "tokens_per", "reused", "fraction", reference=True,
    ),
    _engine(
        "nv_trt_llm_inflight_batcher_metrics", "gauge", "requests, tokens", "inflight_batcher_specific_metric",
        "total_context_tokens", "generation_requests", "micro_batch_id", "paused_requests", reference=True,
    ),
    _engine(
        "nv_trt_llm_v1_metrics", "gauge", "tokens, slots", "v1_specific_metric",
        "total_context_tokens", "total_generation_tokens", "empty_generation_slots",
    ),
    _engine(
        "nv_trt_llm_general_metrics", "gauge", "us, steps", "general_type",
        "timestamp", "iteration_counter", reference=True,
    ),
    _engine(
        "nv_trt_llm_disaggregated_serving_metrics", "counter", "ms, requests", "disaggregated_serving_type",
        "kv_cache_transfer_ms", "request_count",
    ),
    Family(
        name="trtpipe_speculation", kind="gauge", unit="steps, tokens", source="trtpipe", label="speculation_type",
        values=("decode_steps", "draft_tokens", "accepted_draft_tokens"), option="build.speculative_decoding_mode",
    ),
    _engine(
        "nv_llm_input_token_len", "histogram", "tokens", "response_metric_type", "total_input_tokens", reference=True
    ),
    _engine(
        "nv_llm_output_token_len", "histogram", "tokens", "response_metric_type", "total_output_tokens", reference=True
    ),
)  # fmt: skip
KNOWN = {family.name: family for family in FAMILIES}

REQUESTS = "nv_trt_llm_request_metrics"
KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"
BATCHER = "nv_trt_llm_inflight_batcher_metrics"
GENERAL = "nv_trt_llm_general_metrics"
SPECULATION = "trtpipe_speculation"
INPUT_TOKENS, OUTPUT_TOKENS = "nv_llm_input_token_len", "nv_llm_output_token_len"
ENGINE = (REQUESTS, KV_BLOCKS, INPUT_TOKENS, OUTPUT_TOKENS)
# Of vLLM's own server, as its V1 engine publishes them; the parser leaves out a counter's suffix _total.
VLLM_RUNNING, VLLM_WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
VLLM_TOKENS, VLLM_KV = "vllm:generation_tokens", "vllm:kv_cache_usage_perc"
VLLM = (VLLM_RUNNING, VLLM_WAITING, VLLM_TOKENS, VLLM_KV)

# Most bytes and lines of a page, and bytes of a line: a server with a hundred models has a tenth of that. The parser
# takes quadratic time for a long line, and some 30 microseconds for a short one.
MAX_PAGE = 4 << 20
MAX_LINES = 50_000
MAX_LINE = 16 << 10

Labels = tuple[tuple[str, str], ...]
# Published as gauges, although they only grow until the server restarts.
GROWING = {
    (KV_BLOCKS, ("kv_cache_block_type", "reused")),
    (GENERAL, ("general_type", "iteration_counter")),
    *((SPECULATION, ("speculation_type", kind)) for kind in KNOWN[SPECULATION].values),
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One line of a scrape. `part` is the suffix of a histogram or summary: sum, count, bucket."""

    family: str
    part: str
    labels: Labels
    value: float
    grows: bool

    def has(self, labels: dict[str, str]) -> bool:
        own = dict(self.labels)
        return all(own.get(name) == value for name, value in labels.items())

    @property
    def scope(self) -> Labels:
        """Lifetime of the counter: a model's counters restart when it is reloaded, all counters with the server."""
        return tuple(label for label in self.labels if label[0] in ("model", "version", "gpu_uuid"))


@dataclass(frozen=True)
class Scrape:
    """Samples of one moment; `at_s` is a time of any clock that never goes back."""

    at_s: float
    samples: tuple[Sample, ...]

    @cached_property
    def _index(self) -> dict[tuple[str, str], list[Sample]]:
        index: dict[tuple[str, str], list[Sample]] = {}
        for sample in self.samples:
            index.setdefault((sample.family, sample.part), []).append(sample)
        return index

    def find(self, family: str, part: str = "", **labels: str) -> list[Sample]:
        return [sample for sample in self._index.get((family, part), ()) if sample.has(labels)]

    def total(self, family: str, part: str = "", **labels: str) -> float | None:
        """Sum of all series with these labels (over versions, reasons of failure); None if there is none."""
        found = self.find(family, part, **labels)
        # No quantity here is negative, but TensorRT-LLM's waiting requests (active minus scheduled) can be: cut at 0.
        return _finite(max(0.0, sum(sample.value for sample in found))) if found else None

    @property
    def is_known(self) -> bool:
        """Whether anything can be derived from it: whether Triton, TensorRT-LLM or vLLM has written it."""
        return any(sample.family in KNOWN or sample.family in VLLM for sample in self.samples)

    def values(self, label: str, *families: str) -> list[str]:
        """All values of a label, in these families or in any."""
        samples = [sample for sample in self.samples if not families or sample.family in families]
        return sorted({value for sample in samples for name, value in sample.labels if name == label})


def parse(text: str, at_s: float) -> Scrape:
    """Read Prometheus' text format; samples that are not finite numbers are left out. Raises InputDataError."""
    from prometheus_client.parser import text_string_to_metric_families

    within = len(text) <= MAX_PAGE and text.count("\n") < MAX_LINES
    if not within or max(map(len, text.split("\n"))) > MAX_LINE:
        raise InputDataError(
            "these metrics are too many to read",
            why=f"a page has at most {MAX_PAGE:,} bytes, {MAX_LINES:,} lines, and {MAX_LINE:,} bytes in one",
        )

    samples: dict[tuple[str, str, Labels], Sample] = {}
    try:
        for metric in text_string_to_metric_families(text):
            for line in metric.samples:
                value = float(line.value)
                if not math.isfinite(value):
                    continue  # a summary's quantile is NaN while nothing was observed
                # The parser gives a counter's samples the suffix _total, whether or not the server wrote it.
                part = "" if metric.type == "counter" else line.name[len(metric.name) :].removeprefix("_")
                labels = tuple(sorted(line.labels.items()))
                growing = any((metric.name, label) in GROWING for label in labels)
                grows = metric.type in ("counter", "histogram") or part in ("sum", "count") or growing
                samples[metric.name, part, labels] = Sample(
                    family=metric.name, part=part, labels=labels, value=value, grows=grows
                )
    except (ValueError, IndexError, OverflowError) as error:  # the parser's errors for an invalid line
        raise InputDataError("these are not metrics in Prometheus' text format", why=str(error)) from None
    return Scrape(at_s, tuple(samples.values()))


@dataclass(frozen=True)
class Change:
    """Change between two scrapes of one server."""

    before: Scrape | None
    after: Scrape

    @property
    def seconds(self) -> float | None:
        passed = None if self.before is None else self.after.at_s - self.before.at_s
        return passed if passed is not None and passed > 0 else None

    @cached_property
    def _were(self) -> dict[tuple[str, str, Labels], float]:
        samples = () if self.before is None else self.before.samples
        return {(s.family, s.part, s.labels): s.value for s in samples if s.grows}

    @cached_property
    def restarted(self) -> frozenset[Labels]:
        """Scopes in which a counter went down: all its counters restarted at 0, not only those that went down."""
        return frozenset(
            sample.scope
            for sample in self.after.samples
            if sample.grows and sample.value < self._were.get((sample.family, sample.part, sample.labels), 0.0)
        )

    def increase(self, family: str, part: str = "", **labels: str) -> float | None:
        """Growth of counters; a series absent before began at 0. None without the family or an interval."""
        found = self.after.find(family, part, **labels)
        if not found or self.seconds is None:
            return None
        grown = [
            sample.value
            if sample.scope in self.restarted
            else sample.value - self._were.get((family, part, sample.labels), 0.0)
            for sample in found
        ]
        return _finite(max(0.0, sum(grown)))

    def rate(self, family: str, part: str = "", **labels: str) -> float | None:
        return _ratio(self.increase(family, part, **labels), self.seconds)

    def mean_ms(self, family: str, model: str) -> float | None:
        """Milliseconds per successful request, from a counter in microseconds that only successful requests add to."""
        us = self.increase(family, model=model)
        return _scaled(_ratio(us, self.increase("nv_inference_request_success", model=model)), 1e-3)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _ratio(dividend: float | None, divisor: float | None) -> float | None:
    if dividend is None or divisor is None or divisor <= 0:
        return None
    return _finite(dividend / divisor)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else _finite(value * factor)


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """A model as Triton sees it. Counts are since the server started, times are means over the interval."""

    model: str
    succeeded: float | None
    failed: float | None
    pending: float | None
    succeeded_per_s: float | None
    failed_per_s: float | None
    request_ms: float | None
    queue_ms: float | None
    compute_ms: float | None
    first_response_ms: float | None


@dataclass(frozen=True, kw_only=True)
class EngineFigures:
    """The engine of a model. Counts of tokens and reused blocks are since the server started."""

    model: str
    input_tokens: float | None
    output_tokens: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    # Of answers that are being made, which `output_tokens` counts when they end: steps times generating requests.
    making_tokens_per_s: float | None
    in_flight: float | None
    in_flight_max: float | None
    # In the last step, while any request is in flight: on an idle engine the gauge would keep its old value.
    scheduled: float | None
    waiting: float | None
    paused: float | None
    steps_per_s: float | None
    kv_used: float | None
    kv_free: float | None
    kv_max: float | None
    kv_fraction: float | None
    kv_tokens_per_block: float | None
    kv_reused: float | None
    kv_reused_per_s: float | None
    # Share of the interval's prompt tokens that was found in the cache.
    kv_reuse_share: float | None
    # Of the interval: tokens of a request in a step after its first token, and the share of draft tokens that were
    # accepted. None without speculation.
    tokens_per_step: float | None = None
    draft_acceptance: float | None = None


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    uuid: str
    utilization: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None
    power_limit_w: float | None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a server. `seconds` is the interval of the rates, None after a first scrape.

    `restarted` names the models whose counters began anew within it.
    """

    seconds: float | None
    restarted: tuple[str, ...]
    models: tuple[ModelFigures, ...]
    engines: tuple[EngineFigures, ...]
    gpus: tuple[GpuFigures, ...]


def derive(before: Scrape | None, after: Scrape) -> Figures:
    """Figures of the later scrape, with rates since the earlier one."""
    change = Change(before, after)
    restarted = {value for scope in change.restarted for name, value in scope if name == "model"}
    return Figures(
        seconds=change.seconds,
        restarted=tuple(sorted(restarted)),
        models=tuple(_model(change, name) for name in after.values("model", "nv_inference_request_success")),
        engines=(
            *(_of_engine(change, name) for name in after.values("model", *ENGINE)),
            *(_of_vllm(change, name) for name in after.values("model_name", *VLLM)),
        ),
        gpus=tuple(_gpus(after)),
    )


def _model(change: Change, model: str) -> ModelFigures:
    success, failure = "nv_inference_request_success", "nv_inference_request_failure"
    first = "nv_inference_first_response_histogram_ms"
    return ModelFigures(
        model=model,
        succeeded=change.after.total(success, model=model),
        failed=change.after.total(failure, model=model),
        pending=change.after.total("nv_inference_pending_request_count", model=model),
        succeeded_per_s=change.rate(success, model=model),
        failed_per_s=change.rate(failure, model=model),
        request_ms=change.mean_ms("nv_inference_request_duration_us", model),
        queue_ms=change.mean_ms("nv_inference_queue_duration_us", model),
        compute_ms=change.mean_ms("nv_inference_compute_infer_duration_us", model),
        first_response_ms=_ratio(
            change.increase(first, "sum", model=model), change.increase(first, "count", model=model)
        ),
    )


def _of_engine(change: Change, model: str) -> EngineFigures:
    after = change.after

    def requests(kind: str) -> float | None:
        return after.total(REQUESTS, model=model, request_type=kind)

    def blocks(kind: str) -> float | None:
        return after.total(KV_BLOCKS, model=model, kv_cache_block_type=kind)

    steps = change.rate(GENERAL, model=model, general_type="iteration_counter")
    generating = after.total(BATCHER, model=model, inflight_batcher_specific_metric="generation_requests")
    if requests("active") == 0:
        generating = 0.0
    scheduled = requests("scheduled")
    if scheduled is not None and requests("active") == 0:
        scheduled = 0.0
    sizes = [max(0.0, s.value) for s in after.find(KV_BLOCKS, model=model, kv_cache_block_type="tokens_per")]
    tokens_per_block = max(sizes, default=None)
    reused = change.increase(KV_BLOCKS, model=model, kv_cache_block_type="reused")
    prompt = change.increase(INPUT_TOKENS, "sum", model=model)

    def drafts(kind: str) -> float | None:
        return change.increase(SPECULATION, model=model, speculation_type=kind)

    gained = _ratio(drafts("accepted_draft_tokens"), drafts("decode_steps"))
    share = _ratio(None if reused is None else _scaled(tokens_per_block, reused), prompt)
    return EngineFigures(
        model=model,
        input_tokens=after.total(INPUT_TOKENS, "sum", model=model),
        output_tokens=after.total(OUTPUT_TOKENS, "sum", model=model),
        input_tokens_per_s=change.rate(INPUT_TOKENS, "sum", model=model),
        output_tokens_per_s=change.rate(OUTPUT_TOKENS, "sum", model=model),
        making_tokens_per_s=None if steps is None or generating is None else _finite(steps * generating),
        in_flight=requests("active"),
        in_flight_max=requests("max"),
        scheduled=scheduled,
        waiting=requests("waiting"),
        paused=after.total(BATCHER, model=model, inflight_batcher_specific_metric="paused_requests"),
        steps_per_s=steps,
        kv_used=blocks("used"),
        kv_free=blocks("free"),
        kv_max=blocks("max"),
        # The gauge `fraction` is not used: older containers lack it, and fractions of two versions do not add up.
        kv_fraction=_ratio(blocks("used"), blocks("max")),
        kv_tokens_per_block=tokens_per_block,
        kv_reused=blocks("reused"),
        kv_reused_per_s=_ratio(reused, change.seconds),
        # Prompts are counted when a request ends, blocks when it begins, so a short interval can show a share above 1.
        kv_reuse_share=None if share is None else min(1.0, share),
        tokens_per_step=None if gained is None else 1 + gained,
        draft_acceptance=_ratio(drafts("accepted_draft_tokens"), drafts("draft_tokens")),
    )


def _of_vllm(change: Change, model: str) -> EngineFigures:
    """Figures of vLLM's own server: it counts tokens while answers are made, and tells its KV cache's share alone."""
    after = change.after
    used = [sample.value for sample in after.find(VLLM_KV, model_name=model)]  # one of each rank of data parallelism
    found: dict[str, Any] = {
        **dict.fromkeys(EngineFigures.__dataclass_fields__),
        "model": model,
        "output_tokens": after.total(VLLM_TOKENS, model_name=model),
        "output_tokens_per_s": change.rate(VLLM_TOKENS, model_name=model),
        "in_flight": after.total(VLLM_RUNNING, model_name=model),
        "waiting": after.total(VLLM_WAITING, model_name=model),
        "kv_fraction": max(used, default=None),
    }
    return EngineFigures(**found)


def _gpus(after: Scrape) -> Iterator[GpuFigures]:
    for uuid in after.values("gpu_uuid"):
        yield GpuFigures(
            uuid=uuid,
            utilization=after.total("nv_gpu_utilization", gpu_uuid=uuid),
            memory_used_bytes=after.total("nv_gpu_memory_used_bytes", gpu_uuid=uuid),
            memory_total_bytes=after.total("nv_gpu_memory_total_bytes", gpu_uuid=uuid),
            power_w=after.total("nv_gpu_power_usage", gpu_uuid=uuid),
            power_limit_w=after.total("nv_gpu_power_limit", gpu_uuid=uuid),
        )
