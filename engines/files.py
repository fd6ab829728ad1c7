"""File operations shared by several kinds of artefacts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

# Smaller files are copied, so that editing a linked config.json in place cannot change an artefact.
LINK_FROM_BYTES = 1 << 20


def write_json(path: Path, value: Any) -> None:
    """Write `value` as NVIDIA's tools do: indented by four spaces, keys in the given order."""
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


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
