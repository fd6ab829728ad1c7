"""What a registry does, and which one a URL names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engines.errors import InputDataError, UsageError

# Called with a number of bytes that have just been moved.
Moved = Callable[[int], None]


@dataclass(frozen=True)
class Blob:
    """A file of a target by its content: SHA-256 in hexadecimal, and bytes."""

    sha256: str
    size: int


class Registry(Protocol):
    """Content under its digest, and an index under each target's name. Every method raises HostError when it fails.

    A target is there when its index is: `publish` comes last, and is all or nothing.
    """

    url: str

    def has(self, blob: Blob) -> bool:
        """Whether the whole of it is there."""

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        """Bring the file there; one that breaks off leaves nothing that `has` would take for it."""

    def read(self, blob: Blob, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of it. Raises InputDataError where it is not there."""

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        """Make `target` known, whose files `blobs` are all there, in place of one of that name."""

    def targets(self) -> list[str]: ...

    def index(self, target: str) -> Any:
        """What was published. Raises UsageError for a target that is not there."""


def open_registry(url: str) -> Registry:
    """Raises UsageError for a URL of no form that is known, HostError for what is not installed or not reached."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url or re.match("[a-z0-9]{2,}:", url):
            raise UsageError(f"'{url}' is no address", remedy="give for example s3://bucket/prefix, or a folder")
        from pipeline.registry.files import FileRegistry

        return FileRegistry.open(Path(url).absolute().as_uri(), url)
    if not rest.strip("/"):
        raise UsageError(f"{url} names no place", remedy="give for example s3://bucket/prefix")
    if scheme == "oci":
        from pipeline.registry.oci import OciRegistry

        return OciRegistry.open(url)
    if scheme == "hf":
        from pipeline.registry.hub import HubRegistry

        return HubRegistry.at(url)
    from pipeline.registry.files import FileRegistry

    return FileRegistry.open(url, url)


def missing(blob: Blob, registry: Registry) -> InputDataError:
    return InputDataError(
        f"{registry.url} lacks the file sha256:{blob.sha256[:12]}", why="somebody has removed it",
        remedy="push the target again",
    )  # fmt: skip


def unknown_target(target: str, registry: Registry) -> UsageError:
    from engines.errors import suggestion

    there = registry.targets()
    remedy = suggestion(target, there) if there else "push one with `trtpipe push`"
    return UsageError(f"{registry.url} has no target '{target}'", remedy=remedy)
