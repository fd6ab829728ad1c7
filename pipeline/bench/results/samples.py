"""Samples of a load point: what a few of its measured requests asked, and what the server answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtpipe.pipeline.bench.loop.in_flight import InFlightRequest

# Samples of a load point, and the most characters of each text.
COUNT = 3
CHARACTERS = 2000


class Samples:
    """Keeps the beginning of each prompt whose number among the measured requests is a Fibonacci number: however many
    there will be, few are kept, and the last two lie near the middle and in the last third."""

    def __init__(self) -> None:
        self._kept: list[tuple[InFlightRequest, dict[str, Any]]] = []
        self._asked = 0
        self._next, self._after = 1, 2

    def note(self, request: InFlightRequest, prompt: str) -> None:
        self._asked += 1
        if self._asked == self._next:
            self._kept.append((request, _text("prompt", prompt)))
            self._next, self._after = self._after, self._next + self._after

    def read(self, answer: Callable[[InFlightRequest], str]) -> list[dict[str, Any]]:
        """The first of those that were answered, and the last of them, as report.json has them. `answer` gives a text;
        call it before the bytes are freed."""
        answered = [
            (request, prompt)
            for request, prompt in self._kept
            if request.end_ns is not None and request.failure is None and not request.warmup
        ]
        chosen = [*answered[:1], *answered[1:][1 - COUNT :]]
        return [{"id": request.id, **prompt, **_text("answer", answer(request))} for request, prompt in chosen]


def _text(name: str, text: str) -> dict[str, Any]:
    # A server may send half of a surrogate pair, which no file can hold.
    beginning = text[:CHARACTERS].encode(errors="replace").decode()
    return {name: beginning, f"{name}_characters": len(text)}
