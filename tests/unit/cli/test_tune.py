"""`trtpipe tune`: what it prints of a search, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Run as Command
from trtpipe.pipeline.api import tune as module
from trtpipe.pipeline.tune.candidates import AS_IT_IS, Candidate
from trtpipe.pipeline.tune.search import Winner
from trtpipe.pipeline.tune.study import Run, Study

ASKED = ("tune", "tiny.cpu.fp32", "--slo", "ttft:2s")
BATCH = Candidate.of({"build.max_batch_size": 32})
LEFT = {BATCH.name: "its 56 s were over", "a=1": "there was no time for it", "b=1": "there was no time for it"}


def study(monkeypatch: pytest.MonkeyPatch, folder: Path, *runs: Run, **fields: Any) -> None:
    found = Study(target="tiny.cpu.fp32", folder=folder, runs=list(runs), **{"question": {}, **fields})
    monkeypatch.setattr(module, "tune", lambda *arguments, **named: found)


def measured(candidate: Candidate, rate: float | None, told: str = "") -> Run:
    return Run(candidate=candidate, round=0, repeat=0, seconds=60.0, rate=rate, told=told)


def test_without_a_measured_change_it_says_so_with_what_helps_and_fails(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = measured(AS_IT_IS, 14.0), measured(BATCH, None)
    study(monkeypatch, tmp_path, *runs, left=LEFT, state="no answer", remedy="give --minutes 12 or more")
    done = run(*ASKED)
    assert done.status == 5
    assert "nothing but the target as it is was measured; give --minutes 12 or more\n" in done.out
    assert "best" not in done.out
    assert "recipe" not in done.out
    assert done.err.splitlines() == [
        "not measured: build.max_batch_size=32: its 56 s were over",
        "not measured: a=1; b=1: there was no time for it",
    ]
    told = run(*ASKED, "--json")
    assert (told.status, json.loads(told.out)["state"]) == (5, "no answer")


def test_a_gain_of_unknown_error_is_not_decided_and_fails(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    winner = Winner(candidate=BATCH, gain=0.8, complete=True, proven=False)
    runs = measured(AS_IT_IS, 10.0), measured(BATCH, 18.0)
    study(monkeypatch, tmp_path, *runs, winner=winner, remedy="give --minutes 12 or more")
    done = run(*ASKED)
    assert done.status == 5
    assert (
        "not decided: build.max_batch_size=32, +80% over the target as it is, with an unknown error; give --minutes "
        "12 or more, or a quieter machine\n"
    ) in done.out
    assert "recipe" not in done.out


def test_what_serves_best_is_said_of_the_changes_that_were_measured(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    winner = Winner(candidate=AS_IT_IS, gain=0.0, complete=True)
    study(
        monkeypatch, tmp_path, measured(AS_IT_IS, 14.0), measured(BATCH, 14.1), winner=winner, left={"a=1": "no time"}
    )
    done = run(*ASKED)
    assert done.status == 0
    assert "the target serves best as it is: of 1 change measured, none gains more than 5%\n" in done.out
    assert f"next: trtpipe build --recipe {tmp_path / 'recipe.yaml'}\n" in done.out
    assert done.err == "not measured: a=1: no time\n"


def test_the_table_names_what_its_rates_count(run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for sessions, unit in ((None, "requests/s"), ({"turns": "2"}, "conversations/s")):
        study(monkeypatch, tmp_path, measured(AS_IT_IS, 14.0), question={"work": {"sessions": sessions}})
        head = next(line for line in run(*ASKED).out.splitlines() if line.startswith("settings"))
        assert head.split() == ["settings", "round", unit, "tokens/s"]


def test_it_says_which_rates_are_less_precise_than_asked_for(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    study(monkeypatch, tmp_path, measured(AS_IT_IS, 14.0), measured(BATCH, 16.0, "the client was the limit at 20"))
    assert run(*ASKED).err == "build.max_batch_size=32: the client was the limit at 20\n"


def test_one_protocol_is_tuned_for(run: Command, build: Command, model: Path) -> None:
    assert build(model).status == 0
    done = run(*ASKED, "--protocol", "chat,grpc")
    assert (done.status, done.error()) == (2, "--protocol chat,grpc are several; give the one that users will use")
