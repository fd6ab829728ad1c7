"""A repository is the five models NVIDIA's clients expect, byte for byte what the golden files say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.factories import write_passport, write_tokenizer
from tests.support.golden import check_golden
from trtpipe.engines.base import Engine
from trtpipe.engines.errors import InputDataError
from trtpipe.triton_repo.check import RepositoryError, check_configs
from trtpipe.triton_repo.llmapi import INPUTS
from trtpipe.triton_repo.render import ModelRepository, render
from trtpipe.triton_repo.serving import ServingConfig

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    folder = tmp_path / "engine"
    folder.mkdir()
    config = {"build_config": {"max_batch_size": 8}, "pretrained_config": {"vocab_size": 264}}
    (folder / "config.json").write_text(json.dumps(config))
    write_passport(folder)
    (folder / "rank0.safetensors").write_bytes(bytes(2 << 20))
    return Engine(path=folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    return folder


def config(repository: ModelRepository, model: str) -> Any:
    text = (repository.path / model / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("model", MODELS)
def test_config_is_the_golden_one(engine: Engine, tokenizer: Path, out: Path, model: str) -> None:
    render(engine, tokenizer, ServingConfig(), out)
    check_golden(f"{model}.pbtxt", (out / model / "config.pbtxt").read_text())


def test_nvidia_s_graph_has_no_tensor_of_ours(engine: Engine, tokenizer: Path, out: Path) -> None:
    write_passport(engine.path, runtime="tensorrt_llm", sm=90, sms=(90,), gpu="h100", toolchain="1.2.1")
    repository = render(engine, tokenizer, ServingConfig(), out)
    assert "request_key" not in {tensor.name for tensor in config(repository, "tensorrt_llm").output}
    last = config(repository, "ensemble").ensemble_scheduling.step[2]
    assert set(last.input_map) == {"TOKENS_BATCH", "SEQUENCE_LENGTH", "BATCH_INDEX", "SEQUENCE_INDEX"}


def test_the_tree_is_what_triton_loads(engine: Engine, tokenizer: Path, out: Path) -> None:
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert render(engine, tokenizer, ServingConfig(), out).models == MODELS
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "ensemble/1/.keep",
        "ensemble/config.pbtxt",
        "postprocessing/1/model.py",
        "postprocessing/1/trtpipe_text.py",
        "postprocessing/config.pbtxt",
        "preprocessing/1/model.py",
        "preprocessing/1/tokenizer/additional_chat_templates/tool_use.jinja",
        "preprocessing/1/tokenizer/tokenizer.json",
        "preprocessing/1/tokenizer/tokenizer_config.json",
        "preprocessing/1/trtpipe_text.py",
        "preprocessing/config.pbtxt",
        "tensorrt_llm/1/config.json",
        "tensorrt_llm/1/passport.json",
        "tensorrt_llm/1/rank0.safetensors",
        "tensorrt_llm/1/xgrammar_tokenizer_info.json",
        "tensorrt_llm/config.pbtxt",
        "tensorrt_llm_bls/1/model.py",
        "tensorrt_llm_bls/1/trtpipe_text.py",
        "tensorrt_llm_bls/config.pbtxt",
    ]
    weights = out / "tensorrt_llm" / "1" / "rank0.safetensors"
    assert weights.samefile(engine.path / "rank0.safetensors"), "weights are linked, not copied"


def test_options_reach_the_backend_in_the_spelling_it_reads(engine: Engine, tokenizer: Path, out: Path) -> None:
    serving = ServingConfig(
        triton_max_batch_size=4,
        batch_scheduler_policy="max_utilization",
        max_tokens_in_paged_kv_cache=4096,
        enable_kv_cache_reuse=False,
        max_queue_size=100,
        repository_root="/models/",
    )
    repository = render(engine, tokenizer, serving, out)
    llm = config(repository, "tensorrt_llm")
    assert (llm.backend, llm.max_batch_size, llm.model_transaction_policy.decoupled) == ("tensorrtllm", 4, True)
    assert llm.dynamic_batching.default_queue_policy.max_queue_size == 100
    values = {key: value.string_value for key, value in llm.parameters.items()}
    assert values["gpt_model_type"] == "inflight_fused_batching"
    assert values["gpt_model_path"] == "/models/tensorrt_llm/1"
    assert values["batch_scheduler_policy"] == "max_utilization"
    assert values["max_tokens_in_paged_kv_cache"] == "4096"
    assert values["enable_kv_cache_reuse"] == "false"
    assert values["guided_decoding_backend"] == "xgrammar"
    assert values["xgrammar_tokenizer_info_path"] == "/models/tensorrt_llm/1/xgrammar_tokenizer_info.json"
    info = json.loads((out / "tensorrt_llm" / "1" / "xgrammar_tokenizer_info.json").read_text())
    assert info["encoded_vocab"][:3] == ["<s>", "</s>", "!"]
    assert info["stop_token_ids"] == [1]
    assert json.loads(info["tokenizer_str"])["model"]["type"] == "BPE"
    pre = config(repository, "preprocessing")
    assert pre.parameters["tokenizer_dir"].string_value == "/models/preprocessing/1/tokenizer"


def test_the_script_serves_one_request_a_process_and_triton_keeps_the_rest(
    engine: Engine, tokenizer: Path, out: Path
) -> None:
    def counts(**serving: Any) -> list[tuple[int, int, int]]:
        out.mkdir(exist_ok=True)
        repository = render(engine, tokenizer, ServingConfig(ensemble="script", max_queue_size=9, **serving), out)
        found = [config(repository, model) for model in ("ensemble", "tensorrt_llm_bls")]
        shutil.rmtree(out)
        return [
            (m.instance_group[0].count, m.max_batch_size, m.dynamic_batching.default_queue_policy.max_queue_size)
            for m in found
        ]

    assert counts() == [(8, 1, 9), (4, 1, 9)]
    assert counts(bls_instance_count=3) == [(3, 1, 9), (3, 1, 9)]


def test_streaming_can_be_switched_off_in_all_models_alike(engine: Engine, tokenizer: Path, out: Path) -> None:
    repository = render(engine, tokenizer, ServingConfig(decoupled=False), out)
    for model in ("tensorrt_llm", "tensorrt_llm_bls"):
        assert config(repository, model).model_transaction_policy.decoupled is False


def test_what_cannot_be_served_is_refused(engine: Engine, tokenizer: Path, out: Path) -> None:
    with pytest.raises(InputDataError, match="triton_max_batch_size 9 exceeds the engine's max_batch_size 8"):
        render(engine, tokenizer, ServingConfig(triton_max_batch_size=9), out)
    (tokenizer / "tokenizer.json").unlink()
    with pytest.raises(InputDataError, match=r"has no tokenizer\.json"):
        render(engine, tokenizer, ServingConfig(), out)


@pytest.mark.parametrize(
    ("model", "old", "new", "telling"),
    [
        ("tensorrt_llm", "max_batch_size: 8", "max_batch_size: eight", "is not a model configuration"),
        ("tensorrt_llm", 'name: "tensorrt_llm"', 'name: "llm"', "names the model 'llm', its folder is 'tensorrt_llm'"),
        ("preprocessing", "preprocessing/1/tokenizer", "${tokenizer_dir}", "still holds the placeholder"),
        ("ensemble", 'key: "input_ids"', 'key: "inputs_ids"', "feeds 'inputs_ids', which is not an input"),
        ("ensemble", 'value: "_INPUT_ID"', 'value: "_INPUT"', "nothing produces '_INPUT_ID'"),
        (
            "ensemble",
            'key: "OUTPUT" value: "text_output"',
            'key: "OUTPUT" value: "text"',
            "promises the output 'text_output'",
        ),
        ("ensemble", 'model_name: "postprocessing"', 'model_name: "post"', "uses the model 'post'"),
        (
            "ensemble",
            'input_map { key: "QUERY" value: "text_input" }',
            "",
            "leaves the input 'QUERY' of preprocessing unfed",
        ),
    ],
)
def test_a_wrong_repository_is_named(
    engine: Engine, tokenizer: Path, out: Path, model: str, old: str, new: str, telling: str
) -> None:
    render(engine, tokenizer, ServingConfig(), out)
    path = out / model / "config.pbtxt"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(RepositoryError) as caught:
        check_configs(out, MODELS)
    assert telling in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_model_without_a_version_is_named(engine: Engine, tokenizer: Path, out: Path) -> None:
    render(engine, tokenizer, ServingConfig(), out)
    (out / "ensemble" / "1").rename(out / "ensemble" / "01")
    with pytest.raises(RepositoryError, match="has no version folder"):
        check_configs(out, MODELS)


PENALTIES = ["frequency_penalty", "presence_penalty", "repetition_penalty"]
GREEDY = [
    "frequency_penalty", "min_tokens", "presence_penalty", "repetition_penalty", "seed", "temperature", "top_k",
    "top_p",
]  # fmt: skip


@pytest.mark.parametrize(
    ("release", "llm_args", "drafts", "missing"),
    [
        ("1.3.0rc29", {}, False, []),
        ("1.2.1", {}, False, [*PENALTIES, "seed"]),
        ("1.2.1", {"sampler_type": "TorchSampler"}, False, [*PENALTIES, "seed"]),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, False, []),
        ("1.2.1", {"max_beam_width": 4}, False, []),
        ("1.2.1", {"max_beam_width": 4, "sampler_type": "TorchSampler"}, False, [*PENALTIES, "seed"]),
        ("1.2.1", {"sampler_type": "TRTLLMSampler"}, True, [*PENALTIES, "seed"]),
        ("1.1.0", {}, False, [*PENALTIES, "seed"]),
        # The default sampler of 1.0 never draws, so that the other is chosen, which cannot serve drafts.
        ("1.0.0", {}, False, []),
        ("1.0.0", {"enable_trtllm_sampler": False}, False, GREEDY),
        ("1.0.0", {}, True, GREEDY),
    ],
)
def test_the_llm_api_has_no_input_for_what_its_sampler_ignores(
    tmp_path: Path, tokenizer: Path, out: Path, release: str, llm_args: dict[str, Any], drafts: bool, missing: list[str]
) -> None:
    folder = tmp_path / "hf-engine"
    folder.mkdir()
    args = {"max_batch_size": 8, "kv_cache_config": {}}
    more = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3}} if drafts else {}
    (folder / "llm_args.yaml").write_text(yaml.safe_dump({**args, **more}))
    write_passport(folder, runtime="trtllm_pytorch", gpu="h100", sm=90, sms=(90,), toolchain=release)
    render(Engine(path=folder), tokenizer, ServingConfig(llm_args=llm_args), out)
    text = (out / "tensorrt_llm" / "config.pbtxt").read_text()
    asked = {tensor.name for tensor in INPUTS}
    written = {line.split('"')[1] for line in text.splitlines() if line.strip().startswith("name:")}
    # 1.0 does not start with guided decoding and drafts.
    unguided = release == "1.0.0" and drafts
    guides = ["guided_decoding_guide", "guided_decoding_guide_type"] if unguided else []
    assert sorted(asked - written) == guides + [f"sampling_param_{name}" for name in missing]
    told = 'key: "drawn_log_probs"\n  value: { string_value: "false" }' in text
    assert told == (release in ("1.1.0", "1.2.1") and bool(missing))
    for name in ("model.yaml", "llm_args.yaml"):
        given = yaml.safe_load((out / "tensorrt_llm" / "1" / name).read_text())
        expected = {("1.0.0", False): {"enable_trtllm_sampler": True}}.get((release, drafts), {}) | llm_args
        assert {key: given[key] for key in given.keys() & {"enable_trtllm_sampler", *llm_args}} == expected
        assert ("guided_decoding_backend" in given) is not unguided


def test_the_llm_api_is_one_model(tmp_path: Path, tokenizer: Path, out: Path) -> None:
    folder = tmp_path / "hf-engine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(8))
    cache = {"dtype": "fp8", "tokens_per_block": 32}
    args = {"backend": "pytorch", "tensor_parallel_size": 2, "max_batch_size": 8, "kv_cache_config": cache}
    (folder / "llm_args.yaml").write_text(yaml.safe_dump(args))
    write_passport(folder, runtime="trtllm_pytorch", gpu="h100", sm=90, sms=(90,), toolchain="1.2.1")
    more = {"disable_overlap_scheduler": True, "kv_cache_config": {"enable_partial_reuse": False}}
    serving = ServingConfig(
        max_attention_window_size=1024, kv_cache_free_gpu_mem_fraction=0.8, kv_cache_host_memory_bytes=1024,
        llm_args=more,
    )  # fmt: skip
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": 2}')
    repository = render(Engine(path=folder), tokenizer, serving, out)
    assert repository.models == ("tensorrt_llm",)
    check_golden("llmapi.pbtxt", (out / "tensorrt_llm" / "config.pbtxt").read_text())
    assert sorted(path.name for path in (out / "tensorrt_llm" / "1").iterdir()) == [
        "config.json", "generation_config.json", "llm_args.yaml", "model.py", "model.safetensors", "model.yaml",
        "passport.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    settings = yaml.safe_load((out / "tensorrt_llm" / "1" / "model.yaml").read_text())
    # For `trtllm-serve --config`, which knows no more.
    alone = {name: value for name, value in settings.items() if name not in ("model", "triton_config")}
    assert yaml.safe_load((out / "tensorrt_llm" / "1" / "llm_args.yaml").read_text()) == alone
    assert settings == {
        "model": "tensorrt_llm/1",
        "backend": "pytorch",
        "tensor_parallel_size": 2,
        "max_batch_size": 8,
        "kv_cache_config": {
            "dtype": "fp8", "tokens_per_block": 32, "free_gpu_memory_fraction": 0.8, "enable_block_reuse": True,
            "max_attention_window": [1024], "host_cache_size": 1024, "enable_partial_reuse": False,
        },
        "disable_overlap_scheduler": True,
        "enable_chunked_prefill": True,
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "enable_iter_perf_stats": True,
        "guided_decoding_backend": "xgrammar",
        "triton_config": {
            "max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100, "stats_check_period_ms": 100,
            "max_queue_size": 0,
        },
    }  # fmt: skip
