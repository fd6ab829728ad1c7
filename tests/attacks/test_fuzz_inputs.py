"""Damaged inputs of every command, within one process: a command succeeds, or says in one line what is wrong.

TRTPIPE_FUZZ=0.1 python -m pytest -m slow tests/attacks/test_fuzz_inputs.py -k pull      a tenth of the runs
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks import fuzzing
from tests.attacks.fuzzing import campaign
from tests.attacks.running import Outcome, isolated, run_here
from tests.attacks.targets import TARGETS
from tests.attacks.world import TARGET, World

QUICK = 2
SLOW = 20_000
SHARES = sum(target.share for target in TARGETS.values())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def inside() -> Iterator[None]:
    with isolated():
        yield


@pytest.mark.parametrize("name", TARGETS)
def test_some_damage_is_told_in_one_line(world: World, name: str) -> None:
    faults = campaign(world, name, range(QUICK), run_here)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_much_damage_is_told_in_one_line(world: World, name: str) -> None:
    runs = round(float(os.environ.get("TRTPIPE_FUZZ", "1")) * SLOW * TARGETS[name].share / SHARES)
    faults = campaign(world, name, range(QUICK, QUICK + runs), run_here)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [
        (Outcome(3, "note\nerror: it is damaged\n", "", 0.1, 0), None),
        (Outcome(0, "", "", 0.1, 0), None),
        (Outcome(None, "", 'Traceback\n  File "x.py", line 1, in f\nKeyError: 1', 0.1, 0), "KeyError at ?"),
        (Outcome(1, 'Traceback (most recent call last):\n  File "x.py"\nValueError: 1', "", 0.1, 0), "ValueError at ?"),
        (Outcome(1, "error: x", "", 0.1, 0), "exit status 1"),
        (Outcome(-9, "", "", 0.1, 0), "exit status -9"),
        (Outcome(3, "", "", 0.1, 0), "not one line of error"),
        (Outcome(3, "error: x\nerror: y\n", "", 0.1, 0), "not one line of error"),
        (Outcome(3, "error: x\nmore of it\n", "", 0.1, 0), "not one line of error"),
        (Outcome(0, "error: x\n", "", 0.1, 0), "an error without its exit status"),
        (Outcome(3, "error: x\n", "", 15.1, 0), "hang"),
        (Outcome(3, "error: x\n", "", 0.1, 501 << 20), "memory"),
        (Outcome(4, "error: this machine has not enough memory\n", "", 0.1, 0), "no limit"),
    ],
)
def test_a_fault_is_found_and_its_input_kept(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, cause: str | None
) -> None:
    monkeypatch.setattr(fuzzing, "KEPT", tmp_path)
    faults = campaign(world, "settings", range(20), lambda arguments: outcome)
    assert [fault.cause for fault in faults] == ([] if cause is None else [cause])
    if faults:
        case = json.loads((faults[0].kept / "case.json").read_text())
        assert case["file"] == "work/recipe.yaml"
        assert {path.name for path in faults[0].kept.iterdir()} == {"case.json", "detail.txt", "input"}


def test_another_artefact_and_a_file_outside_are_found(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzing, "KEPT", tmp_path)
    outcome = Outcome(0, "", "", 0.1, 0)

    def other(arguments: object) -> Outcome:
        weights = world.work / "runs" / TARGET / "checkpoint" / "rank0.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        return outcome

    def outside(arguments: object) -> Outcome:
        (world.root / "x").touch()
        return outcome

    assert [fault.cause for fault in campaign(world, "import", range(1), other)] == ["wrong artefact"]
    assert campaign(world, "import", range(1), lambda arguments: outcome) == []  # all is as it was again
    assert [fault.cause for fault in campaign(world, "ps", range(1), outside)] == ["a file outside"]
    (world.root / "x").unlink()
