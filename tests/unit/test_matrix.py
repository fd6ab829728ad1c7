"""Lists on the command line: which targets they make, and what is told when some of them cannot be finished here."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.factories import hf_folder
from tests.unit.cli.conftest import Run, rows, run  # noqa: F401  # a fixture
from tests.unit.test_runner import plan
from trtpipe.engines.errors import HostError, StageFailed, UsageError
from trtpipe.pipeline import matrix
from trtpipe.pipeline.execution.hardware import GpuAbsent
from trtpipe.pipeline.runner import StageResult
from trtpipe.pipeline.spec import BuildSpec


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def test_every_combination_in_order() -> None:
    options = {"model": "m", "gpu": "a100,h100", "dtype": "auto", "tp": "1, 2", "pp": None, "recipe": "x"}
    assert [(one["gpu"], one["tp"]) for one in matrix.combinations(options)] == [
        ("a100", 1), ("a100", 2), ("h100", 1), ("h100", 2),
    ]  # fmt: skip
    assert all((one["model"], one["pp"], one["recipe"]) == ("m", None, "x") for one in matrix.combinations(options))
    assert matrix.combinations({"gpu": None}) == [{"gpu": None}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "a100,"}, "--gpu a100, has an empty place"),
        ({"gpu": "a100,a100"}, "--gpu a100,a100 names something twice"),
        ({"tp": "1,two"}, "--tp 1,two is not a list of numbers"),
    ],
)
def test_lists_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        matrix.combinations(options)
    assert str(error.value).startswith(message)


def test_a_models_folder_may_hold_commas(tmp_path: Path) -> None:
    folder = tmp_path / "a,b" / "c"
    folder.mkdir(parents=True)
    options = {"model": str(folder), "gpu": "a100,h100"}
    assert [(one["model"], one["gpu"]) for one in matrix.combinations(options)] == [
        (str(folder), "a100"), (str(folder), "h100"),
    ]  # fmt: skip
    matrix.require_one({"model": str(folder)})


def outcomes(model: Path, *errors: Any) -> list[matrix.Outcome]:
    plans = [plan(model, gpu=gpu, dtype="bf16") for gpu in ("a100", "h100", "l4")][: len(errors)]
    failures = dict(zip((made.target for made in plans), errors, strict=True))

    def build(made: BuildSpec) -> list[StageResult]:
        if failures[made.target] is not None:
            raise failures[made.target]
        return []

    return matrix.build_all(plans, build)


def test_one_failure_does_not_keep_the_others_from_being_built(in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    found = outcomes(model, GpuAbsent("no GPU"), StageFailed("it broke"), None)
    assert [(one.state, one.next_step) for one in found] == [
        (
            "waits for its GPU",
            "trtpipe export tiny.a100.bf16; where the GPU is: trtpipe build --from tiny.a100.bf16.tar",
        ),
        ("failed", "it broke"),
        ("nothing to make", ""),
    ]
    with pytest.raises(StageFailed) as error:
        matrix.raise_failures(found)
    assert str(error.value) == "of 3 targets 1 wait for their GPU and 1 failed; the table says what to do next"
    with pytest.raises(HostError, match="of 2 targets 1 wait for their GPU; the table"):
        matrix.raise_failures(outcomes(model, GpuAbsent("no GPU"), None))
    with pytest.raises(GpuAbsent) as absent:
        matrix.raise_failures(outcomes(model, GpuAbsent("no GPU")))
    assert str(absent.value).startswith("no GPU; the checkpoint is made; next: trtpipe export tiny.a100.bf16; where ")
    matrix.raise_failures(outcomes(model, None, None))


def test_an_error_of_the_system_ends_one_target_and_a_defect_the_command(in_folder: Path) -> None:
    model = hf_folder(in_folder / "tiny")
    full, denied = OSError(errno.ENOSPC, "No space left"), PermissionError(errno.EACCES, "Permission denied", "config")
    found = outcomes(model, full, denied, None)
    assert [one.state for one in found] == ["failed", "failed", "nothing to make"]
    assert str(found[0].error).startswith("the disk is full: No space left")
    assert str(found[1].error).startswith("config: Permission denied; ")
    assert found[0].error is not None
    assert found[0].error.__cause__ is full
    with pytest.raises(HostError, match="of 3 targets 2 failed; the table"):
        matrix.raise_failures(found)
    with pytest.raises(ZeroDivisionError):
        outcomes(model, ZeroDivisionError(), None)


def test_targets_of_one_command_share_what_they_can(run: Run, in_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    model = hf_folder(in_folder / "tiny")
    sizes = ["--set", "build.max_input_len=64", "--set", "build.max_seq_len=128"]
    done = run("build", "--model", model, "--gpu", "a100,h100", "--dtype", "bf16", "--tp", "1,2", *sizes)
    assert done.status == 4
    assert done.error() == "of 4 targets 4 wait for their GPU; the table says what to do next"
    names = ["tiny.a100.bf16", "tiny.a100.bf16.tp2", "tiny.h100.bf16", "tiny.h100.bf16.tp2"]
    assert [row[:2] for row in rows(done.out)] == [
        ["target", "state"],
        *([name, "waits for its GPU"] for name in names),
    ]
    made = [json.loads(path.read_text()) for path in (tmp_path / "home").glob("artefacts/*/*/manifest.json")]
    assert sorted(manifest["record"]["stage"] for manifest in made) == ["convert", "convert", "download", "tokenizer"]


def test_an_impossible_combination_is_refused_before_anything_is_made(run: Run, in_folder: Path) -> None:  # noqa: F811
    model = hf_folder(in_folder / "tiny")
    done = run("build", "--model", model, "--gpu", "a100,h100", "--dtype", "fp8")
    assert done.status == 2
    assert done.error().startswith("fp8 does not run on a100 (SM80)")
    assert not (in_folder / "runs").exists()
