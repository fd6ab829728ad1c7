"""What becomes of an engine's settings, and of its repository's, under the LLM API and vLLM, in literal values."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.repository_changes import Change, both, edit, engine, param, params, rendered
from tests.support.repository_faults import RELEASES
from tests.support.triton_repositories import Repository, inflight, llmapi
from trtpipe.engines import BACKENDS, load_backend
from trtpipe.engines.build_config import NOT_IN_ENGINE, BuildConfig
from trtpipe.engines.errors import ArtefactRefused, InputDataError, TrtpipeError, UsageError
from trtpipe.triton_repo.check import facts
from trtpipe.triton_repo.deployment import read_deployment
from trtpipe.triton_repo.migration import Row, Verdict, chosen, migration_table
from trtpipe.triton_repo.serving import ServingConfig
from trtpipe.triton_repo.tensors import CLIENT_INPUTS, PASSED_TO_ENGINE

LOST, CHANGED, REPLACED, CARRIED, UNUSED = Verdict


def table(repository: Path, runtime: str = "vllm") -> dict[tuple[str, str], Row]:
    """The rows by place and setting; none is there twice."""
    rows = migration_table(read_deployment(repository), runtime)
    out = {(row.place, row.setting): row for row in rows if row.setting != "code"}
    assert len(out) == len([row for row in rows if row.setting != "code"])
    return out


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return inflight(tmp_path_factory.mktemp("nvidia") / "repository").path


def test_each_parameter_and_each_setting_of_a_build_has_a_row() -> None:
    rows = facts.successors()
    for role, known in facts.parameters().items():
        read = {name for name, fact in known.items() if not fact.dead and not fact.limit}
        assert rows.parameters[role].keys() == read, role
    assert {one.name for one in fields(BuildConfig)} - {*NOT_IN_ENGINE} == rows.build.keys() - {"cp_size"}


def test_rows_name_settings_runtimes_and_inputs_that_exist() -> None:
    rows = facts.successors()
    ours = {f"build.{one.name}" for one in fields(BuildConfig)} | {
        f"serving.{one.name}" for one in fields(ServingConfig)
    }
    every = [rows.build, *rows.parameters.values(), *rows.fields.values()]
    successors = [row for group in every for row in group.values()]
    assert {row.becomes for row in successors if row.becomes} <= ours
    assert {runtime for row in successors for runtime in row.there} <= BACKENDS.keys()
    arguments = facts.llm_arguments()
    nested = {f"{group}.{name}" for group, known in arguments.nested.items() for name in known}
    named = {row.there["trtllm_pytorch"] for row in successors if "trtllm_pytorch" in row.there}
    assert named <= arguments.arguments.keys() | nested
    inputs = {f"request.{tensor.name}" for tensor in CLIENT_INPUTS}
    for runtime in BACKENDS:
        assert {*load_backend(runtime).FIXED, *load_backend(runtime).MEANS} <= ours | inputs, runtime


def test_inputs_that_the_python_backend_refuses_are_lost() -> None:
    tree = ast.parse((ROOT / "triton_repo" / "backends" / "tensorrtllm" / "model.py").read_text())
    (refused,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UNSUPPORTED_INPUTS"
    )
    passed = {ours for ours, theirs in PASSED_TO_ENGINE.items() if theirs in refused}
    assert facts.successors().refused.keys() == passed


@pytest.mark.parametrize("release", RELEASES)
def test_templates_of_every_release(tmp_path: Path, release: str) -> None:
    repository = inflight(tmp_path / "repository", release).path
    for runtime, seed in (("vllm", "seed"), ("trtllm_pytorch", "sampling_param_seed")):
        found = table(repository, runtime)
        assert found["engine", "max_batch_size"].to == 8
        assert found["tensorrt_llm", "kv_cache_free_gpu_mem_fraction"].to == 0.9
        assert found["tensorrt_llm", "gpt_model_path"].verdict is REPLACED
        assert all(row.why for row in found.values() if row.verdict in (LOST, CHANGED, REPLACED))
        old = found.get(("requests", "random_seed"))
        assert (old is None) == (release in ("0.20.0", "0.21.0", "1.0.0", "1.2.1"))
        assert old is None or old.becomes == seed


def test_a_template_in_literal_values(nvidia: Path) -> None:
    rows = migration_table(read_deployment(nvidia), "vllm")
    assert chosen(rows) == {
        "build.max_batch_size": 8, "build.max_input_len": 2048, "build.max_seq_len": 4096,
        "build.max_num_tokens": 8192, "build.tokens_per_block": 32, "serving.kv_cache_free_gpu_mem_fraction": 0.9,
        "serving.exclude_input_in_output": True, "serving.enable_chunked_context": True,
        "serving.triton_max_batch_size": 8, "serving.decoupled": True, "serving.preprocessing_instance_count": 1,
        "serving.bls_instance_count": 1,
    }  # fmt: skip
    rows = migration_table(read_deployment(nvidia), "trtllm_pytorch")
    assert chosen(rows) == {
        "build.max_batch_size": 8, "build.max_input_len": 2048, "build.max_seq_len": 4096,
        "build.max_num_tokens": 8192, "build.max_beam_width": 1, "build.tokens_per_block": 32,
        "serving.kv_cache_free_gpu_mem_fraction": 0.9, "serving.exclude_input_in_output": True,
        "serving.enable_chunked_context": False, "serving.decoupled": True,
    }  # fmt: skip


VLLM, LLM = "vllm", "trtllm_pytorch"
BEAMS = both(engine("build_config.max_beam_width", 4), param("max_beam_width", "4"))
DELAY = edit("tensorrt_llm", "max_queue_delay_microseconds: 0", "max_queue_delay_microseconds: 500")
CACHED = edit("tensorrt_llm", "backend:", "response_cache { enable: true }\nbackend:")
# setting, its value or a change of the repository, runtime; then the row: verdict, new value, a part of the reason
ROWS: list[tuple[str, str | Change, str, Verdict, object, str]] = [
    ("batch_scheduler_policy", "max_utilization", VLLM, CARRIED, "max_utilization", ""),
    ("batch_scheduler_policy", "guaranteed_no_evict", VLLM, CHANGED, "max_utilization",
     "pauses and recomputes"),
    ("batch_scheduler_policy", "guaranteed_no_evict", LLM, CARRIED,
     "guaranteed_no_evict", ""),
    ("kv_cache_free_gpu_mem_fraction", "0.5", VLLM, CHANGED, 0.5,
     "whole memory"),
    ("kv_cache_free_gpu_mem_fraction", "0.5", LLM, CARRIED, 0.5, ""),
    ("enable_kv_cache_reuse", "false", VLLM, CARRIED, False, ""),
    ("enable_kv_cache_reuse", "no", VLLM, CHANGED, None, "'no' cannot be read"),
    ("enable_chunked_context", "true", VLLM, CARRIED, True, ""),
    ("exclude_input_in_output", "", VLLM, CARRIED, False, "its reader's default"),
    ("exclude_input_in_output", "false", LLM, CHANGED, True,
     "sampling_param_exclude_input_from_output"),
    ("cancellation_check_period_ms", "20", VLLM, CARRIED, 20, ""),
    ("max_tokens_in_paged_kv_cache", "9000", LLM, CARRIED, 9000, ""),
    ("max_tokens_in_paged_kv_cache", "9000", VLLM, CARRIED, 9000, ""),
    ("max_attention_window_size", "64", LLM, CARRIED, 64, ""),
    ("max_attention_window_size", "64,128", LLM, LOST, None, "one window"),
    ("max_attention_window_size", "64", VLLM, LOST, None, "config.json"),
    ("max_attention_window_size", "64;128", LLM, CHANGED, None, "'64;128' cannot be read"),
    ("sink_token_length", "4", VLLM, LOST, None, "only engines"),
    ("kv_cache_host_memory_bytes", "0", VLLM, UNUSED, None, "default"),
    ("kv_cache_host_memory_bytes", "1024", LLM, CARRIED, 1024, ""),
    ("max_beam_width", BEAMS, LLM,
     CARRIED, 4, ""),
    ("max_beam_width", BEAMS, VLLM, LOST, None,
     "no beam search"),
    ("decoding_mode", "medusa", VLLM, REPLACED, None, "build.speculative_decoding_mode"),
    ("lookahead_window_size", "5", VLLM, LOST, None, "ngram takes build.max_draft_len"),
    ("lora_prefetch_dir", "/adapters", VLLM, REPLACED, None, "`trtpipe build --lora` takes"),
    ("lora_cache_max_adapter_size", "16", LLM, REPLACED, None, "own cache of adapters"),
    ("guided_decoding_backend", "xgrammar", LLM, REPLACED, None, "guided decoding is on"),
    ("gpu_device_ids", "0,1", VLLM, REPLACED, None, "--gpus"),
    ("my_own", "7", VLLM, LOST, None, "no model of TensorRT-LLM reads it"),
    ("max_batch_size", edit("tensorrt_llm", "max_batch_size: 8", "max_batch_size: 64"), VLLM, CHANGED, 8,
     "no more requests"),
    ("dynamic_batching.max_queue_delay_microseconds",
     DELAY, VLLM, CARRIED, 500, ""),
    ("dynamic_batching.max_queue_delay_microseconds",
     DELAY, LLM,
     CHANGED, 0, "at once"),
    ("dynamic_batching.default_queue_policy.max_queue_size",
     edit("tensorrt_llm", "max_queue_size: 0", "max_queue_size: 32"), VLLM, CARRIED, 32, ""),
    ("dynamic_batching.priority_levels",
     edit("tensorrt_llm", "dynamic_batching {", "dynamic_batching {\n  priority_levels: 2"), VLLM, LOST, None,
     "trtpipe writes no such setting"),
    ("response_cache.enable", CACHED, VLLM, LOST,
     None, "trtpipe writes no such setting"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "change", "runtime", "verdict", "to", "why"), ROWS)
def test_a_parameter(
    tmp_path: Path, setting: str, change: str | Change, runtime: str, verdict: Verdict, to: object, why: str
) -> None:
    repository = inflight(tmp_path / "repository")
    (param(setting, change) if isinstance(change, str) else change)(repository)
    row = table(repository.path, runtime)["tensorrt_llm", setting]
    assert (row.verdict, row.to) == (verdict, to)
    assert (why in row.why) if why else row.why == ""


@pytest.mark.parametrize(
    ("name", "value", "runtime", "verdict", "to", "why"),
    [
        ("max_input_len", 4096, "vllm", CHANGED, 4095, "room for one token"),
        ("max_input_len", 2048, "trtllm_pytorch", CARRIED, 2048, ""),
        ("max_num_tokens", 4, "vllm", CHANGED, 32, "a full batch decodes in one step"),
        ("gather_context_logits", True, "vllm", LOST, None, "not returned"),
        ("speculative_decoding_mode", 2, "vllm", LOST, None, "mode=draft_model --set build.speculative_model"),
        ("speculative_decoding_mode", 4, "vllm", LOST, None, "no Medusa heads"),
        ("speculative_decoding_mode", "LOOKAHEAD_DECODING", "vllm", LOST, None, "mode=ngram needs no second model"),
        ("speculative_decoding_mode", 16, "trtllm_pytorch", LOST, None, "no ReDrafter heads"),
        ("speculative_decoding_mode", "eagle", "trtllm_pytorch", LOST, None, "heads are not taken out of an engine"),
        ("max_prompt_embedding_table_size", 16, "vllm", LOST, None, "prompt tables"),
        ("plugin_config.lora_plugin", "auto", "trtllm_pytorch", CARRIED, "auto", ""),
        ("plugin_config.gemm_plugin", "fp8", "vllm", REPLACED, None, "kernels"),
    ],
)
def test_a_setting_of_the_build(
    tmp_path: Path, name: str, value: object, runtime: str, verdict: Verdict, to: object, why: str
) -> None:
    repository = inflight(tmp_path / "repository")
    repository.engine(f"build_config.{name}", value)
    row = table(repository.path, runtime)["engine", name.rpartition(".")[2]]
    assert (row.verdict, row.to) == (verdict, to)
    assert (why in row.why) if why else row.why == ""


def test_prompts_that_no_step_holds_are_shortened_without_chunked_context(tmp_path: Path) -> None:
    repository = inflight(tmp_path / "repository")
    repository.engine("build_config.max_num_tokens", 1024)
    assert table(repository.path, "trtllm_pytorch")["engine", "max_input_len"].to == 1024
    assert table(repository.path, "vllm")["engine", "max_input_len"].to == 2048


def test_requests_of_clients(nvidia: Path) -> None:
    found = table(nvidia, "trtllm_pytorch")
    assert found["requests", "model"].becomes == "tensorrt_llm"
    renamed = {row.setting: row.becomes for row in found.values() if row.place == "requests" and row.becomes}
    assert renamed["max_tokens"] == "sampling_param_max_tokens"
    assert renamed["stop_words"] == "sampling_param_stop"
    assert renamed["stream"] == "streaming"
    assert "no such input" not in found["requests", "max_tokens"].why
    assert found["requests", "presence_penalty"].why == (
        "it is called so there; the model of a release whose sampler ignores it has no such input"
    )
    assert found["requests", "temperature"].why == "it is called so there"
    assert found["requests", "bad_words"].verdict is LOST
    found = table(nvidia, "vllm")
    assert found["requests", "model"].verdict is CARRIED
    assert ("requests", "stop_words") not in found
    lost = [row.setting for row in found.values() if row.place == "requests" and row.verdict is LOST]
    assert lost == [
        "bad_words", "return_context_logits", "return_generation_logits", "beam_width", "prompt_embedding_table",
        "lora_weights", "image_input", "image_bytes_input", "image_url_input",
        "video_bytes_input", "num_draft_tokens", "use_draft_logits",
    ]  # fmt: skip


def test_our_own_repository_keeps_each_serving_option(tmp_path: Path) -> None:
    asked = ServingConfig(
        batch_scheduler_policy="max_utilization", kv_cache_free_gpu_mem_fraction=0.7, enable_kv_cache_reuse=False,
        enable_chunked_context=True, exclude_input_in_output=False, normalize_log_probs=False, max_queue_size=9,
        max_queue_delay_microseconds=50, cancellation_check_period_ms=20, stats_check_period_ms=30,
        preprocessing_instance_count=2, bls_instance_count=3, add_special_tokens=False, skip_special_tokens=False,
        accumulate_tokens=True, decoupled=True, ensemble="script", triton_max_batch_size=4, multi_block_mode=False,
    )  # fmt: skip
    made = rendered(tmp_path, **{one.name: getattr(asked, one.name) for one in fields(asked)})
    values = chosen(migration_table(read_deployment(made.path), "vllm"))
    kept = {name.removeprefix("serving."): value for name, value in values.items() if name.startswith("serving.")}
    left_out = {"multi_block_mode", *(one.name for one in fields(asked) if getattr(asked, one.name) is None)}
    assert kept == {
        one.name: getattr(asked, one.name) for one in fields(asked) if one.name not in {*left_out, "repository_root"}
    }


def test_what_is_beside_the_templates_is_told(tmp_path: Path) -> None:
    repository = inflight(tmp_path / "repository")
    (repository.path / "reranker" / "1").mkdir(parents=True)
    (repository.path / "reranker" / "config.pbtxt").write_text('name: "reranker"\nbackend: "onnxruntime"\n')
    rows = migration_table(read_deployment(repository.path), "vllm")
    told = {(row.place, row.setting, row.value) for row in rows if row.verdict is LOST}
    assert ("reranker", "model", "of no known template") in told
    assert ("preprocessing", "code", "1/model.py") in told


# how the repository is spoilt, what is raised, and a part of the line
REFUSED: list[tuple[Change, type[TrtpipeError], str]] = [
    (param("gpt_model_path", "/engines/llama"), InputDataError,
     r"names the engine '/engines/llama', which is not on this machine; give its folder with --engine"),
    (param("gpt_model_path", "tensorrt_llm/2"), InputDataError, r"is 'tensorrt_llm/2', which is not there"),
    (engine("build_config", None), InputDataError, "which has a config.json without sizes"),
    (engine("build_config.max_batch_size", None), InputDataError, "build_config has no usable max_batch_size"),
    (engine("build_config.max_batch_size", -3), InputDataError, "build_config has no usable max_batch_size"),
    (engine("pretrained_config.mapping", {"world_size": 2, "tp_size": "2"}), InputDataError, "no numbers of ranks"),
    (edit("tensorrt_llm", "max_batch_size: 8", "max_batch_size: ${triton_max_batch_size}"), InputDataError,
     "still holds the placeholder"),
    (edit("tensorrt_llm", 'name: "tensorrt_llm"', 'name: "tensorrt_llm" {'), InputDataError, "tensorrt_llm/config"),
    (params(gpt_model_path="preprocessing/1/tokenizer"), InputDataError, "has no config.json"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "line"), REFUSED)
def test_a_repository_without_an_engine(tmp_path: Path, change: Change, kind: type[TrtpipeError], line: str) -> None:
    repository = inflight(tmp_path / "repository")
    change(repository)
    with pytest.raises(kind, match=line):
        read_deployment(repository.path)


def test_folders_that_hold_no_engine(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder or target"):
        read_deployment(tmp_path / "nothing")
    with pytest.raises(InputDataError, match="holds no engine and no model repository"):
        read_deployment(tmp_path)
    (tmp_path / "config.json").write_text('{"architecture": "LlamaForCausalLM", "dtype": "bfloat16"}')
    with pytest.raises(InputDataError, match=r"\d is a TensorRT-LLM checkpoint, not an engine; build"):
        read_deployment(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputDataError, match=r"\d is a Hugging Face model folder, not an engine; build"):
        read_deployment(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputDataError, match=r"\d has a config\.json without sizes: it has no build_config; build"):
        read_deployment(tmp_path)
    with pytest.raises(ArtefactRefused, match="is served by the LLM API already"):
        read_deployment(llmapi(tmp_path / "llmapi").path)
    with pytest.raises(ArtefactRefused, match="is served by vllm"):
        read_deployment(rendered(tmp_path, "vllm").path)
    engines = inflight(tmp_path / "two")
    engines.path.joinpath("tensorrt_llm").rename(engines.path / "context")
    engines.edit("context", 'name: "tensorrt_llm"', 'name: "context"')
    copied = engines.path / "generation"
    (copied / "1").mkdir(parents=True)
    copied.joinpath("config.pbtxt").write_text(engines.text("context").replace('name: "context"', 'name: "generation"'))
    with pytest.raises(UsageError, match="has 2 engines: context, generation: a new target has one"):
        read_deployment(engines.path)


def test_an_engine_that_is_elsewhere_and_one_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository: Repository = inflight(tmp_path / "repository")
    repository.parameter("tensorrt_llm", "gpt_model_path", "/engines/llama")
    (tmp_path / "engine").mkdir()
    config = repository.path / "tensorrt_llm" / "1" / "config.json"
    config.rename(tmp_path / "engine" / "config.json")
    found = read_deployment(repository.path, tmp_path / "engine")
    assert found.engine.path == tmp_path / "engine"
    monkeypatch.chdir(tmp_path)
    Path("hf").mkdir()
    Path("hf/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputDataError, match=r"^hf is a Hugging Face model folder, not an engine; build"):
        read_deployment(repository.path, Path("hf"))
    alone = read_deployment(tmp_path / "engine")
    assert {one.place for one in alone.settings} == {"engine"}
    with pytest.raises(UsageError, match="--engine is for a model repository"):
        read_deployment(tmp_path / "engine", tmp_path / "engine")
