"""SHA-256 of files, remembered by their stat so that an unchanged file is hashed once.

The memory is a small JSON file: device, inode, size and modification time -> digest, as a version control index
does it. A hard link shares its inode, so placing a file in several artefacts costs one hash.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from pathlib import Path

from pipeline.folders import write_whole

BLOCK_BYTES = 1 << 20
# A file changed again within one tick of the clock keeps its stat: one that is younger is not remembered.
SETTLED_NS = 20_000_000


class Digests:
    """File digests, remembered in `memory`; `save` writes what was learnt. Losing the file costs time only."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._known: dict[str, str] = {}
        self._changed = False
        try:
            known = json.loads(memory.read_text(encoding="utf-8"))
            self._known = {k: v for k, v in known.items() if isinstance(v, str)}
        except (OSError, ValueError, AttributeError):
            pass  # absent or damaged: hash again

    def file(self, path: Path) -> str:
        stat = path.stat()
        key = f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"
        known = self._known.get(key)
        if known is not None:
            return known
        digest = sha256_file(path)
        if time.time_ns() - stat.st_mtime_ns > SETTLED_NS:
            self._known[key] = digest
            self._changed = True
        return digest

    def save(self) -> None:
        if not self._changed:
            return
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._memory, json.dumps(self._known))
        self._changed = False


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def combined(entries: Iterable[tuple[str, str]]) -> str:
    """One digest for a set of (relative name, digest) pairs, independent of their order."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(entries))
    return hashlib.sha256(text.encode()).hexdigest()
