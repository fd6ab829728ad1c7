"""Damaged inputs of every command, within one process: a command succeeds, or says in one line what is wrong.

TRTPIPE_FUZZ=0.1 python -m pytest -m slow tests/attacks/test_fuzz_inputs.py -k pull      a tenth of the runs
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.attacks.fuzzing import campaign
from tests.attacks.running import isolated, run_here
from tests.attacks.targets import TARGETS
from tests.attacks.world import World

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


def report(faults: list[object]) -> str:
    return "\n".join(map(str, faults))


@pytest.mark.parametrize("name", TARGETS)
def test_some_damage_is_told_in_one_line(world: World, name: str) -> None:
    faults = campaign(world, name, range(QUICK), run_here)
    assert not faults, report([*faults])


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_much_damage_is_told_in_one_line(world: World, name: str) -> None:
    runs = round(float(os.environ.get("TRTPIPE_FUZZ", "1")) * SLOW * TARGETS[name].share / SHARES)
    faults = campaign(world, name, range(QUICK, QUICK + runs), run_here)
    assert not faults, report([*faults])
