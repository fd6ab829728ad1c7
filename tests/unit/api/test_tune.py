"""`trtpipe.tune` with a stand-in for serving and measuring: what is kept, how it goes on, what is refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trtpipe
from tests.support.factories import hf_folder
from trtpipe.configs.home import default_home
from trtpipe.engines.files import DiskFull
from trtpipe.pipeline.api import tune as module
from trtpipe.pipeline.api.arguments import known_errors
from trtpipe.pipeline.serving.targets import remove_targets
from trtpipe.pipeline.store.store import Store
from trtpipe.pipeline.tune.candidates import Candidate
from trtpipe.pipeline.tune.study import Point, Run

pytestmark = pytest.mark.process

SLO = "ttft:p99<1s"
# What a change multiplies the rate by.
GAINS = {"max_batch_size=16": 1.5, "preprocessing_instance_count=2": 1.2, "max_num_tokens=4096": 0.7}


class Machine:
    """Serves and measures on a clock of its own; after `most` measurements Ctrl-C is pressed.

    around_s  of a measurement without its search, of which the start of the server takes nearly all
    later_s   by which a start may take longer than the first
    search_s  that a search for a rate takes, unless its time is over before
    late      part of the name of changes whose time is over before they have a result
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.measured: list[tuple[str, int, int]] = []
        self.most = 1000
        self.broken, self.late = "", ""
        self.fault: Exception = trtpipe.StageFailed("the server has no memory left")
        self.gains = GAINS
        self.around_s, self.search_s, self.request_s, self.tail_s = 1.0, 4.0, 0.0, 0.0
        self.later_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def __call__(self, session: Any, candidate: Candidate, number: int, repeat: int, begun: float) -> Run:
        if len(self.measured) == self.most:
            raise KeyboardInterrupt
        if self.broken and self.broken in candidate.name:
            with known_errors():
                raise self.fault
        around_s = self.around_s + self.later_s * (len(self.measured) % 3) / 2
        self.measured.append((candidate.name, number, repeat))
        search_s = min(self.search_s, session._search_s(number, repeat))
        self.now += around_s + search_s
        rate = 10.0
        for change, gain in self.gains.items():
            rate *= gain if change in candidate.name else 1
        point = Point(rate=rate, tokens_per_s=16 * rate, ttft_p99=200.0, tpot_p50=20.0, met=True)
        told = f"its {search_s:.0f} s were over" if self.late and self.late in candidate.name else ""
        return Run(
            candidate=candidate, round=number, repeat=repeat, seconds=self.now - begun, start_s=around_s,
            around_s=around_s, request_s=self.request_s, tail_s=self.tail_s, rate=None if told else rate,
            told=told, interval=(rate, rate * 1.1), points=() if told else (point,), report="measured.json",
        )  # fmt: skip


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module._Session, "_served", lambda session, *arguments: made(session, *arguments))
    return made


@pytest.fixture
def target(in_folder: Path) -> str:
    sizes = {"build.max_batch_size": 8, "build.max_input_len": 128, "build.max_seq_len": 192}
    model = hf_folder(in_folder / "tiny", dtype="F32", max_position_embeddings=256)
    return trtpipe.build(model=str(model), gpu="cpu", dtype="fp32", set=sizes).target


def test_the_result_is_a_recipe_with_every_measurement_beside_it(machine: Machine, target: str) -> None:
    study = trtpipe.tune(target, SLO, input_tokens=32, output_tokens=16, price=3.6)
    assert study.state == "complete"
    assert study.said() == (
        "build.max_batch_size=16, serving.preprocessing_instance_count=2: 18 requests/s within the objectives, +80% "
        "± 0% over the target as it is"
    )
    built = trtpipe.settings(recipe=study.folder / "recipe.yaml")
    assert (built.target, built.build.max_batch_size, built.serving.preprocessing_instance_count) == (target, 16, 2)
    assert built.build.max_seq_len == 192
    written = json.loads((study.folder / "tune.json").read_text())
    assert written["schema"] == "trtpipe.tune/1"
    assert written["winner"]["changes"] == {"build.max_batch_size": 16, "serving.preprocessing_instance_count": 2}
    assert written["runs"][0]["candidate"] == {}
    assert len(written["runs"]) == len(machine.measured)
    # 3.6 an hour for 288 tokens a second
    assert study.cost(study.of(study.winner.candidate)[0]) == pytest.approx(3.472, rel=1e-3)  # type: ignore[union-attr]
    page = (study.folder / "tune.html").read_text()
    assert "+80% ± 0% over the target as it is." in page
    assert "preprocessing_instance_count=2" in page


# The first measurement has 18 s at least, which a tenth of the minutes must exceed to give it more.
@pytest.mark.parametrize(("minutes", "enough"), [(1, 6), (2, 6), (6, 12), (30, 60)])
def test_a_target_that_cannot_be_measured_itself_is_told_with_the_minutes(
    machine: Machine, target: str, minutes: int, enough: int
) -> None:
    machine.late = "as it is"
    told = rf"measured as it is: its \d+ s were over; give --minutes {enough}, shorter answers \(--output-"
    with pytest.raises(trtpipe.StageFailed, match=told):
        trtpipe.tune(target, SLO, input_tokens=32, output_tokens=16, minutes=minutes)


def test_after_ctrl_c_the_same_call_goes_on(machine: Machine, target: str) -> None:
    machine.most = 5
    with pytest.raises(KeyboardInterrupt):
        trtpipe.tune(target, SLO, input_tokens=32, output_tokens=16)
    (folder,) = Path("runs", target, "tune").iterdir()
    written = json.loads((folder / "tune.json").read_text())
    assert written["state"] == "interrupted"
    # A gain that was measured once is not decided.
    assert written["said"] == (
        "not decided: build.max_batch_size=16, +50% over the target as it is, with an unknown error"
    )
    assert not (folder / "recipe.yaml").exists()
    assert (folder / "tune.html").exists()
    machine.most = 1000
    study = trtpipe.tune(target, SLO, input_tokens=32, output_tokens=16)
    assert study.folder == folder
    assert len(set(machine.measured)) == len(machine.measured)  # nothing twice
    # Another question is another study.
    assert trtpipe.tune(target, "ttft:2s", input_tokens=32, output_tokens=16).folder != folder


def test_another_load_or_another_prompt_file_is_another_search(machine: Machine, target: str, tmp_path: Path) -> None:
    """What was measured under one says nothing about the other, though the command is the same."""
    load, prompts = tmp_path / "load.yaml", tmp_path / "prompts.txt"
    bursts = "gamma\n  burstiness: 0.1"
    folders = []
    for arrivals, text in (("poisson", "a"), ("poisson", "a"), (bursts, "a"), ("poisson", "b")):
        prompts.write_text(text)
        load.write_text(
            f"name: mine\ndescription: mine\nload:\n  rate: 1\n  requests: 9\n  arrivals: {arrivals}\n"
            f"work:\n  prompts: {prompts}\n  output_tokens: 16\n"
        )
        folders.append(trtpipe.tune(target, SLO, load=load).folder)
    assert folders[0] == folders[1]
    assert len(set(folders)) == 3


def test_a_candidate_that_cannot_be_served_is_told_and_left(machine: Machine, target: str) -> None:
    machine.broken = "max_batch_size=16"
    study = trtpipe.tune(target, SLO)
    assert study.winner is not None
    assert dict(study.winner.candidate.changes) == {"serving.preprocessing_instance_count": 2}
    failed = [run for run in study.runs if run.rate is None]
    assert {run.told for run in failed} == {"the server has no memory left"}
    assert "The server has no memory left." in (study.folder / "tune.html").read_text()
    machine.broken = "as it is"
    with pytest.raises(trtpipe.StageFailed, match="no memory"):
        trtpipe.tune(target, "ttft:3s")


@pytest.mark.parametrize(
    ("system", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: No space left on device"),
        (OSError(errno.EIO, "Input/output error", "weights.bin"), "weights.bin: Input/output error"),
        (DiskFull("the disk of the store is full", why="1 MB is free"), "the disk of the store is full: 1 MB is free"),
    ],
)
def test_what_the_machine_refuses_says_nothing_about_a_change(
    machine: Machine, target: str, system: Exception, told: str
) -> None:
    machine.broken, machine.fault = "max_batch_size=16", system
    with pytest.raises(trtpipe.HostError, match=told):
        trtpipe.tune(target, SLO)
    assert [name for name, _, _ in machine.measured] == ["as it is"]
    machine.broken = ""
    study = trtpipe.tune(target, SLO)
    assert study.said().startswith("build.max_batch_size=16, serving.preprocessing_instance_count=2: 18 requests/s")
    assert all(run.rate for run in study.runs)
    assert machine.measured.count(("as it is", 0, 0)) == 1


def test_conversations_are_told_as_conversations(machine: Machine, target: str, tmp_path: Path) -> None:
    (tmp_path / "load.yaml").write_text(
        "name: mine\ndescription: mine\nload:\n  rate: 1\n  requests: 9\n"
        "work:\n  input_tokens: 16\n  output_tokens: 16\n  sessions:\n    turns: 2\n"
    )
    notes: list[str] = []
    study = trtpipe.tune(target, SLO, load=tmp_path / "load.yaml", note=notes.append)
    assert (study.unit, study.said()[-78:]) == (
        "conversations/s", ": 18 conversations/s within the objectives, +80% ± 0% over the target as it is"
    )  # fmt: skip
    assert "round 1: as it is: 10 conversations/s (10 to 11)" in notes
    page = (study.folder / "tune.html").read_text()
    assert "Conversations/s within the objectives" in page
    for file in ("tune.html", "tune.json", "recipe.yaml"):
        assert "requests/s" not in (study.folder / file).read_text().lower()


def test_a_short_time_leaves_candidates_out_and_says_so(machine: Machine, target: str) -> None:
    machine.gains, machine.search_s = {}, 1e9
    study = trtpipe.tune(target, SLO, minutes=2)
    # 19 s for the target as it is, and as long for each change.
    assert [name for name, _, _ in machine.measured[:2]] == ["as it is", "build.max_batch_size=16"]
    assert len(machine.measured) == 6
    assert (study.state, len(study.left)) == ("out of time", 5)
    assert set(study.left.values()) == {"there was no time for it: --minutes 5 is enough for all changes"}
    assert study.said() == "the target serves best as it is: of 5 changes measured, none gains more than 5%"
    assert 60 * 2 - machine.now < 19
    trtpipe.tune(target, SLO, minutes=2)
    assert len(machine.measured) == 6
    assert trtpipe.tune(target, SLO, minutes=5).state == "complete"


def test_a_change_whose_time_was_over_does_not_end_the_search(machine: Machine, target: str) -> None:
    """SmolLM2 on a busy CPU: a measurement takes a minute, and the first change has no result within it."""
    machine.around_s, machine.search_s, machine.request_s, machine.tail_s = 20.0, 1e9, 0.34, 4.0
    machine.late = "max_batch_size=16"
    study = trtpipe.tune(target, SLO, minutes=6)
    assert len(study.compared) >= 3
    assert study.left["build.max_batch_size=16"] == "its 42 s were over"
    assert 60 * 6 - machine.now < 62  # of the shortest measurement
    # A run that ended early goes on with what was not measured.
    machine.most = len(machine.measured) + 2
    with pytest.raises(KeyboardInterrupt):
        trtpipe.tune(target, SLO, minutes=7)
    machine.most = 1000
    assert len(trtpipe.tune(target, SLO, minutes=7).compared) >= 3


def test_without_a_measured_change_there_is_no_answer_but_the_minutes_of_one(machine: Machine, target: str) -> None:
    machine.around_s, machine.search_s = 85.0, 1e9
    study = trtpipe.tune(target, SLO, minutes=3)
    assert (study.state, study.winner, len(study.left)) == ("no answer", None, 10)
    # Three measurements of 103 s beside the first, of nine tenths of the time.
    assert study.said() == "nothing but the target as it is was measured; give --minutes 8 or more"
    assert [name for name, _, _ in machine.measured] == ["as it is"]
    assert json.loads((study.folder / "tune.json").read_text())["state"] == "no answer"
    assert not (study.folder / "recipe.yaml").exists()
    assert trtpipe.tune(target, SLO, minutes=8).compared
    machine.late = "="
    late = trtpipe.tune(target, SLO, minutes=9)
    assert late.said() == "nothing but the target as it is was measured; give --minutes 18 or more"


@pytest.mark.parametrize(("gains", "changes"), [({}, 4), (GAINS, 2)])
def test_in_14_minutes_on_a_gpu_several_changes_are_measured(
    gains: dict[str, float], changes: int, machine: Machine, target: str
) -> None:
    """vLLM takes 85 s to start; a request of 128 tokens 1.5 s."""
    machine.around_s, machine.search_s, machine.request_s, machine.tail_s = 90.0, 1e9, 1.5, 2.0
    machine.gains = gains
    study = trtpipe.tune(target, SLO, minutes=14)
    assert len(study.compared) >= changes
    assert machine.now <= 14 * 60
    assert study.winner is not None
    if gains:
        # Once more beside the target as it is, so that the gain has an error.
        assert study.winner.gain == pytest.approx(0.5)
        assert study.winner.error is not None


@pytest.mark.parametrize("later_s", [0.0, 20.0, 40.0])
@pytest.mark.parametrize("minutes", [8, 14, 20, 30])
def test_where_later_starts_take_longer_the_best_is_still_measured_again(
    minutes: int, later_s: float, machine: Machine, target: str
) -> None:
    """vLLM on two cores that have other work: a start takes 40 to 80 s."""
    machine.around_s, machine.search_s, machine.request_s, machine.tail_s = 40.0, 1e9, 0.1, 0.5
    machine.later_s = later_s
    study = trtpipe.tune(target, SLO, minutes=minutes)
    assert study.winner is not None
    assert study.winner.error is not None
    best = study.of(study.winner.candidate)
    beside = [run for run in study.of(Candidate()) if run.round == best[0].round]
    assert min(len(best), len(beside)) >= 2
    assert (study.folder / "recipe.yaml").exists()
    assert machine.now <= 60 * minutes


def test_a_gain_that_there_was_no_time_to_measure_again_is_not_decided(machine: Machine, target: str) -> None:
    machine.around_s, machine.search_s = 85.0, 1e9
    study = trtpipe.tune(target, SLO, minutes=4)
    assert study.state == "undecided"
    assert study.said() == (
        "not decided: build.max_batch_size=16, +50% over the target as it is, with an unknown error; give --minutes 8 "
        "or more, or a quieter machine"
    )
    assert not (study.folder / "recipe.yaml").exists()
    assert trtpipe.tune(target, SLO, minutes=8).decided


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slo": []}, "nothing says what a load has to meet"),
        ({"slo": "ttft"}, "'ttft' is not an objective"),
        ({"minutes": 0}, "--minutes is 0"),
        ({"find": "max-speed"}, "unknown goal 'max-speed'"),
        ({"price": -1}, "--price is -1"),
        ({"input_tokens": 300}, "prompts of 300 tokens are more than"),
        ({"target": "nothing"}, "there is no target 'nothing'"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_served(
    arguments: dict[str, Any], message: str, machine: Machine, target: str
) -> None:
    given: dict[str, Any] = {"target": target, "slo": SLO, **arguments}
    call: Callable[..., Any] = trtpipe.tune
    with pytest.raises(trtpipe.UsageError, match=message):
        call(**given)
    assert not machine.measured
    assert not Path("runs", target, "tune").exists()


def test_one_search_at_a_time(machine: Machine, target: str) -> None:
    """Each would measure the other's work too."""
    with (
        Store(default_home()).alone("tune", trtpipe.HostError("unused")),
        pytest.raises(trtpipe.HostError, match="another `trtpipe tune` runs on this machine; wait until it has ended"),
    ):
        trtpipe.tune(target, SLO)
    assert not machine.measured
    trtpipe.tune(target, SLO, minutes=1)
    assert machine.measured


def test_a_target_that_is_tuned_is_neither_removed_nor_built_again(machine: Machine, target: str) -> None:
    refused: list[str] = []

    def change(message: str) -> None:
        for act in (
            lambda: remove_targets([target], Store(default_home())),
            lambda: trtpipe.build(model="tiny", gpu="cpu", dtype="fp32", set={"build.max_batch_size": 4}),
        ):
            with pytest.raises(trtpipe.UsageError) as caught:
                act()
            refused.append(str(caught.value))

    trtpipe.tune(target, SLO, minutes=1, note=change)
    assert set(refused) == {f"{target} is being tuned; wait until `trtpipe tune` has ended"}
    assert machine.measured
    with pytest.raises(trtpipe.UsageError, match=f"{target} holds 1 study of `trtpipe tune`; copy what you need of "):
        remove_targets([target], Store(default_home()))
    assert remove_targets([target], Store(default_home()), studies=True) == [target]


def test_options_are_judged_while_another_search_runs(machine: Machine, target: str) -> None:
    with (
        Store(default_home()).alone("tune", trtpipe.HostError("unused")),
        pytest.raises(trtpipe.UsageError, match="--minutes is 0"),
    ):
        trtpipe.tune(target, SLO, minutes=0)
    assert not machine.measured
