"""SHA-256 digests of files, cached with the file's stat so that an unchanged file is hashed once.

The cache is a small JSON file: inode and size -> modification time, change time, digest, and when the file was last
read. The change time (ctime) reveals a write whose modification time was set back, as `rsync --inplace -t` does. Hard
links share an inode, so placing a file in several artefacts costs one hash; a link that this program makes or removes
changes the ctime too, and `linked` and `remove_tree` follow that.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from trtpipe.engines.json_input import load_json, open_regular
from trtpipe.pipeline.store.folders import write_whole

# Surrounds the reading of a file, called with its path and size; what it yields is called with the bytes read so far.
Watch = Callable[[Path, int], contextlib.AbstractContextManager[Callable[[int], None]]]
BLOCK_BYTES = 1 << 20
# A file changed again within one clock tick keeps its stat, so the digest of a younger file is not remembered.
SETTLED_NS = 20_000_000
# Limits updates of a file's last-read time to one a day.
NOTE_AGAIN_SECONDS = 86400


@dataclass(frozen=True)
class _Known:
    """State of a file when it was last read. `read` is in seconds since 1970."""

    mtime_ns: int
    ctime_ns: int
    sha256: str
    read: float

    def fits(self, stat: os.stat_result) -> bool:
        return (self.mtime_ns, self.ctime_ns) == (stat.st_mtime_ns, stat.st_ctime_ns)


class Digests:
    """File digests, remembered in the file `memory`; `save` writes new ones. Losing the file costs time only.

    `watch` sees each file that is read.
    """

    def __init__(self, memory: Path, watch: Watch | None = None) -> None:
        self._watch = watch
        self._memory = memory
        self._known = _read(memory)
        self._learnt: dict[str, _Known] = {}
        # Files whose stat was compared with the memory by this process.
        self._confirmed: set[str] = set()

    def file(self, path: Path, *, max_age: float | None = None) -> str:
        """The digest of a file: the remembered one where the file's stat is the same, else by reading the file.

        max_age  in seconds: a file that was last read longer ago is read again
        """
        stat = path.stat()
        known = self._known.get(_key(stat))
        if known is not None and known.fits(stat) and (max_age is None or time.time() - known.read <= max_age):
            self._confirmed.add(_key(stat))
            return known.sha256
        return self.read(path)

    def read(self, path: Path) -> str:
        """The digest of a file, by reading it."""
        stat, now = path.stat(), time.time()
        digest = sha256_file(path, self._watch)
        known = self._known.get(_key(stat))
        if known is not None and known.fits(stat) and known.sha256 == digest and now - known.read < NOTE_AGAIN_SECONDS:
            self._confirmed.add(_key(stat))
        elif time.time_ns() - max(stat.st_mtime_ns, stat.st_ctime_ns) > SETTLED_NS:
            self._learn(stat, _Known(stat.st_mtime_ns, stat.st_ctime_ns, digest, now))
        return digest

    def linked(self, path: Path) -> str:
        """The digest of a file that this process has just written, or linked to a file that it had checked before."""
        stat = path.stat()
        known = self._known.get(_key(stat))
        if known is None or stat.st_nlink < 2 or _key(stat) not in self._confirmed:
            return self.file(path)
        if known.mtime_ns != stat.st_mtime_ns:
            return self.read(path)
        self._learn(stat, replace(known, ctime_ns=stat.st_ctime_ns))
        return known.sha256

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder. Digests of its files with hard links elsewhere stay remembered. Raises OSError."""
        for path in list(folder.rglob("*")):
            if self._is_shared(path):
                # Closed before its folder goes: on NFS a removed file stays in its folder while it is open.
                with path.open("rb") as file:
                    path.unlink()
                    self._follow(file)
        shutil.rmtree(folder)

    def save(self) -> None:
        """Write the new digests, merged with what other processes have written since. Nothing is written to a disk that
        is full or may not be written."""
        if not self._learnt:
            return
        from filelock import FileLock  # here: it loads asyncio, which takes longer than to find a server

        with contextlib.suppress(OSError):
            self._memory.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self._memory.with_suffix(".lock")):
                self._known = {**_read(self._memory), **self._learnt}
                rows = {key: (k.sha256, k.mtime_ns, k.ctime_ns, k.read) for key, k in self._known.items()}
                write_whole(self._memory, json.dumps(rows))
            self._learnt = {}

    def _learn(self, stat: os.stat_result, known: _Known) -> None:
        self._known[_key(stat)] = self._learnt[_key(stat)] = known
        self._confirmed.add(_key(stat))

    def _is_shared(self, path: Path) -> bool:
        stat = path.lstat()
        known = self._known.get(_key(stat))
        return known is not None and known.fits(stat) and stat.st_nlink > 1 and not path.is_symlink()

    def _follow(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        known = self._known[_key(stat)]
        if known.mtime_ns == stat.st_mtime_ns:
            self._learn(stat, replace(known, ctime_ns=stat.st_ctime_ns))


def _key(stat: os.stat_result) -> str:
    # Without the device number: machines that share a file system number it differently.
    return f"{stat.st_ino}:{stat.st_size}"


def _read(memory: Path) -> dict[str, _Known]:
    """The remembered digests; none where the file is absent, damaged or of an earlier version."""
    try:
        known = load_json(memory)
        return {
            key: _Known(int(mtime), int(ctime), digest, float(read))
            for key, (digest, mtime, ctime, read) in known.items()
            if len(digest) == 64
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}


@contextlib.contextmanager
def _unwatched(path: Path, size: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def sha256_file(path: Path, watch: Watch | None = None) -> str:
    """The digest of a regular file. Raises OSError, also for a pipe or a device."""
    digest = hashlib.sha256()
    try:
        opened = open_regular(path)
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with opened as file, (watch or _unwatched)(path, os.fstat(file.fileno()).st_size) as tell:
        done = 0
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            tell(done)
    return digest.hexdigest()


def combined(entries: Iterable[tuple[str, str]]) -> str:
    """One digest for a set of (relative name, digest) pairs, independent of their order."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(entries))
    return hashlib.sha256(text.encode()).hexdigest()
