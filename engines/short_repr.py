"""Short reprs of large dataclasses, for consoles, notebooks and tracebacks."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any


def short_repr(*names: str) -> Callable[[Any], str]:
    """A __repr__ that shows these attributes alone; a name with dots is that of an attribute's attribute."""

    def show(self: Any) -> str:
        told = " ".join(f"{name.rpartition('.')[2]}={attrgetter(name)(self)!r}" for name in names)
        return f"<{type(self).__name__} {told}>"

    return show
