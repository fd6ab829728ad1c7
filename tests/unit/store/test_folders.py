"""Output folders and files outside the store: whole or not there."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from trtpipe.engines.errors import UsageError
from trtpipe.pipeline.store.folders import new_folder, require_place, write_whole


def test_the_folder_takes_its_name_when_the_block_succeeds(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with new_folder(out) as partial:
        (partial / "x").write_text("1")
        assert not out.exists()
        assert partial.parent == out.parent  # one file system, so that a rename is enough
    assert [path.name for path in out.iterdir()] == ["x"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    out = tmp_path / "out"

    def work() -> None:
        with new_folder(out) as partial:
            (partial / "x").write_text("1")
            raise error

    with pytest.raises(error):
        work()
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_an_empty_folder_that_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match="no"), new_folder(out):
        raise ValueError("no")
    assert list(tmp_path.rglob("*")) == [out]


def test_an_empty_folder_is_filled_also_behind_a_link(tmp_path: Path) -> None:
    out, link = tmp_path / "out", tmp_path / "link"
    out.mkdir()
    link.symlink_to(out)
    with new_folder(link) as partial:
        (partial / "x").write_text("1")
    assert link.is_symlink()
    assert (out / "x").read_text() == "1"


def test_what_stands_there_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    told = {"file": "is a file", "full": "already exists and is not an empty folder"}
    for name, what in told.items():
        with pytest.raises(UsageError) as caught, new_folder(tmp_path / name):
            raise AssertionError("the block must not run")
        assert str(caught.value) == f"{tmp_path / name} {what}; name a new folder"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "x"]


def test_a_file_is_written_whole_and_only_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_whole(path, "one")
    before = path.stat()
    write_whole(path, "one")
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    write_whole(path, "two")
    assert path.read_text() == "two"
    assert path.stat().st_ino != before.st_ino  # a reader of the old file still has all of it
    path.write_bytes(b"\xff")
    write_whole(path, "three")
    assert path.read_text() == "three"
    with path.open("wb") as large:
        large.truncate(1 << 40)
    write_whole(path, "five")
    assert path.read_text() == "five"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_named_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="folder is a folder; give the name of a file"):
        write_whole(tmp_path / "folder", "text")
    for place, kind in (("none/x", FileNotFoundError), ("file/x", NotADirectoryError)):
        with pytest.raises(kind) as error:
            write_whole(tmp_path / place, "text")
        assert error.value.filename == str(tmp_path / place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_pipe_or_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes to it: reading it would never end
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UsageError, match=f"{name} is not a regular file; give the name of a file"):
            write_whole(tmp_path / name, "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path, ends = tmp_path / "x", threading.Event()
    texts = {"a" * 200_000, "b" * 200_000}
    write_whole(path, "a" * 200_000)
    seen: set[str] = set()

    def read() -> None:
        while not ends.is_set():
            seen.add(path.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for text in sorted(texts):
            write_whole(path, text)
    ends.set()
    reader.join()
    assert seen <= texts


def test_no_file_is_written_in_place_of_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "read").write_text("1")
    (tmp_path / "link").symlink_to("read")
    for out in ("read", "link", "../" + tmp_path.name + "/read"):
        with pytest.raises(UsageError, match="is read by the same command"):
            require_place(tmp_path / out, None, tmp_path / "read")
    require_place(tmp_path / "other", None, "chat", tmp_path / "read")
