"""Each class of failure has its exit code, each message is one line, and what the system reports gets our words."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path

import httpx
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


def test_a_permission_names_the_file_and_a_place_that_helps(tmp_path: Path) -> None:
    def message(path: object) -> str:
        known = translate(PermissionError(errno.EACCES, "Permission denied", path))
        assert isinstance(known, HostError)
        return str(known)

    assert message("runs").endswith(
        "; run this in a folder of yours: runs and reports are written to the current folder"
    )
    assert message("/etc/page.html").endswith("; check the permissions, or name another place")
    (secret := tmp_path / "recipe.yaml").touch()
    assert message(str(secret)) == f"{secret}: Permission denied; check the permissions"
    home = tmp_path / "home"  # as the tests' environment has it
    for path in (home, home / "artefacts" / "x", str(tmp_path)):
        assert message(path).endswith("; set TRTPIPE_HOME to a folder that you may write")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the temporary file that was to be in it, nor what a link was to lead to."""
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    (tmp_path / "mine").mkdir()
    for paths in ((tmp_path / "mine" / ".out.123",), ("/elsewhere/files", None, str(tmp_path / "mine" / ".model.7"))):
        assert str(translate(OSError(errno.EROFS, "Read-only file system", *paths))) == (
            f"folder {tmp_path / 'mine'} cannot be written: Read-only file system; "
            "check the permissions, or name another place"
        )


def test_a_home_that_cannot_be_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "home" / "roots")
    known = translate(NotADirectoryError(errno.ENOTDIR, "Not a directory", path))
    assert isinstance(known, HostError)
    assert str(known).startswith(f"TRTPIPE_HOME is {tmp_path}/home: {path}: Not a directory; ")


def test_a_disk_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRTPIPE_HOME", str(tmp_path))
    known = translate(OSError(errno.ENOLCK, "No locks available"))  # as fcntl.flock raises it
    assert isinstance(known, HostError)
    assert str(known) == (
        f"TRTPIPE_HOME is {tmp_path}, whose disk takes no locks: No locks available; "
        "mount it with locks, or set TRTPIPE_HOME to a folder on another disk"
    )


@pytest.mark.parametrize(
    "number",
    [errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EIO, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.EBUSY],
)
def test_the_machine_s_state_is_a_host_error(number: int) -> None:
    known = translate(OSError(number, os.strerror(number), "x"))
    assert isinstance(known, HostError)
    remedy = "" if number in (errno.EIO, errno.ENOTEMPTY, errno.EBUSY) else "; name another place"
    assert str(known) == f"x: {os.strerror(number)}{remedy}"
    assert str(translate(OSError(number, os.strerror(number)))) == f"{os.strerror(number)}{remedy}"


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file or directory"), (b"noise", "NO_CERTIFICATE_OR_CRL_FOUND")]
)
def test_certificates_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, why: str
) -> None:
    """Neither error of ssl names the file."""
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    with pytest.raises((FileNotFoundError, ssl.SSLError)) as caught:
        httpx.Client()
    told = translate(caught.value)
    assert isinstance(told, HostError)
    assert str(told).startswith(f"the certificates in {file} cannot be read: {why}; set SSL_CERT_FILE")
    assert "certificates" not in str(translate(OSError(errno.ENOENT, "No such file or directory", "x")))


@pytest.mark.parametrize("address", ["nonsense://", "socks5://127.0.0.1:1"])
def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("HTTPS_PROXY", address)
    with pytest.raises((ValueError, ImportError)) as caught:
        httpx.Client()
    told = translate(caught.value)
    assert isinstance(told, HostError)
    assert str(told).startswith("HTTPS_PROXY cannot be used: ")


def test_a_link_to_itself_is_no_defect_of_ours(tmp_path: Path) -> None:
    (loop := tmp_path / "loop").symlink_to(loop)
    try:
        loop.resolve()
    except RuntimeError as error:  # before Python 3.13
        known = translate(error)
        assert isinstance(known, HostError)
        assert str(known) == f"Symlink loop from '{loop}'; name another place"


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
        ("h1oo", "did you mean 'h100'?"),
        ("h1000", "did you mean 'h100'?"),
        ("int4", "did you mean 'int4-awq'?"),
        ("int", "did you mean 'int4-awq' or 'int8-sq'?"),
        ("h", "did you mean 'h100'?"),
        ("zebra", "known: 1.2.1, a100, h100, h100-nvl, int4-awq, int8-sq"),
        ("2.0", "known: 1.2.1, a100, h100, h100-nvl, int4-awq, int8-sq"),
        ("1.2", "did you mean '1.2.1'?"),
        ("", "known: 1.2.1, a100, h100, h100-nvl, int4-awq, int8-sq"),
    ],
)
def test_a_suggestion_continues_the_word_or_is_the_nearest_spelling_or_the_list(value: str, remedy: str) -> None:
    assert suggestion(value, ["h100", "h100-nvl", "a100", "int4-awq", "int8-sq", "1.2.1"]) == remedy


def test_another_family_is_no_spelling_and_a_long_list_is_cut() -> None:
    assert suggestion("Qwen2ForCausalLM", ["LlamaForCausalLM"]) == "known: LlamaForCausalLM"
    assert suggestion("x", [f"n{number:02}" for number in range(30)]).endswith(", n22, n23 and 6 more")
