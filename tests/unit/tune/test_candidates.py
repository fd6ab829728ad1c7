"""Which settings are changed for which runtime, and which candidates the planner leaves."""

from __future__ import annotations

from typing import Any

import pytest

import trtpipe
from trtpipe.configs.facts import find_shape
from trtpipe.pipeline.bench.load.work import Work
from trtpipe.pipeline.bench.results.slo import parse_objective
from trtpipe.pipeline.planner.demand import Demand
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate, single_changes
from trtpipe.pipeline.tune.prior import expected_rate, worth_measuring


def changed(runtime: str, gpu: str) -> set[str]:
    spec = trtpipe.settings(model="llama3-8b", gpu=gpu, dtype="bf16", runtime=runtime)
    found = single_changes(runtime, spec.build, spec.serving, on_cpu=spec.gpu.is_cpu)
    assert len(set(found)) == len(found)
    now = {value.name: value.value for value in spec.values}
    assert all(now.get(name) != value for one in found for name, value in one.changes)
    return {name.partition(".")[2] for one in found for name in one.settings}


def test_each_runtime_is_searched_in_the_settings_that_it_follows() -> None:
    sizes, stubs = {"max_batch_size", "max_num_tokens"}, {"engine_instance_count", "preprocessing_instance_count"}
    policy, memory = {"batch_scheduler_policy", "enable_chunked_context"}, {"kv_cache_free_gpu_mem_fraction"}
    drafts = {"speculative_decoding_mode", "max_draft_len"}
    assert changed("tensorrt_llm", "h100") == sizes | policy | memory | {"preprocessing_instance_count"}
    assert changed("vllm", "h100") == sizes | stubs | memory | drafts
    assert changed("vllm", "cpu") == sizes | stubs | drafts
    assert changed("reference", "cpu") == sizes | stubs | policy | drafts


def test_a_target_that_drafts_is_tried_without() -> None:
    drafting = {"build.speculative_decoding_mode": "ngram", "build.max_draft_len": 3}
    spec = trtpipe.settings(model="llama3-8b", gpu="cpu", dtype="bf16", runtime="vllm", set=drafting)
    found = single_changes("vllm", spec.build, spec.serving, on_cpu=True)
    assert Candidate.of({"build.speculative_decoding_mode": None, "build.max_draft_len": 0}) in found


def rate(*slo: str, **changes: Any) -> float | None:
    gpu, model = changes.pop("gpu", "h100"), changes.pop("model", "llama3-8b")
    runtime = None if gpu == "cpu" else "tensorrt_llm"
    spec = trtpipe.settings(model=model, gpu=gpu, dtype="bf16", runtime=runtime, set=changes)
    return expected_rate(
        find_shape(model)[1], spec.gpu, spec.precision, spec.mapping, spec.runtime, spec.build, spec.serving,
        Demand(Work(input_tokens="512", output_tokens="256")), [*map(parse_objective, ("tpot:50ms", *slo))],
    )  # fmt: skip


def test_the_planner_expects_more_of_a_larger_batch_and_nothing_of_a_cpu() -> None:
    few, many = rate(**{"build.max_batch_size": 4}), rate(**{"build.max_batch_size": 32})
    assert few is not None
    assert many is not None
    assert many > 3 * few > 0
    assert rate(gpu="cpu") is None


def test_an_engine_of_several_stages_or_groups_of_experts_is_expected_to_serve() -> None:
    """Two GPUs hold half of the layers each, of which one would hold none."""
    assert (rate(model="llama3-70b", pp=2) or 0) > 0
    assert rate(model="mixtral-8x7b", tp=4) != rate(model="mixtral-8x7b", tp=4, moe_ep=4)


def test_objectives_that_the_planner_does_not_predict_are_left_to_the_measurements() -> None:
    assert rate("error_rate<1%") == rate() != 0


def test_an_engine_that_is_expected_to_serve_nothing_as_it_is_leaves_no_change_out() -> None:
    batch = Candidate.of({"build.max_batch_size": 128})
    for then in (0.0, 10.0, None):
        assert worth_measuring([batch], {AS_IT_IS: 0.0, batch: then}, compiled=True) == ([batch], {})


def test_an_engine_is_compiled_anew_only_where_that_is_expected_to_pay() -> None:
    batch, tokens, share, policy = (
        Candidate.of({name: value})
        for name, value in (
            ("build.max_batch_size", 128), ("build.max_num_tokens", 64),
            ("serving.kv_cache_free_gpu_mem_fraction", 0.8), ("serving.batch_scheduler_policy", "max_utilization"),
        )
    )  # fmt: skip
    expected = {AS_IT_IS: 10.0, batch: 10.6, tokens: 10.4, share: 9.0, policy: 10.0}
    every = [tokens, share, policy, batch]
    kept, left = worth_measuring(every, expected, compiled=True)
    assert kept == [batch, policy, share]
    assert left == {
        "build.max_num_tokens=64": "it needs another engine, and the planner expects 10.4 instead of 10 clients/s"
    }
    assert worth_measuring(every, expected, compiled=False) == ([batch, tokens, policy, share], {})
    kept, left = worth_measuring(every, {}, compiled=True)
    assert kept == [share, policy]
    assert len(left) == 2


@pytest.mark.parametrize(("changes", "name"), [({}, "as it is"), ({"b.c": False, "a.b": 2}, "a.b=2, b.c=false")])
def test_a_candidate_is_called_by_what_it_changes(changes: dict[str, Any], name: str) -> None:
    assert Candidate.of(changes).name == name
