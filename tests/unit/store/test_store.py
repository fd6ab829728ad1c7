"""The store: an artefact is there whole or not at all, whatever happens, and made once, whoever asks."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.paths import ROOT
from trtpipe.configs.home import default_home
from trtpipe.pipeline.store.digests import Digests, Watch, combined, sha256_file
from trtpipe.pipeline.store.manifest import Origin, Record, read_manifest
from trtpipe.pipeline.store.scrub import Scrubbed, scrub
from trtpipe.pipeline.store.store import Artefact, Store, machine

RECORD = Record(stage="convert", stage_version=1, inputs={}, settings={"dtype": "bfloat16"}, tools={})
CONTENT = {"config.json": b"{}", "rank0.safetensors": b"weights" * 1000, "deep/er/x": b""}


def fill(out: Path) -> dict[str, Any]:
    for name, content in CONTENT.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    return {"made": "by the test"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def make(store: Store, record: Record = RECORD, work: Callable[[Path], dict[str, Any]] = fill) -> Artefact:
    with store.locked(record):
        return store.make(record, work)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def beside(store: Store) -> list[str]:
    """The names of all that lies beside artefacts of the record's stage."""
    return sorted(path.name for path in (store.home / "artefacts" / RECORD.stage).iterdir())


def test_what_is_made_is_found(store: Store) -> None:
    assert store.find(RECORD) is None
    made = make(store)
    assert made.path == store.home / "artefacts" / "convert" / RECORD.key[:32] / "files"
    assert tree(made.path) == CONTENT
    assert Store(store.home).find(RECORD) == made
    assert Store(store.home).find(RECORD, verify=True) == made
    other = dataclasses.replace(RECORD, settings={"dtype": "float16"})
    assert store.find(other) is None
    assert beside(store) == [RECORD.key[:32]]


def test_the_manifest_says_what_was_made(store: Store) -> None:
    made = make(store)
    manifest = read_manifest(made.path.parent / "manifest.json")
    assert manifest is not None
    assert manifest == made.manifest
    assert manifest.record == RECORD
    assert manifest.notes == {"made": "by the test"}
    assert manifest.size == 2 + 7000
    assert [(file.path, file.size) for file in manifest.files] == [
        ("config.json", 2), ("deep/er/x", 0), ("rank0.safetensors", 7000),
    ]  # fmt: skip
    # printf '{}' | sha256sum
    assert manifest.files[0].sha256 == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert manifest.content == combined((file.path, file.sha256) for file in manifest.files)


def test_equal_content_has_one_digest_however_it_came_about(store: Store) -> None:
    def backwards(out: Path) -> dict[str, Any]:
        for name in reversed(CONTENT):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(CONTENT[name])
        return {}

    other = dataclasses.replace(RECORD, stage_version=2)
    assert make(store).manifest.content == make(store, other, backwards).manifest.content


def test_others_may_read_an_artefact(store: Store) -> None:
    assert stat.S_IMODE(make(store).path.parent.stat().st_mode) == 0o755


def test_nothing_is_there_before_the_manifest(store: Store) -> None:
    seen: list[object] = []

    def work(out: Path) -> dict[str, Any]:
        notes = fill(out)
        seen.append(Store(store.home).find(RECORD))
        seen.append(store.folder(RECORD).exists())
        seen.append(list(out.parent.glob("manifest.json")))
        return notes

    make(store, work=work)
    assert seen == [None, False, []]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(store: Store, error: BaseException) -> None:
    def work(out: Path) -> dict[str, Any]:
        fill(out)
        raise error

    with pytest.raises(type(error)):
        make(store, work=work)
    assert beside(store) == []
    assert store.find(RECORD) is None
    assert tree(make(store).path) == CONTENT  # and is no obstacle


def test_a_failure_s_partial_folder_can_be_kept_until_the_next_try(store: Store) -> None:
    def work(out: Path) -> dict[str, Any]:
        (out / "half").write_bytes(b"h")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), store.locked(RECORD):
        store.make(RECORD, work, keep_failed=True)
    (left,) = store.leftovers(RECORD)
    assert tree(left) == {"files/half": b"h"}
    assert store.find(RECORD) is None
    make(store)
    assert beside(store) == [RECORD.key[:32]]


def truncate(files: Path) -> None:
    os.truncate(files / "rank0.safetensors", 6999)


def alter(files: Path) -> None:
    (files / "rank0.safetensors").write_bytes(b"weightz" * 1000)
    os.utime(files / "rank0.safetensors", (1, 1))


def lose(files: Path) -> None:
    (files / "deep" / "er" / "x").unlink()


def pipe(files: Path) -> None:
    """In place of an empty file: it has the same size, and a reader would wait for a writer."""
    (files / "deep" / "er" / "x").unlink()
    os.mkfifo(files / "deep" / "er" / "x")


def spoil_manifest(files: Path) -> None:
    (files.parent / "manifest.json").write_text("{")


def lose_manifest(files: Path) -> None:
    (files.parent / "manifest.json").unlink()


def swap_manifest(files: Path) -> None:
    manifest = read_manifest(files.parent / "manifest.json")
    assert manifest is not None
    dataclasses.replace(manifest, record=dataclasses.replace(RECORD, stage_version=9)).write(
        files.parent / "manifest.json"
    )


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (truncate, "rank0.safetensors has 6999 bytes instead of 7000"),
        (alter, "rank0.safetensors has changed"),
        (lose, "deep/er/x is missing"),
        (pipe, "deep/er/x cannot be read (it is not a regular file)"),
        (spoil_manifest, "it has no readable manifest"),
        (lose_manifest, "it has no readable manifest"),
        (swap_manifest, "it has no readable manifest"),
    ],
)
def test_damage_is_named_moved_aside_and_a_miss(
    store: Store, damage: Callable[[Path], None], fault: str
) -> None:  # fmt: skip
    made = make(store)
    damage(made.path)
    spoilt = tree(made.path.parent)
    assert store.find(RECORD) is None
    assert store.fault(RECORD) == fault
    with store.locked(RECORD):
        words = store.set_aside(RECORD)
    (aside,) = (store.home / "damaged").iterdir()
    assert words == f"{fault}; moved to {aside}"
    assert tree(aside) == spoilt  # kept for a look
    assert store.fault(RECORD) is None
    assert tree(make(store).path) == CONTENT


def rot(path: Path, store: Store) -> None:
    """Change a file as a failing disk does: its stat stays what it was, as far as the memory of digests can tell."""
    stat = path.stat()
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    memory = store.home / "digests.json"
    known = json.loads(memory.read_text())
    known[f"{stat.st_ino}:{stat.st_size}"][2] = path.stat().st_ctime_ns
    memory.write_text(json.dumps(known))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch, store: Store) -> Path:
    """A file that counts as large, of an artefact that was found whole."""
    monkeypatch.setattr("trtpipe.pipeline.store.store.SMALL_BYTES", 0)
    made = make(store)
    time.sleep(0.03)  # past the clock's tick, so that it is remembered
    assert store.find(RECORD) == made
    store.digests.save()
    return made.path / "rank0.safetensors"


def test_a_write_whose_time_was_set_back_is_seen(large: Path, store: Store) -> None:
    before = large.stat()
    large.write_bytes(b"weightz" * 1000)  # as `rsync --inplace -t` does
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Store(store.home).fault(RECORD) == "rank0.safetensors has changed"


def test_lost_bits_are_found_by_verify_and_after_a_week(
    large: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rot(large, store)
    assert Store(store.home).find(RECORD) is not None
    assert Store(store.home).fault(RECORD, verify=True) == "rank0.safetensors has changed"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 6 * 86400)
    assert Store(store.home).find(RECORD) is not None
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86400)
    assert Store(store.home).fault(RECORD) == "rank0.safetensors has changed"


def test_lost_bits_of_a_small_file_are_found_at_once(store: Store) -> None:
    made = make(store)
    time.sleep(0.03)
    assert store.find(RECORD) == made
    store.digests.save()
    rot(made.path / "rank0.safetensors", store)
    store = Store(store.home)
    with store.locked(RECORD):
        words = store.set_aside(RECORD)
    assert words is not None
    assert words.startswith("rank0.safetensors has changed; moved to ")


def test_our_own_links_cost_no_reading(large: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(RECORD, stage="build")

    def link(out: Path) -> dict[str, Any]:
        os.link(large, out / large.name)
        return {}

    def read(path: Path, watch: Watch | None) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("trtpipe.pipeline.store.digests.sha256_file", read)
    engine = make(store, other, link)
    assert Store(store.home).find(other) == engine
    folder = store.folder(other)
    store.digests.remove_tree(folder)
    store.digests.save()
    assert not folder.exists()
    monkeypatch.setattr("trtpipe.pipeline.store.store.SMALL_BYTES", 10)  # the small files beside it are read every time
    monkeypatch.setattr(
        "trtpipe.pipeline.store.digests.sha256_file",
        lambda path, watch: read(path, watch) if path == large else sha256_file(path),
    )
    assert Store(store.home).find(RECORD) is not None


def test_a_folder_goes_where_a_removed_file_stays_while_it_is_open(
    large: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS."""
    other = dataclasses.replace(RECORD, stage="build")

    def link(out: Path) -> dict[str, Any]:
        os.link(large, out / large.name)
        return {}

    engine = make(store, other, link)
    remove = os.rmdir

    def rmdir(path: Any, **options: Any) -> None:
        held = [str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
        if any(one.startswith(str(engine.path)) and one.endswith(" (deleted)") for one in held):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    store.digests.remove_tree(store.folder(other))
    assert not store.folder(other).exists()
    assert large.stat().st_size > 0


def test_two_processes_add_to_one_memory(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(path.name.encode())
    time.sleep(0.03)
    first, second = Digests(tmp_path / "digests.json"), Digests(tmp_path / "digests.json")
    for digests, path in zip((first, second), paths, strict=True):
        digests.file(path)
    first.save()
    second.save()
    assert len(json.loads((tmp_path / "digests.json").read_text())) == 2


ORIGIN = Origin(source="oci://registry.example/team", content="ab" * 32)


def test_what_was_made_elsewhere_is_found_under_its_origin_alone(store: Store) -> None:
    with store.locked(RECORD):
        made = store.of(ORIGIN).make(RECORD, fill)
    assert made.origin == ORIGIN
    assert store.find(RECORD) is None
    assert store.of(ORIGIN).find(RECORD) == made
    assert Store(store.home).of(ORIGIN).find(RECORD) == made
    assert store.of(dataclasses.replace(ORIGIN, source="another")).find(RECORD) is None
    assert store.imported(RECORD) == [made]
    own = make(store)
    assert own.origin is None
    assert store.find(RECORD) == own
    assert {folder.parent.parent.name for folder in store.artefacts()} == {"artefacts", "imported"}


def test_an_artefact_that_lies_in_place_of_another_is_none(store: Store) -> None:
    with store.locked(RECORD):
        made = store.of(ORIGIN).make(RECORD, fill)
    store.folder(RECORD).parent.mkdir(parents=True)
    made.path.parent.rename(store.folder(RECORD))
    assert store.fault(RECORD) == "it is from elsewhere than its place says"
    assert store.find(RECORD) is None


def test_what_version_0_1_imported_is_no_artefact_of_ours(store: Store) -> None:
    make(store, RECORD, lambda out: fill(out) | {"imported": "oci://registry.example/team"})
    assert store.find(RECORD) is None
    assert str(store.fault(RECORD)).startswith("version 0.1 of trtpipe imported it from oci://registry.example/team")


def test_a_touched_file_of_the_same_content_is_a_hit(store: Store) -> None:
    made = make(store)
    for path in made.path.rglob("*"):
        os.utime(path, (1, 1))
    assert store.find(RECORD) == made


def test_nothing_is_wrong_with_what_is_not_there(store: Store) -> None:
    assert store.fault(RECORD) is None
    with store.locked(RECORD):
        assert store.set_aside(RECORD) is None


def test_threads_that_ask_for_one_artefact_make_it_once(store: Store) -> None:
    made: list[int] = []
    told: list[int] = []
    found: list[Artefact] = []

    def work(out: Path) -> dict[str, Any]:
        made.append(1)
        time.sleep(0.05)
        return fill(out)

    def ask() -> None:
        own = Store(store.home)
        with own.locked(RECORD, lambda: told.append(1)):
            found.append(own.find(RECORD) or own.make(RECORD, work))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(told) == 3
    assert len(found) == 4
    assert len({str(artefact) for artefact in found}) == 1


# Runs Store.make in a process that stops dead at a given point, having said so with a file.
CHILD = """
import sys, time
from pathlib import Path
from trtpipe.pipeline.store import store as module
from trtpipe.pipeline.store.digests import Digests
from trtpipe.pipeline.store.manifest import Manifest
from tests.unit.store.test_store import RECORD, fill

home, point, here = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])

def stop(*ignored):
    here.touch()
    time.sleep(60)

def work(out):
    if point == "at the start of the work":
        stop()
    if point == "in the middle of a file":
        with (out / "rank0.safetensors").open("wb") as file:
            file.write(b"weigh")
            file.flush()
            stop()
    return fill(out)

if point == "before the manifest":
    Manifest.write = stop
if point == "in the middle of the manifest":
    Manifest.write = lambda self, path: (path.write_text('{"format": 1, "key"'), stop())
if point == "before the rename":
    module.sync = stop
if point == "after the rename":
    Digests.save = stop
store = module.Store(home)
with store.locked(RECORD):
    if store.find(RECORD) is None:
        store.make(RECORD, work)
"""


def child(*arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CHILD, *map(str, arguments)], cwd=ROOT)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.process
@pytest.mark.parametrize(
    ("point", "whole"),
    [
        ("at the start of the work", False),
        ("in the middle of a file", False),
        ("before the manifest", False),
        ("in the middle of the manifest", False),
        ("before the rename", False),
        ("after the rename", True),
    ],
)
def test_a_kill_at_any_moment_leaves_a_whole_artefact_or_none(
    store: Store, tmp_path: Path, point: str, whole: bool
) -> None:
    process = child(store.home, point, tmp_path / "here")
    wait_for(tmp_path / "here", process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (store.find(RECORD) is not None) == whole
    assert len(store.leftovers(RECORD)) == (0 if whole else 1)
    with store.locked(RECORD, lambda: pytest.fail("the dead still hold the lock")):
        assert store.set_aside(RECORD) is None  # what a kill leaves is never taken for an artefact
        made = store.find(RECORD) or store.make(RECORD, fill)
    assert tree(made.path) == CONTENT
    assert made.manifest.content == make(Store(tmp_path / "other")).manifest.content
    assert beside(store) == [RECORD.key[:32]]


@pytest.mark.process
def test_a_process_waits_for_the_one_that_makes_it(store: Store, tmp_path: Path) -> None:
    first = child(store.home, "in the middle of a file", tmp_path / "here")
    wait_for(tmp_path / "here", first)
    second = child(store.home, "nowhere", tmp_path / "never")
    (left,) = store.leftovers(RECORD)
    assert store.being_made(left)
    time.sleep(0.3)
    assert second.poll() is None
    assert store.leftovers(RECORD) == [left]  # nobody sweeps it under the one who works there
    first.kill()
    first.wait()
    assert second.wait(timeout=30) == 0
    assert store.leftovers(RECORD) == []
    assert store.find(RECORD) is not None


def test_a_leftover_that_nobody_works_in_is_not_being_made(store: Store) -> None:
    left = store.home / "artefacts" / "convert" / f".{RECORD.key[:32]}.abcdefgh"
    left.mkdir(parents=True)
    assert not store.being_made(left)
    with store.locked(RECORD):
        assert Store(store.home).being_made(left)


def test_the_home_is_absolute(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(in_folder))
    for value, home in (
        ("here", in_folder / "here"),
        ("~/there", in_folder / "there"),
        ("", in_folder / ".cache" / "trtpipe"),
    ):
        monkeypatch.setenv("TRTPIPE_HOME", value)
        assert default_home() == home


def test_a_file_is_hashed_once_until_its_stat_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def counted(path: Path, watch: Watch | None) -> str:
        hashed.append(path)
        return sha256_file(path)

    monkeypatch.setattr("trtpipe.pipeline.store.digests.sha256_file", counted)
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"abc")
    link.hardlink_to(path)
    time.sleep(0.03)
    digests = Digests(tmp_path / "home" / "digests.json")
    # printf abc | sha256sum
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert [digests.file(path), digests.file(link), digests.file(path)] == [abc] * 3
    digests.save()
    assert Digests(tmp_path / "home" / "digests.json").file(path) == abc
    assert hashed == [path]
    os.utime(path, (2, 2))
    assert digests.file(path) == abc
    assert hashed == [path, path]
    time.sleep(0.03)
    assert [digests.file(path), digests.file(path)] == [abc] * 2
    assert [digests.file(path, max_age=0), digests.file(path, max_age=60)] == [abc] * 2
    assert hashed == [path] * 4


def test_a_file_that_may_change_within_the_clock_s_tick_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "x"
    digests = Digests(tmp_path / "digests.json")
    path.write_bytes(b"abc")
    before, stamp = digests.file(path), path.stat().st_mtime_ns
    path.write_bytes(b"abd")
    os.utime(path, ns=(stamp, stamp))
    assert digests.file(path) != before


def test_scrub_reports_what_it_has_read_where_its_digests_cannot_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(store)
    (made.path / "rank0.safetensors").write_bytes(b"another")
    memory = store.home / "digests.json"
    time.sleep(0.03)

    def full(path: Path, text: str) -> None:
        assert path == memory
        tried.append(text)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tried: list[str] = []
    monkeypatch.setattr("trtpipe.pipeline.store.digests.write_whole", full)
    name = f"artefacts/convert/{RECORD.key[:32]}"
    assert scrub(Store(store.home)) == [Scrubbed(name, 7002, "rank0.safetensors has 7 bytes instead of 7000")]
    assert len(tried) == 1


def test_the_digests_of_a_home_that_cannot_be_made_are_not_kept(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    time.sleep(0.03)
    digests = Digests(tmp_path / "x" / "digests.json")
    assert digests.file(tmp_path / "x") == sha256_file(tmp_path / "x")
    digests.save()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', "null"])
def test_damaged_memory_costs_time_only(tmp_path: Path, content: str) -> None:
    memory, path = tmp_path / "digests.json", tmp_path / "x"
    memory.write_text(content)
    path.write_bytes(b"abc")
    time.sleep(0.03)
    digests = Digests(memory)
    assert digests.file(path) == sha256_file(path)
    digests.save()
    assert [row[0] for row in json.loads(memory.read_text()).values()] == [sha256_file(path)]


DOCKER = "812 790 8:1 /var/lib/docker/containers/{id}/hostname /etc/hostname rw,relatime - ext4 /dev/sda1 rw"
PODMAN = "99 80 0:25 /containers/overlay-containers/{id}/userdata/hostname /etc/hostname rw - tmpfs tmpfs rw"
HOST = "25 1 8:1 / / rw - ext4 /dev/sda1 rw\n90 25 0:48 / /var/lib/docker/containers/{id}/mounts/shm rw - tmpfs"


@pytest.mark.parametrize(
    ("mounts", "marked", "name"),
    [
        (DOCKER, True, "gpu-7 (container 0123456789ab)"),
        (PODMAN, True, "gpu-7 (container 0123456789ab)"),
        (DOCKER, False, "gpu-7 (container 0123456789ab)"),
        (HOST, True, "gpu-7 (container)"),
        (HOST, False, "gpu-7"),
        (None, False, "gpu-7"),
    ],
)
def test_a_container_is_a_machine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounts: str | None, marked: bool, name: str
) -> None:
    """Also one that has its host's name, as with `docker run --network host`."""
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="gpu-7"))
    monkeypatch.setattr("trtpipe.pipeline.store.store.MOUNTS", tmp_path / "mountinfo")
    monkeypatch.setattr("trtpipe.pipeline.store.store.CONTAINER_MARKS", (tmp_path / "mark",))
    if mounts is not None:
        (tmp_path / "mountinfo").write_text(mounts.format(id="0123456789ab" + 52 * "c"))
    if marked:
        (tmp_path / "mark").touch()
    assert machine() == name
