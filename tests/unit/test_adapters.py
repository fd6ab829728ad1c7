"""LoRA adapters in the stages: settings, files for each runtime, and what is refused before a build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.support import nvidia_smi
from tests.support.adapters import write_adapter
from tests.support.doubles import install_trtllm_build
from tests.support.factories import hf_folder, write_passport
from tests.unit.test_runner import Recorder, build, plan
from trtpipe.engines import load_backend
from trtpipe.engines.adapters import AdapterFolder
from trtpipe.engines.errors import ArtefactRefused, InputDataError, UsageError
from trtpipe.engines.passport import read_passport
from trtpipe.pipeline.registry import export, provenance, transfer
from trtpipe.pipeline.registry.address import open_registry
from trtpipe.pipeline.registry.package import refuse_objects
from trtpipe.pipeline.resolve import read_spec
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.runner import execute
from trtpipe.pipeline.serving import adapters
from trtpipe.pipeline.serving.ports import Endpoints
from trtpipe.pipeline.serving.servers import Served, Server
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages.adapters import ADAPTERS
from trtpipe.pipeline.store.manifest import read_manifest
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.check import check_repository


@pytest.fixture
def model(in_folder: Path) -> Path:
    return hf_folder(in_folder / "tiny")


@pytest.fixture
def lora(in_folder: Path, model: Path) -> dict[str, str]:
    write_adapter(in_folder / "fr", model, rank=4)
    write_adapter(in_folder / "de", model, rank=2, roles=("q", "v"), seed=1)
    return {"fr": "fr", "de": "de"}


def repository(chosen: BuildSpec, home: Path) -> Path:
    execute(chosen, Store(home), Recorder())
    return RunFolder.of(chosen.target).linked("repository")


def test_a_target_with_adapters(model: Path, lora: dict[str, str], tmp_path: Path) -> None:
    chosen = plan(model, lora=lora)
    assert chosen.target == plan(model).target
    assert chosen.settings["lora"] == {name: str(Path(name).absolute()) for name in ("de", "fr")}
    assert (chosen.build.max_lora_rank, len(chosen.build.lora_target_modules)) == (4, 7)
    # What was recorded resolves to the same, whether the folders are there or not.
    recorded = chosen.to_json()
    recorded["settings"]["lora"]["fr"] = "/gone"
    assert read_spec(recorded, "here").build == chosen.build
    found = repository(chosen, tmp_path / "home")
    folder = AdapterFolder(found / "tensorrt_llm" / "1" / "lora")
    assert [(one.name, one.rank) for one in folder.all()] == [("de", 2), ("fr", 4)]
    text = (found / "tensorrt_llm" / "config.pbtxt").read_text()
    assert 'key: "lora_prefetch_dir"\n  value: { string_value: "tensorrt_llm/1/lora" }' in text
    passport = read_passport(found / "tensorrt_llm" / "1")
    assert passport.build_config["max_lora_rank"] == 4
    assert check_repository(found) == []
    incomplete = folder.all()[0].path
    (incomplete / "adapter_model.safetensors").unlink()
    (fault,) = check_repository(found)
    assert (fault.rule, fault.path) == ("engine-feature", f"tensorrt_llm/1/lora/{incomplete.name}")


def test_a_target_that_is_built_again_without_adapters_has_none(
    model: Path, lora: dict[str, str], tmp_path: Path
) -> None:
    chosen, store = plan(model), Store(tmp_path / "home")
    assert repository(plan(model, lora=lora), tmp_path / "home").is_dir()
    run = RunFolder.of(chosen.target)
    assert AdapterFolder(run.path / "adapters").all()
    execute(chosen, store, Recorder())
    assert not (run.path / "adapters").is_symlink()
    assert "adapters" not in run.stages()
    assert "adapters" not in {read_manifest(folder / "manifest.json").record.stage for folder in run.folders(store)}  # type: ignore[union-attr]
    assert not (run.linked("repository") / "tensorrt_llm" / "1" / "lora").exists()


@pytest.mark.parametrize("before", [False, True])
def test_an_adapter_that_is_refused_leaves_the_target_as_it_was(
    model: Path, lora: dict[str, str], tmp_path: Path, before: bool
) -> None:
    first = plan(model, lora=lora) if before else plan(model)
    found, run = repository(first, tmp_path / "home"), RunFolder.of(first.target)
    wrong = write_adapter(Path("wrong"), model, rank=4, size=float("inf"))
    with pytest.raises(InputDataError, match="holds numbers that are not finite"):
        execute(plan(model, lora={"wrong": str(wrong)}), Store(tmp_path / "home"), Recorder())
    assert run.linked("repository") == found
    assert run.spec().adapters == first.adapters


@pytest.mark.parametrize("way", ["export", "registry"])
def test_a_target_with_adapters_is_finished_elsewhere(
    model: Path, lora: dict[str, str], tmp_path: Path, way: str
) -> None:
    """The other machine has neither the model nor the folders of the adapters."""
    chosen = plan(model, lora=lora)
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    execute(chosen, here, Recorder())
    shelf = open_registry(str(tmp_path / "shelf"))
    told = json.loads(json.dumps(provenance.statement(RunFolder.of(chosen.target), here)))
    assert provenance.verify(RunFolder.of(chosen.target), here, told).elsewhere == []
    packed = export.pack(chosen.target, here, tmp_path / "out.tar")
    transfer.push(chosen.target, shelf, here)
    for folder in (model, Path("fr"), Path("de"), here.home):
        shutil.rmtree(folder)
    few = transfer.pull(chosen.target, shelf, Store(tmp_path / "few"), ["engine", "tokenizer"]).arrived
    assert few is not None
    with pytest.raises(
        InputDataError, match=r"^tiny\.cpu\.fp32 came without its adapters: .*/tiny is not a Hugging Face"
    ):
        execute(few.spec, Store(tmp_path / "few"), Recorder(), given=few.artefacts)
    arrived = export.unpack(packed, there) if way == "export" else transfer.pull(chosen.target, shelf, there).arrived
    assert arrived is not None
    execute(arrived.spec, there, Recorder(), given=arrived.artefacts)
    found = RunFolder.of(chosen.target).linked("repository")
    assert [(one.name, one.rank) for one in AdapterFolder(found / "tensorrt_llm" / "1" / "lora").all()] == [
        ("de", 2), ("fr", 4),
    ]  # fmt: skip


def test_only_what_adapters_change_is_made_again(model: Path, lora: dict[str, str], tmp_path: Path) -> None:
    store = Store(tmp_path / "home")
    assert "adapters" not in build(plan(model), store)
    made = build(plan(model, lora=lora), store)
    assert {stage for stage, (state, _) in made.items() if state == "made"} == {"adapters", "build", "package"}
    write_adapter(Path("fr"), model, rank=4, seed=9)
    made = build(plan(model, lora=lora), store)
    assert {stage for stage, (state, _) in made.items() if state == "made"} == {"adapters", "package"}
    assert made["adapters"][1] == "input: adapter fr changed"


def test_an_engine_that_takes_adapters_later(model: Path, tmp_path: Path) -> None:
    chosen = plan(model, "build.lora_plugin=auto", "build.max_lora_rank=16")
    folder = repository(chosen, tmp_path / "home") / "tensorrt_llm" / "1" / "lora"
    assert (folder.is_dir(), AdapterFolder(folder).all()) == (True, ())
    with pytest.raises(UsageError, match=r"build.max_lora_rank is not for the reference runtime"):
        plan(model, "build.max_lora_rank=16")


@pytest.mark.parametrize(
    ("runtime", "gpu", "file", "settings"),
    [
        ("vllm", "cpu", "engine_args.yaml",
         {"enable-lora": True, "max-lora-rank": 8, "max-loras": 8, "max-cpu-loras": 64}),
        ("trtllm_pytorch", "h100", "llm_args.yaml",
         {"enable_lora": True, "lora_config": {
             "lora_target_modules": ["attn_k", "attn_q", "attn_v"], "max_lora_rank": 2, "max_loras": 8,
             "max_cpu_loras": 64}}),
    ],
)  # fmt: skip
def test_settings_of_the_runtimes(
    model: Path, lora: dict[str, str], tmp_path: Path, runtime: str, gpu: str, file: str, settings: dict[str, Any]
) -> None:
    chosen = plan(model, gpu=gpu, dtype="bf16", runtime=runtime, lora={"de": lora["de"]})
    found = repository(chosen, tmp_path / "home") / "tensorrt_llm" / "1"
    told = yaml.safe_load((found / file).read_text())
    assert {name: value for name, value in told.items() if "lora" in name} == settings
    (one,) = AdapterFolder(found / "lora").all()
    assert json.loads((one.path / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.process
def test_an_engine_of_tensorrt_llm(
    model: Path, lora: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the double of trtllm-build; the arrays are in the folder that the C++ backend loads."""
    monkeypatch.setenv("PATH", str(install_trtllm_build(tmp_path / "bin").parent), prepend=":")
    nvidia_smi.install(monkeypatch, tmp_path / "bin", nvidia_smi.H100)
    with pytest.raises(UsageError, match="does not serve adapters of a bfloat16 engine by name"):
        plan(model, gpu="h100", dtype="bf16", runtime="tensorrt_llm", lora=lora)
    chosen = plan(model, gpu="h100", dtype="fp16", runtime="tensorrt_llm", executor="local", lora={"de": lora["de"]})
    found = repository(chosen, tmp_path / "home") / "tensorrt_llm" / "1"
    built = json.loads((found / "config.json").read_text())["build_config"]
    assert built["plugin_config"]["lora_plugin"] == "auto"
    assert built["lora_config"]["max_lora_rank"] == 2
    assert built["lora_config"]["lora_target_modules"] == ["attn_k", "attn_q", "attn_v"]
    (one,) = AdapterFolder(found / "lora").all()
    assert np.load(one.path / "model.lora_config.npy").tolist() == [[[1, 0, 2], [3, 0, 2], [1, 1, 2], [3, 1, 2]]]
    assert load_backend("tensorrt_llm").SAME_ADAPTERS
    # Their arrays travel, and an array of Python objects, which holds code, does not.
    store = Store(tmp_path / "home")
    shelf = open_registry(str(tmp_path / "shelf"))
    transfer.push(chosen.target, shelf, store)
    assert "adapters" in transfer.pull(chosen.target, shelf, Store(tmp_path / "there"), any_machine=True).artefacts
    np.save(tmp_path / "objects.npy", np.array([print]), allow_pickle=True)
    (tmp_path / "objects.npy").rename(tmp_path / "model.lora_weights.npy")
    with pytest.raises(ArtefactRefused, match=r"^here: model\.lora_weights\.npy of the adapters is not an array"):
        refuse_objects("here")(tmp_path)


@pytest.mark.parametrize(
    ("runtime", "native", "remedy"),
    [
        ("reference", "", ", or with --set build.lora_plugin=auto to add adapters later"),
        ("vllm", "", ", or with --set build.lora_plugin=auto to add adapters later"),
        ("vllm", "vllm.entrypoints.openai.api_server", ""),
        ("tensorrt_llm", "", ""),
        ("trtllm_pytorch", "", ""),
    ],
)
def test_an_engine_without_adapters_says_how_it_can_have_some(
    tmp_path: Path, runtime: str, native: str, remedy: str
) -> None:
    """A runtime whose adapters are fixed at its start takes none later, whatever the engine is built with."""
    (tmp_path / "tensorrt_llm" / "1").mkdir(parents=True)
    write_passport(tmp_path / "tensorrt_llm" / "1", runtime=runtime)
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = Served(name="a", repository=tmp_path)
    server = Server(name="a", pid=1, log=Path("/l"), endpoints=points, served=(served,), native=native)
    with pytest.raises(UsageError) as refused:
        adapters.find(Store(tmp_path / "home"), server, served)
    assert str(refused.value) == (
        f"a takes no adapters: its engine was built without them; build it with --lora NAME=FOLDER{remedy}"
    )


@pytest.mark.parametrize(
    ("given", "assignments", "words"),
    [
        ({"fr": "nowhere"}, (), "nowhere is not a LoRA adapter: there is no such folder"),
        ({"a/b": "fr"}, (), "'a/b' cannot be the name of an adapter"),
        ({"fr": 3}, (), r"option: lora.fr is 3, not a folder"),
        ({"fr": "fr"}, ("build.max_lora_rank=2",), "has rank 4, the engine takes 2"),
        ({"fr": "fr"}, ("lora=fr",), "--set: lora is not a mapping"),
    ],
)
def test_what_is_refused_at_once(
    model: Path, lora: dict[str, str], given: dict[str, Any], assignments: tuple[str, ...], words: str
) -> None:
    with pytest.raises((UsageError, InputDataError), match=words):
        plan(model, *assignments, lora=given)


def test_an_adapter_of_another_model_is_refused_with_the_settings(in_folder: Path, lora: dict[str, str]) -> None:
    other = hf_folder(in_folder / "other", hidden_size=64)
    with pytest.raises(InputDataError, match=r"is of another model: its self_attn.q_proj is 32 x 32, the model's is"):
        plan(other, lora=lora)


def test_an_adapter_that_has_gone_is_told_by_its_stage(model: Path, lora: dict[str, str], tmp_path: Path) -> None:
    chosen = plan(model, lora=lora)
    (Path("fr") / "adapter_config.json").unlink()
    with pytest.raises(InputDataError, match=r"is not a LoRA adapter: it has no adapter_config.json"):
        ADAPTERS.sources(ADAPTERS.settings(chosen), Store(tmp_path / "home").digests)
