"""Fuzzing of the trtpipe command: one input of a small world is mutated, then a command reads it.

What may happen: the command succeeds, or ends with one of its exit codes and one line that says what is wrong. What
may not: a traceback, a hang, memory beyond LIMIT_BYTES, a file outside the world, or an artefact whose bytes are not
those of the original.

    python -m tests.attacks.fuzzing .scratch/fuzz/FOLDER      runs a kept case again
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.mutations import PLACES, flip_bit, mutate, mutate_yaml, replace
from tests.attacks.running import LIMIT_BYTES, LIMIT_S, Outcome, isolated, run_here
from tests.attacks.targets import TARGETS, Target
from tests.attacks.world import World, remove
from tests.support.paths import ROOT

KEPT = ROOT / ".scratch" / "fuzz"
CODES = (0, 2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Case:
    """A mutation: of which file (from the world's root), and how: a name of PLACES, or other bytes or arguments."""

    target: str
    index: int
    file: str
    how: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Fault:
    """What must not happen, by a name that is the same for the same cause."""

    case: Case
    cause: str
    detail: str
    kept: Path

    def __str__(self) -> str:
        return f"{self.case.target} {self.case.index} ({self.case.file} {self.case.how}): {self.cause}; {self.kept}"


def mutated(world: World, name: str, index: int) -> Case:
    """Mutate one input of the world for run `index` of a target."""
    target = TARGETS[name]
    rng = random.Random(f"{name} {index}")
    arguments = target.arguments
    if not target.files:
        text = mutate_yaml(rng, b"16").decode(errors="replace").replace("\0", "")[:100_000]
        return Case(name, index, "", "argument", tuple(one.replace("{yaml}", text) for one in arguments))
    file = rng.choice(world.files(target.files))
    path, chance = world.root / file, rng.random()
    if chance < 0.15:
        place = rng.choice(list(PLACES))
        replace(path, place)
        return Case(name, index, file, place, arguments)
    data = path.read_bytes()
    if chance < 0.25 and data:  # a disk's error: neither size nor time tell
        before = path.stat()
        path.write_bytes(flip_bit(rng, data))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        return Case(name, index, file, "bit", arguments)
    path.write_bytes(mutate(rng, path.name, data))
    return Case(name, index, file, "bytes", arguments)


def campaign(world: World, name: str, runs: Iterable[int], run: Callable[[Iterable[str]], Outcome]) -> list[Fault]:
    """Run a target with the mutations of these numbers; the faults, of each cause that with the smallest input."""
    target = TARGETS[name]
    found: dict[str, Fault] = {}
    with world.entered(target.home):
        for index in runs:
            case = mutated(world, name, index)
            fault = _fault(world, target, case, run(case.arguments))
            if fault is not None:
                cause, detail = fault
                kept = _keep(world, case, cause, detail)
                found.setdefault(cause, Fault(case, cause, detail, kept))
            world.restore(made=target.makes, changed=target.changes, file=case.file)
    return list(found.values())


def _fault(world: World, target: Target, case: Case, outcome: Outcome) -> tuple[str, str] | None:
    """(cause, detail) of what must not have happened."""
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    report = re.search(r"please report it with (\S+),", outcome.err)
    if report is not None:
        trace = Path(report[1]).read_text(errors="replace")
        Path(report[1]).unlink()
        return _cause(trace), trace
    if outcome.trace or "Traceback (most recent call last)" in outcome.err:
        trace = outcome.trace or outcome.err
        return _cause(trace), trace
    if outcome.code not in CODES:
        return f"exit status {outcome.code}", outcome.err
    if outcome.seconds > LIMIT_S:
        return "hang", f"{outcome.seconds:.1f} s\n{outcome.err}"
    if outcome.peak > LIMIT_BYTES:
        return "memory", f"{outcome.peak >> 20} MB\n{outcome.err}"
    if "File too large" in outcome.err or "not enough memory" in outcome.err:
        return "no limit", outcome.err
    if outcome.code and (len(errors) != 1 or errors != outcome.err.splitlines()[-1:]):
        return "not one line of error", outcome.err
    if not outcome.code and errors:
        return "an error without its exit status", outcome.err
    strangers = world.strangers()
    if strangers:
        return "a file outside", f"{strangers}\n{outcome.err}"
    wrong = target.wrong(world) if outcome.code == 0 else None
    return None if wrong is None else ("wrong artefact", f"{wrong}\n{outcome.err}")


def _cause(trace: str) -> str:
    """The exception's class and the innermost line of ours, which are the same for the same cause."""
    lines = trace.strip().splitlines()
    ours = [line.strip() for line in lines if line.lstrip().startswith('File "') and f"{ROOT}/" in line]
    inner = [line for line in ours if "/tests/" not in line and "/.venv/" not in line]
    last = next((line for line in reversed(lines) if line and not line.startswith(" ")), "")
    place = inner[-1].replace(f"{ROOT}/", "") if inner else "?"
    return f"{last.partition(':')[0]} at {place}"


def _keep(world: World, case: Case, cause: str, detail: str) -> Path:
    """Keep the input of a fault, unless a smaller one with the same cause is kept."""
    folder = KEPT / f"{case.target}-{hashlib.sha256(cause.encode()).hexdigest()[:8]}"
    mutation, kept = world.root / case.file, folder / "input"
    content = case.how in ("bytes", "bit")
    if folder.exists() and (not content or (kept.exists() and kept.stat().st_size <= mutation.stat().st_size)):
        return folder
    remove(folder)
    folder.mkdir(parents=True)
    if content and mutation.is_file():
        shutil.copy(mutation, kept)
    (folder / "case.json").write_text(json.dumps({**vars(case), "cause": cause}, indent=1) + "\n")
    (folder / "detail.txt").write_text(detail, errors="replace")
    return folder


def again(folder: Path) -> None:
    """Run a kept case again, and print what becomes of it."""
    told = json.loads((folder / "case.json").read_text())
    told.pop("cause")
    case = Case(**{**told, "arguments": tuple(told["arguments"])})
    with tempfile.TemporaryDirectory() as scratch, isolated():
        world = World(Path(scratch))
        if case.how in PLACES:
            replace(world.root / case.file, case.how)
        elif (folder / "input").exists():
            shutil.copy(folder / "input", world.root / case.file)
        with world.entered(TARGETS[case.target].home):
            outcome = run_here(case.arguments)
        print(f"trtpipe {' '.join(case.arguments)}    with {case.file} {case.how}")
        print(outcome.trace or outcome.err)
        print(f"exit status {outcome.code}, {outcome.seconds:.1f} s, {outcome.peak >> 20} MB")
        print("fault:", _fault(world, TARGETS[case.target], case, outcome))


if __name__ == "__main__":
    again(Path(sys.argv[1]))
