"""The user's configuration file: lower than recipes and options, and refused in one line when it is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run, rows
from trtpipe.engines.errors import HostError, StageFailed
from trtpipe.pipeline.api import prove, tune
from trtpipe.pipeline.api.build import settings
from trtpipe.pipeline.cli import config
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.serving import triton_package
from trtpipe.pipeline.store.store import Store

FILE = """
runtime = "vllm"
registry = "shelf"
engine_python = "/opt/vllm/bin/python"

[prices]
H100-SXM = 2.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config" / "trtpipe" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(FILE)
    return path


def test_config_prints_values_and_where_they_are_from(
    run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert rows(run("config").out) == [
        [str(file)],
        ["setting", "value", "from"],
        ["runtime", "vllm", str(file)],
        ["registry", "shelf", str(file)],
        ["engine_python", "/opt/vllm/bin/python", str(file)],
        ["prices.h100", "2.5", str(file)],
        ["TRTPIPE_HOME", f"{tmp_path}/home", "environment"],
        *([["NO_COLOR", os.environ["NO_COLOR"], "environment"]] if "NO_COLOR" in os.environ else []),
        ["HF_TOKEN", "set, not shown", "environment"],
    ]
    file.unlink()
    told = json.loads(run("config", "--json").out)
    assert (told["path"], told["exists"]) == (str(file), False)
    assert told["values"][0] == {"setting": "runtime", "value": None, "from": "default"}


def test_options_and_recipes_outrank_it(run: Run, file: Path, in_folder: Path) -> None:
    def runtime(*words: str) -> list[str]:
        return next(row[1:] for row in rows(run("settings", *words).out) if row[0] == "runtime")

    h100 = ("--model", "llama3-8b", "--gpu", "h100")
    assert runtime(*h100) == ["vllm", str(file)]
    assert runtime(*h100, "--runtime", "tensorrt_llm") == ["tensorrt_llm", "option"]
    (in_folder / "mine.yaml").write_text("model: llama3-8b\ngpu: h100\nruntime: tensorrt_llm\n")
    assert runtime("--recipe", "mine.yaml") == ["tensorrt_llm", "recipe mine.yaml"]
    # A runtime for GPUs is no hindrance on a CPU.
    assert runtime("--recipe", "smollm2-cpu") == ["reference", "default for the CPU"]
    file.write_text('runtime = "tensorrt_llm"\n')
    for cpu in ("cpu", "CPU"):
        assert runtime("--model", "llama3-8b", "--gpu", cpu) == ["reference", "default for the CPU"]


def test_a_price_and_a_registry_need_not_be_given(run: Run, file: Path, tmp_path: Path) -> None:
    question = ("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--input-tokens", "64",
                "--output-tokens", "16", "--runtime", "tensorrt_llm", "--json")  # fmt: skip
    assert json.loads(run(*question).out)["candidates"][0]["price_per_hour"] == 2.5
    assert json.loads(run(*question, "--price", "h100=3").out)["candidates"][0]["price_per_hour"] == 3.0
    Path("shelf").mkdir()
    assert run("search").out == "shelf has no targets\n"
    file.unlink()
    done = run("search")
    assert (done.status, done.error()) == (
        2, f"no registry is given; name one, or set `registry` in {file}"
    )  # fmt: skip


def test_plan_names_the_file_for_a_runtime_whose_speed_is_not_predicted(run: Run, file: Path) -> None:
    question = ("plan", "--model", "llama3-8b", "--gpu", "h100", "--tp", "1", "--input-tokens", "64",
                "--output-tokens", "16", "--json")  # fmt: skip
    assert run(*question).status == 0
    file.write_text('runtime = "reference"\n')
    assert run(*question).error() == (
        f"runtime of {file}: the speed of runtime reference is not predicted; give --runtime"
    )
    assert run(*question, "--runtime", "vllm").status == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('runtme = "vllm"', ["unknown key 'runtme'", "did you mean 'runtime'?"]),
        ('runtime = "vlm"', ["unknown runtime 'vlm'", "did you mean 'vllm'?"]),
        ("engine_python = 3", ["engine_python"]),
        ("[prices]\nh1000 = 2.5", ["unknown GPU 'h1000'", "did you mean 'h100'?"]),
        ("[prices]\nh100 = -1.0", ["prices.h100 is -1.0", "give the price of one GPU an hour"]),
        ('runtime = "vllm', ["is not TOML", "write lines such as"]),
    ],
)
def test_a_mistake_names_the_file_and_the_remedy(run: Run, file: Path, text: str, words: list[str]) -> None:
    file.write_text(text)
    done = run("settings", "--model", "llama3-8b", "--gpu", "h100")
    assert done.status == 3
    assert done.error().startswith(str(file))
    assert [word for word in words if word not in done.error()] == []


def test_a_pipe_or_a_large_file_is_not_read(run: Run, file: Path) -> None:
    file.touch()
    os.truncate(file, config.MAX_BYTES + 1)
    asked = ("settings", "--model", "llama3-8b", "--gpu", "h100")
    assert run(*asked).error() == f"{file} cannot be read: it has more than 1,048,576 bytes"
    file.unlink()
    os.mkfifo(file)
    assert run(*asked).error() == f"{file} cannot be read: it is not a regular file"


@pytest.mark.loopback
def test_the_python_of_vllm_is_not_that_of_another_runtime(
    run: Run, build: Run, model: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "vllm/bin/python"
    monkeypatch.setenv("HOME", str(tmp_path))
    file.write_text('engine_python = "~/vllm/bin/python"\n')
    with pytest.raises(HostError, match=f"engine_python of {file} is {python}: it is not an executable file; write"):
        config.read_config().python_for(lambda: "vllm")
    assert config.read_config().python_for(lambda: "reference") is None
    # `serve` gets as far as without the file: to the server, which is next.
    monkeypatch.setattr(triton_package, "find_installation", refuse)
    assert build(model).status == 0
    free = [part for name in ("http", "grpc", "metrics", "openai") for part in (f"--{name}-port", "0")]
    assert run("serve", *free).error() == "the server is next"
    assert f"{python} cannot be started" in run("serve", *free, "--engine-python", python).error()
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    assert config.read_config().python_for(lambda: "vllm") == str(python)
    file.write_text('engine_python = "~nobody-of-that-name/python"\n')
    assert config.read_config().engine_python == Path("~nobody-of-that-name/python")


def refuse() -> None:
    raise StageFailed("the server is next")


@pytest.mark.parametrize(("words", "given"), [((), "false"), (("--engine-python", "true"), "true")])
def test_tune_and_prove_take_it_for_the_targets_of_vllm(
    run: Run, store: Store, file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], given: str
) -> None:
    heard = []

    def work(*arguments: object, engine_python: str | None, ready_s: int, **named: object) -> None:
        heard.append(engine_python)
        assert ready_s == 1800
        raise StageFailed("it was asked")

    monkeypatch.setattr(tune, "tune", work)
    monkeypatch.setattr(prove, "prove", work)
    file.write_text('engine_python = "false"\n')
    h100 = ("--model", "llama3-8b", "--gpu", "h100")
    words += ("--ready-timeout", "1800")
    for runtime in ("vllm", "tensorrt_llm"):
        assert run("prove", *h100, "--runtime", runtime, *words).error() == "it was asked"
        spec = settings(model="llama3-8b", gpu="h100", runtime=runtime)
        RunFolder.of(spec.target).start(spec, store)
        assert run("tune", spec.target, "--slo", "ttft:2s", *words).error() == "it was asked"
    others = given if "--engine-python" in words else None
    assert heard == [given, given, others, others]


def test_a_relative_folder_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("", "relative"):
        monkeypatch.setenv("XDG_CONFIG_HOME", folder)
        assert config.path() == tmp_path / ".config/trtpipe/config.toml"
