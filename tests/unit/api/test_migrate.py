"""A migration as a whole: where the model, the precision and the GPU come from, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import trtpipe
from tests.support.adapters import write_adapter
from tests.support.factories import hf_folder
from tests.support.repository_changes import made, rendered
from tests.support.triton_repositories import Repository, inflight
from trtpipe.engines.errors import ArtefactRefused, InputDataError, TrtpipeError, UsageError
from trtpipe.engines.files import write_json
from trtpipe.engines.hf.adapter import lay_out, read_adapter
from trtpipe.engines.model_source import HubSource
from trtpipe.pipeline.migration import Migration
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.store.manifest import Record
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.migration import Row, Verdict

SIZES = {"max_batch_size": 8, "max_input_len": 128, "max_seq_len": 256, "max_num_tokens": 512}
FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def tiny(repository: Repository, **pretrained: Any) -> Path:
    """The repository with the engine of the model `tiny`."""
    for name, value in {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **pretrained}.items():
        repository.engine(f"pretrained_config.{name}", value)
    for name, value in SIZES.items():
        repository.engine(f"build_config.{name}", value)
    return repository.path


@pytest.fixture
def nvidia(in_folder: Path) -> Path:
    """NVIDIA's template with an engine of the model `tiny`, which is in the working folder."""
    hf_folder(in_folder / "tiny")
    return tiny(inflight(in_folder / "repository"))


def change(repository: Path, **pretrained: Any) -> Path:
    return tiny(Repository(repository), **pretrained)


@pytest.fixture
def target(in_folder: Path, tmp_path: Path) -> Path:
    """A target of ours in ./runs, built from the folder `tiny`."""
    spec = trtpipe.settings(
        model=str(hf_folder(in_folder / "tiny")), gpu="h100", dtype="fp8-kv", accept_accuracy=True,
        set={"build": SIZES, "calibration": {"samples": 16, "seq_len": 64}},
    )  # fmt: skip
    run = RunFolder.of(spec.target)
    run.start(spec, Store(tmp_path / "home"))
    repository = tiny(rendered(tmp_path, batch_scheduler_policy="max_utilization"), quantization=FP8)
    made(repository / "tensorrt_llm" / "1", quant_algo="FP8", kv_cache_quant_algo="FP8")
    (run.path / "repository").symlink_to(repository)
    (run.path / "engine").symlink_to(repository / "tensorrt_llm" / "1")
    return run.path


def test_a_template_with_an_engine_from_elsewhere(nvidia: Path) -> None:
    found = trtpipe.migrate(nvidia, to="vllm", model="tiny", gpu="h100")
    assert found.spec.target == "tiny.h100.bf16.vllm"
    assert found.recipe == {
        "tp": 1, "pp": 1, "dtype": "bf16", "build": {**SIZES, "tokens_per_block": 32},
        "serving": {
            "kv_cache_free_gpu_mem_fraction": 0.9, "exclude_input_in_output": True, "enable_chunked_context": True,
            "triton_max_batch_size": 8, "decoupled": True, "preprocessing_instance_count": 1, "bls_instance_count": 1,
        },
        "model": str(Path("tiny").absolute()), "gpu": "h100", "runtime": "vllm",
    }  # fmt: skip
    assert {value.name: value.source for value in found.spec.values}["build.max_batch_size"] == "the engine"
    assert not Path("runs").exists()
    again = trtpipe.settings(recipe=_written(found.recipe))
    assert {**again.settings, "model": "tiny"} == found.spec.settings
    assert again.target == found.spec.target


def test_adapters_of_a_target_come_along(in_folder: Path, nvidia: Path, tmp_path: Path) -> None:
    """From the target's own settings; an engine's settings of adapters are carried over too."""
    adapter = write_adapter(in_folder / "fr", Path("tiny"), rank=4)
    spec = trtpipe.settings(model="tiny", gpu="h100", dtype="fp16", runtime="tensorrt_llm", lora={"fr": adapter})
    run = RunFolder.of(spec.target)
    run.start(spec, Store(tmp_path / "home"))
    repository = Repository(nvidia)
    repository.engine("pretrained_config.dtype", "float16")
    repository.engine("build_config.plugin_config.lora_plugin", "auto")
    repository.engine(
        "build_config.lora_config", {"lora_dir": [], "max_lora_rank": 16, "lora_target_modules": ["attn_q"]}
    )
    (run.path / "repository").symlink_to(nvidia)
    found = trtpipe.migrate(run.path, to="vllm", gpu="h100")
    assert found.spec.adapters == (("fr", adapter.absolute()),)
    assert (found.spec.build.takes_adapters, found.spec.build.max_lora_rank) == (True, 16)
    assert {"attn_q", "mlp_gate"} <= set(found.spec.build.lora_target_modules)
    named = trtpipe.migrate(run.path, to="vllm", gpu="h100", model=str(in_folder / "tiny"))
    assert named.spec.adapters == found.spec.adapters, "the model is the engine's, wherever it comes from"
    elsewhere = trtpipe.migrate(nvidia, to="llmapi", model="tiny", gpu="h100")
    assert (elsewhere.spec.adapters, elsewhere.spec.build.lora_target_modules) == ((), ("attn_q",))


def _folder_of_adapters(found: Migration) -> Row:
    return next(row for row in found.rows if row.setting == "lora_prefetch_dir")


def test_adapters_of_a_repository_come_along_where_they_are_as_peft_saves_them(
    in_folder: Path, nvidia: Path, tmp_path: Path
) -> None:
    folder = nvidia / "tensorrt_llm" / "1" / "lora"
    Repository(nvidia).parameter("tensorrt_llm", "lora_prefetch_dir", "tensorrt_llm/1/lora")

    def migrate() -> Migration:
        return trtpipe.migrate(nvidia, to="vllm", model="tiny", gpu="h100")

    gone = _folder_of_adapters(migrate())
    assert gone.verdict is Verdict.LOST
    assert gone.why == "the folder is not here; adapters as PEFT saves them, which `trtpipe build --lora` takes"
    folder.mkdir()
    (folder / ".keep").touch()
    assert _folder_of_adapters(migrate()).verdict is Verdict.REPLACED, "no adapter is there"
    ours = lay_out(read_adapter(write_adapter(in_folder / "fr", Path("tiny"), rank=4)), "french", folder)
    write_adapter(folder / "77", Path("tiny"), rank=4)
    found = migrate()
    assert dict(found.spec.adapters) == {"french": ours, "77": folder / "77"}
    assert found.recipe["lora"] == {"french": str(ours), "77": str(folder / "77")}
    row = _folder_of_adapters(found)
    assert (row.verdict, row.becomes, row.to) == (Verdict.CARRIED, "lora", "77, french")
    (folder / "5").mkdir()
    (folder / "5" / "model.lora_weights.npy").touch()
    assert dict(migrate().spec.adapters) == {"french": ours, "77": folder / "77"}
    row = _folder_of_adapters(migrate())
    assert (row.verdict, row.why.partition(";")[0]) == (Verdict.LOST, "1 of 3 are not PEFT's files")


def _written(recipe: dict[str, Any]) -> Path:
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump(recipe))
    return path


def test_a_target_of_ours_brings_its_model_and_what_it_was_quantized_with(target: Path, in_folder: Path) -> None:
    for folder in (target.name, target, target / "repository", target / "engine"):
        found = trtpipe.migrate(folder, to="vllm")
        assert found.spec.target == "tiny.h100.fp8-kv.vllm"
        assert found.recipe["model"] == str(in_folder / "tiny")
        assert found.recipe["calibration"]["samples"] == 16
        assert found.recipe["accept_accuracy"] is True
    other = trtpipe.migrate(target, to="llmapi", dtype="bf16")
    assert other.spec.target == "tiny.h100.bf16.trtllm_pytorch"
    assert "calibration" not in other.recipe
    rows = {row.setting: row for row in other.rows if row.place == "engine"}
    assert (rows["precision"].value, rows["precision"].to) == ("FP8, KV cache FP8", "bf16")
    assert rows["precision"].verdict is Verdict.CHANGED
    assert rows["version"].verdict is Verdict.CARRIED


def test_a_target_of_ours_brings_the_commit_of_its_weights_and_the_tasks_of_its_gate(
    nvidia: Path, tmp_path: Path
) -> None:
    """`main` of the hub may have gone on since the engine was built."""
    spec = trtpipe.settings(model="llama3-8b", gpu="h100", dtype="fp8-kv", tasks=["ours.jsonl"])
    repo, commit = "meta-llama/Meta-Llama-3-8B-Instruct", "8afb486c1db24fe5011ec46dfbe5b5dccdb575c2"
    run = RunFolder.of(spec.target)
    run.start(spec, Store(tmp_path / "home"))
    change(nvidia, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, quantization=FP8)
    (run.path / "repository").symlink_to(nvidia)
    assert "revision" not in trtpipe.migrate(run.path, to="vllm", gpu="h100").recipe
    record = Record(stage="download", stage_version=1, inputs={repo: commit}, settings={}, tools={})
    write_json(run.path / "run.json", {"download": vars(record)})
    found = trtpipe.migrate(run.path, to="vllm", gpu="h100")
    assert (found.recipe["model"], found.recipe["revision"], found.recipe["tasks"]) == (
        "llama3-8b", commit, ["ours.jsonl"],
    )  # fmt: skip
    assert found.spec.model.source == HubSource(repo_id=repo, revision=commit)
    assert found.spec.tasks == ("ours.jsonl",)
    other = trtpipe.migrate(run.path, to="vllm", gpu="h100", revision="v2", dtype="bf16")
    assert (other.recipe["revision"], "tasks" in other.recipe) == ("v2", False)
    assert trtpipe.migrate(run.path, to="vllm", gpu="h100", dtype="int4-awq").spec.tasks == ("ours.jsonl",)
    assert "revision" not in trtpipe.migrate(run.path, to="vllm", gpu="h100", model="llama3.1-8b").recipe


def test_the_passport_of_an_engine_alone_names_its_model(nvidia: Path) -> None:
    weights = {"model": "llama3-8b", "revision": "v1", "dtype": "fp8"}
    made(nvidia / "tensorrt_llm" / "1", weights=weights)
    change(nvidia, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    found = trtpipe.migrate(nvidia, to="vllm")
    assert {name: found.recipe[name] for name in weights} == {"model": "llama3-8b", "revision": "v1", "dtype": "bf16"}
    assert {value.name: value.source for value in found.spec.values}["model"] == "its passport"
    assert "revision" not in trtpipe.migrate(nvidia, to="vllm", model="llama3.1-8b").recipe


@pytest.mark.process
def test_a_target_of_the_reference_runtime_goes_to_vllm(in_folder: Path) -> None:
    tiny = str(hf_folder(in_folder / "tiny", dtype="F32"))
    built = trtpipe.build(model=tiny, gpu="cpu", dtype="fp32", set={"build": SIZES, "serving": {"max_queue_size": 16}})
    found = trtpipe.migrate(built.target, to="vllm")
    assert found.spec.target == "tiny.cpu.fp32.vllm"
    assert {row.setting: row.verdict for row in found.rows if row.becomes == "serving.max_queue_size"} == {
        "dynamic_batching.default_queue_policy.max_queue_size": Verdict.CARRIED
    }
    made = trtpipe.build(found.spec)
    assert yaml.safe_load((made.folder / "engine" / "engine_args.yaml").read_text()) == {
        "tensor-parallel-size": 1, "pipeline-parallel-size": 1, "max-num-seqs": 8, "max-model-len": 256,
        "max-num-batched-tokens": 512, "block-size": 32, "kv-cache-dtype": "auto", "dtype": "float32",
        "enforce-eager": True,
    }  # fmt: skip
    assert trtpipe.check(made.target) == []
    with pytest.raises(ArtefactRefused, match=rf"^runs/{made.target}/repository is served by vllm: it holds no engine"):
        trtpipe.migrate(made.target, to="llmapi")
    with pytest.raises(UsageError, match=r"trtllm_pytorch runtime needs an NVIDIA GPU: .*; name the GPU with --gpu"):
        trtpipe.migrate(built.target, to="llmapi")


def test_an_option_outranks_the_engine(nvidia: Path) -> None:
    given = {"build.max_batch_size": 4, "serving.triton_max_batch_size": 4}
    found = trtpipe.migrate(nvidia, to="vllm", model="tiny", gpu="h100", set=given)
    row = next(row for row in found.rows if (row.place, row.setting) == ("engine", "max_batch_size"))
    assert (row.verdict, row.value, row.to, row.why) == (Verdict.CHANGED, 8, 4, "from --set")
    assert found.spec.build.max_batch_size == 4


@pytest.mark.parametrize(
    ("quantization", "dtype", "dtype_of_target"),
    [
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, "bfloat16", "fp8"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": None}, "bfloat16", "fp8-pc-pt"),
        ({"quant_algo": None, "kv_cache_quant_algo": None}, "float16", "fp16"),
    ],
)
def test_precisions(nvidia: Path, quantization: dict[str, Any], dtype: str, dtype_of_target: str) -> None:
    change(nvidia, quantization=quantization, dtype=dtype)
    found = trtpipe.migrate(nvidia, to="llmapi", model="tiny", gpu="h100")
    assert found.spec.precision.name == dtype_of_target
    row = next(row for row in found.rows if row.setting == "precision")
    assert row.verdict is Verdict.CARRIED


def test_a_model_that_comes_quantized_keeps_its_own_precision(nvidia: Path) -> None:
    """A bf16 engine, and a model whose files are FP8: the engine's precision is not asked of them."""
    change(nvidia, hidden_size=4096, num_hidden_layers=32, num_attention_heads=32)
    found = trtpipe.migrate(nvidia, to="vllm", model="llama3.1-8b-fp8", gpu="h100")
    row = next(row for row in found.rows if row.setting == "precision")
    assert (row.verdict, row.value, row.to, row.why) == (
        Verdict.CHANGED, "bfloat16", found.spec.precision.name, "the model is quantized already",
    )  # fmt: skip
    assert found.spec.precision.name == "fp8-kv"
    with pytest.raises(UsageError, match=r"--dtype bf16 is not the precision of llama3\.1-8b-fp8"):
        trtpipe.migrate(nvidia, to="vllm", model="llama3.1-8b-fp8", gpu="h100", dtype="bf16")


# how the engine is changed, options, the error and a part of its line
REFUSED: list[tuple[dict[str, Any], dict[str, Any], type[TrtpipeError], str]] = [
    ({}, {"to": "sglang"}, UsageError, "unknown runtime 'sglang'; known: llmapi, vllm"),
    ({}, {"model": None}, UsageError, "nothing says which model .* no weights are taken out of an engine"),
    ({}, {"gpu": None}, UsageError, "no gpu is given"),
    ({"architecture": "GPTForCausalLM"}, {}, UsageError, "is of GPTForCausalLM, which trtpipe does not know; it knows"),
    ({"hidden_size": 64}, {}, UsageError, "tiny is not the engine's model: its hidden_size is 32, and .* has 64"),
    ({"quantization": {"quant_algo": "W8A8_SQ_PER_CHANNEL", "kv_cache_quant_algo": None}},
     {"to": "llmapi", "gpu": "a100"}, UsageError, r"; take --dtype .*bf16"),
    ({"quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": None}}, {}, UsageError,
     r"W4A8_AWQ.*; take --dtype .*bf16.*, or --to llmapi"),
    ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, {"to": "llmapi"}, UsageError,
     "unquantized weights with an FP8 KV cache: .*; take --dtype bf16 or fp8 or"),
    ({"quantization": {"quant_algo": "W4A16_GPTQ", "kv_cache_quant_algo": None}}, {}, UsageError,
     "the engine's precision, W4A16_GPTQ, is none that trtpipe makes; choose another with --dtype"),
    ({}, {"model": "nowhere/"}, UsageError, "unknown model 'nowhere/'"),
]  # fmt: skip


@pytest.mark.parametrize(("pretrained", "options", "kind", "line"), REFUSED)
def test_what_is_refused(
    nvidia: Path, pretrained: dict[str, Any], options: dict[str, Any], kind: type[TrtpipeError], line: str
) -> None:
    change(nvidia, **pretrained)
    with pytest.raises(kind, match=line):
        trtpipe.migrate(nvidia, **{"to": "vllm", "model": "tiny", "gpu": "h100", **options})
    assert not Path("runs").exists()


def test_a_source_that_is_gone(target: Path, in_folder: Path) -> None:
    (in_folder / "tiny").rename(in_folder / "moved")
    with pytest.raises(
        InputDataError, match=r"folder .*/tiny is gone: .* was built from it; give the model with --model"
    ):
        trtpipe.migrate(target, to="vllm")
    assert trtpipe.migrate(target, to="vllm", model="moved").spec.model.name == "moved"


def test_the_table_as_json(nvidia: Path) -> None:
    found = json.loads(json.dumps(trtpipe.migrate(nvidia, to="vllm", model="tiny", gpu="h100").to_json()))
    assert (found["target"], found["runtime"]) == ("tiny.h100.bf16.vllm", "vllm")
    assert {
        "place": "tensorrt_llm", "setting": "kv_cache_free_gpu_mem_fraction", "value": 0.9, "verdict": "changed",
        "becomes": "serving.kv_cache_free_gpu_mem_fraction", "to": 0.9,
        "why": "a share of the GPU's whole memory, for weights and activations too",
    } in found["rows"]  # fmt: skip
