"""Prometheus text as Triton writes it -> samples -> figures; with what is absent, reset or nonsense."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT
from trtpipe.engines.errors import InputDataError
from trtpipe.pipeline.net.triton_metrics import (
    FAMILIES,
    KNOWN,
    EngineFigures,
    Figures,
    ModelFigures,
    Scrape,
    derive,
    parse,
)

# A Triton 2.51 serving an ensemble on the reference runtime with token lengths, some models left out.
FIRST = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ensemble",version="1"} 4
nv_inference_request_success{model="tensorrt_llm",version="1"} 6
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="ensemble",reason="OTHER",version="1"} 2
nv_inference_request_failure{model="ensemble",reason="BACKEND",version="1"} 0
nv_inference_request_failure{model="tensorrt_llm",reason="CANCELED",version="1"} 0
# HELP nv_inference_request_duration_us Cumulative inference request duration in microseconds (includes cached requests)
# TYPE nv_inference_request_duration_us counter
nv_inference_request_duration_us{model="ensemble",version="1"} 3889721
nv_inference_request_duration_us{model="tensorrt_llm",version="1"} 49743
# HELP nv_inference_queue_duration_us Cumulative inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_duration_us counter
nv_inference_queue_duration_us{model="ensemble",version="1"} 10
nv_inference_queue_duration_us{model="tensorrt_llm",version="1"} 1287
# HELP nv_inference_compute_infer_duration_us Cumulative compute inference duration in microseconds
# TYPE nv_inference_compute_infer_duration_us counter
nv_inference_compute_infer_duration_us{model="ensemble",version="1"} 117213
nv_inference_compute_infer_duration_us{model="tensorrt_llm",version="1"} 50000
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="ensemble",version="1"} 0
nv_inference_pending_request_count{model="tensorrt_llm",version="1"} 3
# HELP nv_pinned_memory_pool_total_bytes Pinned memory pool total memory size, in bytes
# TYPE nv_pinned_memory_pool_total_bytes gauge
nv_pinned_memory_pool_total_bytes 268435456
# HELP nv_trt_llm_request_metrics TRT LLM request metrics
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 12
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 32
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 14
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.75
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused",model="tensorrt_llm",version="1"} 40
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 32
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 768
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 256
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 1024
# HELP nv_trt_llm_inflight_batcher_metrics TRT LLM inflight_batcher-specific metrics
# TYPE nv_trt_llm_inflight_batcher_metrics gauge
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="paused_requests",model="tensorrt_llm",version="1"}\t1
nv_trt_llm_inflight_batcher_metrics{inflight_batcher_specific_metric="generation_requests",\
model="tensorrt_llm",version="1"} 11
# HELP nv_trt_llm_general_metrics General TRT LLM metrics
# TYPE nv_trt_llm_general_metrics gauge
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 50
# HELP trtpipe_speculation Speculative decoding, so far
# TYPE trtpipe_speculation gauge
trtpipe_speculation{model="tensorrt_llm",speculation_type="decode_steps",version="1"} 100
trtpipe_speculation{model="tensorrt_llm",speculation_type="draft_tokens",version="1"} 300
trtpipe_speculation{model="tensorrt_llm",speculation_type="accepted_draft_tokens",version="1"} 90
# HELP nv_llm_input_token_len TRT LLM response metrics
# TYPE nv_llm_input_token_len histogram
nv_llm_input_token_len_count{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 8
nv_llm_input_token_len_sum{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1"} 1000
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="10"} 1
nv_llm_input_token_len_bucket{model="tensorrt_llm",response_metric_type="total_input_tokens",version="1",le="+Inf"} 8
# HELP nv_llm_output_token_len TRT LLM response metrics
# TYPE nv_llm_output_token_len histogram
nv_llm_output_token_len_count{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 8
nv_llm_output_token_len_sum{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1"} 500
nv_llm_output_token_len_bucket{model="tensorrt_llm",response_metric_type="total_output_tokens",version="1",le="+Inf"} 8
# HELP nv_inference_queue_summary_us Summary of inference queuing duration in microseconds (includes cached requests)
# TYPE nv_inference_queue_summary_us summary
nv_inference_queue_summary_us_count{model="ensemble",version="1"} 4
nv_inference_queue_summary_us_sum{model="ensemble",version="1"} 10
nv_inference_queue_summary_us{model="ensemble",version="1",quantile="0.5"} Nan
"""

GPU = """\
# HELP nv_gpu_utilization GPU utilization rate [0.0 - 1.0)
# TYPE nv_gpu_utilization gauge
nv_gpu_utilization{gpu_uuid="GPU-1ccddeda-8caf-7d8e-cfe2-a63cddeaafd2"} 0.97
# TYPE nv_gpu_memory_total_bytes gauge
nv_gpu_memory_total_bytes{gpu_uuid="GPU-1ccddeda-8caf-7d8e-cfe2-a63cddeaafd2"} 85899345920.000000
# TYPE nv_gpu_power_usage gauge
nv_gpu_power_usage{gpu_uuid="GPU-1ccddeda-8caf-7d8e-cfe2-a63cddeaafd2"} 641.250000
# TYPE nv_energy_consumption counter
nv_energy_consumption{gpu_uuid="GPU-1ccddeda-8caf-7d8e-cfe2-a63cddeaafd2"} 123456.7
"""

FIRST_RESPONSE = """\
# HELP nv_inference_first_response_histogram_ms Duration from request to first response in milliseconds
# TYPE nv_inference_first_response_histogram_ms histogram
nv_inference_first_response_histogram_ms_count{{model="ensemble",version="1"}} {count}
nv_inference_first_response_histogram_ms_sum{{model="ensemble",version="1"}} {sum}
nv_inference_first_response_histogram_ms_bucket{{model="ensemble",version="1",le="100"}} {count}
nv_inference_first_response_histogram_ms_bucket{{model="ensemble",version="1",le="+Inf"}} {count}
"""

# Half a minute later, as (start of the lines, what they say then).
LATER = {
    'nv_inference_request_success{model="ensemble"': 64,
    'nv_inference_request_success{model="tensorrt_llm"': 66,
    'nv_inference_request_failure{model="ensemble",reason="OTHER"': 8,
    'nv_inference_request_failure{model="ensemble",reason="BACKEND"': 3,
    'nv_inference_request_duration_us{model="ensemble"': 3889721 + 60 * 1_500_000,
    'nv_inference_queue_duration_us{model="ensemble"': 10 + 60 * 250,
    'nv_inference_compute_infer_duration_us{model="ensemble"': 117213 + 60 * 900_000,
    'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="reused"': 40 + 45,
    'nv_trt_llm_general_metrics{general_type="iteration_counter"': 50 + 600,
    'trtpipe_speculation{model="tensorrt_llm",speculation_type="decode_steps"': 100 + 800,
    'trtpipe_speculation{model="tensorrt_llm",speculation_type="draft_tokens"': 300 + 2400,
    'trtpipe_speculation{model="tensorrt_llm",speculation_type="accepted_draft_tokens"': 90 + 600,
    "nv_llm_input_token_len_sum": 1000 + 4800,
    "nv_llm_output_token_len_sum": 500 + 1500,
}


def changed(text: str, changes: Mapping[str, float]) -> str:
    """The scrape with other numbers in the lines that start so."""
    for start, value in changes.items():
        text, count = re.subn(rf"^({re.escape(start)}\S*) \S+$", rf"\g<1> {value}", text, flags=re.MULTILINE)
        assert count, start
    return text


def between(first: str, second: str, seconds: float = 30.0) -> Figures:
    return derive(parse(first, 100.0), parse(second, 100.0 + seconds))


def model(figures: Figures, name: str = "ensemble") -> ModelFigures:
    return next(entry for entry in figures.models if entry.model == name)


def engine(figures: Figures) -> EngineFigures:
    (only,) = figures.engines
    return only


def test_samples_keep_their_family_part_and_labels() -> None:
    scrape = parse(FIRST, 1.5)
    assert scrape.at_s == 1.5
    # A counter keeps the name Triton gave it, without the suffix other servers' counters have.
    (success,) = scrape.find("nv_inference_request_success", model="ensemble")
    assert (success.family, success.part, success.value, success.grows) == ("nv_inference_request_success", "", 4, True)
    assert success.labels == (("model", "ensemble"), ("version", "1"))
    (bucket,) = scrape.find("nv_llm_input_token_len", "bucket", le="10")
    assert (bucket.value, bucket.grows) == (1, True)
    (waiting,) = scrape.find("nv_trt_llm_request_metrics", request_type="waiting")
    assert (waiting.value, waiting.grows) == (2, False)
    (reused,) = scrape.find("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="reused")
    assert reused.grows
    # The quantile that is not a number is left out, its count is not.
    assert not scrape.find("nv_inference_queue_summary_us")
    assert scrape.total("nv_inference_queue_summary_us", "count") == 4


def test_labels_may_hold_whatever_a_model_s_name_holds() -> None:
    name = 'a "quoted" \\ name, with {braces} and = signs'
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    text = f'# TYPE nv_inference_request_success counter\nnv_inference_request_success{{model="{escaped}"}} 7\n'
    assert model(derive(None, parse(text, 0.0)), name).succeeded == 7


@pytest.mark.parametrize(
    "text", ["<html><body>404</body></html>", "a b c\n", 'x{y="1" 2\n', 'x{="1"} 2\n', "x 1_000\n", "x " + "9" * 400]
)
def test_what_is_no_prometheus_text_is_refused(text: str) -> None:
    with pytest.raises(InputDataError, match="not metrics in Prometheus' text format"):
        parse(text, 0.0)


@given(st.text() | st.text(alphabet='{}=",\\ #_a1.\n\t', max_size=60).map("x{{{}".format))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(InputDataError):
        derive(None, parse(text, 0.0))


def test_one_scrape_has_states_and_counts_but_no_rates() -> None:
    figures = derive(None, parse(FIRST, 100.0))
    assert figures.seconds is None
    assert [entry.model for entry in figures.models] == ["ensemble", "tensorrt_llm"]
    assert model(figures) == ModelFigures(
        model="ensemble", succeeded=4, failed=2, pending=0, succeeded_per_s=None, failed_per_s=None,
        request_ms=None, queue_ms=None, compute_ms=None, first_response_ms=None,
    )  # fmt: skip
    assert engine(figures) == EngineFigures(
        model="tensorrt_llm", input_tokens=1000, output_tokens=500, input_tokens_per_s=None, output_tokens_per_s=None,
        making_tokens_per_s=None, in_flight=14, in_flight_max=32, scheduled=12, waiting=2, paused=1, steps_per_s=None,
        kv_used=768, kv_free=256, kv_max=1024, kv_fraction=0.75, kv_tokens_per_block=32,
        kv_reused=40, kv_reused_per_s=None, kv_reuse_share=None,
    )  # fmt: skip
    assert figures.gpus == ()


def test_two_scrapes_give_rates_and_means_over_their_interval() -> None:
    figures = between(FIRST, changed(FIRST, LATER))
    assert (figures.seconds, figures.restarted) == (30.0, ())
    ensemble = model(figures)
    assert ensemble.succeeded_per_s == 2.0
    assert ensemble.failed_per_s == pytest.approx(9 / 30)  # of both reasons
    assert (ensemble.request_ms, ensemble.queue_ms, ensemble.compute_ms) == (1500.0, 0.25, 900.0)
    tokens = engine(figures)
    assert (tokens.input_tokens_per_s, tokens.output_tokens_per_s) == (160.0, 50.0)
    assert tokens.steps_per_s == 20.0
    # 20 steps a second, with 11 generating requests in the last.
    assert tokens.making_tokens_per_s == 220.0
    assert tokens.kv_reused_per_s == 1.5
    assert tokens.kv_reuse_share == pytest.approx(45 * 32 / 4800)
    # The tensorrt_llm model answered 60 requests whose durations did not grow.
    assert model(figures, "tensorrt_llm").request_ms == 0


def test_nothing_happened_is_a_rate_of_0_and_no_mean() -> None:
    figures = between(FIRST, FIRST)
    assert (model(figures).succeeded_per_s, model(figures).queue_ms) == (0.0, None)
    assert (engine(figures).output_tokens_per_s, engine(figures).kv_reuse_share) == (0.0, None)


def test_the_first_response_is_the_histogram_s_mean_over_the_interval() -> None:
    first, second = (
        FIRST + FIRST_RESPONSE.format(count=count, sum=total) for count, total in ((37, 10771), (40, 11371))
    )
    assert model(between(first, second)).first_response_ms == 200.0
    assert model(between(first, second), "tensorrt_llm").first_response_ms is None
    assert model(between(first, first)).first_response_ms is None


def test_gpus_have_what_their_server_publishes() -> None:
    (gpu,) = derive(None, parse(FIRST + GPU, 0.0)).gpus
    assert (gpu.uuid, gpu.utilization, gpu.power_w) == ("GPU-1ccddeda-8caf-7d8e-cfe2-a63cddeaafd2", 0.97, 641.25)
    assert gpu.memory_total_bytes == 80 * 2**30
    assert (gpu.memory_used_bytes, gpu.power_limit_w) == (None, None)


def without(text: str, family: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if family not in line)


def test_speculation_is_of_the_interval() -> None:
    found = engine(between(FIRST, changed(FIRST, LATER)))
    assert (found.tokens_per_step, found.draft_acceptance) == (1.75, 0.25)
    idle = engine(between(FIRST, FIRST))
    assert (idle.tokens_per_step, idle.draft_acceptance) == (None, None)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("nv_llm_output_token_len", {"output_tokens", "output_tokens_per_s"}),
        ("nv_llm_input_token_len", {"input_tokens", "input_tokens_per_s", "kv_reuse_share"}),
        ("nv_trt_llm_request_metrics", {"in_flight", "in_flight_max", "scheduled", "waiting"}),
        (
            "nv_trt_llm_kv_cache_block_metrics",
            {
                "kv_used", "kv_free", "kv_max", "kv_fraction", "kv_tokens_per_block", "kv_reused", "kv_reused_per_s",
                "kv_reuse_share",
            },
        ),
        ("nv_trt_llm_inflight_batcher_metrics", {"paused", "making_tokens_per_s"}),
        ("nv_trt_llm_general_metrics", {"steps_per_s", "making_tokens_per_s"}),
        ("trtpipe_speculation", {"tokens_per_step", "draft_acceptance"}),
    ],
)  # fmt: skip
def test_an_absent_family_of_the_engine_is_none_and_takes_nothing_with_it(family: str, fields: set[str]) -> None:
    whole = vars(engine(between(FIRST, changed(FIRST, LATER))))
    less = vars(engine(between(without(FIRST, family), without(changed(FIRST, LATER), family))))
    assert {name for name, value in less.items() if value is None} == fields
    assert {name: value for name, value in whole.items() if name not in fields} == {
        name: value for name, value in less.items() if name not in fields
    }


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("nv_inference_request_failure", {"failed", "failed_per_s"}),
        ("nv_inference_queue_duration_us", {"queue_ms"}),
        ("nv_inference_compute_infer_duration_us", {"compute_ms"}),
        ("nv_inference_request_duration_us", {"request_ms"}),
        ("nv_inference_pending_request_count", {"pending"}),
    ],
)
def test_an_absent_family_of_triton_is_none(family: str, fields: set[str]) -> None:
    less = vars(model(between(without(FIRST, family), without(changed(FIRST, LATER), family))))
    assert {name for name, value in less.items() if value is None} == {"first_response_ms", *fields}


def test_a_server_without_an_engine_has_no_engine_figures() -> None:
    triton_alone = without(without(FIRST, "nv_trt_llm"), "nv_llm")
    figures = between(triton_alone, triton_alone)
    assert figures.engines == ()
    assert len(figures.models) == 2


def test_an_older_container_s_fraction_is_used_over_max() -> None:
    old = without(without(FIRST, '"fraction"'), '"waiting"')
    assert engine(derive(None, parse(old, 0.0))).kv_fraction == 0.75
    assert engine(derive(None, parse(old, 0.0))).waiting is None
    empty = changed(FIRST, {'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"': 0})
    assert engine(derive(None, parse(empty, 0.0))).kv_fraction is None


def test_waiting_below_0_is_0() -> None:
    """The C++ backend writes active minus scheduled: 0 - 1 after a last step in which one request ended."""
    idle = changed(FIRST, {'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting"': -1})
    assert engine(derive(None, parse(idle, 0.0))).waiting == 0


def test_nothing_is_scheduled_where_nothing_is_in_flight() -> None:
    """The gauge keeps the last step's value, as an idle server's does for ever."""
    idle = changed(FIRST, {'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active"': 0})
    assert 'request_type="scheduled",version="1"} 12' in idle
    figures = engine(derive(None, parse(idle, 0.0)))
    assert (figures.in_flight, figures.scheduled) == (0, 0)


def test_after_a_restart_counters_count_from_0() -> None:
    """A restart shows in any counter of the model; then all of its counters began anew, those too that are larger."""
    again = changed(
        changed(FIRST, LATER),
        {
            'nv_inference_request_success{model="ensemble"': 3,  # less than before: it started again
            'nv_inference_queue_duration_us{model="ensemble"': 900,  # more than before, and all of it since
        },
    )
    figures = between(FIRST, again)
    assert figures.restarted == ("ensemble",)
    assert model(figures).succeeded_per_s == pytest.approx(3 / 30)
    assert model(figures).queue_ms == pytest.approx(0.3)
    # A model that was not loaded again goes on from where it was.
    assert model(figures, "tensorrt_llm").succeeded_per_s == 2.0
    # The engine's step counter is published as a gauge and tells of a restart as well.
    engine_again = changed(FIRST, {'nv_trt_llm_general_metrics{general_type="iteration_counter"': 7})
    assert between(FIRST, engine_again).restarted == ("tensorrt_llm",)
    assert engine(between(FIRST, engine_again)).output_tokens_per_s == pytest.approx(500 / 30)


def test_a_model_loaded_in_between_began_at_0() -> None:
    figures = between(without(FIRST, 'model="ensemble"'), FIRST)
    assert model(figures).succeeded_per_s == pytest.approx(4 / 30)
    gone = between(FIRST, without(FIRST, 'model="ensemble"'))
    assert [entry.model for entry in gone.models] == ["tensorrt_llm"]


def test_versions_of_a_model_are_added_up() -> None:
    both = FIRST + FIRST.replace('version="1"', 'version="2"')
    figures = derive(None, parse(both, 0.0))
    assert model(figures).succeeded == 8
    assert (engine(figures).kv_used, engine(figures).kv_fraction) == (1536, 0.75)
    assert engine(figures).kv_tokens_per_block == 32


def test_two_scrapes_of_one_moment_have_no_rates() -> None:
    figures = between(FIRST, changed(FIRST, LATER), seconds=0.0)
    assert figures.seconds is None
    assert model(figures).succeeded_per_s is None
    assert engine(figures).output_tokens_per_s is None


LINES = [line.rpartition(" ")[0] for line in (FIRST + GPU + FIRST_RESPONSE.format(count=1, sum=1)).splitlines()]
NUMBERS = st.one_of(
    st.integers(0, 5).map(str), st.floats(0, 1e308).map(repr), st.sampled_from(["Nan", "+Inf", "-1", "1e308", "0"])
)


@st.composite
def scrapes(draw: st.DrawFn) -> Scrape:
    """Any of the lines with any numbers; their families stay declared."""
    declared = [line for line in (FIRST + GPU + FIRST_RESPONSE.format(count=1, sum=1)).splitlines() if line[0] == "#"]
    types = {line.split()[2]: line for line in declared if line.startswith("# TYPE")}
    text = []
    for name, line in types.items():
        text.append(line)
        series = [one for one in LINES if not one.startswith("#") and re.match(rf"{name}(_sum|_count|_bucket)?{{", one)]
        text += [f"{one} {draw(NUMBERS)}" for one in series if draw(st.integers(0, 9))]
    return parse("\n".join(text) + "\n", draw(st.sampled_from([0.0, 1e-9, 1.0, 3600.0])))


def numbers(value: Any) -> list[float]:
    if isinstance(value, float | int):
        return [value]
    if isinstance(value, tuple):
        return [number for item in value for number in numbers(item)]
    return [number for item in vars(value).values() for number in numbers(item)] if hasattr(value, "__dict__") else []


@given(scrapes(), scrapes())
def test_no_figure_is_ever_negative_or_infinite(before: Scrape, after: Scrape) -> None:
    figures = derive(before, after)
    found = numbers(figures)
    assert all(number >= 0 and math.isfinite(number) for number in found)
    for entry in figures.engines:
        assert entry.kv_reuse_share is None or entry.kv_reuse_share <= 1


@given(scrapes(), st.floats(1e-3, 1e6))
def test_rates_times_the_interval_are_what_the_counters_grew_by(after: Scrape, seconds: float) -> None:
    """From an empty server: everything counted happened within the interval."""
    empty = Scrape(after.at_s - seconds, ())
    for entry in derive(empty, after).models:
        if entry.succeeded is not None and entry.succeeded_per_s is not None:
            passed = after.at_s - empty.at_s
            assert entry.succeeded_per_s * passed == pytest.approx(entry.succeeded, rel=1e-6)


# -- the list of families and what is written about it -----------------------------------------------------------------

DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = {row.split("`")[1]: row for row in DOCUMENT.splitlines() if row.startswith(("| `nv_", "| `trtpipe_speculation"))}


def test_the_document_has_a_row_for_every_family_and_for_no_other() -> None:
    assert set(ROWS) == set(KNOWN)
    assert len(KNOWN) == len(FAMILIES)


def test_the_document_names_no_family_that_is_not_in_the_list() -> None:
    named = set(re.findall(r"nv_[a-z0-9_]*[a-z0-9]|trtpipe_speculation", DOCUMENT))
    assert {name for name in named if name not in ("nv_trt_llm", "nv_inference")} == set(KNOWN)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_row_says_the_family_s_type_unit_labels_and_whether_we_publish_it(family: Any) -> None:
    cells = [cell.strip() for cell in ROWS[family.name].strip("|").split("|")]
    kind, unit = cells[1].split(", ", 1)
    assert (kind, unit.replace(" and ", ", ")) == (family.kind, family.unit)
    assert cells[-1].split(",")[0] == ("yes" if family.reference else "no")
    if family.label and family.label != "gpu_uuid":
        assert cells[2].startswith(f"`{family.label}`")
        assert set(re.findall(r"`(\w+)`", cells[2])[1:]) == set(family.values)


def test_every_family_the_figures_need_is_in_the_list() -> None:
    """Figures are derived from known families alone: those of the others never show."""
    source = (ROOT / "pipeline" / "net" / "triton_metrics.py").read_text(encoding="utf-8")
    code = source.partition("KNOWN = ")[2]
    assert set(re.findall(r'"(nv_\w+)"', code)) <= set(KNOWN)
