"""Division of one load among processes: slot, request and arrival k belong to share k modulo the number of shares.

Every share follows from the one seed: together they send what a single process would, at the same times, and no request
is sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """Share `index` of `of`, counted from 0."""

    index: int = 0
    of: int = 1

    def take(self, items: Iterable[_T]) -> Iterator[_T]:
        return islice(items, self.index, None, self.of)

    def count(self, total: int) -> int:
        """Number of `total` items in this share."""
        return len(range(self.index, total, self.of))


WHOLE = Share()
