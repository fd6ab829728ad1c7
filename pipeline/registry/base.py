"""What a registry does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from engines.errors import InputDataError, UsageError, suggestion

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


def missing(blob: Blob, registry: Registry) -> InputDataError:
    return InputDataError(
        f"{registry.url} lacks the file sha256:{blob.sha256[:12]}", why="somebody has removed it",
        remedy="push the target again",
    )  # fmt: skip


def unknown_target(target: str, registry: Registry) -> UsageError:
    there = registry.targets()
    remedy = suggestion(target, there) if there else "push one with `trtpipe push`"
    return UsageError(f"{registry.url} has no target '{target}'", remedy=remedy)
