"""Folders and files outside the store, written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trtpipe.engines.errors import HostError, UsageError
from trtpipe.engines.files import naming_full_disk
from trtpipe.engines.json_input import read_bounded


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, renamed to it when the block succeeds and removed when it fails.

    Raises UsageError if `path` exists and is not an empty folder.
    """
    path = path.resolve()  # behind a link, the folder it points to
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file", remedy="name a new folder")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} already exists and is not an empty folder", remedy="name a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with naming_full_disk(path.parent):
            yield partial
        partial.chmod(0o755)  # mkdtemp's 0700 would keep other users out
        if path.exists():
            path.rmdir()
        partial.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; a file with that content already is left alone. Raises OSError."""
    data = text.encode("utf-8")
    with contextlib.suppress(OSError, ValueError):
        if read_bounded(path, len(data)) == data:
            return
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Write several files, each atomically, once all of their content is on disk. Raises OSError, and UsageError as
    `require_replaceable`."""
    for path in texts:
        require_replaceable(path)
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    path = Path()
    try:
        for path, text in texts.items():
            partial[path].write_text(text, encoding="utf-8")
            sync(partial[path])
        for path in texts:
            partial[path].replace(path)
        for folder in {path.parent for path in texts}:
            sync(folder)
    except OSError as error:
        for left in partial.values():
            with contextlib.suppress(OSError):
                left.unlink()
        # The error names the requested file, not the temporary one.
        raise OSError(error.errno, error.strerror, str(path)) from None


def require_replaceable(path: Path) -> None:
    """Raises UsageError for a folder, and for a device, a pipe or a socket: renaming a file to its name would remove
    it."""
    if not path.name or path.is_dir():
        raise UsageError(f"{path} is a folder", remedy="give the name of a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file", remedy="give the name of a file")


def require_place(path: Path, *inputs: str | Path | None) -> None:
    """Check, before the work whose result it is to hold, that a file can be written there, and is none of `inputs`,
    which the work reads. Raises HostError, and UsageError as `require_replaceable`."""
    require_replaceable(path)
    if any(one is not None and path.exists() and Path(one).exists() and path.samefile(one) for one in inputs):
        raise UsageError(f"{path} is read by the same command", remedy="give another file to write")
    try:
        # Missing folders are made with the file: work that fails before leaves none behind.
        with tempfile.TemporaryFile(dir=next(folder for folder in path.absolute().parents if folder.exists())):
            pass
    except OSError as error:
        below_a_file = isinstance(error, NotADirectoryError)
        why = f"{path.parent} is not a folder" if below_a_file else error.strerror or str(error)
        raise HostError(f"{path} cannot be written", why=why, remedy="give another place for it") from None


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk, so that they survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
