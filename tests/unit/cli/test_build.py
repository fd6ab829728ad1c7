"""`trtpipe build`, `settings`, `status` and the commands for targets."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder, write_tokenizer
from tests.unit.cli.conftest import SETTINGS, Outcome, Run, remember, rows
from tests.unit.cli.damages import DAMAGES, no_tokenizer
from tests.unit.test_runner import snapshot
from trtpipe.configs.home import default_home
from trtpipe.pipeline.serving import tritonserver
from trtpipe.pipeline.serving.repositories import find_repository
from trtpipe.pipeline.store.store import Store


def test_plan_prints_every_value_with_its_source_and_touches_nothing(run: Run, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    done = run("settings", "--model", "smollm2", "--gpu", "cpu", "--set", "build.max_batch_size=16")
    assert (done.status, done.err) == (0, "")
    title, header, *values = rows(done.out)
    assert (title, header) == (["target smollm2-135m.cpu.bf16"], ["setting", "value", "from"])
    assert ["model", "smollm2-135m", "option"] in values
    assert ["build.max_batch_size", "16", "--set"] in values
    assert ["build.max_seq_len", "2048", "default"] in values
    assert snapshot(tmp_path) == before


def test_plan_as_json(run: Run) -> None:
    done = run("settings", "--recipe", "smollm2-cpu", "--json")
    value = json.loads(done.out)
    assert value["target"] == "smollm2-135m.cpu.fp32"
    assert {"name": "build.max_batch_size", "value": 16, "source": "recipe smollm2-cpu.yaml"} in value["values"]
    assert done.err == ""


def test_paths_are_shown_as_they_are(run: Run, in_folder: Path) -> None:
    folder = in_folder / "[red]tiny[" / "x]:key:" / "tiny"  # markup, a closing tag and an emoji to rich
    done = run("settings", "--model", hf_folder(folder), "--gpu", "cpu")
    assert f"folder {folder}" in done.out.replace("\n", "")
    (folder / "config.json").unlink()
    refusal = run("build", "--model", folder, "--gpu", "cpu").error()
    assert refusal.startswith(f"{folder} is not a Hugging Face model folder")


def test_build_says_what_is_made_and_what_is_next(build: Run, run: Run, model: Path) -> None:
    done = build(model)
    assert done.status == 0, done.err
    assert rows(done.out) == [
        ["made", "where"],
        ["model", "runs/tiny.cpu.fp32/model"],
        ["tokenizer", "runs/tiny.cpu.fp32/tokenizer"],
        ["checkpoint", "runs/tiny.cpu.fp32/checkpoint"],
        ["engine", "runs/tiny.cpu.fp32/engine"],
        ["repository", "runs/tiny.cpu.fp32/repository"],
        ["next: trtpipe serve tiny.cpu.fp32"],
    ]
    assert [line.split()[0] for line in done.err.splitlines() if "(first run)" in line] == [
        name for name in ("download", "tokenizer", "convert", "build", "package") for _ in ("running", "done")
    ]
    again = build(model)
    preamble, stages = again.err.splitlines()[:-5], again.err.splitlines()[-5:]
    assert [line.split()[:2] for line in stages] == [
        [name, "reused"] for name in ("download", "tokenizer", "convert", "build", "package")
    ]
    assert preamble[0] == "target tiny.cpu.fp32"
    assert ["gpu", "cpu", "(option)"] in [line.split() for line in preamble]
    assert re.fullmatch(r"  and \d+ defaults, which `trtpipe settings` prints", preamble[-1])
    assert again.out == done.out
    partly = build(model, "--until", "convert")
    assert [row[0] for row in rows(partly.out)[:-1]] == ["made", "model", "tokenizer", "checkpoint"]
    assert partly.out.splitlines()[-1] == "next: the same command without --until"


def test_a_build_of_another_recipe_says_what_it_replaces(
    build: Run, run: Run, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = "tiny.cpu.fp32"
    common = f"model: {model}\ngpu: cpu\ndtype: fp32\nbuild: {{max_input_len: 64, max_seq_len: 128"
    Path("chat.yaml").write_text(f"{common}, max_batch_size: 4}}\n")
    Path("batch.yaml").write_text(f"{common}, max_batch_size: 8}}\n")
    words = ["build", "--until", "download", "--recipe"]
    for recipe, replaced in (("chat", None), ("chat", None), ("batch", "chat.yaml"), ("batch", None)):
        done = run(*words, f"{recipe}.yaml")
        assert done.status == 0, done.err
        told = " ".join(done.err.split())
        note = f"this replaces {target}, which {replaced} made: to keep both, build in another folder"
        assert (note in told) is (replaced is not None)
        assert "this replaces" not in told.replace(note, "")
    remember(store, target, source=Path("runs") / target)
    monkeypatch.setattr("trtpipe.pipeline.serving.servers.Server.alive", True)
    told = " ".join(run(*words, "batch.yaml", "--set", "build.max_batch_size=2").err.split())
    assert f"{target} is served: once it is built, `trtpipe reload {target}` gives its server the new one" in told
    assert "this replaces" not in told
    remember(store, target)  # as 0.1 did
    told = " ".join(run(*words, "batch.yaml", "--set", "build.max_batch_size=3").err.split())
    assert (
        f"{target} is served: once it is built, stop it, and serve it again, which gives its server the new one" in told
    )
    told = " ".join(build(model, "--until", "download").err.split())
    assert f"this replaces {target}, which batch.yaml made" in told


def test_what_is_next_for_an_engine_that_runs_elsewhere(
    build: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.compatibility.objections", lambda *args, **kwargs: ["it is for h100"])
    assert build(model).out.splitlines()[-1] == "next: trtpipe export tiny.cpu.fp32   (to serve it on cpu)"


def test_status_of_a_target_and_of_nothing(build: Run, run: Run, model: Path) -> None:
    assert run("ps") == Outcome(0, f"no server is running that was started from the store in {default_home()}\n", "")
    assert json.loads(run("ps", "--json").out) == []
    build(model)
    options = ["--model", model, "--gpu", "cpu", "--dtype", "fp32", *SETTINGS]
    options[options.index("build.max_batch_size=4")] = "build.max_batch_size=8"
    assert [row[:3] for row in rows(run("status", *options).out)] == [
        ["stage", "state", "why"],
        ["download", "current", "same inputs and settings"],
        ["tokenizer", "current", "same inputs and settings"],
        ["convert", "current", "same inputs and settings"],
        ["build", "stale", "settings: build.max_batch_size 4 -> 8"],
        ["package", "stale", "input: build must run first"],
    ]
    state = json.loads(run("status", *options, "--json").out)[3]
    assert state == {
        "stage": "build", "state": "stale", "why": "settings: build.max_batch_size 4 -> 8", "artefact": None,
    }  # fmt: skip


def test_gc_says_what_would_go_and_then_drops_it(build: Run, run: Run, model: Path, store: Store) -> None:
    build(model)
    shutil.rmtree("runs")
    before = snapshot(store.home)
    done = run("gc", "--dry-run")
    assert re.search(r"^would drop 5, [\d.]+ kB$", done.out, re.MULTILINE)
    assert [row[1] for row in rows(done.out)[1:-1]] == ["no run refers to it"] * 5
    assert snapshot(store.home) == before
    assert run("gc").out.splitlines()[-1] == done.out.splitlines()[-1].replace("would drop", "dropped")
    assert run("gc", "--dry-run").out.splitlines()[-1] == "would drop 0, 0 B"


def test_gc_names_what_it_keeps_for_other_machines(
    build: Run, run: Run, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(model)
    (root,) = (store.home / "roots").iterdir()
    root.write_text(json.dumps({**json.loads(root.read_text()), "machine": "gpu-7"}))
    shutil.rmtree("runs")
    done = run("gc")
    folder = Path("runs/tiny.cpu.fp32").absolute()
    assert rows(done.out) == [
        ["kept for", "on", "by"], [str(folder), "gpu-7", str(root)], ["dropped 0, 0 B"]
    ]  # fmt: skip
    assert (
        "run `trtpipe gc` on that machine to drop what was deleted on it; --others-after DAYS forgets runs that were "
        "not built for so long; remove the file of a server whose machine is gone"
    ) in " ".join(done.err.split())
    os.utime(root, (0, 0))
    assert run("gc", "--dry-run", "--others-after", "30").out.splitlines()[-1].startswith("would drop 5, ")
    assert json.loads(run("gc", "--json").out) == {
        "dry_run": False, "garbage": [],
        "elsewhere": [{"kept_for": str(folder), "machine": "gpu-7", "file": str(root)}],
    }  # fmt: skip
    monkeypatch.setattr("trtpipe.pipeline.serving.references.machine", lambda: "gpu-7")
    assert run("gc").out.splitlines()[-1].startswith("dropped 5, ")
    assert not root.exists()


def test_a_relative_home_serves_as_well(build: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", "home-of-mine")
    assert build(model).status == 0
    assert (Path("runs/tiny.cpu.fp32/repository") / "ensemble").is_dir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [*DAMAGES, (no_tokenizer, "{0} has no tokenizer.json: serving reads the fast tokenizer only")],
)
def test_damaged_data_exits_with_3(
    build: Run, model: Path, store: Store, damage: Callable[[Path], None], message: str
) -> None:
    damage(model)
    done = build(model)
    assert done.status == 3
    assert done.error().startswith(message.format(model))
    assert not (store.home / "artefacts").exists()


def test_data_that_only_a_stage_can_judge(build: Run, model: Path, store: Store) -> None:
    with (model / "model.safetensors").open("r+b") as weights:
        weights.seek(-4, os.SEEK_END)
        weights.write(b"\xff\xff\xff\xff")
    done = build(model)
    assert done.status == 3
    assert re.match(r"tensor '\S+' .* holds a value that is infinite or not a number", done.error())
    assert list((store.home / "artefacts" / "convert").iterdir()) == []


def test_a_recipe_with_a_mistake_is_data(run: Run, in_folder: Path) -> None:
    (in_folder / "mine.yaml").write_text("model: smollm2\ngpu: cpu\nbuild:\n  max_batchsize: 4\n")
    done = run("settings", "--recipe", "mine.yaml")
    assert (done.status, done.error()) == (
        3,
        "recipe mine.yaml: build: unknown key 'max_batchsize'; did you mean 'max_batch_size'?",
    )
    (in_folder / "mine.yaml").write_text("model: [smollm2\n")
    done = run("settings", "--recipe", "mine.yaml")
    assert done.status == 3
    assert done.error().startswith("mine.yaml is not YAML: while parsing a flow sequence")


def test_what_settings_print_is_a_recipe(run: Run, in_folder: Path) -> None:
    options = ["--model", "llama3-8b", "--gpu", "h100", "--load", "rag", "--group-size", "64", "--dtype", "int4-awq"]
    printed = run("settings", *options, "--json").out
    (in_folder / "printed.json").write_text(printed)
    again = json.loads(run("settings", "--recipe", "printed.json", "--json").out)
    first = json.loads(printed)
    assert (again["target"], again["settings"]) == (first["target"], first["settings"])
    sources = {value["name"]: value["source"] for value in again["values"]}
    assert (sources["gpu"], sources["build.max_seq_len"]) == ("recipe printed.json", "the plan, for the load rag")
    (in_folder / "empty.yaml").write_text("# nothing\n")
    done = run("settings", "--recipe", "empty.yaml")
    assert (done.status, done.error().partition(";")[0]) == (3, "empty.yaml is empty")


def test_what_cannot_be_built_is_refused_before_a_folder_is_made(run: Run, in_folder: Path) -> None:
    done = run("build", "--model", "llama3-70b", "--gpu", "h100", "--dtype", "bf16", "--tp", "1")
    assert done.status == 2
    assert done.error().startswith("llama3-70b on h100 does not fit: the weights take 131.4 GiB of 78.1 on each of 1; ")
    done = run("build", "--model", "llama3-8b", "--gpu", "h100", "--tp", "99999999999999999999")
    assert (done.status, done.error().partition(";")[2]) == (2, " tp sizes that fit: 1, 2, 4, 8, 16, 32")
    assert list(in_folder.iterdir()) == []


def test_a_mistake_in_a_value_is_not_blamed_on_the_plan(run: Run) -> None:
    done = run("settings", "--model", "llama3-8b", "--gpu", "h100", "--set", "build.max_batch_size=1e9")
    assert done.error() == '--set: build: max_batch_size: Input should be a valid integer, got "1e9"'


def test_quiet_prints_results_alone_and_verbose_the_defaults_too(build: Run, model: Path) -> None:
    quiet = build(model, "--quiet")
    assert (quiet.status, quiet.err) == (0, "")
    assert rows(quiet.out)[0] == ["made", "where"]
    verbose = build(model, "-v")
    assert ["pp", "1", "(default)"] in [line.split() for line in verbose.err.splitlines()]
    assert "defaults, which" not in verbose.err
    assert ["pp", "1", "(default)"] not in [line.split() for line in build(model).err.splitlines()]
    assert ["serving.enable_kv_cache_reuse", "yes", "(the", "engine", "can", "do", "it)"] in [
        line.split() for line in verbose.err.splitlines()
    ]


def test_a_build_says_what_it_made_as_json(build: Run, model: Path) -> None:
    (made,) = json.loads(build(model, "--until", "convert", "--json").out)
    assert (made["target"], made["folder"]) == ("tiny.cpu.fp32", str(Path("runs/tiny.cpu.fp32").absolute()))
    assert (made["state"], made["error"]) == ("made up to convert", None)
    assert [(one["stage"], one["reused"]) for one in made["stages"]][-1] == ("convert", False)
    (again,) = json.loads(build(model, "--json").out)
    assert (again["state"], again["stages"][0]["reused"]) == ("ready", True)


def test_targets_are_listed_and_removed(build: Run, run: Run, model: Path, store: Store, monkeypatch: Any) -> None:
    build(model)
    failed = Path("runs/tiny.cpu.bf16")
    failed.mkdir()
    shutil.copy("runs/tiny.cpu.fp32/plan.json", failed)
    build(model, "--set", "serving.max_queue_size=2", "--until", "convert")
    assert rows(run("ls").out)[2][:2] == ["tiny.cpu.fp32", "package is next"]  # the repository is of other settings
    build(model)
    table = rows(run("ls").out)
    assert [row[:2] for row in table[1:]] == [
        ["tiny.cpu.bf16", "nothing is made"], ["tiny.cpu.fp32", "complete"],
    ]  # fmt: skip
    _, whole = json.loads(run("ls", "--json").out)
    assert (whole["model"], whole["gpu"], whole["dtype"], whole["servers"]) == ("tiny", "cpu", "fp32", [])
    assert (whole["done"][0], whole["done"][-1], whole["missing"]) == ("download", "package", [])
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "tiny.cpu.fp32")
    assert rows(run("ls").out)[2][-1] == "tiny.cpu.fp32"
    refused = run("rm", "tiny.cpu.bf16", "tiny.cpu.fp32")
    assert (refused.status, "tiny.cpu.fp32 is served" in refused.error()) == (2, True)
    assert failed.is_dir()
    (store.home / "servers" / "tiny.cpu.fp32.json").unlink()
    assert run("rm", "nix").error() == "there is no target 'nix' in ./runs; `trtpipe ls` lists the targets in ./runs"
    assert run("rm", "runs/tiny.cpu.bf16/").out == "removed tiny.cpu.bf16\n"
    assert re.fullmatch(r"removed tiny.cpu.fp32\nnext: trtpipe gc   \(frees \S+ kB\)\n", run("rm", "tiny.cpu.fp32").out)
    build(model)
    told = json.loads(run("rm", "tiny.cpu.fp32", "--gc", "--json").out)
    assert (told["removed"], told["dropped"], len(told["garbage"])) == (["tiny.cpu.fp32"], True, 5)
    assert not list((store.home / "artefacts").glob("*/*"))


def test_rm_removes_only_what_is_meant(
    build: Run, run: Run, model: Path, store: Store, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    build(model)
    made = in_folder / "runs" / "tiny.cpu.fp32"
    (in_folder / "app").mkdir()
    (in_folder / "app" / "plan.json").write_text("{}")
    refused = run("rm", "tiny.cpu.fp32", "app")
    assert (refused.status, refused.error()) == (
        2,
        f"{in_folder / 'app'} is no run folder of {store.home}; give a name of `trtpipe ls`, or remove it yourself",
    )
    for name, files in (
        ("notes", ["f"]),
        ("junk", ["plan.json", "f"]),
    ):  # somebody else's, in a folder of the same name
        (in_folder / "runs" / name).mkdir()
        for file in files:
            (in_folder / "runs" / name / file).write_text("{}")
        assert run("rm", name).error().startswith(f"runs/{name} is no run folder of {store.home}; give a name of")
        assert (in_folder / "runs" / name / "f").is_file()
    (in_folder / "runs" / "link").symlink_to("tiny.cpu.fp32")
    assert run("rm", "runs/link").out == "removed link\n"
    remember(store, "tiny.cpu.fp32", source=made)
    assert run("rm", "tiny.cpu.fp32").error() == "tiny.cpu.fp32 is served; run `trtpipe stop tiny.cpu.fp32` first"
    remember(store, "tiny.cpu.fp32", source=in_folder / "elsewhere" / "tiny.cpu.fp32")
    assert rows(run("ls").out)[1][-1] == "-"
    monkeypatch.chdir(in_folder / "app")
    assert made.is_dir()
    assert run("rm", str(made)).out.startswith(f"removed {made}\n")
    assert not made.exists()


def test_a_target_is_named_by_its_folder_too(build: Run, run: Run, model: Path) -> None:
    build(model)
    for folder in ("runs/tiny.cpu.fp32", "runs/tiny.cpu.fp32/", Path("runs/tiny.cpu.fp32").absolute()):
        assert run("check", folder).out == "no fault found\n"
        assert run("passport", folder).status == 0
        assert run("provenance", folder).status == 0
        assert find_repository(str(folder))[0] == "tiny.cpu.fp32"
    Path("packed").mkdir()
    for out in ([], ["-o", "packed"], ["-o", "packed/"]):
        assert run("export", "runs/tiny.cpu.fp32", *out).status == 0
        (Path("packed" if out else "") / "tiny.cpu.fp32.tar").unlink()
    assert run("export", "runs/tiny.cpu.fp32", "-o", "nowhere/").error() == (
        "there is no folder nowhere; make it, or give another --output"
    )
    Path("afile").touch()
    assert run("export", "tiny.cpu.fp32", "-o", "afile/x.tar").error() == "afile is not a folder; give another --output"
    assert not Path("nowhere").exists()


def test_the_tokenizer_alone_is_no_model(build: Run, in_folder: Path) -> None:
    (in_folder / "bare").mkdir()
    write_tokenizer(in_folder / "bare")
    assert build(in_folder / "bare").status == 3


@pytest.mark.parametrize(
    "words", [("settings", "--executor", "ray"), ("status", "--set", "executor=ray"), ("build", "--recipe", "ray.yaml")]
)
def test_ray_is_an_option_of_build_alone(run: Run, model: Path, words: tuple[str, ...]) -> None:
    Path("ray.yaml").write_text("executor: ray\n")
    assert run(words[0], "--model", model, "--gpu", "cpu", *words[1:]).error() == (
        "ray is not the executor of a target: each machine of a Ray cluster chooses its own; leave it out, and build "
        "on the cluster with `trtpipe build --executor ray`"
    )


def test_a_target_that_came_with_what_is_asked_for(build: Run, run: Run, model: Path) -> None:
    build(model)
    assert run("export", "tiny.cpu.fp32").status == 0
    partly = ("build", "--from", "tiny.cpu.fp32.tar", "--until", "convert")
    assert run(*partly).out.splitlines() == [
        "nothing to do: tiny.cpu.fp32 was imported with every artefact up to convert",
        "next: the same command without --until",
    ]
    (told,) = json.loads(run(*partly, "--json").out)
    assert (told["state"], told["stages"], told["error"]) == ("nothing to make", [], None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--executor", "ray", "--verify"), "--verify is not for --executor ray: leave --verify out"),
        (("--executor", "ray", "--from", "x.tar"), "--from is not for --executor ray: leave --from out"),
        (("--exchange", "s3://x/y"), "--exchange is for --executor ray: leave --exchange out, or add --executor ray"),
    ],
)
def test_options_of_a_cluster_are_never_ignored(run: Run, arguments: tuple[str, ...], message: str) -> None:
    done = run("build", "--model", "tiny", "--gpu", "cpu", *arguments)
    assert done.status == 2
    assert done.error().replace("; leave", ": leave") == message
