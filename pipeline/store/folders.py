"""Folders and files outside the store: made whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from trtpipe.engines.errors import UsageError
from trtpipe.engines.json_input import read_bounded


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path` that takes its name when the block succeeds and goes when it fails.

    Raises UsageError if `path` exists and is not an empty folder.
    """
    path = path.resolve()  # behind a link, the folder it points to
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} already exists and is not an empty folder", remedy="name a new folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
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
    """Give `path` that content, at once for every reader; a file that has it already is left alone. Raises OSError."""
    data = text.encode("utf-8")
    with contextlib.suppress(OSError, ValueError):
        if read_bounded(path, len(data)) == data:
            return
    write_together({path: text})


def write_together(texts: Mapping[Path, str]) -> None:
    """Give files their content once all of it is on disk, each at once for every reader. Raises OSError."""
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
        # Of the file that was asked for, not of ours.
        raise OSError(error.errno, error.strerror, str(path)) from None


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, outlive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
