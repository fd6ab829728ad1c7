"""Content-keyed store of artefacts: made under a temporary name, manifest last, then renamed. A kill at any moment
leaves either the whole artefact or nothing that is taken for one.

    $TRTPIPE_HOME/
      artefacts/<stage>/<key>/manifest.json    key: the first 32 digits of the record's SHA-256
                             /files/...        what the stage made
      imported/<stage>/<key>.<origin>/...      the same, made elsewhere; origin: digest of source and content
      <either>/<stage>/.<name>.<random>        being made, or left by a killed run
      damaged/                                 entries that failed their check, kept for inspection
      incoming/<stage>-<key>/<sha256>          a file that a pull has received, or the part of one
      uploads/                                 the registry's address for the rest of a file
      cluster/                                 a file of each build on a cluster, which shows who shares this home
      locks/ logs/ roots/ digests.json
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtpipe.engines.errors import HostError
from trtpipe.pipeline.store.digests import Digests, combined
from trtpipe.pipeline.store.folders import sync
from trtpipe.pipeline.store.manifest import FileRecord, Manifest, Origin, Record, read_manifest

if TYPE_CHECKING:
    from filelock import FileLock

KEY_DIGITS = 32
# A file that was read longer ago than this is read again before it is used: disks lose bits in silence.
READ_AGAIN_SECONDS = 7 * 86400
# Seconds after which a command says what it waits for.
SLOW_S = 2.0
# Smaller files are read every time.
SMALL_BYTES = 1 << 20
# Docker, Podman and Kubernetes mount such files of a container from a folder that has its id as its name.
CONTAINER_ID = re.compile(r"/([0-9a-f]{12})[0-9a-f]{52}/(?:userdata/)?(?:hostname|hosts|resolv\.conf) /etc/")
MOUNTS = Path("/proc/self/mountinfo")
# Files of Docker's and Podman's containers.
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A finished artefact: `path` holds the stage's files."""

    path: Path
    manifest: Manifest

    @property
    def origin(self) -> Origin | None:
        return self.manifest.origin


# Locks that this process holds until it ends; a lock that nothing refers to is released.
_HELD: dict[str, FileLock] = {}


class Store:
    """The artefacts under one home folder. Several processes may use it at once.

    origin  None for the artefacts that were made here; else only artefacts of that origin are found and added
    note    called with what a command waits for
    """

    def __init__(
        self, home: Path, origin: Origin | None = None, digests: Digests | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        self.home = home
        self.note = note
        self.origin = origin
        self.digests = digests or Digests(home / "digests.json")

    def of(self, origin: Origin | None) -> Store:
        """The part of this store that holds what came from `origin`."""
        return self if origin == self.origin else Store(self.home, origin, self.digests, self.note)

    def imported(self, record: Record) -> list[Artefact]:
        """The whole artefacts of `record` that were made elsewhere."""
        folders = sorted((self.home / "imported" / record.stage).glob(f"{record.key[:KEY_DIGITS]}.*"))
        manifests = [read_manifest(folder / "manifest.json") for folder in folders]
        origins = [manifest.origin for manifest in manifests if manifest is not None and manifest.origin is not None]
        found = [self.of(origin).find(record) for origin in origins]
        return [artefact for artefact in found if artefact is not None]

    def sources(self) -> set[str]:
        """Where the artefacts came from that were made elsewhere: registry URLs and files."""
        manifests = [read_manifest(file) for file in (self.home / "imported").glob("*/*/manifest.json")]
        origins = [manifest.origin for manifest in manifests if manifest is not None]
        return {origin.source for origin in origins if origin is not None}

    def folder(self, record: Record) -> Path:
        digits = record.key[:KEY_DIGITS]
        if self.origin is None:
            return self.home / "artefacts" / record.stage / digits
        return self.home / "imported" / record.stage / f"{digits}.{self.origin.key[:KEY_DIGITS]}"

    def log_path(self, record: Record) -> Path:
        return self.home / "logs" / f"{record.stage}-{record.key[:KEY_DIGITS]}.log"

    def incoming(self, record: Record) -> Path:
        """Folder for the received files of an artefact, kept when a pull breaks off; to be used under its lock."""
        return self.home / "incoming" / f"{record.stage}-{record.key[:KEY_DIGITS]}"

    def find(self, record: Record, *, verify: bool = False) -> Artefact | None:
        """The artefact of `record` if it is whole, else None; `fault` describes the check."""
        folder = self.folder(record)
        manifest = read_manifest(folder / "manifest.json")
        if manifest is None or self.fault(record, verify=verify) is not None:
            return None
        return Artefact(path=folder / "files", manifest=manifest)

    def fault(self, record: Record, *, verify: bool = False) -> str | None:
        """The fault of the artefact of `record`; None when it is whole, or when there is none.

        Reads small files, and larger ones that were touched or not read for READ_AGAIN_SECONDS; `verify` reads all.
        """
        folder = self.folder(record)
        if not folder.exists():
            return None
        manifest = read_manifest(folder / "manifest.json")
        if manifest is None or manifest.record.key != record.key:
            return "it has no readable manifest"
        if manifest.origin != self.origin:
            return "it is from elsewhere than its place says"
        if self.origin is None and "imported" in manifest.notes:
            return f"version 0.1 of trtpipe imported it from {manifest.notes['imported']} and kept no note of that"
        return self._damage(folder / "files", manifest, verify)

    def _damage(self, files: Path, manifest: Manifest, verify: bool) -> str | None:
        for file in manifest.files:
            path = files / file.path
            try:
                size = path.stat().st_size
                if size != file.size:
                    return f"{file.path} has {size} bytes instead of {file.size}"
                max_age = 0 if verify or size < SMALL_BYTES else READ_AGAIN_SECONDS
                if self.digests.file(path, max_age=max_age) != file.sha256:
                    return f"{file.path} has changed"
            except FileNotFoundError:
                return f"{file.path} is missing"
            except OSError as error:
                return f"{file.path} cannot be read ({error.strerror})"
        return None

    @contextlib.contextmanager
    def locked(self, record: Record, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Lock of an artefact: one process makes it, the others wait (`waiting` is called once) and then find it."""
        lock = self._lock(f"{record.stage}-{record.key[:KEY_DIGITS]}")
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            waiting()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def alone(self, name: str, refusal: HostError) -> Iterator[None]:
        """Hold a name against other commands of this store. Raises `refusal` while another command holds it."""
        lock = self._lock(name)
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            raise refusal from None
        try:
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def importing(self, name: str) -> Iterator[None]:
        """Hold a name while artefacts of a target arrive, one after another, and until its run folder refers to them.
        Waits for another command that holds it."""
        with self._waited_for(f"import-{name}", "another pull or import of this target"):
            with self.referring():  # a `gc` that saw no import has removed the manifest of what it deletes
                pass
            yield

    def imports(self) -> bool:
        """Whether some command holds a name by `importing`."""
        return any(self.held(path.stem) for path in (self.home / "locks").glob("import-*.lock"))

    def referring(self) -> contextlib.AbstractContextManager[Any]:
        """Lock under which a run folder comes to refer to an artefact, and `gc` deletes one that nothing refers to."""
        return self._waited_for("references", "another command, which changes or deletes what runs refer to")

    @contextlib.contextmanager
    def _waited_for(self, name: str, holder: str) -> Iterator[None]:
        """Hold a name; what holds it is noted once this command has waited for SLOW_S."""
        lock = self._lock(name)
        try:
            lock.acquire(timeout=SLOW_S)
        except TimeoutError:
            self.note(f"waiting for {holder}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def hold(self, name: str) -> None:
        """Hold a name until this process ends."""
        if name not in _HELD:
            lock = self._lock(name)
            with contextlib.suppress(TimeoutError):  # a child of an earlier process may hold it yet
                lock.acquire(timeout=0)
                _HELD[name] = lock

    def held(self, name: str) -> bool:
        """Whether another command holds the name, by `alone` or `hold`."""
        lock = self._lock(name)
        if not Path(lock.lock_file).exists():
            return False
        try:
            with lock.acquire(timeout=0):
                return False
        except TimeoutError:
            return True

    def _lock(self, name: str) -> FileLock:
        path = self.home / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock  # here: it loads asyncio, which takes longer than to find a server

        return FileLock(path)

    def set_aside(self, record: Record, *, verify: bool = False) -> str | None:
        """Move a damaged artefact away; return what was wrong, None when there was no artefact.

        To be called under the record's lock.
        """
        fault = self.fault(record, verify=verify)
        if fault is None:
            return None
        folder = self.folder(record)
        target = self.home / "damaged" / f"{record.stage}-{folder.name}-{time.time_ns()}"
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(target)
        sync(folder.parent)
        return f"{fault}; moved to {target}"

    def make(self, record: Record, work: Callable[[Path], dict[str, Any]], *, keep_failed: bool = False) -> Artefact:
        """Run `work(out)` in a fresh folder and commit what it made. To be called under the record's lock.

        `work` returns notes for the manifest. If it raises, the partial folder goes, unless `keep_failed`.
        """
        folder = self.folder(record)
        folder.parent.mkdir(parents=True, exist_ok=True)
        for leftover in self.leftovers(record):
            self.digests.remove_tree(leftover)  # under the lock no process works in it
        started, clock = datetime.now(timezone.utc), time.monotonic()
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            (partial / "files").mkdir()
            notes = work(partial / "files")
            files = tuple(self._describe(partial / "files"))
            manifest = Manifest(
                record=record,
                files=files,
                content=combined((file.path, file.sha256) for file in files),
                notes=notes,
                host=host(),
                started=started.isoformat(timespec="seconds"),
                seconds=round(time.monotonic() - clock, 3),
                origin=self.origin,
            )
            manifest.write(partial / "manifest.json")
            # After a power cut a file may have its size but not its bytes, and the manifest vouches for both.
            for file in files:
                sync(partial / "files" / file.path)
            sync(partial / "manifest.json")
            for inner in [partial, *(path for path in partial.rglob("*") if path.is_dir())]:
                sync(inner)
            partial.chmod(0o755)  # mkdtemp's 0700 would keep a container's user out
            partial.rename(folder)
            sync(folder.parent)
        except BaseException:
            if not keep_failed:
                with contextlib.suppress(OSError):
                    self.digests.remove_tree(partial)
            raise
        self.digests.save()
        return Artefact(path=folder / "files", manifest=manifest)

    def leftovers(self, record: Record) -> list[Path]:
        """Folders in which the artefact of `record` is being made, or was when a run was killed."""
        folder = self.folder(record)
        return sorted(folder.parent.glob(f".{folder.name}.*"))

    def being_made(self, leftover: Path) -> bool:
        """Whether a process works in that folder now."""
        with self.claimed(leftover) as free:
            return not free

    @contextlib.contextmanager
    def claimed(self, folder: Path) -> Iterator[bool]:
        """Lock of the artefact of a folder, which is an artefact's own, a leftover or one of `incoming`. Yields False
        where another process holds it."""
        incoming = folder.parent == self.home / "incoming"
        lock = self._lock(folder.name if incoming else f"{folder.parent.name}-{folder.name.lstrip('.').split('.')[0]}")
        try:
            lock.acquire(timeout=0)
        except TimeoutError:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def _describe(self, files: Path) -> Iterator[FileRecord]:
        for path in sorted(p for p in files.rglob("*") if p.is_file()):
            stat = path.stat()
            yield FileRecord(
                path=path.relative_to(files).as_posix(),
                size=stat.st_size,
                sha256=self.digests.linked(path),
                mtime_ns=stat.st_mtime_ns,
            )

    def artefacts(self) -> Iterator[Path]:
        """Every artefact folder, whole or not, made here or elsewhere, and every leftover of a killed run."""
        for part in ("artefacts", "imported"):
            for stage in sorted((self.home / part).glob("*")):
                yield from sorted(p for p in stage.iterdir() if p.is_dir())


def machine() -> str:
    """Name of this machine, by which those that share a store tell their run folders and servers apart. A container is
    a machine of its own: it may have the name of its host, and it has other folders and processes."""
    name = os.uname().nodename
    with contextlib.suppress(OSError):
        if found := CONTAINER_ID.search(MOUNTS.read_text(errors="replace")):
            return f"{name} (container {found[1]})"
    return f"{name} (container)" if any(mark.exists() for mark in CONTAINER_MARKS) else name


def host() -> dict[str, str]:
    # Not platform.platform(), which starts a process to ask for the processor.
    system = f"{platform.system()} {platform.release()}"
    return {"system": system, "python": platform.python_version(), "machine": platform.machine()}
