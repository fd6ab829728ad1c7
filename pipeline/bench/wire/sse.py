"""Server-sent events: what a body holds, each event with the stamp of the read that completed it."""

from __future__ import annotations

from pipeline.bench.exchange import Exchange
from pipeline.bench.wire.http1 import pieces
from pipeline.bench.wire.transport import BadAnswer


class SseDecoder:
    """Splits a byte stream into the data of server-sent events, however the bytes were cut."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Data of the events that `piece` completes; lines other than `data:` are skipped."""
        alone = piece.startswith(b"data: ") and piece.endswith(b"\n\n") and not piece.endswith(b"\r\n\n")
        if alone and piece.count(b"\n") == 2 and not self.unfinished:
            return [piece[6:-2]]  # one event, as servers send tokens
        *lines, self._tail = (self._tail + piece).split(b"\n")
        events = []
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events

    @property
    def unfinished(self) -> bool:
        return bool(self._tail or self._data)


def events(exchange: Exchange) -> list[tuple[bytes, int]]:
    """(data, stamp) of each event of an answer that has ended. Raises BadAnswer."""
    decoder = SseDecoder()
    out = []
    try:
        for piece, stamp in pieces(exchange):
            out += [(event, stamp) for event in decoder.feed(piece)]
    except ValueError as error:
        raise BadAnswer("MalformedResponse", str(error)) from None
    if decoder.unfinished:
        raise BadAnswer("TruncatedStream", f"the body ended within an event, after {len(out)} events")
    return out
