"""Download of files from a registry: verified as they arrive, continued where an earlier attempt broke off."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import InputDataError
from trtpipe.engines.files import place
from trtpipe.pipeline.registry.base import Blob, Registry
from trtpipe.pipeline.stages.base import Progress

# Bytes read from the disk at a time.
CHUNK = 1 << 20


def damaged(path: str, blob: Blob, registry: Registry) -> InputDataError:
    return InputDataError(
        f"{path} from {registry.url} is damaged", why="its digest is another",
        remedy=f"pull again; if it stays so, remove the file {blob.sha256} there, which a push takes for whole, "
        "and push the target again",
    )  # fmt: skip


class Counter:
    """Count of bytes moved, out of `total`; each addition is reported to `progress`."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self._done, self._progress = 0, progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self.total)


class Fetch:
    """Files from a registry, each digest once."""

    def __init__(self, registry: Registry, counter: Counter) -> None:
        self._registry = registry
        self._counter = counter
        # Paths of files of earlier artefacts, by digest.
        self.here: dict[str, Path] = {}
        # Bytes that have come, and bytes that were here before: a digest that several artefacts have counts once.
        self.moved = self.there = 0
        self._counted: set[str] = set()

    def skip(self, file: dict[str, Any]) -> None:
        """Count a file of an artefact that was here before."""
        if file["sha256"] not in self._counted:
            self._counted.add(file["sha256"])
            self.there += file["size"]
        self._counter.add(file["size"])

    def take(self, folder: Path, file: dict[str, Any], out: Path) -> None:
        """Bring a file to `out`. What has arrived of it stays in `folder`, for a pull that goes on after this one has
        broken off. Raises InputDataError for a file that does not match its digest."""
        blob = Blob(file["sha256"], file["size"])
        if blob.sha256 in self.here:
            place(self.here[blob.sha256], out)
            self._counter.add(blob.size)
            return
        folder.mkdir(parents=True, exist_ok=True)
        arriving = folder / blob.sha256
        digest = hashlib.sha256()
        with arriving.open("a+b") as target:
            target.seek(0)
            while chunk := target.read(CHUNK):
                digest.update(chunk)
                self._counter.add(len(chunk))
            done = target.tell()
            self.there += done
            for piece in self._registry.read(blob, done) if done < blob.size else ():
                target.write(piece)
                digest.update(piece)
                done += len(piece)
                self.moved += len(piece)
                self._counter.add(len(piece))
        if done != blob.size or digest.hexdigest() != blob.sha256:
            arriving.unlink()
            raise damaged(file["path"], blob, self._registry)
        place(arriving, out)
        self._counted.add(blob.sha256)
        self.here[blob.sha256] = out  # valid within the same artefact only: a finished artefact moves
