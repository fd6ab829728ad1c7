"""Protocol of a registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from trtpipe.engines.errors import HostError, InputDataError, TrtpipeError, UsageError, suggestion
from trtpipe.engines.files import is_full, naming_full_disk
from trtpipe.engines.json_input import parse_json
from trtpipe.pipeline.net.proxies import with_proxy

# Called with the number of bytes that have just been moved.
Moved = Callable[[int], None]

# Largest index: one of 10,000 files has some 4 MB with its provenance.
MAX_INDEX_BYTES = 8 << 20
# Limits on the targets of a registry, and on the pages of their list.
MAX_TARGETS = 10_000
MAX_PAGES = 1000


@dataclass(frozen=True)
class Blob:
    """A file of a target, identified by its content: SHA-256 in hexadecimal, and size in bytes."""

    sha256: str
    size: int


class Registry(Protocol):
    """Content under its digest, and an index under each target's name. Every method raises HostError on failure.

    A target exists once its index does: `publish` comes last, and is all or nothing.
    """

    url: str

    def require_name(self, target: str) -> None:
        """Raises UsageError for a name that a target cannot have there; by default every name is that of a file."""
        return

    def has(self, blob: Blob) -> bool:
        """Whether the registry has the whole file."""

    def put(self, blob: Blob, path: Path, moved: Moved) -> None:
        """Upload the file; an interrupted upload leaves nothing that `has` would take for the file."""

    def read(self, blob: Blob, start: int = 0) -> Iterator[bytes]:
        """The file's bytes from `start` on, in pieces as they arrive, at most its size. The digest is not checked.

        Raises InputDataError where the file is missing or ends early.
        """

    def publish(self, target: str, index: dict[str, Any], blobs: Sequence[Blob]) -> None:
        """Publish `target`, whose files `blobs` are all present, in place of an earlier one of that name."""

    def targets(self) -> list[str]: ...

    def index(self, target: str) -> Any:
        """The published index. Raises UsageError for an unknown target."""


def missing(blob: Blob, registry: Registry) -> InputDataError:
    return InputDataError(
        f"{registry.url} lacks the file sha256:{blob.sha256[:12]}", why="somebody has removed it",
        remedy="push the target again",
    )  # fmt: skip


def damaged_size(blob: Blob, size: int, registry: Registry) -> InputDataError:
    """A file that is there with another size than its target's index says."""
    return InputDataError(
        f"the file sha256:{blob.sha256[:12]} of {registry.url} is {'truncated' if size < blob.size else 'too long'}",
        why=f"it has {size:,} bytes instead of {blob.size:,}",
        remedy="push the target again",
    )


def unknown_target(target: str, registry: Registry) -> UsageError:
    remedy = "check its name"
    with contextlib.suppress(HostError):  # who may pull may not always list
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
    """Turn any exception of a library that talks to `url` into a HostError.

    Libraries raise exceptions of any kind for a malformed answer: a missing field, for example, is a KeyError.
    """
    remote = "://" in url
    try:
        yield
    except (TrtpipeError, MemoryError, AssertionError):
        raise
    except PermissionError as error:
        check = "your credentials for it" if remote else "its permissions"
        raise HostError(
            f"{url} does not let you", why=error.strerror or _words(error), remedy=f"check {check}"
        ) from None
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise HostError(f"{url} takes too long to answer", remedy="try again later") from None
    except NotImplementedError as error:
        raise HostError(
            f"{url} cannot be used",
            why=str(error) or f"fsspec's driver of {urlsplit(url).scheme}:// does not do all of this",
            remedy="name a registry that can be written",
        ) from None
    except OSError as error:
        if is_full(error) and not remote:
            with naming_full_disk(Path(url)):
                raise
        remedy = "check its permissions, or name another folder"
        if remote:
            remedy = with_proxy("check its address and the network", f"https://{urlsplit(url).netloc}")
        why = error.strerror or _words(error)
        raise HostError(f"{url} cannot be reached or written", why=why, remedy=remedy) from None
    except Exception as error:
        from trtpipe.pipeline.net.http_limits import certificate_remedy  # here: it loads httpx

        raise HostError(
            f"{url} cannot be used",
            why=_words(error.__cause__ if isinstance(error.__cause__, Exception) else error),
            remedy=certificate_remedy(error) or "check its address and your credentials",
        ) from None


def _words(error: BaseException) -> str:
    """The first line of a library's message, with the exception's kind where the line is not a sentence."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    name = type(error).__name__
    return line[:300] if " " in line else f"{name}: {line[:300]}" if line else name
