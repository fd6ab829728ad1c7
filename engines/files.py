"""File operations shared by several kinds of artefacts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import DiskFull

# Smaller files are copied, so that editing a linked config.json in place cannot change an artefact.
LINK_FROM_BYTES = 1 << 20


def write_json(path: Path, value: Any) -> None:
    """Write `value` as NVIDIA's tools do: indented by four spaces, keys in the given order."""
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


def device(folder: Path) -> int:
    """Number of the disk that holds a folder, or would hold it."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def require_disk(needs: Mapping[Path, int], what: str, why: str = "") -> None:
    """Raises DiskFull when a disk has fewer bytes free than the folders on it need together; a folder may be absent."""
    by_disk: dict[int, tuple[Path, int]] = {}
    for folder, size in needs.items():
        there = _existing(folder)
        by_disk[device(there)] = there, by_disk.get(device(there), (there, 0))[1] + size
    for there, size in by_disk.values():
        free = shutil.disk_usage(there).free
        if free < size:
            raise DiskFull(
                f"{what} needs about {size / 1e9:.1f} GB of disk and {there} has {free / 1e9:.1f} GB free", why=why
            )


def place(source: Path, target: Path) -> None:
    """Make `target` a hard link to `source` when it is large and on the same file system, else a copy."""
    real = source.resolve()
    if real.stat().st_size >= LINK_FROM_BYTES:
        try:
            os.link(real, target)
            return
        except OSError as error:
            # Other file system, file system without hard links, or protected file of another user: copy instead.
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                raise
    shutil.copyfile(real, target)


def pwrite_all(file: int, data: bytes | memoryview, position: int) -> None:
    """Write all of `data` at `position`; one pwrite call may write less, after a signal or at a quota."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, position)
        view, position = view[written:], position + written
