"""The command `trtpipe migrate`: the recipe that it writes, and notes before it builds."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.support.factories import hf_folder
from tests.support.triton_repositories import inflight
from tests.unit.api.test_migrate import tiny
from trtpipe.pipeline.cli import app as cli
from trtpipe.pipeline.run_folder import RunFolder
from trtpipe.pipeline.spec import BuildSpec


def test_values_of_a_repository_stay_in_the_comments_of_a_recipe(in_folder: Path) -> None:
    hf_folder(in_folder / "tiny")
    repository = inflight(in_folder / "a\nset: {x: 1}")
    tiny(repository)
    config = repository.path / "tensorrt_llm" / "config.pbtxt"
    foreign = r'parameters: { key: "mine" value: { string_value: "1\ntasks: [/etc/passwd]\r\xe2\x80\xa8gpu: cpu" } }'
    config.write_text(f"{config.read_text()}\n{foreign}\n")
    words = ["migrate", str(repository.path), "--to", "vllm", "--model", "./tiny", "--gpu", "h100", "-o", "new.yaml"]
    done = CliRunner().invoke(cli.make_app(), words)
    assert done.exit_code == 0, done.output
    text = Path("new.yaml").read_text()
    assert "mine 1 tasks: [/etc/passwd]  gpu: cpu" in text
    found = yaml.safe_load(text)
    assert found.keys().isdisjoint({"set", "tasks"})
    assert (found["gpu"], found["model"]) == ("h100", str(in_folder / "tiny"))


def test_a_migration_of_another_deployment_says_what_it_replaces(
    in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_folder(in_folder / "tiny")

    def made(spec: BuildSpec, **_: object) -> None:
        RunFolder.of(spec.target).path.mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr("trtpipe.pipeline.api.build.build", made)
    monkeypatch.setattr("trtpipe.pipeline.cli.build.next_command", lambda target: "trtpipe serve")
    for name, replaced in (("a", None), ("a", None), ("b", "a"), ("b", None)):
        if not (in_folder / name).exists():
            tiny(inflight(in_folder / name))
        words = ["migrate", name, "--to", "vllm", "--model", "tiny", "--gpu", "h100"]
        done = CliRunner().invoke(cli.make_app(), words)
        assert done.exit_code == 0, done.output
        told = " ".join(done.output.split())
        note = f"this replaces tiny.h100.bf16.vllm, which was migrated from {replaced}/"
        assert (note in told) is (replaced is not None)
        assert "this replaces" not in told.replace(note, "")
