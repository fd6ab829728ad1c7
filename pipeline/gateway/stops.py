"""Finder of stop strings in a text that comes in pieces."""

from __future__ import annotations


def overlap(text: str, *marks: str) -> int:
    """Length of the longest end of `text` that is the beginning of one of the marks, and not all of it."""
    longest = min(max(map(len, marks)) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if any(mark.startswith(text[-n:]) for mark in marks)), 0)


class Stops:
    """Finds stop strings in a text that comes in pieces; holds back what may be the start of a stop string."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words = words
        self._longest = max(map(len, words), default=0)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that surely precedes any stop string, whether one was found; the text after it is dropped)."""
        if not self._longest:
            return piece, False
        text, held = self._held + piece, len(self._held)
        # One that ended in what is held was in a piece that was skipped.
        found = [place for word in self._words if (place := text.find(word, max(0, held - len(word) + 1))) >= 0]
        if found:
            self._held = ""
            return text[: min(found)], True
        return self.skip(piece), False

    def skip(self, piece: str) -> str:
        """As `push`, for a piece in which stop strings may begin, and none counts that ends in it."""
        if not self._longest:
            return piece
        text = self._held + piece
        keep = overlap(text, *self._words)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, once the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held
