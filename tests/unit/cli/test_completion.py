"""What the shell offers, through the very function that it calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.unit.cli.conftest import Run
from trtpipe.pipeline.cli.app import app


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trtpipe bui", ["build"]),
        ("trtpipe build --recip", ["--recipe"]),
        ("trtpipe build --gpu h2", ["h20", "h200"]),
        ("trtpipe build --gpu a100,h2", ["a100,h20", "a100,h200"]),
        ("trtpipe build --gpu a100,own", ["a100,own-card"]),
        ("trtpipe build --recipe smol", ["smollm2-cpu"]),
        ("trtpipe settings --model tiny", ["tinyllama-1.1b"]),
        ("trtpipe settings --runtime v", ["vllm"]),
        ("trtpipe serve mi", ["mine.cpu.fp32"]),
        ("trtpipe generate Hello --server up", ["up"]),
        ("trtpipe completion z", ["zsh"]),
        ("trtpipe bench --load cha", ["chat"]),
        ("trtpipe plan --load cha", ["chat"]),
        ("trtpipe tune --load cha", ["chat"]),
        ("trtpipe stop u", ["up"]),
        ("trtpipe build --executor r", ["ray"]),
        ("trtpipe settings --executor r", []),
        ("trtpipe logs --server u", ["up"]),
    ],
)
def test_names_that_continue_a_word(
    run: Run, in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    (in_folder / "runs" / "mine.cpu.fp32").mkdir(parents=True)
    (tmp_path / "home" / "servers").mkdir(parents=True)
    (tmp_path / "home" / "servers" / "up.json").touch()
    for name in ("gpus/own-card.yaml", "recipes/smol-own.yaml"):  # recipes there are not found by name
        (tmp_path / "home" / name).parent.mkdir()
        (tmp_path / "home" / name).touch()
    monkeypatch.setenv("_TRTPIPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    done = run()
    assert (done.status, done.out.split(), done.err) == (0, offered, "")


@pytest.mark.process
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_the_shell_reads(run: Run, tmp_path: Path, shell: str) -> None:
    done = run("completion", shell)
    assert done.status == 0
    assert f"_TRTPIPE_COMPLETE=complete_{shell}" in done.out
    if shutil.which(shell):
        script = tmp_path / "script"
        script.write_text(done.out)
        subprocess.run([shell, "-n", os.fspath(script)], check=True)


def test_a_shell_that_is_not_known(run: Run) -> None:
    done = run("completion", "fsh")
    assert (done.status, done.error()) == (2, "there is no completion for the shell 'fsh'; did you mean 'fish'?")


# Arguments and options that take one of the names that docs/command-line.md says are completed.
NAMED = ("gpu", "load", "model", "quant", "recipe", "runtime", "server", "target", "targets", "toolchain")
# A target that is in a registry, and a text.
ELSEWHERE = {("pull", "target"), ("bench", "model")} | {("search", name) for name in ("gpu", "model", "toolchain")}


def test_names_are_completed_wherever_one_is_taken() -> None:
    def without(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for name, child in getattr(command, "commands", {}).items():
            yield from without(child, (*path, name))
        for one in command.params:
            if one.name in NAMED and one._custom_shell_complete is None:
                yield (" ".join(path), one.name)

    assert set(without(typer.main.get_command(app), ())) - ELSEWHERE == set()
