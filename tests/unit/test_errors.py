"""Each class of failure has its exit code, each message is one line, and what the system reports gets our words."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtpipe.engines import errors as classes
from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError, suggestion
from trtpipe.engines.files import DiskFull
from trtpipe.pipeline.errors import translate


def test_the_five_exit_codes() -> None:
    names = {"UsageError": 2, "InputDataError": 3, "HostError": 4, "StageFailed": 5, "ArtefactRefused": 6}
    assert {name: getattr(classes, name).exit_code for name in names} == names
    assert {cls.__name__ for cls in TrtpipeError.__subclasses__()} == set(names)


def test_a_message_has_three_parts() -> None:
    assert str(UsageError("it cannot be")) == "it cannot be"
    assert str(UsageError("it cannot be", why="too big")) == "it cannot be: too big"
    assert str(UsageError("it cannot be", remedy="try less")) == "it cannot be; try less"
    assert str(UsageError("it cannot be", why="too big", remedy="try less")) == "it cannot be: too big; try less"


TEXT = st.text("a \n\r\t\v\x1c\x85\u2028", max_size=8)


@given(TEXT, TEXT, TEXT)
def test_a_message_is_one_line_whatever_the_cause(what: str, why: str, remedy: str) -> None:
    assert len(str(HostError(what, why=why, remedy=remedy)).splitlines()) <= 1


def test_our_own_errors_are_left_as_they_are() -> None:
    error = InputDataError("damaged")
    assert translate(error) is error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_how_to_make_room(number: int) -> None:
    known = translate(OSError(number, os.strerror(number), "big.bin"))
    assert isinstance(known, HostError)
    assert str(known) == (
        f"big.bin: the disk is full: {os.strerror(number)}; free some space (`trtpipe gc` drops artefacts "
        "no run uses), or set TRTPIPE_HOME to a larger disk"
    )


def test_a_full_disk_is_known_in_a_library_s_own_exception() -> None:
    known = translate(RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert isinstance(known, DiskFull)
    assert str(known).startswith("the disk is full: Error while serializing: ")
    assert translate(RuntimeError("a defect of ours")) is None


def test_a_permission_names_the_file() -> None:
    known = translate(PermissionError(errno.EACCES, "Permission denied", "x"))
    assert isinstance(known, HostError)
    assert str(known) == ("x: Permission denied; check the permissions, or set TRTPIPE_HOME to a folder of yours")


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EIO, errno.ENAMETOOLONG])
def test_the_machine_s_state_is_a_host_error(number: int) -> None:
    known = translate(OSError(number, os.strerror(number), "x"))
    assert isinstance(known, HostError)
    assert str(known) == f"x: {os.strerror(number)}"
    assert str(translate(OSError(number, os.strerror(number)))) == os.strerror(number)


def test_memory_that_is_short_is_the_machine_s() -> None:
    assert str(translate(MemoryError())) == (
        "this machine has not enough memory; close other programs or use a larger one"
    )


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), AssertionError(), OSError("no number"), TypeError()])
def test_what_we_do_not_know_is_a_defect_and_keeps_its_traceback(error: Exception) -> None:
    assert translate(error) is None


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        ("H10", "did you mean 'h100'?"),
        ("h100", "did you mean 'h100'?"),
        ("zebra", "known: a100, h100"),
        ("", "known: a100, h100"),
    ],
)
def test_a_suggestion_is_the_nearest_spelling_or_the_list(value: str, remedy: str) -> None:
    assert suggestion(value, ["h100", "a100"]) == remedy
