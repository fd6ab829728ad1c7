"""A registry in a file system that fsspec knows: a folder, S3 and what speaks its protocol, and others.

<url>/blobs/<sha256>        every file, under its digest: targets share what they have in common
<url>/targets/<name>.json   written last
"""

from __future__ import annotations

import contextlib
import datetime
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.errors import HostError, UsageError, suggestion
from pipeline.registry.base import Blob, Moved, missing, unknown_target
from pipeline.registry.parts import PART, Parts

# At a time, to and from the far end.
CHUNK = 32 << 20
# How old a partial file of a push is that nobody writes to any more.
LEFT = datetime.timedelta(days=1)
# Whose exceptions are no OSError.
FOREIGN = ("botocore", "aiobotocore", "aiohttp", "gcsfs", "adlfs", "httpx", "httpcore", "requests")
# They have no folders, and would make a bucket of a name that somebody misspelt.
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs")


class FileRegistry:
    """`root` in the file system `system`."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self.url = url
        self._system = system
        self._root = root.rstrip("/")

    @staticmethod
    def open(address: str, url: str) -> FileRegistry:
        import fsspec

        scheme = address.partition("://")[0]
        try:
            system, root = fsspec.core.url_to_fs(address, skip_instance_cache=True)
        except ImportError as error:
            raise HostError(f"{scheme}:// is not installed", why=str(error), remedy=_remedy(scheme)) from None
        except ValueError as error:
            known = ["oci", "hf", *fsspec.available_protocols()]
            raise UsageError(f"{url}: {error}", remedy=suggestion(scheme, known)) from None
        except (OSError, TypeError, NotImplementedError) as error:
            raise HostError(f"{url} cannot be used", why=_words(error), remedy="check its address") from None
        return FileRegistry(system, root, url)

    def has(self, blob: Blob) -> bool:
        with self._named():
            try:
                return int(self._system.info(self._blob(blob))["size"]) == blob.size
            except FileNotFoundError:
                return False

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        place = self._blob(blob)
        with self._named():
            self._make_folder(place)
            if "s3" in self._protocols() and blob.size > PART:
                Parts(self._system, place, path).upload(moved)
            elif "file" in self._protocols():
                self._sweep(place)
                self._put_beside(path, place, moved)
            else:  # an object appears when it is whole
                self._copy(path, place, moved)

    def read(self, blob: Blob, start: int, stop: int) -> bytes:
        with self._named():
            try:
                data: bytes = self._system.cat_file(self._blob(blob), start=start, end=stop)
            except FileNotFoundError:
                raise missing(blob, self) from None
        return data

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        place = self._index(target)
        text = (json.dumps(index, indent=1) + "\n").encode()
        with self._named():
            self._make_folder(place)
            if "file" in self._protocols():
                partial = f"{place}.{uuid.uuid4().hex}"
                self._system.pipe_file(partial, text)
                self._system.mv(partial, place)
            else:
                self._system.pipe_file(place, text)

    def targets(self) -> list[str]:
        with self._named():
            try:
                names = self._system.ls(f"{self._root}/targets", detail=False, refresh=True)
            except FileNotFoundError:
                return []
        return sorted(Path(name).name.removesuffix(".json") for name in names if name.endswith(".json"))

    def index(self, target: str) -> Any:
        with self._named():
            try:
                text = self._system.cat_file(self._index(target))
            except FileNotFoundError:
                raise unknown_target(target, self) from None
        try:
            return json.loads(text)
        except ValueError:
            return None  # whoever asks says so

    def _put_beside(self, path: Path, place: str, moved: Moved) -> None:
        """To another name first."""
        partial = f"{place}.{uuid.uuid4().hex}"
        try:
            self._copy(path, partial, moved)
            self._system.mv(partial, place)
        except BaseException:
            with contextlib.suppress(OSError):
                self._system.rm(partial)
            raise

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
        """What a push that was killed has left of this file; one that runs now is younger."""
        old = datetime.datetime.now(datetime.timezone.utc) - LEFT
        for partial in self._system.glob(f"{place}.*"):
            with contextlib.suppress(FileNotFoundError):
                if self._system.modified(partial) < old:
                    self._system.rm(partial)

    def _make_folder(self, place: str) -> None:
        if not set(OBJECT_STORES) & set(self._protocols()):
            self._system.makedirs(place.rpartition("/")[0], exist_ok=True)

    def _protocols(self) -> tuple[str, ...]:
        named = self._system.protocol
        return (named,) if isinstance(named, str) else tuple(named)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A HostError in place of any way in which the far end fails."""
        try:
            yield
        except PermissionError as error:
            raise HostError(
                f"{self.url} does not let you", why=_words(error), remedy="check your credentials for it"
            ) from None
        except (OSError, ConnectionError) as error:
            raise HostError(f"{self.url} cannot be reached or written", why=_words(error)) from None
        except Exception as error:
            # Each file system has exceptions of its own.
            if type(error).__module__.partition(".")[0] not in FOREIGN and not isinstance(error, NotImplementedError):
                raise
            raise HostError(
                f"{self.url} cannot be used", why=_words(error), remedy="check its address and your credentials"
            ) from None


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _remedy(scheme: str) -> str:
    return "run `pip install trtpipe[registry]`" if scheme in ("s3", "s3a") else f"install fsspec's driver of {scheme}"
