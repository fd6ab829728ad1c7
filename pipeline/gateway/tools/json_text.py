"""Finder of the end of a JSON object or array in a text that comes in pieces."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ValueEnd:
    """Finds the end of an object or array by counting brackets outside strings. It does not check that it is JSON."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = False
        self._escaped = False  # the last piece ended with a backslash

    def find(self, piece: str) -> int | None:
        """Position in the next piece after the value's last bracket; None where the value does not end in it."""
        place = int(self._escaped and bool(piece))
        self._escaped = self._escaped and not piece
        while found := (_IN_STRING if self._string else _OUTSIDE).search(piece, place):
            mark, place = found[0], found.end()
            if mark == "\\":
                self._escaped = place == len(piece)
                place += 1
            elif mark == '"':
                self._string = not self._string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return place
        return None
