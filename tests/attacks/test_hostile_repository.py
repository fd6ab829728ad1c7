"""Model repositories that are made to keep `trtpipe check` busy: each is judged in seconds, by faults."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.triton_repositories import MODEL_YAML, inflight, llmapi
from trtpipe.engines.errors import InputDataError
from trtpipe.triton_repo.check import check_repository
from trtpipe.triton_repo.check.code import foreign_code
from trtpipe.triton_repo.combine import link_models

# Each took minutes, more than 700 MB, or ended in a traceback; a busy machine is not to be taken for that.
SECONDS = 30

Change = Callable[[Path], None]


def more(model: str, text: str) -> Change:
    """More text at the end of a model's config.pbtxt."""

    def change(repository: Path) -> None:
        path = repository / model / "config.pbtxt"
        path.write_text(path.read_text() + text)

    return change


def script(text: str | bytes) -> Change:
    def change(repository: Path) -> None:
        data = text.encode() if isinstance(text, str) else text
        (repository / "preprocessing" / "1" / "model.py").write_bytes(data)

    return change


def ranks(size: int) -> Change:
    def change(repository: Path) -> None:
        path = repository / "tensorrt_llm" / "1" / "config.json"
        raw = json.loads(path.read_text())
        raw["pretrained_config"]["mapping"] = {"world_size": size, "tp_size": size, "pp_size": 1}
        path.write_text(json.dumps(raw))

    return change


def entries(count: int, text: str) -> str:
    return "".join(text.replace("@", str(number)) for number in range(count))


INFLIGHT: dict[str, tuple[Change, str]] = {
    "backslashes": (more("tensorrt_llm", 'name: "' + "\\" * 500_000 + '"'), "1,000 backslashes in a row"),
    "a gigabyte": (lambda repository: os.truncate(repository / "ensemble" / "config.pbtxt", 1 << 30), "1,048,576"),
    "a depth": (more("tensorrt_llm", "model_warmup { inputs { " * 20_000), "is not a model configuration"),
    "digits": (more("tensorrt_llm", "max_batch_size: " + "1" * 500_000), "is not a model configuration"),
    "parameters": (
        more("tensorrt_llm", entries(5000, 'parameters {key:"none@" value:{string_value:"x"}}\n')),
        "none4999",
    ),
    "no type": (more("tensorrt_llm", 'input {name:"x" data_type:-1 dims:[1]}'), "data_type -1, which Triton does not"),
    "no kind": (more("tensorrt_llm", "instance_group [{kind:77}]"), "has the kind 77"),
    "ranks": (ranks(10**9), "is not in its folder (999999999 of 1000000000 are missing)"),
    "more ranks": (ranks(10**60), "is not in its folder"),
    "a sum": (script("CLASS = " + "+".join(["a"] * 2500) + "\nclass X: pass\n"), "has no class TritonPythonModel"),
    "a chain": (script("CLASS = a" + ".b" * 2500 + "\nclass X: pass\n"), "has no class TritonPythonModel"),
    "a deep sum": (script("x = " + "+".join(["a"] * 100_000)), "cannot be read"),
    "a list": (script("x = [" + "a," * 120_000 + "]\nclass X: pass\n"), "has no class TritonPythonModel"),
    "a null byte": (script(b"a = 1\0"), "model-script"),
    "an encoding": (script(b"# coding: nobody\n"), "is not Python"),
}
LLMAPI: dict[str, tuple[str, str]] = {
    "arguments": (MODEL_YAML + entries(40_000, "none@: 1\n"), "settings: LLM takes fewer"),
    "a bomb": ("a: &a [x,x,x,x,x,x,x,x,x]\n" + entries(9, "b@: &b@ [*a,*a]\n") + "c: " + "[" * 70, "is not YAML"),
    "an infinity": (MODEL_YAML + "max_num_tokens: .inf\n", "is inf"),
    "no number": (MODEL_YAML + "max_num_tokens: .nan\n", "is nan"),
    "a number to base 60": (MODEL_YAML + "max_num_tokens: 1" + ":1" * 200_000, "more than 64 digits"),
}


@pytest.mark.parametrize("name", INFLIGHT)
def test_a_repository_that_keeps_one_busy_is_judged_in_seconds(tmp_path: Path, name: str) -> None:
    change, told = INFLIGHT[name]
    inflight(tmp_path / "repository")
    change(tmp_path / "repository")
    started = time.monotonic()
    faults = check_repository(tmp_path / "repository")
    assert time.monotonic() - started < SECONDS
    assert any(told in f"{fault} {fault.rule}" for fault in faults), faults[:5]


@pytest.mark.parametrize("name", LLMAPI)
def test_settings_that_keep_one_busy_are_judged_in_seconds(tmp_path: Path, name: str) -> None:
    settings, told = LLMAPI[name]
    llmapi(tmp_path / "repository", settings)
    started = time.monotonic()
    faults = check_repository(tmp_path / "repository")
    assert time.monotonic() - started < SECONDS
    assert any(told in str(fault) for fault in faults), faults[:5]


def test_settings_without_end_are_foreign_code_and_serve_with_no_other(tmp_path: Path) -> None:
    llmapi(tmp_path / "repository")
    path = tmp_path / "repository" / "tensorrt_llm" / "1" / "model.yaml"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert any("cannot be read" in str(fault) for fault in foreign_code(tmp_path / "repository"))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError, match="more than 1,048,576 bytes"):
        link_models(tmp_path / "repository", "a-", tmp_path / "out")


@pytest.mark.parametrize(
    "text", ['name: "' + "\\" * 500_000, "max_batch_size: " + "9" * 5000, "input {" * 20_000, "\xff"]
)
def test_a_configuration_that_cannot_be_read_is_not_combined(tmp_path: Path, text: str) -> None:
    inflight(tmp_path / "repository")
    (tmp_path / "repository" / "ensemble" / "config.pbtxt").write_bytes(text.encode("latin-1"))
    (tmp_path / "out").mkdir()
    with pytest.raises(InputDataError, match="is not a model configuration"):
        link_models(tmp_path / "repository", "a-", tmp_path / "out")
