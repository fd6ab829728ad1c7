"""Damaged inputs of the command as a user runs it: a process each, whose memory and time are measured."""

from __future__ import annotations

import os

import pytest

from tests.attacks.fuzzing import campaign
from tests.attacks.running import run_apart
from tests.attacks.targets import TARGETS
from tests.attacks.world import World

pytestmark = pytest.mark.process
QUICK = 8
SLOW = 1000
NAMES = [name for name, target in TARGETS.items() if not target.alone]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", NAMES[:: len(NAMES) // QUICK][:QUICK])
def test_some_damage_is_told_in_one_line(world: World, name: str) -> None:
    faults = campaign(world, name, range(1), run_apart)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_much_damage_is_told_in_one_line(world: World, name: str) -> None:
    share = TARGETS[name].share / sum(TARGETS[other].share for other in NAMES)
    runs = max(1, round(float(os.environ.get("TRTPIPE_FUZZ", "1")) * SLOW * share))
    # Other mutations than those within one process.
    faults = campaign(world, name, range(100_000, 100_000 + runs), run_apart)
    assert not faults, "\n".join(map(str, faults))
