"""File operations shared by several kinds of artefacts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from trtpipe.engines.errors import HostError, UsageError

# Smaller files are copied, so that editing a linked config.json in place cannot change an artefact.
LINK_FROM_BYTES = 1 << 20
# Bytes of one write. ext4 keeps those of a larger one in pages of 2 MB, and where memory is fragmented the kernel may
# spend ten times as long on making such a page as on copying into it.
WRITE_BYTES = 512 << 10
# Bytes that are copied at a time.
COPIED_BYTES = 8 << 20
# Linux's ioctl for a file that shares another's blocks until one of the two is written; linux/fs.h.
FICLONE = 0x40049409
# What the operating system says of a disk or a quota that is full, in messages of programs and libraries.
FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)


class DiskFull(HostError):
    """A disk has no room, or will not have it."""

    def __init__(self, what: str, *, why: str, variable: str | None = "TRTPIPE_HOME") -> None:
        """`variable` moves what fills the disk to another one; None for runs and reports, which stay where you are."""
        remedy = f"free some space (`trtpipe gc` drops artefacts no run uses), or set {variable} to a larger disk"
        if variable is None:
            remedy = "free some space there, or change to a folder on another disk for runs and reports"
        super().__init__(what, why=why, remedy=remedy)


def is_full(error: BaseException) -> bool:
    """Whether the error means that a disk or a quota is full, whichever library or process raised it."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return full or FULL.search(str(error)) is not None


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Context in which the error of a full disk names `folder`, the user's folder for the output. Raises HostError."""
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        raise HostError(
            f"the disk of {folder} is full",
            why=f"{getattr(error, 'strerror', None) or FULL.findall(str(error))[0]}; "
            f"{size_text(free_bytes(folder))} are free",
            remedy="free some space there, or name another folder",
        ) from None


def reserve(file: int, size: int) -> None:
    """Give an open file its size, and its blocks where the system can: what is written to it through memory then does
    not end the process by SIGBUS on a full disk. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.truncate(file, size)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as NVIDIA's tools do: indented by four spaces, keys in the given order."""
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


def file_in(path: Path, *names: str) -> Path:
    """The first of the files `names` that a folder has; another path than a folder's unchanged. Raises UsageError for
    a folder without one."""
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise UsageError(f"folder {path} has no {' and no '.join(names)}", remedy="name the file")


def size_text(nbytes: float) -> str:
    """Bytes for people, in powers of 1000: 325.7 MB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def device(folder: Path) -> int:
    """Number of the disk that holds a folder, or would hold it."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def free_bytes(folder: Path) -> int:
    """Bytes free on the disk that holds a folder, or would hold it."""
    return shutil.disk_usage(_existing(folder)).free


def require_disk(folder: Path, size: int, what: str, why: str = "", variable: str = "TRTPIPE_HOME") -> None:
    """Raises DiskFull when the disk of `folder`, which need not exist, has fewer than `size` bytes free.

    variable  the environment variable that moves the folder to another disk
    """
    there = _existing(folder)
    free = free_bytes(there)
    if free < size:
        needed = f"{what} needs about {size_text(size)} of disk and {there} has {size_text(free)} free"
        raise DiskFull(needed, why=why, variable=variable)


def place(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source` when it is large and on the same file system, else a copy."""
    real = source.resolve()
    if real.stat().st_size >= LINK_FROM_BYTES:
        try:
            os.link(real, target)
            return
        except OSError as error:
            # Other file system, file system without hard links, or protected file of another user: copy instead.
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    shutil.copyfile(real, target)


def copy_files(source: Path, out: Path, names: Iterable[str]) -> None:
    """Copy those of the files `names` that the folder `source` has into `out`, with the folders that they are in."""
    for name in names:
        if (source / name).is_file():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, out / name)


def copy(source: Path, target: Path, progress: Callable[[int], None] = lambda nbytes: None) -> None:
    """Make `target` a file of its own with the bytes of `source`: what is written into `source` later is not in it, as
    it is in a hard link. The two share their blocks where the file system can (Btrfs, XFS).

    progress  called with the number of each few bytes that are copied
    """
    with source.open("rb") as read, target.open("wb") as written:
        if _clone(read, written):
            progress(read.seek(0, os.SEEK_END))
            return
        while block := read.read(COPIED_BYTES):
            written.write(block)
            progress(len(block))


def takes_clones(source: Path, folder: Path) -> bool:
    """Whether a copy of the file `source` in `folder`, which need not exist, shares its blocks and takes no space."""
    try:
        with source.open("rb") as read, tempfile.TemporaryFile(dir=_existing(folder)) as written:
            return _clone(read, written)
    except OSError:
        return False


def _clone(source: IO[bytes], target: IO[bytes]) -> bool:
    """Have `target`, an empty file, share the blocks of `source`; False where the file system cannot."""
    try:
        fcntl.ioctl(target, FICLONE, source.fileno())
    except OSError:
        return False
    return True


def pwrite_all(file: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data` at `position`; one pwrite call may write less, after a signal or at a quota."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view[:WRITE_BYTES], position)
        view, position = view[written:], position + written
