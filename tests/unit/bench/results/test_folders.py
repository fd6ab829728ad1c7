"""Each run has a folder of its own, and the last two are compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.pipeline.bench.results import folders


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(target: str, second: int) -> Path:
    place = folders.claim(folders.new(target))
    place.touch()
    os.utime(place, (second, second))
    folders.link_latest(place.parent)
    return place


def test_no_two_runs_share_a_folder() -> None:
    places = [made("llama3-8b.h100", second) for second in range(3)]
    assert len({place.parent for place in places}) == 3
    assert all(place.parent.parent == Path("reports") for place in places)
    assert Path("reports/latest").resolve() == places[-1].parent.resolve()


def test_runs_that_begin_in_the_same_second_do_not_share_one_either() -> None:
    begun = [folders.new("llama3-8b.h100")] * 3
    claimed = [folders.claim(place) for place in begun]
    name = begun[0].parent.name
    assert [place.parent.name for place in claimed] == [name, f"{name}.2", f"{name}.3"]
    assert not any(claimed[0].parent.iterdir())


def test_a_folder_of_reports_that_cannot_be_made_is_told() -> None:
    Path("reports").symlink_to("gone/reports")
    with pytest.raises(HostError, match=r"^reports/\d+-\d+-x cannot be made: File exists"):
        folders.claim(folders.new("x"))


def test_a_target_s_name_stays_one_folder() -> None:
    assert folders.new("../other/model:1").parent.name.endswith("-..-other-model-1")
    assert folders.new("../other/model:1").parent.parent == Path("reports")


def test_the_last_two_are_compared_the_earlier_first() -> None:
    first, second, third = made("b", 5), made("c", 9), made("a", 7)
    assert folders.last_two() == [third, second]
    second.unlink()
    assert folders.last_two() == [first, third]


def test_a_folder_in_place_of_the_link_stays_and_is_no_run() -> None:
    first = folders.claim(folders.new("a"))
    first.touch()
    copy = Path("reports/latest/report.json")
    copy.parent.mkdir()
    copy.touch()
    with pytest.raises(HostError, match=r"^reports/latest cannot be made: Is a directory$"):
        folders.link_latest(first.parent)
    assert copy.is_file()
    second = folders.claim(folders.new("b"))
    second.touch()
    os.utime(first, (5, 5))
    assert folders.last_two() == [first, second]


@pytest.mark.parametrize(("count", "told"), [(0, "there are no reports in ./reports"), (1, "there is 1 report in ")])
def test_fewer_than_two_cannot_be_compared(count: int, told: str) -> None:
    for second in range(count):
        made("x", second)
    with pytest.raises(UsageError, match=told):
        folders.last_two()
