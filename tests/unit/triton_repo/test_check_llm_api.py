"""The check of a model that is served through the LLM API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.repository_changes import (
    H100,
    Change,
    adds,
    both,
    edit,
    move,
    param,
    remove,
    says,
    tensor,
    untensor,
    write,
)
from tests.support.repository_faults import expect, looked_into, told
from tests.support.triton_repositories import MODEL_YAML, inflight, llmapi
from trtpipe.configs.facts import find_toolchain
from trtpipe.triton_repo.check import RULES, WARNING, check_repository

# fmt: off
LLMAPI_WRONG: list[tuple[Any, ...]] = [
    ("no settings", remove("tensorrt_llm/1/model.yaml"), "llmapi-settings"),
    ("no YAML", write("tensorrt_llm/1/model.yaml", "model: [\n"), "llmapi-settings"),
    ("no mapping", write("tensorrt_llm/1/model.yaml", "- model\n"), "llmapi-settings"),
    ("no section", write("tensorrt_llm/1/model.yaml", MODEL_YAML.partition("triton_config")[0]), "llmapi-settings"),
    ("no policy", says("  decoupled: False\n", ""), "llmapi-settings"),
    ("policy as text", says("decoupled: False", 'decoupled: "False"'), "llmapi-settings"),
    ("misspelt period", adds("  cancelation_check_period_ms: 50\n"), "llmapi-settings"),
    ("batch of words", says("max_batch_size: 0", "max_batch_size: many"), "llmapi-argument"),
    ("processor", adds("logits_post_processors:\n  ban: mymodule\n"), "llmapi-settings"),
    ("misspelt argument", says("tensor_parallel_size", "tensor_parallel"), "llmapi-argument"),
    ("nobody's argument", adds("colour: blue\n"), "llmapi-argument", WARNING),
    ("misspelt inside", says("free_gpu_memory_fraction", "free_gpu_mem_fraction"), "llmapi-argument"),
    ("share", says("fraction: 0.9", "fraction: 90"), "llmapi-argument"),
    ("words for a size", says("tensor_parallel_size: 1", "tensor_parallel_size: two"), "llmapi-argument"),
    ("no ranks", says("tensor_parallel_size: 1", "tensor_parallel_size: 0"), "llmapi-argument"),
    ("list for a mapping", says("kv_cache_config:\n  free_gpu_memory_fraction: 0.9", "kv_cache_config: [0.9]"),
     "llmapi-argument"),
    ("backend", says('"pytorch"', '"torch"'), "llmapi-argument"),
    ("no model", says("model: TinyLlama/TinyLlama-1.1B-Chat-v1.0\n", ""), "llmapi-model"),
    ("model elsewhere", says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "./models/llama"), "llmapi-model"),
    ("model not in the repository", says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tensorrt_llm/2"), "llmapi-model"),
    ("draft not there", adds("speculative_config:\n  speculative_model_dir: tensorrt_llm/1/draft\n"), "llmapi-model"),
    ("an engine", both(says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tensorrt_llm/1/engine"),
                       write("tensorrt_llm/1/engine/config.json", "{}"),
                       write("tensorrt_llm/1/engine/rank0.engine", "")), "llmapi-model"),
    ("unfilled", says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "${model}"), "placeholder"),
    ("other policy", edit("tensorrt_llm", 'backend: "python"', 'backend: "python"\nmodel_transaction_policy { '
                          "decoupled: true }"), "llmapi-policy"),
    ("larger batch", edit("tensorrt_llm", 'backend: "python"', 'backend: "python"\nmax_batch_size: 64'),
     "llmapi-policy"),
    ("two instances", edit("tensorrt_llm", "count: 1", "count: 2"), "instances"),
    ("one list", both(edit("tensorrt_llm", "count: 1", "count: 2"), param("gpu_device_ids", "0")), "gpu-ids"),
    ("no helpers", remove("tensorrt_llm/1/helpers.py"), "script-import"),
    ("no text", untensor("text_input"), "missing-tensor"),
    ("type", tensor("sampling_param_top_k", "TYPE_INT32", "TYPE_FP32"), "tensor-type"),
    ("misspelt tensor", edit("tensorrt_llm", 'name: "sampling_param_top_p"', 'name: "sampling_param_topp"'),
     "unknown-tensor"),
]
LLMAPI_RIGHT: list[tuple[str, Change]] = [
    ("as it is", adds("")),
    ("streaming", says("decoupled: False", "decoupled: true")),
    ("both", both(says("decoupled: False", "decoupled: true"),
                  edit("tensorrt_llm", 'backend: "python"', 'backend: "python"\nmodel_transaction_policy { '
                       "decoupled: true }"))),
    ("instances", both(edit("tensorrt_llm", "count: 1", "count: 2"), param("gpu_device_ids", "0;1"))),
    ("more", adds("  cancellation_check_period_ms: 50\nmax_batch_size: 64\ncuda_graph_config: {}\n"
                  "speculative_config:\n  decoding_type: NGram\n")),
    ("draft", both(adds("speculative_config:\n  speculative_model_dir: tensorrt_llm/1/draft\n"),
                   write("tensorrt_llm/1/draft/config.json", "{}"))),
    ("container's model", says("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "/models/llama")),
    ("settings elsewhere", move("tensorrt_llm/1/model.yaml", "tensorrt_llm/1/llama.yaml")),
    ("quoted number", says("tensor_parallel_size: 1", 'tensor_parallel_size: "1"')),
]
# fmt: on


@pytest.mark.parametrize("case", LLMAPI_WRONG, ids=lambda case: case[0])
def test_an_llm_api_model_is_looked_into(tmp_path: Path, case: tuple[Any, ...]) -> None:
    repository = llmapi(tmp_path / "models")
    _, change, rule, *severity = case
    change(repository)
    expect(repository, rule, *severity)


@pytest.mark.parametrize(("name", "change"), LLMAPI_RIGHT, ids=[name for name, _ in LLMAPI_RIGHT])
def test_a_sound_llm_api_model_is_left_alone(tmp_path: Path, name: str, change: Change) -> None:
    repository = llmapi(tmp_path / "models")
    change(repository)
    faults = check_repository(repository.path, toolchain=find_toolchain("1.2.1"), gpus=[H100, H100])
    assert told(looked_into(faults)) == ""


def test_an_argument_is_taken_by_the_releases_that_have_it(tmp_path: Path) -> None:
    repository = llmapi(tmp_path / "models", MODEL_YAML + "use_cuda_graph: true\ncolour: blue\n")
    faults = looked_into(check_repository(repository.path, toolchain=find_toolchain("1.0.0")))
    assert [(fault.rule, fault.where) for fault in faults] == [
        ("llmapi-argument", "use_cuda_graph, line 13"),
        ("llmapi-argument", "colour, line 14"),
    ]
    assert "0.21.0 was its last release" in str(faults[0])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sleep_config: {}", ""),
        ("kv_cache_config:\n  disk_cache_size: 1024\n  use_kv_cache_manager_v2: auto", ""),
        ("cuda_graph_config:\n  mode: decode\n  enable_padding: true", ""),
        ("enable_sleep: true", "error llmapi-argument: 1.2.1 was its last release"),
        ("kv_cache_config:\n  onboard_blocks: true", "error llmapi-argument: 1.2.1 was its last release"),
        ("scheduler_config:\n  capacity_scheduler_policy: NO_EVICT", "error llmapi-argument: LLM refuses it"),
        ("prefill_cuda_graph_backend: pieces", "error llmapi-argument: LLM refuses it"),
        (
            "num_serve_frontend: 2",
            "error llmapi-argument: it refuses unknown ones; did you mean 'num_serve_frontends'?",
        ),
        # Candidates of 1.3 differ, so that an unknown argument may be one that came later.
        ("colour: blue", "warning llmapi-argument: is none that LLM is known to take"),
    ],
)
def test_the_arguments_of_the_first_release_without_engines(tmp_path: Path, line: str, told: str) -> None:
    repository = llmapi(tmp_path / "models", f"{MODEL_YAML}{line}\n")
    newest = find_toolchain("1.3")
    faults = [one for one in check_repository(repository.path, toolchain=newest) if one.rule == "llmapi-argument"]
    severity, _, words = told.partition(" llmapi-argument: ")
    assert [one.severity for one in faults] == ([severity] if told else [])
    assert all(words in str(one) for one in faults)
    engines = inflight(tmp_path / "engines", "1.2.1")
    assert "which TensorRT-LLM 1.3.0rc29 does not have" in expect(engines, "release-runtime", toolchain=newest).what


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    settings_=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["model", "backend", "triton_config", "decoupled", "kv_cache_config", "dtype", "x"]),
                inner,
            )
        ),
        max_leaves=12,
    )
)
def test_any_settings_of_the_llm_api_are_faults_and_never_exceptions(
    tmp_path_factory: pytest.TempPathFactory, settings_: Any
) -> None:
    repository = llmapi(tmp_path_factory.mktemp("llmapi") / "models", yaml.safe_dump(settings_))
    for fault in check_repository(repository.path, gpus=[], toolchain=find_toolchain(None)):
        assert fault.rule in RULES
