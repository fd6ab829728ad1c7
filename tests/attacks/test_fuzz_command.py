"""Damaged inputs of the command as a user runs it: a process each, whose memory and time are measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from tests.attacks.fuzzing import campaign
from tests.attacks.running import LIMIT_S, Outcome
from tests.attacks.targets import TARGETS
from tests.attacks.world import World

pytestmark = pytest.mark.process
QUICK = 15
SLOW = 1000
NAMES = [name for name, target in TARGETS.items() if not target.alone]
# A command that is stopped has hung; a busy machine is not to be taken for that.
STOP_S = 4 * LIMIT_S

Run = Callable[[Iterable[str]], Outcome]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs the command in the current folder."""
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).with_name("measured.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert helper.stdin is not None
    assert helper.stdout is not None
    stdin, stdout = helper.stdin, helper.stdout
    trtpipe = Path(sys.executable).with_name("trtpipe")

    def command(arguments: Iterable[str]) -> Outcome:
        out, err = tmp_path / "out", tmp_path / "err"
        asked = {
            "command": [str(trtpipe), *arguments], "cwd": str(Path.cwd()), "env": dict(os.environ), "out": str(out),
            "err": str(err), "seconds": STOP_S,
        }  # fmt: skip
        stdin.write(json.dumps(asked) + "\n")
        stdin.flush()
        told = json.loads(stdout.readline())
        return Outcome(told["status"], err.read_text(errors="replace"), "", told["seconds"], told["peak"])

    yield command
    stdin.close()
    helper.wait()
    stdout.close()


@pytest.mark.parametrize("name", NAMES[:: len(NAMES) // QUICK][:QUICK])
def test_some_damage_is_told_in_one_line(world: World, run: Run, name: str) -> None:
    faults = campaign(world, name, range(1), run)
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_much_damage_is_told_in_one_line(world: World, run: Run, name: str) -> None:
    share = TARGETS[name].share / sum(TARGETS[other].share for other in NAMES)
    runs = max(1, round(float(os.environ.get("TRTPIPE_FUZZ", "1")) * SLOW * share))
    # Other mutations than those within one process.
    faults = campaign(world, name, range(100_000, 100_000 + runs), run)
    assert not faults, "\n".join(map(str, faults))
