"""What a registry does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError, suggestion
from trtpipe.engines.json_input import parse_json

# Called with a number of bytes that have just been moved.
Moved = Callable[[int], None]

# The largest index: one of 10,000 files has some 4 MB with its provenance.
MAX_INDEX_BYTES = 8 << 20
# The most targets of a registry, and pages that it may list them in.
MAX_TARGETS = 10_000
MAX_PAGES = 1000


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

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        """Its bytes from `start` on, in pieces as they arrive, and never more than its size. The digest is not checked.

        Raises InputDataError where it is not there or ends early.
        """

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


def parse_index(text: bytes, target: str, registry: Registry) -> Any:
    try:
        return parse_json(text, max_bytes=MAX_INDEX_BYTES)
    except ValueError as error:
        raise InputDataError(f"{target} at {registry.url} is damaged", why=str(error), remedy="push it again") from None


@contextlib.contextmanager
def translated(url: str) -> Iterator[None]:
    """A HostError in place of whatever a library raises that talks to `url`.

    What a far end sends comes out of libraries as exceptions of any kind: a missing field is their KeyError.
    """
    try:
        yield
    except (TrtpipeError, MemoryError, AssertionError):
        raise
    except PermissionError as error:
        raise HostError(f"{url} does not let you", why=_words(error), remedy="check your credentials for it") from None
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise HostError(f"{url} takes too long to answer", remedy="try again later") from None
    except OSError as error:
        raise HostError(f"{url} cannot be reached or written", why=_words(error)) from None
    except Exception as error:
        raise HostError(
            f"{url} cannot be used",
            why=_words(error.__cause__ if isinstance(error.__cause__, Exception) else error),
            remedy="check its address and your credentials",
        ) from None


def _words(error: BaseException) -> str:
    """The first line of what a library says, and its kind where that is no sentence."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return line[:300] if " " in line else f"{name}: {line[:300]}" if line else name
