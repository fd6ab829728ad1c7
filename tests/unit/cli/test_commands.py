"""The command line as a whole: help, what is wrong in one line with an exit code, and how a command ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.commands import command_of_examples, every_command
from tests.support.golden import check_golden
from tests.unit.cli.conftest import SETTINGS, Outcome, Run, fill_the_disk, rows
from trtpipe import __version__
from trtpipe.engines.errors import StageFailed
from trtpipe.pipeline.cli import app as cli
from trtpipe.pipeline.store.store import Store

COMMANDS = [
    "build", "settings", "status", "migrate", "recipes", "ls", "rm", "gc", "scrub", "serve", "chat", "generate", "ps",
    "logs", "top", "reload", "stop", "check", "gateway", "lora", "deploy", "monitoring", "bench", "compare", "prove",
    "plan", "tune", "probe", "export", "import", "push", "pull", "search", "provenance", "verify-provenance", "convert",
    "inspect", "restore", "quantize", "verify", "quants", "models", "gpus", "toolchains", "passport", "doctor",
    "config", "completion",
]  # fmt: skip


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
    assert len(examples) == {"completion": 3}.get(command, 2)
    assert run(command, "-h").out == run("help", command).out == done.out


def test_every_option_says_what_it_does_and_every_example_is_a_command_line() -> None:
    root = command_of_examples()
    for path, command in every_command(root):
        shown = command.get_help(command.context_class(command, info_name=f"trtpipe {path}"))
        assert [line for line in shown.splitlines() if len(line) > 80] == [], path
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
    assert refused("settings", "--tp", "two") == "--tp is 'two'; give a whole number; see `trtpipe settings --help`"
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
    # What is wrong in itself is told where no server runs too.
    assert refused("lora", "add", "x=") == "x= names no folder; write x=FOLDER"
    assert refused("lora", "add", "a/b=absent").startswith("'a/b' cannot be the name of an adapter")
    assert refused("lora", "add", "x=absent").startswith("absent is not a LoRA adapter: there is no such folder")
    assert refused("lora", "list") == "no server is running; run `trtpipe serve`"
    for option, value, told in (
        ("--temperature", "-1", "--temperature is -1.0; it has to be greater than or equal to 0"),
        ("--temperature", "nan", "--temperature is nan; it has to be a finite number"),
        ("--max-tokens", "0", "--max-tokens is 0; it has to be greater than or equal to 1"),
        ("--max-tokens", 2**31, "--max-tokens is 2147483648; it has to be less than 2147483648"),
        ("--seed", 2**64, "--seed is 18446744073709551616; it has to be less than 18446744073709551616"),
        ("--top-p", "5", "--top-p is 5.0; it has to be less than or equal to 1"),
        ("--top-k", "-1", "--top-k is -1; it has to be greater than or equal to 0"),
        ("--repetition-penalty", "0", "--repetition-penalty is 0.0; it has to be greater than or equal to 0.01"),
    ):
        assert refused("generate", "Hello", option, value) == told
    assert refused("chat", "--temperature", "nan") == "--temperature is nan; it has to be a finite number"
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
    assert refused("bench", "--sampling", "top_p=0.5", "--sampling", "top_p=0.9") == (
        "--sampling top_p is given more than once; give it once"
    )
    assert refused("bench", "--sampling", "top_p").startswith("--sampling top_p is not NAME=VALUE; write for example")
    assert refused("bench", "--workers", "0") == "--workers is 0; give 1 or more"
    assert refused("bench", "--requests", "0") == "--requests is 0; give 1 or more"
    assert refused("bench", "--load", "chat", "--duration", "3") == (
        "--load says what --duration would; leave one of them out"
    )
    assert refused("bench", "--load", "chat", "--sampling", "top_p=1").startswith("--load says what --sampling would")
    there = ("--grpc-url", "localhost:1", "--protocol", "grpc", "--tokenizer", __file__)
    assert refused("bench", *there, "--timeout", "0").startswith("--timeout is 0")
    assert refused("bench", *there, "--token-timeout", "0").startswith("--token-timeout is 0")
    for option in ("--timeout", "--token-timeout"):
        assert refused("bench", *there, option, "3e6") == (
            f"{option} is 3000000.0; give a positive number of seconds, at most 2,592,000"
        )
    for option in ("--repeat", "--connections"):
        assert refused("bench", *there, option, "0").startswith(f"{option} is 0; give a whole number of 1 or more")
    assert refused("bench", *there, "--ray", "10.0.0.1:6379") == (
        "--ray says of which cluster --hosts are; give --hosts too"
    )
    assert refused("bench", *there, "--hosts", "2", "--concurrency", "1") == (
        "2 workers on 2 machines cannot share 1 in flight; give fewer workers or machines"
    )
    assert refused("bench", *there, "--attainment", "0.5") == "--attainment is for --find; give both, or leave it out"
    assert refused("bench", *there, "--precision", "0.5") == "--precision is for --find; give both, or leave it out"
    assert refused("bench", *there, "--sampling", "top_p=2") == "top_p is 2; give 0 to 1"
    assert refused("bench", *there, "--sampling", "temperature=-1") == "temperature is -1; give 0 or more"
    assert refused("bench", "again", "reports/nosuch").startswith("Path 'reports/nosuch' does not")
    assert refused("bench", "--protocol", "http", "--connections", "3").startswith("--connections is of gRPC; ")
    library = refused("bench", "--transport", "tritonclient", "--connections", "3")
    assert library.startswith("--connections is of our own reader: ")
    assert refused("bench", *there, "--report", "") == ". is a folder; give the name of a file"
    assert refused("bench", *there, "--report", "/dev/full") == (
        "/dev/full is not a regular file; give the name of a file"
    )
    Path("load.yaml").write_text("load: {concurrency: [1], requests: 2}\n")
    Path("p.requests.jsonl").write_text('{"prompt": "a"}\n')
    beside = refused("bench", *there, "--prompts", "p.requests.jsonl", "--report", "p.json")
    assert beside == "p.requests.jsonl is read by the same command; give another file to write"
    for words in (["--prompts", "prompts.jsonl"], ["--load", "load.yaml"]):
        Path("prompts.jsonl").write_text('{"prompt": "a"}\n')
        assert refused("bench", *there, *words, "--report", words[1]) == (
            f"{words[1]} is read by the same command; give another file to write"
        )
    assert refused("bench", *there, "--report", "x.html") == (
        "--report x.html is the name of a file beside it; give a name such as report.json"
    )
    assert refused("stop", "x") == "no server named 'x' is running; run `trtpipe serve`"
    for stage, known in (
        ("covnert", "did you mean 'convert'?"),
        ("nosuch", "stages: download, tokenizer, convert, build, package"),
    ):
        assert build(model, "--until", stage).err == f"error: unknown stage '{stage}'; {known}\n"
    assert refused("settings", "--recipe", "smollm2-cpu", "--group-size", "64") == (
        "fp32 has no groups to choose the size of; leave the group size out"
    )
    assert refused("settings", *SETTINGS, "--set", "build.max_batch_size=8") == (
        "--set build.max_batch_size is given more than once; give it once"
    )
    assert refused("plan", "--model", "llama3-8b", "--gpu", "h100,h100-sxm") == (
        "--gpu names h100 more than once; name it once"
    )
    assert refused("convert", model, "out", "--toolchain", "1.3").startswith("TensorRT-LLM 1.3.0rc29 builds no engines")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["convert", "absent", "out"], "Directory 'absent' does not exist"),
        (["quantize", "absent", "out", "--quant", "fp8"], "Directory 'absent' does not exist"),
        (["restore", "absent", "out"], "Directory 'absent' does not exist"),
        (["inspect", "file"], "Directory 'file' is a file"),
        (["inspect", ""], "Directory '' does not exist"),
        (["import", "absent"], "File 'absent' does not exist"),
        (["import", "."], "File '.' is a directory"),
        (["compare", "file", "absent"], "Path 'absent' does not exist"),
        (["bench", "--tokenizer", "absent"], "Invalid value for '--tokenizer': Path 'absent' does not exist"),
        (["serve", "--tls-cert", "absent"], "Invalid value for '--tls-cert': File 'absent' does not exist"),
    ],
)
def test_a_path_that_is_not_there_is_a_wrong_request(run: Run, in_folder: Path, words: list[str], told: str) -> None:
    (in_folder / "file").touch()
    done = run(*words)
    assert (done.status, done.out) == (2, "")
    assert done.err == f"error: {told}; see `trtpipe {words[0]} --help`\n"
    assert [path.name for path in in_folder.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["check", "absent"], "there is no folder or target 'absent'; `trtpipe ls` lists the targets in ./runs"),
        (["bench", "--load", "absent.yaml"], "unknown load 'absent.yaml': there is no such file either; known: "),
    ],
)
def test_a_name_that_may_be_a_path_too(run: Run, words: list[str], told: str) -> None:
    done = run(*words)
    assert done.status == 2
    assert done.error().startswith(told)


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
    file = f"{model}/config.json, which is a file"
    assert done.error() == f"the store cannot be {file}; set TRTPIPE_HOME to a folder that you may write"
    assert (run("ls").status, run("ls").error()) == (4, done.error())


def test_a_failed_stage_exits_with_5(build: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise StageFailed("it broke", why="line one\nline two", remedy="the log is x")

    monkeypatch.setattr("trtpipe.engines.backends.reference.build", fails)
    done = build(model)
    assert (done.status, done.error()) == (5, "it broke: line one line two; the log is x")


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

    monkeypatch.setattr("trtpipe.pipeline.resolve.resolve", broken)
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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["biuld"], "No such command 'biuld' (did you mean build?); see `trtpipe --help`"),
        (["clean"], "No such command 'clean'; see `trtpipe --help`"),
        (["version"], "No such command 'version' (did you mean --version?); see `trtpipe --help`"),
        (
            ["settings", "--modle", "x"],
            "No such option: --modle (did you mean --model?); see `trtpipe settings --help`",
        ),
        (
            ["bench", "llama3-8b.h100.fp8"],
            "No such command 'llama3-8b.h100.fp8'; a target is named by --target llama3-8b.h100.fp8; "
            "see `trtpipe bench --help`",
        ),
        (["bench", "selftest", "--protocol", "foo"], "unknown protocol 'foo'; known: chat, completions, grpc, http"),
        (
            ["bench", "selftest", "--streams", "4,0"],
            "--streams is 0; give 1 or more",
        ),
        (
            ["serve", "--http-port", "80a"],
            "--http-port is '80a'; give a whole number from 0 to 65535, such as 8000; see `trtpipe serve --help`",
        ),
        (
            ["logs", "--lines", "x"],
            "--lines is 'x'; give a whole number from 0 to 1000000000, such as 50; see `trtpipe logs --help`",
        ),
        (
            ["bench", "selftest", "--itl", "-1"],
            "--itl is -1.0; give a number from 0.1 to 4000, such as 10; see `trtpipe bench selftest --help`",
        ),
        (
            ["bench", "--duration", "10s"],
            "--duration is '10s'; give a number of seconds; see `trtpipe bench --help`",
        ),
        (
            ["bench", "--timeout", "3s"],
            "--timeout is '3s'; give a number of seconds, such as 300; see `trtpipe bench --help`",
        ),
        (
            ["bench", "--concurrency", "1,4,1"],
            "--concurrency is a list with 1 twice; give it once; --repeat 2 measures each load point twice",
        ),
        (
            ["settings", "--model", "llama3-8b", "--gpu", "a100,h100"],
            "--gpu a100,h100 is a list: that is for `trtpipe build`; this command is of one target; "
            "give one, such as --gpu a100",
        ),
        (["bench", "--tokenizer", "."], "folder . has no tokenizer.json; name the file"),
        (["bench", "again", "."], "folder . has no report.json; name the file"),
        (["search", "oci://"], "oci:// names no place; give for example oci://registry.example/team/engines"),
        (["search", "hf://"], "hf:// names no place; give for example hf://owner/name"),
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
    sizes = ("--set", "build.max_batch_size=4", "--set", "build.max_seq_len=4096")
    assert run("settings", "--model", "llama3-8b", "--gpu", "h100", "-q", "-q", "--json", "--json", *sizes).status == 0


def test_an_argument_that_is_not_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def encodes(*args: object) -> None:
        "\udcff".encode()

    monkeypatch.setattr("trtpipe.pipeline.resolve.resolve", encodes)
    done = run("settings", "--model", "\udcff")
    assert (done.status, done.error()) == (2, "the input is not text: it holds bytes that are not UTF-8")


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
    assert child.returncode == 141
    with Path("/dev/full").open("wb") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False)
    assert (failed.returncode, failed.stderr) == (
        4, "error: standard output cannot be written: No space left on device\n",
    )  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "status"), [(("gpus", "nosuch"), 2), (("recipes",), 141), (("--debug", "gpus", "nosuch"), 2)]
)
def test_a_reader_of_both_streams_that_leaves_is_no_failure(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    """As of `2>&1 | head -1`: where a result is not read, the exit status is that of other programs then; an error that
    is not read stays one."""
    command = [sys.executable, "-c", "from trtpipe.pipeline.cli.app import main; main()", *words]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=writer, cwd=tmp_path, check=False)
    os.close(writer)
    assert done.returncode == status


@pytest.mark.process
@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        (">/dev/full", 4, "error: standard output cannot be written: No space left on device\n"),
        (">&-", 4, "error: standard output cannot be written: Bad file descriptor\n"),
        ("<&- >/dev/null", 0, ""),
        (">/dev/null 2>&-", 0, ""),
        (">/dev/full 2>&1", 4, ""),
    ],
)
@pytest.mark.parametrize(("words", "unbuffered"), [("build --help", ""), ("gpus", "1")])
def test_streams_that_the_caller_closed_or_that_are_full(
    tmp_path: Path, words: str, redirection: str, status: int, said: str, unbuffered: str
) -> None:
    code = shlex.quote("from trtpipe.pipeline.cli.app import main; main()")
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -c {code} {words} {redirection}"], cwd=tmp_path, stderr=subprocess.PIPE,
        text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (status, said)


def test_a_folder_that_holds_nothing(run: Run, in_folder: Path) -> None:
    missing = run("search", "empty")
    assert (missing.status, missing.error()) == (
        2,
        f"there is no folder {in_folder / 'empty'}; check its path, or push a target to it first",
    )
    Path("empty").mkdir()
    assert run("search", "empty").out == "empty has no targets\n"
    assert run("search", "empty", "--gpu", "h100").out == "empty has no targets\n"
    Path("empty/targets").mkdir()
    for text in ("", "{", '{"a": 1}'):
        Path("empty/targets/tiny.cpu.fp32.json").write_text(text)
        damaged = run("search", "empty")
        assert (damaged.status, damaged.out) == (0, "empty has no targets that can be read\n")
        assert f"tiny.cpu.fp32 at {in_folder / 'empty'} is damaged: " in damaged.err


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
