"""The real stages on a tiny model: each runs once, runs again exactly when what it depends on changed, and says why."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trtpipe.engines.backends.reference
from tests.support import nvidia_smi
from tests.support.doubles import install_trtllm_build
from tests.support.factories import hf_folder
from trtpipe.engines.errors import HostError, InputDataError, StageFailed, UsageError
from trtpipe.engines.passport import read_passport
from trtpipe.pipeline.execution.hardware import GpuAbsent
from trtpipe.pipeline.layers import set_layer
from trtpipe.pipeline.registry.trust import Trust
from trtpipe.pipeline.resolve import resolve
from trtpipe.pipeline.run_folder import RUNS, RunFolder
from trtpipe.pipeline.runner import StageResult, execute, status
from trtpipe.pipeline.serving.repositories import find_repository
from trtpipe.pipeline.serving.targets import list_targets
from trtpipe.pipeline.spec import BuildSpec
from trtpipe.pipeline.stages import stages_of
from trtpipe.pipeline.stages.build import BUILD
from trtpipe.pipeline.stages.download import Download
from trtpipe.pipeline.store.store import Store

# The tiny model ends at 256 positions.
SIZES = ["build.max_batch_size=4", "build.max_input_len=64", "build.max_seq_len=128", "build.max_num_tokens=64"]
NAMES = ["download", "tokenizer", "convert", "build", "package"]
REUSED = ("reused", "same inputs and settings")


class Recorder:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.finished_stages: list[StageResult] = []

    @contextlib.contextmanager
    def stage(self, name: str, reason: str) -> Iterator[Any]:
        self.started.append((name, reason))
        yield lambda done, total: None

    def finished(self, result: StageResult) -> None:
        self.finished_stages.append(result)

    def line(self, text: str) -> None:
        self.notes.append(text)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def model(in_folder: Path) -> Path:
    return settled(hf_folder(in_folder / "tiny"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def settled(folder: Path) -> Path:
    """As a folder that was downloaded some time ago: its files are hashed once."""
    time.sleep(0.03)
    return folder


def plan(model: Path, *assignments: str, gpu: str = "cpu", dtype: str = "fp32", **options: Any) -> BuildSpec:
    layer = {"model": str(model), "gpu": gpu, "dtype": dtype, **options}
    return resolve([("option", layer), set_layer(SIZES), set_layer(list(assignments))])


def build(made: BuildSpec, store: Store, **options: Any) -> dict[str, tuple[str, str]]:
    """Run the plan with what a process of its own would know; stage -> (reused or made, why)."""
    recorder, own = Recorder(), Store(store.home)
    results = execute(made, own, recorder, **options)
    own.digests.save()
    assert recorder.finished_stages == results
    assert recorder.started == [(result.stage, result.reason) for result in results if not result.reused]
    return {result.stage: ("reused" if result.reused else "made", result.reason) for result in results}


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every path with its inode and, of files, the time of its last change; without the memory of digests."""
    stats = {str(path): path.lstat() for path in folder.rglob("*") if path.stem != "digests"}
    return {path: (0 if stat.S_ISDIR(one.st_mode) else one.st_mtime_ns, one.st_ino) for path, one in stats.items()}


@pytest.mark.parametrize(
    ("dtype", "names"),
    [
        ("fp32", NAMES),
        ("fp8", ["download", "tokenizer", "calibrate", "quantize", "verify", "build", "package"]),
        ("int8-wo", ["download", "tokenizer", "quantize", "verify", "build", "package"]),
    ],
)
def test_the_order_of_the_stages(model: Path, dtype: str, names: list[str]) -> None:
    # Kernels for INT8 weights compute in tiles of 64.
    even = hf_folder(model.parent / "even", hidden_size=256, intermediate_size=256)
    spec = plan(even, dtype=dtype)
    stages = stages_of(spec)
    assert [stage.name for stage in stages] == names
    made: set[str] = set()
    for stage in stages:
        assert set(stage.inputs(spec)) <= made
        made.add(stage.makes)


def test_a_first_run_makes_all_and_a_second_writes_nothing(model: Path, store: Store) -> None:
    assert build(plan(model), store) == dict.fromkeys(NAMES, ("made", "first run"))
    before = snapshot(store.home)
    assert build(plan(model), store) == dict.fromkeys(NAMES, REUSED)
    assert snapshot(store.home) == before


def test_a_serving_option_changes_the_repository_only(model: Path, store: Store) -> None:
    build(plan(model), store)
    assert build(plan(model, "serving.max_queue_size=7"), store) == {
        **dict.fromkeys(NAMES, REUSED),
        "package": ("made", "settings: max_queue_size 0 -> 7"),
    }
    assert build(plan(model), store) == dict.fromkeys(NAMES, REUSED)  # what was made before is still there


def test_a_build_limit_changes_engine_and_repository(model: Path, store: Store) -> None:
    build(plan(model), store)
    assert build(plan(model, "build.max_batch_size=8", "build.max_seq_len=100"), store) == {
        "download": REUSED,
        "tokenizer": REUSED,
        "convert": REUSED,
        "build": ("made", "settings: build.max_batch_size 4 -> 8, settings: build.max_seq_len 128 -> 100"),
        "package": ("made", "input: engine changed"),
    }


def test_one_byte_of_the_source_changes_everything(model: Path, store: Store) -> None:
    build(plan(model), store)
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert build(plan(model), store) == {
        "download": ("made", "input: folder changed"),
        "tokenizer": ("made", "input: model changed"),
        "convert": ("made", "input: model changed"),
        "build": ("made", "input: checkpoint changed"),
        "package": ("made", "input: engine changed"),
    }
    content[-1] ^= 1
    weights.write_bytes(content)
    assert build(plan(model), store) == dict.fromkeys(NAMES, REUSED)


def test_a_source_that_changes_only_what_serving_reads_leaves_the_weights(model: Path, store: Store) -> None:
    build(plan(model), store)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert build(plan(model), store) == {
        "download": ("made", "input: folder changed"),
        "tokenizer": ("made", "input: model changed"),
        "convert": ("made", "input: model changed"),
        "build": REUSED,  # the same checkpoint came out
        "package": ("made", "input: tokenizer changed"),
    }


def test_where_a_model_lies_does_not_matter(model: Path, store: Store, tmp_path: Path) -> None:
    build(plan(model), store)
    shutil.copytree(model, tmp_path / "elsewhere" / "tiny")
    (tmp_path / "elsewhere" / "tiny" / "README.md").write_text("not part of the model")
    assert build(plan(tmp_path / "elsewhere" / "tiny"), store) == dict.fromkeys(NAMES, REUSED)


def test_a_precision_has_a_checkpoint_of_its_own(model: Path, store: Store) -> None:
    build(plan(model), store)
    assert build(plan(model, dtype="fp16"), store) == {
        "download": REUSED,
        "tokenizer": REUSED,
        "convert": ("made", "first run"),  # of this target
        "build": ("made", "first run"),
        "package": ("made", "first run"),
    }


def test_a_build_that_ended_early_leaves_no_engine_of_other_settings(in_folder: Path, tmp_path: Path) -> None:
    model, store = hf_folder(in_folder / "tiny"), Store(tmp_path / "home")
    build(plan(model), store)
    run = RunFolder.of("tiny.cpu.fp32")
    build(plan(model, "build.max_batch_size=8"), store, until="convert")
    assert [(run.path / makes).exists() for makes in ("checkpoint", "engine", "repository")] == [True, False, False]
    finished = build(plan(model, "build.max_batch_size=8"), store)
    assert finished["build"] == ("made", "settings: build.max_batch_size 4 -> 8")  # it still knows why
    shutil.rmtree(model)
    hf_folder(in_folder / "tiny", seed=1)
    build(plan(model, "build.max_batch_size=8"), store, until="download")
    assert [(run.path / makes).exists() for makes in ("model", "checkpoint", "engine")] == [True, False, False]


def test_a_stage_that_changed_its_ways_runs_again(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    build(plan(model), store)
    version, before = BUILD.version, trtpipe.engines.backends.reference.VERSION
    monkeypatch.setattr(BUILD, "version", version + 1)
    monkeypatch.setattr("trtpipe.engines.backends.reference.VERSION", "reference-next")
    reason = f"tools: reference {before} -> reference-next, stage version: {version} -> {version + 1}"
    assert build(plan(model), store)["build"] == ("made", reason)


def test_until_stops_after_that_stage(model: Path, store: Store) -> None:
    made = ("made", "first run")
    assert build(plan(model), store, until="convert") == {"download": made, "tokenizer": made, "convert": made}
    run = RunFolder.of("tiny.cpu.fp32")
    assert sorted(path.name for path in run.path.iterdir()) == [
        ".id", "checkpoint", "model", "plan.json", "run.json", "tokenizer",
    ]  # fmt: skip
    assert build(plan(model), store) == {
        "download": REUSED, "tokenizer": REUSED, "convert": REUSED, "build": made, "package": made,
    }  # fmt: skip


def test_a_build_that_is_refused_leaves_no_target(
    model: Path, store: Store, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise HostError("the hub has no acme/tiny")

    with monkeypatch.context() as patched:
        patched.setattr(Download, "check", refuse)
        with pytest.raises(HostError):
            build(plan(model), store)
    assert not (in_folder / "runs").exists()
    assert list_targets(store) == []
    build(plan(model), store)
    assert [one.state for one in list_targets(store)] == ["complete"]


def test_an_unknown_stage_is_refused_before_anything_happens(model: Path, store: Store) -> None:
    with pytest.raises(UsageError) as caught:
        build(plan(model), store, until="covnert")
    assert str(caught.value) == "unknown stage 'covnert'; did you mean 'convert'?"
    assert not RUNS.exists()
    assert not store.home.exists()


def test_the_run_folder_links_to_what_is_current(model: Path, store: Store, in_folder: Path) -> None:
    build(plan(model), store)
    run = in_folder / "runs" / "tiny.cpu.fp32"
    links = {name: (run / name).readlink() for name in ("model", "tokenizer", "checkpoint", "engine", "repository")}
    artefacts = store.home / "artefacts"
    assert {link.parent.parent for link in links.values()} == {artefacts / name for name in NAMES}
    assert (run / "model" / "tokenizer.json").is_file()
    assert (run / "checkpoint" / "rank0.safetensors").is_file()
    assert json.loads((run / "engine" / "passport.json").read_text())["runtime"] == "reference"
    assert (run / "repository" / "ensemble" / "config.pbtxt").is_file()
    assert json.loads((run / "plan.json").read_text()) == plan(model).to_json()
    build(plan(model, "serving.max_queue_size=7"), store)
    assert (run / "repository").readlink() != links["repository"]
    assert (run / "engine").readlink() == links["engine"]
    assert RunFolder.of("tiny.cpu.fp32").linked("repository") == (run / "repository").resolve()


def test_what_has_not_run_has_no_link(model: Path, store: Store) -> None:
    build(plan(model), store, until="download")
    with pytest.raises(InputDataError) as caught:
        RunFolder.of("tiny.cpu.fp32").linked("repository")
    assert str(caught.value) == (
        "runs/tiny.cpu.fp32 has no repository: the stage that makes it has not run; "
        "run `trtpipe build --recipe runs/tiny.cpu.fp32/plan.json`"
    )


def test_after_the_store_has_moved_a_target_is_incomplete_until_a_build_links_to_it(
    model: Path, store: Store, tmp_path: Path
) -> None:
    build(plan(model), store)
    gone = RunFolder.of("tiny.cpu.fp32").linked("repository")
    store.home.rename(tmp_path / "moved")
    moved = Store(tmp_path / "moved")
    assert [one.state for one in list_targets(moved)] == ["incomplete: its links are broken"]
    with pytest.raises(InputDataError) as caught:
        RunFolder.of("tiny.cpu.fp32").linked("repository")
    assert str(caught.value) == (
        f"runs/tiny.cpu.fp32 has no repository: its link points to {gone}, which is not there: the store was moved or "
        "removed; set TRTPIPE_HOME to where the store is now, then run `trtpipe build --recipe "
        "runs/tiny.cpu.fp32/plan.json`, which reuses what is there"
    )
    with pytest.raises(InputDataError, match=r"^runs/tiny\.cpu\.fp32 has no repository: its link points to "):
        find_repository(None)
    assert build(plan(model), moved) == dict.fromkeys(NAMES, REUSED)
    assert [one.state for one in list_targets(moved)] == ["complete"]


def states(made: BuildSpec, store: Store) -> dict[str, tuple[str, str]]:
    return {entry.stage: (entry.state, entry.reason) for entry in status(made, Store(store.home))}


def test_status_says_what_a_build_would_do_and_does_nothing(model: Path, store: Store, tmp_path: Path) -> None:
    behind = {
        "tokenizer": ("stale", "input: download must run first"),
        "convert": ("stale", "input: download must run first"),
        "build": ("stale", "input: convert must run first"),
        "package": ("stale", "input: tokenizer must run first"),
    }
    assert states(plan(model), store) == {"download": ("missing", "first run"), **behind}
    assert not store.home.exists()
    build(plan(model), store)
    before = snapshot(tmp_path)
    current = dict.fromkeys(NAMES, ("current", "same inputs and settings"))
    assert states(plan(model), store) == current
    assert states(plan(model, "serving.max_queue_size=7"), store) == {
        **current,
        "package": ("stale", "settings: max_queue_size 0 -> 7"),
    }
    assert states(plan(model, "build.max_batch_size=8"), store) == {
        **current,
        "build": ("stale", "settings: build.max_batch_size 4 -> 8"),
        "package": ("stale", "input: build must run first"),
    }
    assert states(plan(model, dtype="bf16"), store)["convert"] == ("missing", "first run")
    assert snapshot(tmp_path) == before
    (model / "tokenizer.json").unlink()
    unknown = states(plan(model), store)
    assert unknown["download"][0] == "unknown"
    assert unknown["download"][1].startswith(f"{model} has no tokenizer.json: ")
    assert {name: unknown[name] for name in behind} == behind


def test_an_artefact_that_was_removed_is_made_again(model: Path, store: Store) -> None:
    build(plan(model), store)
    shutil.rmtree(store.home / "artefacts" / "convert")
    assert states(plan(model), store)["convert"] == ("stale", "its artefact is gone")
    assert build(plan(model), store) == {
        **dict.fromkeys(NAMES, REUSED),  # the same checkpoint came out
        "convert": ("made", "its artefact is gone"),
    }


def test_a_damaged_artefact_is_reported_moved_aside_and_made_again(model: Path, store: Store) -> None:
    build(plan(model), store)
    rank = RunFolder.of("tiny.cpu.fp32").linked("checkpoint") / "rank0.safetensors"
    size = rank.stat().st_size
    os.truncate(rank, size - 1)
    fault = f"damaged: rank0.safetensors has {size - 1} bytes instead of {size}"
    assert states(plan(model), store)["convert"] == ("stale", fault)
    made, reason = build(plan(model), store)["convert"]
    (aside,) = (store.home / "damaged").iterdir()
    assert (made, reason) == ("made", f"{fault}; moved to {aside}")
    assert rank.stat().st_size == size


def test_a_write_whose_time_was_set_back_is_found(model: Path, store: Store) -> None:
    build(plan(model), store)
    config = RunFolder.of("tiny.cpu.fp32").linked("engine") / "config.json"
    before = config.stat()
    config.write_text(config.read_text().replace("silu", "gelu"))
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert build(plan(model), store)["build"][1].startswith("damaged: config.json has changed; moved to ")


def test_what_was_finished_before_a_failure_is_kept(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def fails(*args: object, **kwargs: object) -> None:
        raise StageFailed("it broke")

    with monkeypatch.context() as broken:
        broken.setattr("trtpipe.engines.backends.reference.build", fails)
        with pytest.raises(StageFailed, match="it broke"):
            build(plan(model), store)
    assert list((store.home / "artefacts" / "build").iterdir()) == []
    made = ("made", "first run")
    assert build(plan(model), store) == {
        "download": REUSED, "tokenizer": REUSED, "convert": REUSED, "build": made, "package": made,
    }  # fmt: skip


def test_what_a_failed_stage_left_is_kept_on_demand_and_named(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def fails(engine: Any, tokenizer: Path, serving: Any, out: Path, **more: object) -> None:
        (out / "half").write_text("h")
        raise StageFailed("it broke")

    monkeypatch.setattr("trtpipe.pipeline.stages.package.render", fails)
    recorder = Recorder()
    with pytest.raises(StageFailed):
        execute(plan(model), store, recorder, keep_failed=True)
    (left,) = (store.home / "artefacts" / "package").iterdir()
    assert recorder.notes == [f"package: what it made so far is kept in {left}"]
    assert (left / "files" / "half").read_text() == "h"


@pytest.mark.process
@pytest.mark.parametrize(
    ("visible", "settings", "devices"),
    [
        (None, [], "3"), (None, ["build.workers=4"], "3,1"), ("2,1,0", ["build.workers=4"], "1"), ("GPU-1", [], "1"),
        ("MIG-c1d0", [], "MIG-c1d0"),
    ],
)  # fmt: skip
def test_an_engine_is_built_on_the_gpu_that_was_checked(
    model: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    visible: str | None, settings: list[str], devices: str,
) -> None:  # fmt: skip
    gpus = ["NVIDIA H100 80GB HBM3, 9.0", "NVIDIA L4, 8.9", "NVIDIA L4, 8.9", "NVIDIA L4, 8.9"]
    used = [0, 9000, 23034, 4]  # the third is full
    lines = [f"echo '{at}, {gpus[at]}, 595.10.01, 23034, {used[at]}, GPU-{at}a8b'" for at in range(4)]
    listing = "if [ $1 = -L ]; then echo 'GPU 1: NVIDIA L4 (UUID: GPU-1a8b)\n (UUID: MIG-c1d0)'; exit; fi"
    nvidia_smi.install_script(monkeypatch, tmp_path / "bin", "\n".join([listing, *lines]))
    seen = tmp_path / "seen"
    install_trtllm_build(tmp_path / "bin", f'echo "$CUDA_VISIBLE_DEVICES $CUDA_DEVICE_ORDER" > {seen}')
    monkeypatch.setenv("TRTLLM_DOUBLE_SM", "89")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    chosen = plan(model, *settings, gpu="l4", dtype="bf16", tp=2)
    build(chosen, store)
    assert seen.read_text() == f"{devices} PCI_BUS_ID\n"
    passport = read_passport(RunFolder.of(chosen.target).linked("engine"))
    assert passport.made == {"gpu": "NVIDIA L4", "driver": "595.10.01"}


def test_a_gpu_engine_without_its_gpu_keeps_the_checkpoint(
    model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GpuAbsent, match="is built on that GPU: this machine has no NVIDIA driver"):
        build(plan(model, gpu="h100", dtype="bf16"), store)
    assert (RunFolder.of("tiny.h100.bf16").linked("checkpoint") / "rank0.safetensors").is_file()
    assert states(plan(model, gpu="h100", dtype="bf16"), store) == {
        "download": ("current", "same inputs and settings"),
        "tokenizer": ("current", "same inputs and settings"),
        "convert": ("current", "same inputs and settings"),
        "build": ("missing", "first run"),
        "package": ("stale", "input: build must run first"),
    }


@pytest.mark.parametrize("content", ["", "{", "[]", '{"download": {"stage": 1}}', '{"download": 7}'])
def test_a_damaged_run_record_costs_the_reason_only(model: Path, store: Store, content: str) -> None:
    build(plan(model), store, until="download")
    (RunFolder.of("tiny.cpu.fp32").path / "run.json").write_text(content)
    made = ("made", "first run")
    assert build(plan(model), store, until="convert") == {"download": REUSED, "tokenizer": made, "convert": made}


def test_two_folders_of_the_store_never_share_a_root(store: Store, in_folder: Path, model: Path) -> None:
    for name in ("a/b_c", "a_b/c"):
        RunFolder(in_folder / name).start(plan(model), store)
    roots = [json.loads(path.read_text())["run"] for path in (store.home / "roots").iterdir()]
    assert sorted(roots) == [str(in_folder / "a" / "b_c"), str(in_folder / "a_b" / "c")]


@pytest.mark.process
def test_two_builds_at_once_make_each_artefact_once(model: Path, store: Store, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from trtpipe.pipeline.cli.app import main; main()"]
    options = ["build", "--model", str(model), "--gpu", "cpu", "--dtype", "fp32"]
    options += [part for size in SIZES for part in ("--set", size)]
    children = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        children.append(
            subprocess.Popen(
                [*command, *options], cwd=tmp_path / name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    running = [line.split()[0] for _, err in outputs for line in err.splitlines() if " running " in line]
    assert sorted(running) == sorted(NAMES)
    for name in NAMES:
        assert len(list((store.home / "artefacts" / name).iterdir())) == 1


def test_a_library_that_a_stage_needs_is_looked_for_before_the_download(
    store: Store, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise HostError("nvidia-modelopt is not installed")

    monkeypatch.setattr("trtpipe.engines.quantize.job.require_modelopt", absent)
    with pytest.raises(HostError, match="nvidia-modelopt is not installed"):
        execute(plan(model, gpu="h100", dtype="fp8"), store, Recorder())
    assert list(store.artefacts()) == []


def test_torch_is_looked_for_before_a_download_unless_what_needs_it_may_be_there(
    store: Store, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    # Kernels for INT8 weights compute in tiles of 64.
    spec = plan(hf_folder(in_folder / "even", hidden_size=256, intermediate_size=256), dtype="int8-wo")
    for trust, began in (
        (None, ["download"]),
        (Trust(origins=("oci://registry.example/team",)), ["download", "tokenizer", "quantize"]),
        (None, ["quantize"]),  # in another folder, with a store that has the model
    ):
        recorder = Recorder()
        with pytest.raises(HostError, match="quantizing needs torch"):
            execute(spec, store, recorder, trust=trust)
        assert [name for name, _ in recorder.started] == began
        shutil.rmtree(RUNS, ignore_errors=True)
