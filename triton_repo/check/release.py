"""Releases of TensorRT-LLM: comparison, and inference from a repository's contents."""

from __future__ import annotations

import re
from dataclasses import dataclass

Key = tuple[int, int, int]
# Oldest release that the facts in configs/triton cover.
OLDEST: Key = (0, 9, 0)


def release_key(text: str | None) -> Key | None:
    """First three numbers of a release: 1.2.0rc1 -> (1, 2, 0), 0.17.0.post1 -> (0, 17, 0). None for other texts."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", (text or "").strip())
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else None


@dataclass(frozen=True, kw_only=True)
class Release:
    """Release that serves a repository, as far as it is known.

    name    stated release, and `source` the origin of the statement; None when no release is stated
    lowest  oldest release that has the repository's tensors and parameters, when none is stated
    """

    name: str | None = None
    source: str = ""
    lowest: Key | None = None

    @property
    def key(self) -> Key | None:
        return release_key(self.name)

    @property
    def at_least(self) -> Key | None:
        return self.key or self.lowest

    def lacks(self, since: str | None) -> bool:
        """Whether the release is known to be older than `since`."""
        asked = release_key(since)
        return self.key is not None and asked is not None and self.key < asked

    def has_left(self, until: str | None) -> bool:
        """Whether the release is known to be newer than `until`."""
        asked = release_key(until)
        return self.at_least is not None and asked is not None and self.at_least > asked

    def reaches(self, since: str | None) -> bool:
        """Whether the release is known to be `since` or newer."""
        asked = release_key(since)
        return self.at_least is not None and asked is not None and self.at_least >= asked

    def told(self) -> str:
        if self.name is not None:
            return f"TensorRT-LLM {self.name} ({self.source})"
        if self.lowest is not None:
            return "the release that the other tensors are of, {}.{} or newer".format(*self.lowest[:2])
        return "this release"
