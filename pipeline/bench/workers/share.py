"""How one load is divided among processes: place, request and arrival k are of share k modulo their number.

Every share follows from the one seed: together they ask what a single process would, at the same times, and no two of
them the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True)
class Share:
    """The part `index` of `of`, counted from 0."""

    index: int = 0
    of: int = 1

    def take(self, items: Iterable[_T]) -> Iterator[_T]:
        return islice(items, self.index, None, self.of)

    def count(self, total: int) -> int:
        """How many of `total` are in it."""
        return len(range(self.index, total, self.of))


WHOLE = Share()
