"""Registry in a file system that fsspec knows, such as a folder. S3 has a module of its own.

<url>/blobs/<sha256>        every file, under its digest: targets share equal files
<url>/targets/<name>.json   written last
"""

from __future__ import annotations

import contextlib
import datetime
import glob
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trtpipe.engines.errors import HostError, InputDataError, UsageError, nearest
from trtpipe.pipeline.registry.base import (
    MAX_INDEX_BYTES,
    Blob,
    Moved,
    Registry,
    damaged_size,
    missing,
    parse_index,
    translated,
    unknown_target,
)

# Bytes moved at a time, to and from the far end.
CHUNK = 32 << 20
# Age beyond which no push writes to a partial file any more.
LEFT = datetime.timedelta(days=1)
# These have no folders, and would create a bucket for a misspelt name.
OBJECT_STORES = ("gs", "gcs", "az", "abfs")


class FileRegistry(Registry):
    """Registry in the folder `root` of the file system `system`."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self.url = url
        self._system = system
        self._root = root.rstrip("/")

    @staticmethod
    def at(folder: str) -> FileRegistry:
        """The registry in a folder of this machine, which need not exist."""
        import fsspec

        return FileRegistry(fsspec.filesystem("file", skip_instance_cache=True), folder, folder)

    @staticmethod
    def open(url: str) -> FileRegistry:
        import fsspec

        scheme = url.partition("://")[0]
        try:
            system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
        except ImportError as error:
            raise HostError(f"{scheme}:// is not installed", why=str(error), remedy=_remedy(scheme)) from None
        except ValueError as error:
            near = nearest(scheme, ["oci", "hf", *fsspec.available_protocols()])
            meant = f"did you mean '{near[0]}'?" if near else "give oci://, hf://, s3:// or a folder"
            raise UsageError(f"{url}: {error}", remedy=meant) from None
        except (OSError, TypeError, NotImplementedError) as error:
            raise HostError(f"{url} cannot be used", why=str(error), remedy="check its address") from None
        return FileRegistry(system, root, url)

    def has(self, blob: Blob) -> bool:
        return self._size(blob) == blob.size

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        place = self._blob(blob)
        with translated(self.url):
            self._make_folder(place)
            if "file" in self._protocols():
                self._sweep(place)
                self._put_beside(path, place, moved)
            else:  # an object store shows an object only when it is whole
                self._copy(path, place, moved)

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        if start < blob.size:
            size = self._size(blob)
            if size is None:
                raise missing(blob, self)
            if size != blob.size:
                raise damaged_size(blob, size, self)
        for position in range(start, blob.size, CHUNK):
            stop = min(position + CHUNK, blob.size)
            with translated(self.url):
                try:
                    data: bytes = self._system.cat_file(self._blob(blob), start=position, end=stop)
                except FileNotFoundError:
                    raise missing(blob, self) from None
            if len(data) != stop - position:
                raise InputDataError(
                    f"{self.url} ends the file sha256:{blob.sha256[:12]} early", remedy="push the target again"
                )
            yield data

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        place = self._index(target)
        text = (json.dumps(index, indent=1) + "\n").encode()
        with translated(self.url):
            self._make_folder(place)
            if "file" in self._protocols():
                partial = f"{place}.{uuid.uuid4().hex}"
                self._system.pipe_file(partial, text)
                self._system.mv(partial, place)
            else:
                self._system.pipe_file(place, text)

    def targets(self) -> list[str]:
        with translated(self.url):
            try:
                names = self._system.ls(f"{self._root}/targets", detail=False, refresh=True)
            except FileNotFoundError:
                # An object store has no folders that could be missing.
                if "file" in self._protocols() and not self._system.isdir(self._root):
                    raise UsageError(
                        f"there is no folder {self.url}", remedy="check its path, or push a target to it first"
                    ) from None
                return []
        return sorted(Path(name).name.removesuffix(".json") for name in names if name.endswith(".json"))

    def index(self, target: str) -> Any:
        with translated(self.url):
            try:
                if self._system.info(self._index(target))["type"] != "file":
                    raise InputDataError(f"{target} at {self.url} is damaged", why="it is not a regular file")
                text = self._system.cat_file(self._index(target), start=0, end=MAX_INDEX_BYTES + 1)
            except FileNotFoundError:
                raise unknown_target(target, self) from None
        return parse_index(text, target, self)

    def _put_beside(self, path: Path, place: str, moved: Moved) -> None:
        """Upload to a temporary name first."""
        partial = f"{place}.{uuid.uuid4().hex}"
        try:
            self._copy(path, partial, moved)
            self._system.mv(partial, place)
        except BaseException:
            with contextlib.suppress(OSError):
                self._system.rm(partial)
            raise

    def _size(self, blob: Blob) -> int | None:
        """The size of a file that is there; None where none is."""
        with translated(self.url):
            try:
                found = self._system.info(self._blob(blob))
            except FileNotFoundError:
                return None
            return int(found["size"]) if found["type"] == "file" else None

    def _copy(self, path: Path, place: str, moved: Moved) -> None:
        with path.open("rb") as source, self._system.open(place, "wb", block_size=CHUNK) as target:
            while chunk := source.read(CHUNK):
                target.write(chunk)
                moved(len(chunk))

    def _blob(self, blob: Blob) -> str:
        return f"{self._root}/blobs/{blob.sha256}"

    def _index(self, target: str) -> str:
        return f"{self._root}/targets/{target}.json"

    def _sweep(self, place: str) -> None:
        """Remove partial files of this file that killed pushes have left; those of running pushes are younger."""
        old = datetime.datetime.now(datetime.timezone.utc) - LEFT
        for partial in self._system.glob(f"{glob.escape(place)}.*"):
            with contextlib.suppress(FileNotFoundError):
                if self._system.modified(partial) < old:
                    self._system.rm(partial)

    def _make_folder(self, place: str) -> None:
        if not set(OBJECT_STORES) & set(self._protocols()):
            self._system.makedirs(place.rpartition("/")[0], exist_ok=True)

    def _protocols(self) -> tuple[str, ...]:
        named = self._system.protocol
        return (named,) if isinstance(named, str) else tuple(named)


def _remedy(scheme: str) -> str:
    return f"install fsspec's driver of {scheme}"
